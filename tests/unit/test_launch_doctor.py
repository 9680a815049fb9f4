"""`smp-train doctor`: what a machine has and lacks, each with the remedy; machines are doubled by commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from smp_train import cli
from smp_train.launch import environment, instances
from smp_train.launch.doctor import examine, machine, packages, services
from smp_train.launch.doctor.finding import FAIL, OK, WARN, Finding

ROOT = Path(__file__).parents[2]
TORCH = {"cuda": "12.8", "gpus": 8, "nccl": True}
NO_GPU = {"cuda": None, "gpus": 0, "nccl": True}


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any of the commands that are looked for; a test adds those that it has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("stat", "bash", "cat"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    aws = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_REGION")
    for name in (*environment.DROPPED, *aws, "NCCL_SOCKET_IFNAME", "NCCL_DEBUG_SUBSYS", "HF_TOKEN", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (
        ("PATH", str(folder)), ("HOME", str(tmp_path)), ("AWS_EC2_METADATA_DISABLED", "true"),
        ("AWS_METADATA_SERVICE_TIMEOUT", "1"), ("AWS_METADATA_SERVICE_NUM_ATTEMPTS", "1"),  # as the doctor sets them
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(instances, "PRODUCT", tmp_path / "product")
    monkeypatch.setattr(machine, "count_efa", lambda: 0)
    monkeypatch.setattr(packages, "ASK_TORCH", f"print('''{json.dumps(NO_GPU)}''')")
    return folder


def has(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def levels(*findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for several in findings for finding in several}


def found(name: str, findings: Iterable[Finding]) -> Finding:
    (one,) = [finding for finding in findings if finding.name == name]
    return one


def test_command(bin_: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--folder", str(tmp_path / "runs")])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert f"importing torch {packages.version('torch')} (up to 60 s)" in printed.err, "it would be silent for long"
    assert lines[0] == f"smp-train doctor on {socket.gethostname()}"
    assert lines[-1].endswith(f"{len(lines) - 2} looked at")
    assert code == (2 if any(line.startswith(FAIL) for line in lines) else 0)
    assert not (tmp_path / "runs").exists(), "it looks, and makes nothing"
    (tmp_path / "file").touch()
    assert cli.main(["doctor", "--json", "--folder", str(tmp_path / "file/runs")]) == 2
    findings = json.loads(capsys.readouterr().out)
    assert len(findings) == len(lines) - 2
    assert all(one["fix"] for one in findings if one["level"] != OK), "each problem has its remedy"
    assert [one["seen"] for one in findings if one["name"].startswith("folder ")] == ["Not a directory"]
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


GPU = "NVIDIA H100 80GB HBM3, {}\n"
Case = tuple[Callable[[], Iterable[Finding]], dict[str, str], str, dict[str, str], str]
CASES: dict[str, Case] = {
    "no GPUs": (machine.gpus, {}, "", {"GPUs": OK}, "none: runs here use the CPU"),
    "no driver": (machine.gpus, {}, "p5.48xlarge", {"GPUs": FAIL}, "no nvidia-smi on this p5.48xlarge, which has 8"),
    "all GPUs": (
        machine.gpus, {"nvidia-smi": f"echo '{GPU.format(0) * 8}'"}, "p5.48xlarge", {"GPUs": OK}, "8 x NVIDIA H100",
    ),
    "one GPU": (machine.gpus, {"nvidia-smi": f"echo '{GPU.format(0)}'"}, "p5.48xlarge", {"GPUs": FAIL}, "of the 8"),
    "errors": (machine.gpus, {"nvidia-smi": f"echo '{GPU.format(0)}{GPU.format(3)}'"}, "", {"GPUs": FAIL}, "on [1]"),
    "Slurm is down": (
        services.slurm, {"sbatch": "", "scontrol": "echo 'Slurmctld(primary) is DOWN'"}, "", {"Slurm": FAIL}, "is DOWN",
    ),
    "Slurm alone": (
        services.slurm,
        {"sbatch": "", "sinfo": "echo 'dev* up 8 idle'", "srun": "echo --auto-resume",
         "scontrol": 'case "$1" in ping) echo "is UP";; *) echo "JobRequeue = 0";; esac'},
        "", {"Slurm": OK, "pyxis": WARN, "restart": WARN}, "dev* up 8 idle",
    ),
    "HyperPod": (
        services.slurm,
        {"sbatch": "", "srun": "echo --auto-resume --container-image",
         "scontrol": 'case "$1" in ping) echo "is UP";; *) echo "TaskPlugin = task/none";; esac'},
        "", {"Slurm": OK, "pyxis": OK, "restart": OK}, "answers",
    ),
    "images": (
        services.containers, {"docker": "echo fine", "enroot": "exit 1"}, "", {"docker": OK, "enroot": WARN}, "answers",
    ),
    "no daemon": (
        services.containers, {"docker": "exit 1", "enroot": "echo 4"}, "", {"docker": WARN, "enroot": OK}, "not answer",
    ),
    "kubectl alone": (services.kubernetes, {"kubectl": "exit 1"}, "", {"kubectl": WARN}, "no cluster"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_commands_of_a_machine(case: str, bin_: Path, tmp_path: Path) -> None:
    check, commands, kind, wanted, seen = CASES[case]
    (tmp_path / "product").write_text(f"{kind}\n")
    for name, body in commands.items():
        has(bin_, name, body)
    findings = list(check())
    assert levels(findings) == wanted
    assert seen in "\n".join(finding.seen for finding in findings)


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
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert found("host name", machine.host_name()).level == FAIL
    for address, level in (("10.0.0.1", OK), ("127.0.1.1", WARN)):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, a=address: [(0, 0, 0, "", (a, 0))])
        assert found("host name", machine.host_name()).level == level


@pytest.mark.parametrize(
    ("answer", "gpus", "level", "seen"),
    [
        (TORCH, 8, OK, "with CUDA 12.8, 8 GPUs"),
        (NO_GPU, 0, OK, "with no CUDA, 0 GPUs"),
        (NO_GPU, 8, FAIL, "with no CUDA, 0 GPUs, and the driver has 8"),
        ({**TORCH, "nccl": False}, 8, FAIL, "but no NCCL"),
        (None, 8, FAIL, "cannot be imported: OSError: libcudart.so.12"),
    ],
)
def test_torch_for_this_machine(
    answer: dict[str, object] | None, gpus: int, level: str, seen: str, bin_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"print('''{json.dumps(answer)}''')" if answer else "raise OSError('libcudart.so.12')"
    monkeypatch.setattr(packages, "ASK_TORCH", program)
    listed = "\n".join(["GPU 0: H100"] * gpus)
    has(bin_, "nvidia-smi", f"echo '{listed}'")
    finding = found("torch", packages.torch())
    assert (finding.level, seen in finding.seen) == (level, True), finding


NEW = {"torch": "2.13.0", "transformers": "5.0.0", "sagemaker": None, "sagemaker-train": None}
SMP_OK = {"transformers": OK, "SMP v2": OK}


@pytest.mark.parametrize(
    ("smp", "installed", "wanted", "fix"),
    [
        (False, {"torch": "2.7.1"}, {"torch for --backend native": FAIL}, "needs 2.8 or newer"),
        (False, {"torch": "2.8.0a0+34c6371d24.nv25.8"}, {"torch": OK}, ""),
        (False, {"torch": None}, {"torch": WARN}, "pip install '.[train]'"),
        (False, {"transformers": "4.44.2"}, {"transformers": FAIL}, "needs 4.50 or newer"),
        (True, {"torch": "2.5.1", "transformers": "4.44.2"}, SMP_OK, ""),
        (True, {"torch": "2.2.0", "transformers": "5.0.0"}, {"transformers": WARN, "SMP v2": FAIL}, "of torch 2.4.1"),
        (False, {}, {"extras": OK}, ""),
        (False, {"boto3": None, "orjson": None}, {"extras": OK, "packages": FAIL}, "pip install '.[train,s3]'"),
        (False, {"sagemaker": "2.257.7", "sagemaker-train": "1.27.0"}, {"SageMaker's SDK": FAIL}, "keep one"),
        (False, {"sagemaker": "3.27.0", "sagemaker-train": "1.27.0"}, {"SageMaker's SDK": OK}, ""),
    ],
)
def test_releases_of_packages(
    smp: bool, installed: dict[str, str | None], wanted: dict[str, str], fix: str, bin_: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(packages, "version", lambda name: {**NEW, **installed}.get(name, "1"))
    monkeypatch.setattr(packages, "smp_installed", lambda: smp)
    checks = (packages.torch, packages.transformers, packages.smp, packages.extras)
    findings = [finding for check in checks for finding in check()]
    assert wanted.items() <= levels(findings).items()
    assert fix in "\n".join(finding.fix for finding in findings)
    assert FAIL in wanted.values() or FAIL not in levels(findings).values()


def test_variables_aws_and_hugging_face(bin_: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    assert [one.level for one in (*services.variables(), *services.aws())] == [OK, WARN, WARN]
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "hidden"), ("DEFAULT_REGION", "eu-west-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    assert [one.line() for one in services.aws()] == ["ok   AWS credentials: from env", "ok   AWS region: eu-west-1"]
    assert "hf auth login" in found("Hugging Face", services.hugging_face()).fix
    monkeypatch.setenv("HF_TOKEN", "hidden")
    assert "hidden" not in found("Hugging Face", services.hugging_face()).line()
    monkeypatch.setenv("FI_PROVIDER", "efa")
    (harmful,) = services.variables()
    assert (harmful.name, harmful.level, harmful.fix) == ("variable FI_PROVIDER=efa", WARN, "unset it")
