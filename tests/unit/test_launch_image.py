"""docker_build.sh with doubles of docker, aws and enroot: what is built, what is refused, what is left behind."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with doubles that write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    double(folder, "docker", "")
    double(folder, "aws", "echo secret")
    double(folder, "enroot", 'shift; [ "$1" = --output ] && echo image > "$2"')
    return folder


def double(folder: Path, name: str, body: str) -> None:
    path = folder / name
    # A login reads its password: whoever writes into a pipe that nobody reads fails.
    read = 'if [ "$1" = login ]; then cat > /dev/null; fi'
    path.write_text(f'#!/bin/bash\necho "{name} $*" >> "{folder}/../calls"\n{read}\n{body}\n')
    path.chmod(0o755)


def build(tools: Path, *words: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(
        ["bash", ROOT / "docker_build.sh", *words], capture_output=True, text=True, check=False,
        env={"PATH": f"{tools}:/usr/bin:/bin", "OUTPUT": str(tools.parent / "smpv2.sqsh"), "FREE_GB": "0", **environ},
    )  # fmt: skip
    calls = tools.parent / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_smp_image(tools: Path) -> None:
    done, calls = build(tools, AWS_REGION="eu-west-1", ENGINE="docker")
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


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_builds_nothing(tools: Path, word: str) -> None:
    done, calls = build(tools, word)
    assert (done.returncode, done.stderr, calls) == (0, "", [])
    assert "EXTRA_PACKAGES" in done.stdout
    done, calls = build(tools, "--native")
    assert (done.returncode, calls) == (2, [])


def test_native_image(tools: Path) -> None:
    (tools / "aws").unlink()
    double(tools, "uname", "echo x86_64")
    done, calls = build(tools, TARGET="native", ENGINE="docker", IMAGE_USER="root")
    assert done.returncode == 0, done.stderr
    (call,) = [one for one in calls[-3:] if " build " in one]
    assert "BASE=public.ecr.aws/deep-learning-containers/pytorch-training:2.8.0" in call
    assert "--target native --tag smp-train" in call
    assert "--build-arg IMAGE_USER=root " in call
    assert "EFA" not in done.stderr
    double(tools, "uname", "echo aarch64")
    done, _ = build(tools, TARGET="native", ENGINE="docker")
    assert done.returncode == 2, "AWS's arm64 image has torch 2.7"
    assert "BASE" in done.stderr
    for base in ("docker.io/pytorch/pytorch:2.8.0", "nvcr.io/nvidia/pytorch:25.09-py3"):
        done, _ = build(tools, TARGET="native", ENGINE="docker", BASE=base)
        assert done.returncode == 0, done.stderr
        assert "EFA plugin" in done.stderr


def test_pushed_to_the_repository_given(tools: Path) -> None:
    place = "123456789012.dkr.ecr.us-east-2.amazonaws.com/smp-train:1"
    done, calls = build(tools, TARGET="native", ENGINE="docker", PUSH=place, EXTRA_PACKAGES="hyperpod-elastic-agent")
    assert done.returncode == 0, done.stderr
    assert "aws ecr get-login-password --region us-east-2" in calls
    assert [call for call in calls if "--build-arg EXTRA_PACKAGES=hyperpod-elastic-agent --target native" in call]
    assert calls[-3:-1] == [f"docker tag smp-train {place}", f"docker push {place}"]


ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"


@pytest.mark.parametrize(
    ("host", "login"),
    [
        (f"evil.example/{ECR[1:]}", False),
        (f"{ECR}.evil.example", False),
        (f"evil.example:443/{ECR}", False),
        (f"x{ECR}", False),
        ("123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn", True),
        ("123456789012.dkr.ecr-fips.us-east-1.amazonaws.com", True),
    ],
)
@pytest.mark.parametrize("variable", ["PUSH", "BASE"])
def test_the_password_for_ecr_goes_to_ecr_alone(tools: Path, host: str, variable: str, login: bool) -> None:
    done, calls = build(tools, TARGET="native", ENGINE="docker", **{variable: f"{host}/y:1"})
    assert done.returncode == 0, done.stderr
    logins = [call for call in calls if call.startswith("docker login")]
    assert logins == ([f"docker login --username AWS --password-stdin {host}"] if login else [])
    assert any(call.startswith("aws ") for call in calls) is login


def test_the_image_does_not_run_as_root_unless_asked_to() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")[2:]
    assert len(stages) == 2
    for stage in stages:
        assert [line for line in stage.splitlines() if line][-2:] == ["ARG IMAGE_USER=trainer", "USER ${IMAGE_USER}"]


def test_a_failed_import_leaves_the_old_image(tools: Path) -> None:
    (tools.parent / "smpv2.sqsh").write_text("old")
    double(tools, "enroot", 'shift; echo half > "$2"; exit 1')
    done, _ = build(tools, ENGINE="docker")
    assert done.returncode == 1
    assert (tools.parent / "smpv2.sqsh").read_text() == "old"
    assert [path.name for path in tools.parent.glob("*.sqsh")] == ["smpv2.sqsh"]


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
    ],
)
def test_refused_early(tools: Path, name: str, body: str, environ: dict[str, str], said: str) -> None:
    double(tools, name, body)
    done, calls = build(tools, **{"ENGINE": "docker", **environ})
    assert done.returncode == 2
    assert said in done.stderr
    assert not [call for call in calls if " build " in call]


def test_image_context_is_small() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", "tests", "data", "runs"} <= set(ignored)
    copied = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    for name in {name for names in copied for name in names}:
        assert (ROOT / name).exists()
    assert os.access(ROOT / "docker_build.sh", os.X_OK)
