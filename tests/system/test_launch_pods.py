"""What the pods of a Kubernetes job execute, executed: two pods on this machine, as the cluster starts them."""

from __future__ import annotations

import os
import shutil
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
from tests.harness import free_port, run
from tests.soak_recovery import EXACT, last_checkpoint
from tests.system.command import PATIENCE_SECONDS, ROOT
from tests.training import TINY, flags, same, steps, train
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


def image(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment of a pod without its own variables: this interpreter's programs first, and the package."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environ


def worker_below(pod: subprocess.Popen[bytes]) -> int:
    """Return the process id of a pod's training process."""
    (child,) = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    return int(child)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks processes up in /proc")
def test_pods_train_and_survive_a_lost_process(tmp_path: Path) -> None:
    values = {**TINY, "num_layers": 1, "max_steps": FOR_EVER, "checkpoint_freq": 20, "run_dir": f"{tmp_path}/run"}
    words = [f"--{name}={value}" for name, value in values.items()]
    options = ["--nodes", "2", "--nproc", "1", "--image", "any", "--claims", f"volume:{tmp_path}", "--env", "PODS=2"]
    spec, target = k8s.prepare([*options, *words])
    job = k8s.manifest(spec, target)["spec"]
    (container,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    environ = image({  # of the operator, from elasticPolicy
        "PET_RDZV_BACKEND": job["elasticPolicy"]["rdzvBackend"],
        "PET_RDZV_ID": job["elasticPolicy"]["rdzvId"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_MAX_RESTARTS": str(job["elasticPolicy"]["maxRestarts"]),
        "PET_NNODES": f"{job['elasticPolicy']['minReplicas']}:{job['elasticPolicy']['maxReplicas']}",
    })  # fmt: skip
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


PID_1 = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
needs_unshare = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*PID_1, "true"], capture_output=True, check=False).returncode != 0,
    reason="may not make a namespace of process ids",
)


@needs_unshare
def test_a_lost_pod_that_is_created_again_joins_the_run(tmp_path: Path) -> None:
    """Pod 1 is killed with all its processes. The other pod waits for it, as half of the state is lost, and keeps its
    process; both go back to a checkpoint."""
    last = 150
    changes = {"recovery": "in_place", "sharding_strategy": "full_shard", "max_steps": last, "checkpoint_freq": 10}
    options = ["--nodes", "2", "--nproc", "1", "--image", "any", "--claims", f"volume:{tmp_path}"]
    spec, target = k8s.prepare([*options, *flags(tmp_path, **changes)])
    _, job = k8s.manifest(spec, target)["items"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    given = {one["name"]: one.get("value", "127.0.0.1") for one in container["env"]}  # POD_IP is a field of the pod
    log, port = tmp_path / "pods.log", str(free_port())
    with log.open("wb") as output:

        def create(index: int) -> subprocess.Popen[bytes]:
            environ = image(given | {"NODE_RANK": str(index), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
            command = [*PID_1, *(expand(word, environ) for word in container["command"])]
            return subprocess.Popen(command, cwd="/", env=environ, stdout=output, stderr=output)

        pods = [create(index) for index in range(job["spec"]["completions"])]
        try:
            metrics = tmp_path / "run/metrics.jsonl"
            wait(lambda: metrics.exists() and len(steps(tmp_path)) >= 20, pods, log)
            pods[1].kill()
            wait(lambda: "waiting up to 300 s" in log.read_text(), pods[:1], log)
            pods.append(create(1))
            assert [pod.wait(PATIENCE_SECONDS) for pod in pods] == [0, -signal.SIGKILL, 0], log.read_text()[-5000:]
        finally:
            for pod in pods:
                pod.kill()
                pod.wait()
    straight = tmp_path / "straight"
    run(train, 2, flags(straight, **changes | {"recovery": "off"}), timeout=600)
    ours, theirs = (
        [(record["step"], [record[name] for name in EXACT]) for record in steps(each)] for each in (tmp_path, straight)
    )  # fmt: skip
    assert dict(ours) == dict(theirs)
    assert set(map(repr, ours)) == set(map(repr, theirs)), "each repeated step has the same numbers"
    same(last_checkpoint(tmp_path, last), last_checkpoint(straight, last))


@needs_unshare
def test_process_1_of_a_pod_collects_orphans() -> None:
    rank = (
        "import os, time, pathlib\n"
        "if os.fork() == 0:\n    os.fork()\n    os._exit(0)\n"
        "os.wait()\n"
        "stats = lambda: [p.read_text().rpartition(')')[2] for p in pathlib.Path('/proc').glob('[0-9]*/stat')]\n"
        "while any(stat.startswith(' Z 1 ') for stat in stats()):\n    time.sleep(0.05)\n"
    )
    agent = (
        "import sys\nfrom smp_train.launch import supervisor\nfrom smp_train.launch.node import Node\n"
        f"sys.exit(supervisor.supervise([sys.executable, '-c', {rank!r}], Node(1))[0])"
    )
    subprocess.run([*PID_1, sys.executable, "-c", agent], env=image({}), check=True, timeout=60)
