"""`smp-train doctor`: what a machine has and lacks, each with the way to mend it; machines are doubled by commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from smp_train import cli
from smp_train.launch import environment, instances
from smp_train.launch.doctor import examine, machine, packages, services
from smp_train.launch.doctor.finding import FAIL, OK, WARN, Finding

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA H100 80GB HBM3, {}"
TORCH = {"cuda": "12.8", "gpus": 8, "nccl": True, "gloo": True}


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any of the commands that are looked for; a test adds those that it has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("stat", "bash", "cat"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    aws = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION")
    for name in (*environment.DROPPED, *aws, "NCCL_SOCKET_IFNAME", "NCCL_DEBUG_SUBSYS", "HF_TOKEN", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_METADATA_SERVICE_TIMEOUT", "AWS_METADATA_SERVICE_NUM_ATTEMPTS"):
        monkeypatch.setenv(name, "1")  # as the doctor does, for good
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(instances, "PRODUCT", tmp_path / "product")
    monkeypatch.setattr(machine, "count_efa", lambda: 0)
    monkeypatch.setattr(packages, "ASK_TORCH", f"print('''{json.dumps({**TORCH, 'gpus': 0})}''')")
    return folder


def has(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def found(name: str, findings: object) -> Finding:
    (one,) = [finding for finding in findings if finding.name == name]  # type: ignore[attr-defined]
    return one


def test_command(bin_: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--folder", str(tmp_path / "runs")]) in (0, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"smp-train doctor on {socket.gethostname()}"
    assert {line.split()[0] for line in lines[1:-1]} <= {OK, WARN, FAIL}
    assert lines[-1].endswith(f"{len(lines) - 2} looked at")
    assert not (tmp_path / "runs").exists(), "it looks, and makes nothing"
    code = cli.main(["doctor", "--json", "--folder", str(tmp_path / "runs")])
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert f"importing torch {packages.version('torch')} (up to 60 s)" in said.err, "it would be silent for long"
    assert len(told) == len(lines) - 2
    assert {tuple(one) for one in told} == {("name", "level", "seen", "fix")}
    assert code == (2 if FAIL in {one["level"] for one in told} else 0)
    assert all(one["fix"] for one in told if one["level"] != OK), "whoever is told what is wrong is told what to do"


def test_something_to_mend_is_exit_code_2(bin_: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["doctor", "--folder", str(tmp_path / "file" / "runs")]) == 2
    out = capsys.readouterr().out
    assert f"fail folder {tmp_path}/file/runs: Not a directory; give another --folder" in out
    assert cli.main(["doctor", "--moon"]) == 2


def test_a_check_that_breaks_does_not_end_the_others(
    bin_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limits() -> None:
        raise KeyError("moon")

    monkeypatch.setattr(machine, "limits", limits)
    *_, last = findings = list(examine(tmp_path))
    assert (found("limits", findings).level, last.name) == (FAIL, "Hugging Face")
    assert "KeyError: 'moon'" in found("limits", findings).seen


def test_no_torch_is_imported(bin_: Path) -> None:
    code = (
        "import sys; from smp_train.launch import doctor; doctor.packages.ASK_TORCH = 'print(0)'; "
        "list(doctor.examine(doctor.Path('.'))); sys.exit('torch' in sys.modules)"
    )
    environ = {**os.environ, "PATH": str(bin_)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environ, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("kind", "smi", "level", "seen"),
    [
        ("", "", OK, "none: runs here use the CPU"),
        ("p5.48xlarge", "", FAIL, "no nvidia-smi on this p5.48xlarge, which has 8 GPUs"),
        ("p5.48xlarge", f"echo '{(GPU.format(0) + chr(10)) * 8}'", OK, "8 x NVIDIA H100 80GB HBM3"),
        ("p5.48xlarge", f"echo '{GPU.format(0)}'", FAIL, "1 x NVIDIA H100 80GB HBM3 of the 8 of a p5.48xlarge"),
        ("", f"echo '{GPU.format(0)}\n{GPU.format(3)}'", FAIL, "errors of memory that could not be corrected on [1]"),
        ("", "echo 'Unable to determine the device handle'; exit 9", FAIL, "nvidia-smi: Unable to determine"),
    ],
)
def test_gpus_against_the_instance_type(kind: str, smi: str, level: str, seen: str, bin_: Path, tmp_path: Path) -> None:
    (tmp_path / "product").write_text(f"{kind}\n")
    if smi:
        has(bin_, "nvidia-smi", smi)
    finding = found("GPUs", machine.gpus())
    assert (finding.level, seen in finding.seen) == (level, True), finding


def test_adapters_against_the_instance_type(bin_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "product").write_text("p5.48xlarge\n")
    for count, plugin, level in (
        (0, None, WARN),  # a container need not see them
        (31, None, FAIL), (32, None, WARN), (32, "/opt/libnccl-net.so", OK),
    ):  # fmt: skip
        monkeypatch.setattr(machine, "count_efa", lambda count=count: count)
        monkeypatch.setattr(machine, "nccl_plugin", lambda environ, plugin=plugin: plugin)
        assert found("EFA", machine.adapters()).level == level
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (65536, machine.resource.RLIM_INFINITY))
    assert found("locked memory", machine.adapters()).level == FAIL


def test_limits_shared_memory_and_host_name(bin_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1024, 2048))
    assert found("open files", machine.limits()).fix == "`ulimit -n 65536` (as root: it is capped)"
    monkeypatch.setattr(machine, "SHARED_MEMORY_LEAST", 1 << 62)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    assert "--shm-size" in found("/dev/shm", machine.shared_memory()).fix
    for address, level in (("10.0.0.1", OK), ("127.0.1.1", WARN), (None, FAIL)):

        def resolve(*_: object, address: str | None = address) -> list[object]:
            if address is None:
                raise socket.gaierror(-2, "Name or service not known")
            return [(0, 0, 0, "", (address, 0))]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        assert found("host name", machine.host_name()).level == level


@pytest.mark.parametrize(
    ("said", "gpus", "level", "seen"),
    [
        (TORCH, 8, OK, "with CUDA 12.8, 8 GPUs"),
        ({**TORCH, "gpus": 0, "cuda": None}, 0, OK, "with no CUDA, 0 GPUs"),
        ({**TORCH, "gpus": 0, "cuda": None}, 8, FAIL, "with no CUDA, 0 GPUs, and the driver has 8"),
        ({**TORCH, "nccl": False}, 8, FAIL, "but no NCCL"),
        (None, 8, FAIL, "cannot be imported: OSError: libcudart.so.12"),
    ],
)
def test_torch_for_this_machine(
    said: dict[str, object] | None, gpus: int, level: str, seen: str, bin_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"print('''{json.dumps(said)}''')" if said else "raise OSError('libcudart.so.12')"
    monkeypatch.setattr(packages, "ASK_TORCH", program)
    listed = "\n".join(["GPU 0: H100"] * gpus)
    has(bin_, "nvidia-smi", f"echo '{listed}'")
    finding = found("torch", packages.torch())
    assert finding.level == level
    assert seen in finding.seen


VERSIONS = {"torch": "2.13.0", "transformers": "5.0.0", "sagemaker": None, "sagemaker-train": None}


def versions(monkeypatch: pytest.MonkeyPatch, *, smp: bool = False, **more: str | None) -> None:
    known = {**VERSIONS, **{name.replace("_", "-"): value for name, value in more.items()}}
    monkeypatch.setattr(packages, "version", lambda name: known.get(name, "1"))
    monkeypatch.setattr(packages, "smp_installed", lambda: smp)


def test_releases_for_either_backend(bin_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.7.1")
    assert found("torch for --backend native", packages.torch()).level == FAIL
    versions(monkeypatch, torch="2.8.0a0+34c6371d24.nv25.8")
    assert "torch for --backend native" not in {one.name for one in packages.torch()}
    versions(monkeypatch, torch=None)
    assert found("torch", packages.torch()).fix.startswith("pip install '.[train]'")
    versions(monkeypatch, transformers="4.44.2")
    assert "needs 4.50 or newer" in found("transformers", packages.transformers()).fix
    versions(monkeypatch, smp=True, torch="2.5.1", transformers="4.44.2")
    assert [one.level for one in (*packages.transformers(), *packages.smp())] == [OK, OK]
    versions(monkeypatch, smp=True, torch="2.2.0", transformers="5.0.0")
    assert [one.level for one in (*packages.transformers(), *packages.smp())] == [WARN, FAIL]


def test_what_could_be_installed_besides(bin_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch)
    every = "train, s3, hf, text, fast, tracking, wandb, mlflow"
    assert found("extras", packages.extras()) == Finding("extras", OK, every)
    versions(monkeypatch, boto3=None, orjson=None)
    assert found("extras", packages.extras()).fix.startswith("pip install '.[train,s3]'")
    assert found("packages", packages.extras()).seen == "without orjson"
    versions(monkeypatch, sagemaker="2.257.7", sagemaker_train="1.27.0")
    assert found("SageMaker's SDK", packages.extras()).level == FAIL
    versions(monkeypatch, sagemaker="3.27.0", sagemaker_train="1.27.0")
    assert found("SageMaker's SDK", packages.extras()).seen == "v3 1.27.0"


def test_slurm(bin_: Path) -> None:
    assert found("Slurm", services.slurm()).seen == "is not here"
    has(bin_, "sbatch", "")
    has(bin_, "scontrol", "echo 'Slurmctld(primary) at head is DOWN'")
    assert found("Slurm", services.slurm()).level == FAIL
    has(bin_, "scontrol", 'case "$1" in ping) echo "Slurmctld(primary) is UP";; *) echo "JobRequeue = 0";; esac')
    has(bin_, "sinfo", "echo 'dev* up 8 idle'")
    has(bin_, "srun", "echo --auto-resume")
    findings = {one.name: one for one in services.slurm()}
    assert "dev* up 8 idle" in findings["Slurm"].seen
    assert {name: one.level for name, one in findings.items()} == {"Slurm": OK, "pyxis": WARN, "restart": WARN}
    has(bin_, "srun", "echo --auto-resume --container-image")
    has(bin_, "scontrol", 'case "$1" in ping) echo "is UP";; *) echo "TaskPlugin = task/none";; esac')
    assert {one.level for one in services.slurm()} == {OK}


def test_images_clusters_and_variables(bin_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def levels() -> dict[str, str]:
        return {one.name: one.level for one in (*services.containers(), *services.kubernetes())}

    programs = ("docker", "enroot", "kubectl")
    assert set(levels().values()) == {OK}
    for body, level in (("echo 'not today' >&2; exit 1", WARN), ("echo fine", OK)):
        for name in programs:
            has(bin_, name, body)
        assert levels() == dict.fromkeys(programs, level)
    assert found("variables", services.variables()).level == OK
    monkeypatch.setenv("FI_PROVIDER", "efa")
    (harmful,) = services.variables()
    assert (harmful.name, harmful.level, harmful.fix) == ("variable FI_PROVIDER=efa", WARN, "unset it")


def test_aws_and_hugging_face(bin_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    assert [one.level for one in services.aws()] == [WARN, WARN]
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "hidden"), ("DEFAULT_REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    assert [one.line() for one in services.aws()] == ["ok   AWS credentials: from env", "ok   AWS region: eu-west-1"]
    assert "hf auth login" in found("Hugging Face", services.hugging_face()).fix
    monkeypatch.setenv("HF_TOKEN", "hidden")
    assert "hidden" not in found("Hugging Face", services.hugging_face()).line()
