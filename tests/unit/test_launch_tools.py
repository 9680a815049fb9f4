"""docker_build.sh and setup_conda_env.sh with doubles of their tools: what is made, what is refused, what is left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "launchers/hyperpod_slurm/setup_conda_env.sh"
ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"


def double(folder: Path, name: str, body: str) -> None:
    """Put a double into a folder: it writes down how it was called, then does ``body``."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    read = 'if [ "$1" = login ]; then cat > /dev/null; fi'  # who writes into a pipe that nobody reads fails
    path.unlink(missing_ok=True)
    path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder}/../calls"\n{read}\n{body}\n')
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    double(folder, "docker", "")
    double(folder, "aws", "echo secret")
    double(folder, "enroot", 'shift; [ "$1" = --output ] && echo image > "$2"')
    return folder


def run(script: Path, tools: Path, *words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script; return (result, calls of doubles)."""
    done = subprocess.run(
        ["bash", script, *words], capture_output=True, text=True, check=False,
        env={"PATH": f"{tools}:/usr/bin:/bin", **environ},
    )  # fmt: skip
    calls = tools.parent / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def build(tools: Path, *words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    environ = {"OUTPUT": str(tools.parent / "smpv2.sqsh"), "FREE_GB": "0", "ENGINE": "docker", **environ}
    return run(ROOT / "docker_build.sh", tools, *words, **environ)


def test_smp_image(tools: Path) -> None:
    done, calls = build(tools, AWS_REGION="eu-west-1")
    assert done.returncode == 0, done.stderr
    registry = "658645717510.dkr.ecr.eu-west-1.amazonaws.com"
    assert calls[1:4] == [
        "aws ecr get-login-password --region eu-west-1",
        f"docker login --username AWS --password-stdin {registry}",
        f"docker build --build-arg BASE={registry}/smdistributed-modelparallel:2.5.1-gpu-py311-cu124 --build-arg "
        f"EXTRA_PACKAGES= --target smp --tag smpv2 {ROOT}",
    ]
    assert calls[4].startswith("enroot import --output ")
    assert calls[4].endswith(" dockerd://smpv2:latest")
    assert (tools.parent / "smpv2.sqsh").read_text() == "image\n"
    assert "secret" not in done.stdout + done.stderr


def test_native_image(tools: Path) -> None:
    (tools / "aws").unlink()
    double(tools, "uname", "echo x86_64")
    done, calls = build(tools, TARGET="native", IMAGE_USER="root")
    assert done.returncode == 0, done.stderr
    (call,) = [one for one in calls[-3:] if " build " in one]
    assert "BASE=public.ecr.aws/deep-learning-containers/pytorch-training:2.8.0" in call
    assert all(part in call for part in ("--target native --tag smp-train", "--build-arg IMAGE_USER=root "))
    assert "EFA" not in done.stderr
    double(tools, "uname", "echo aarch64")
    done, _ = build(tools, TARGET="native")
    assert (done.returncode, "BASE" in done.stderr) == (2, True), "AWS's arm64 image has torch 2.7"
    for base in ("docker.io/pytorch/pytorch:2.8.0", "nvcr.io/nvidia/pytorch:25.09-py3"):
        done, _ = build(tools, TARGET="native", BASE=base)
        assert (done.returncode, "EFA plugin" in done.stderr) == (0, True), done.stderr


def test_pushed_to_the_repository_given(tools: Path) -> None:
    place = f"{ECR}/smp-train:1"
    done, calls = build(tools, TARGET="native", PUSH=place, EXTRA_PACKAGES="hyperpod-elastic-agent")
    assert done.returncode == 0, done.stderr
    assert [call for call in calls if "--build-arg EXTRA_PACKAGES=hyperpod-elastic-agent --target native" in call]
    assert calls[-3:-1] == [f"docker tag smp-train {place}", f"docker push {place}"]


@pytest.mark.parametrize(
    ("host", "login"),
    [
        (f"evil.example/{ECR[1:]}", False), (f"{ECR}.evil.example", False), (f"evil.example:443/{ECR}", False),
        (f"x{ECR}", False), ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", True),
        ("123456789012.dkr.ecr-fips.us-east-1.amazonaws.com", True),
    ],
)  # fmt: skip
def test_the_password_for_ecr_goes_to_ecr_alone(tools: Path, host: str, login: bool) -> None:
    for variable in ("PUSH", "BASE"):
        (tools.parent / "calls").unlink(missing_ok=True)
        done, calls = build(tools, TARGET="native", **{variable: f"{host}/y:1"})
        assert done.returncode == 0, done.stderr
        logins = [call for call in calls if call.startswith("docker login")]
        assert logins == ([f"docker login --username AWS --password-stdin {host}"] if login else [])


def test_the_image_does_not_run_as_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for stage in text.split("\nFROM ")[2:]:
        assert [line for line in stage.splitlines() if line][-2:] == ["ARG IMAGE_USER=trainer", "USER ${IMAGE_USER}"]
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY")]
    assert all((ROOT / name).exists() for names in copied for name in names)


def test_a_failed_import_leaves_the_old_image(tools: Path) -> None:
    (tools.parent / "smpv2.sqsh").write_text("old")
    double(tools, "enroot", 'shift; echo half > "$2"; exit 1')
    assert build(tools)[0].returncode == 1
    assert [(path.name, path.read_text()) for path in tools.parent.glob("*.sqsh")] == [("smpv2.sqsh", "old")]


@pytest.mark.parametrize(
    ("name", "body", "environ", "said"),
    [
        ("aws", "exit 1", {}, "no login to ECR in us-west-2; add iam/ecr-pull.json to the role"),
        ("docker", '[ "$1" != info ]', {}, "docker does not answer: is the daemon running"),
        ("docker", '[ "$1" != login ]', {}, "does not accept the login"),
        ("docker", "", {"TARGET": "moon"}, "TARGET=moon: is not smp or native"),
        ("docker", "", {"ENGINE": "nothing"}, "ENGINE=nothing is not installed here"),
        ("docker", "", {"IMAGE_NAME": "a:b"}, "IMAGE_NAME=a:b: a plain name"),
        ("docker", "", {"OUTPUT": "/no/x.sqsh"}, "OUTPUT=/no/x.sqsh: /no is no folder that you may write to"),
        ("docker", "", {"FREE_GB": "99999999"}, "GB are free, and an image may need 99999999"),
        ("uname", "echo aarch64", {}, "AWS has SMP images for x86_64 only, and this machine is aarch64"),
        ("docker", "", {"WORD": "--native"}, ""),
    ],
)
def test_refused_early(tools: Path, name: str, body: str, environ: dict[str, str], said: str) -> None:
    double(tools, name, body)
    done, calls = build(tools, *([environ["WORD"]] if "WORD" in environ else []), **environ)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert not [call for call in calls if " build " in call]


def test_help_builds_nothing(tools: Path) -> None:
    done, calls = build(tools, "--help")
    assert (done.returncode, done.stderr, calls, "EXTRA_PACKAGES" in done.stdout) == (0, "", [], True)


# A python that can make an environment: what it puts there writes down what it is asked to install.
PYTHON = '[ "$1 $2" != "-m venv" ] || { mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; }\n'
PYTHON += '[ "$1" != -c ] || exit "${OLD_PYTHON:-0}"'
CONDA = 'while [ "$1" != --prefix ]; do shift; done; mkdir -p "$2/bin"; cp "$(dirname "$0")/python3" "$2/bin/python"'


@pytest.mark.parametrize("words", [(), ("--conda",)])
def test_an_environment_is_made_once_and_updated_after(tools: Path, words: tuple[str, ...]) -> None:
    double(tools, "python3", PYTHON)
    double(tools, "conda", CONDA)
    target = tools.parent / "env"
    made = f"conda create --yes --prefix {target} python=3.11 pip" if words else f"python3 -m venv {target}"
    install = f"python3 -m pip install --upgrade --editable {ROOT}[train]"
    for count in (1, 2):
        done, calls = run(SETUP, tools, *words, EXTRAS="train", TARGET=str(target))
        assert (done.returncode, "launch_training_conda.sh" in done.stdout) == (0, True), done.stderr
        assert [call for call in calls if not call.startswith("python3 -c")] == [made, *[install] * count]


@pytest.mark.parametrize(
    ("words", "environ", "code", "said"),
    [
        (["--mamba"], {}, 2, "unknown option --mamba; the only one is --conda"),
        (["--conda"], {"PATH": "/usr/bin:/bin"}, 2, "no conda here; install Miniconda, or leave --conda out"),
        ([], {"OLD_PYTHON": "1"}, 1, ""),
    ],
)
def test_no_environment(tools: Path, words: list[str], environ: dict[str, str], code: int, said: str) -> None:
    double(tools, "python3", PYTHON)
    done, calls = run(SETUP, tools, *words, TARGET=str(tools.parent / "env"), **environ)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not [call for call in calls if "pip install" in call]
