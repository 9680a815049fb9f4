"""What the pods of a Kubernetes job execute, executed: two pods on this machine, as Kubeflow's operator starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.launch import k8s
from smp_train.telemetry.metrics import read_metrics
from tests.harness import free_port
from tests.system.command import PATIENCE_SECONDS, ROOT
from tests.training import TINY
from tests.unit.test_launch_k8s import expand

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(1800)]
FOR_EVER = 10**6
"""Steps: the run ends when it is asked to, however long what is asked of it before takes."""


def wait(true: Callable[[], bool], pods: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Wait until something comes true, as long as every pod lives."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert all(pod.poll() is None for pod in pods), log.read_text()[-5000:]
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.1)


def worker_below(pod: subprocess.Popen[bytes]) -> int:
    """Return the process id of a pod's training process."""
    (child,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    return int(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks processes up in /proc")
def test_pods_train_and_survive_a_lost_process(tmp_path: Path) -> None:
    flags = {**TINY, "num_layers": 1, "max_steps": FOR_EVER, "checkpoint_freq": 20, "run_dir": f"{tmp_path}/run"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    options = ["--nodes", "2", "--nproc", "1", "--image", "any", "--claims", f"volume:{tmp_path}", "--env", "PODS=2"]
    spec, target = k8s.prepare([*options, *words])
    job = k8s.manifest(spec, target)["spec"]
    (container,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {
        # The image: this interpreter's programs first, and the package.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # The operator, from elasticPolicy.
        "PET_RDZV_BACKEND": job["elasticPolicy"]["rdzvBackend"],
        "PET_RDZV_ID": job["elasticPolicy"]["rdzvId"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_MAX_RESTARTS": str(job["elasticPolicy"]["maxRestarts"]),
        "PET_NNODES": f"{job['elasticPolicy']['minReplicas']}:{job['elasticPolicy']['maxReplicas']}",
    }
    environ |= {one["name"]: expand(one["value"], environ) for one in container["env"]}
    command = [expand(word, environ) for word in container["command"]]
    metrics, log = tmp_path / "run/metrics.jsonl", tmp_path / "pods.log"

    def records() -> list[dict[str, Any]]:
        return read_metrics(metrics.parent) if metrics.exists() else []

    def committed() -> bool:
        return any((tmp_path / "checkpoints/run").glob("*steps/COMMITTED"))

    def went_on() -> bool:
        """Whether it has resumed, and trained since."""
        resumed = [record["step"] for record in records() if record.get("event") == "resume"]
        return bool(resumed) and records()[-1].get("step", 0) > resumed[0] + 20

    with log.open("wb") as output:
        pods = [subprocess.Popen(command, cwd="/", env=environ, stdout=output, stderr=output) for _ in "12"]
    try:
        wait(committed, pods, log)
        os.kill(worker_below(pods[1]), signal.SIGKILL)
        wait(went_on, pods, log)
        seen = {record["step"] for record in records() if "event" not in record}
        assert sorted(seen) == list(range(1, max(seen) + 1)), "it went on from a checkpoint, by itself"
        (tmp_path / "run/STOP").touch()
        assert [pod.wait(PATIENCE_SECONDS) for pod in pods] == [0, 0], log.read_text()[-5000:]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert (tmp_path / "run/STOPPED").exists()
