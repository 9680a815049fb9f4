"""What one node of a run does: finds its rank, starts its processes, answers signals, and names what failed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_train.arguments import parse
from smp_train.checkpoints.format import META, Marker
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import environment, flags, instances, local, network_check, nsys, slurm, supervisor
from smp_train.launch import node_agent as agent
from smp_train.launch.instances import find
from smp_train.launch.node import Failure, Node
from smp_train.launch.starts import CrashLoopError, Starts
from smp_train.launch.supervisor import supervise
from smp_train.storage.checksum import FileRecord

ROOT = Path(__file__).parents[2]

# One write per line: two workers share the output.
WORKER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(WORKER + text)
    return [sys.executable, str(path)]


def test_peers_of_a_failed_worker_have_time_to_commit_and_to_leave() -> None:
    from smp_train.checkpoints import save  # not above: a launcher does without torch

    assert supervisor.GRACE_SECONDS >= save.ABANDON_SECONDS + 5


def test_every_worker_knows_its_rank(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    command = program(
        tmp_path,
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT '\n"
        "names += 'TORCHELASTIC_RUN_ID K'\nsay(*(os.environ.get(name, '-') for name in names.split()))",
    )
    stale = {"RANK": "7", "TORCHELASTIC_RUN_ID": "old", "K": "yes", "PATH": os.environ["PATH"]}
    node = Node(2, nodes=3, node_rank=1, master_addr="a", master_port=5)
    (tmp_path / "rank-3.log").mkdir()  # a log that cannot be written stops nobody
    assert supervise(command, node, environ=stale, log_dir=tmp_path) == (0, None)
    assert (tmp_path / "rank-2.log").read_text() == "2 6 0 2 1 a 5 - yes\n"
    assert sorted(capfdbinary.readouterr().out.splitlines()) == [b"2 6 0 2 1 a 5 - yes", b"3 6 1 2 1 a 5 - yes"]


def test_rank_0_has_the_terminal_for_its_progress_line(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    worker = "import os, sys; os.write(1, f\"{os.environ['RANK']} {sys.stderr.isatty()}\\n\".encode())"
    code = (
        "import sys; from pathlib import Path; from smp_train.launch.node import Node; "
        "from smp_train.launch.supervisor import supervise; "
        f"supervise([sys.executable, '-c', {worker!r}], Node(2), log_dir=Path({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=-1, stderr=theirs, text=True, timeout=60, check=True)
    os.close(theirs)
    os.close(ours)
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 False"]


LOST = """
from smp_train import cli
from smp_train.errors import LostPeerError
def lose(*_):
    raise LostPeerError("no word from rank 7")
cli.run_verb = lose
sys.exit(cli.main([]))
"""


@pytest.mark.parametrize(
    ("ending", "code", "cause"),
    [
        ("sys.exit(3)", 3, "data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed"),
        ("os.abort()", 134, "aborted"),
        (f"exec({LOST!r})", 1, "lost-peer"),
    ],
)
def test_first_failure_is_named_and_its_code_returned(
    tmp_path: Path, ending: str, code: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other worker would stay for ever, whatever it is asked.
    wait = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    command = program(tmp_path, f"if rank == 1: {ending}\n{wait}")
    lines: list[str] = []
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    failure = Failure(1, "n2", code, cause)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = supervise(command, Node(2), environ=environ, log_dir=tmp_path, grace_seconds=0.2, say=lines.append)
    assert result == (code, failure)
    assert lines == [f"LAUNCH-FAIL node=n2 rank=1 rc={code} cause={cause}"]


def test_a_request_during_the_start_reaches_each_worker_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the starts of ranks 0 and 1; a second signal could kill a worker that has saved and is ending."""
    sent: dict[int, list[int]] = {0: [], 1: []}

    def start(workers: Any, rank: int) -> None:
        process = SimpleNamespace(send_signal=sent[rank].append, wait=lambda: 0, poll=lambda: 0)
        workers.processes[rank] = process
        workers.running.add(rank)
        workers.inbox.put(process)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(supervisor._Workers, "start", start)
    assert supervise([], Node(2)) == (0, None)
    assert [*sent.values()] == [[signal.SIGTERM, signal.SIGKILL]] * 2  # the last one for whatever may be left


def test_output_that_a_workers_child_holds_open_is_waited_for_within_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "held")
    monkeypatch.setattr(supervisor, "DRAIN_SECONDS", 0.1)
    command = program(tmp_path, f"if os.fork() == 0: open({str(tmp_path / 'held')!r}).read()")
    assert supervise(command, Node(1), log_dir=tmp_path) == (0, None)
    (tmp_path / "held").write_text("")


def start(tmp_path: Path, text: str, more: str = "", workers: int = 2, **options: Any) -> subprocess.Popen[str]:
    """Run a supervisor in a process of its own and wait until its workers are ready."""
    command = program(tmp_path, text)
    outer = (
        "import sys; from pathlib import Path; from smp_train.launch.node import Node; "
        "from smp_train.launch.supervisor import supervise; "
        f"sys.exit(supervise({command!r}, Node({workers}), grace_seconds=0.2{more})[0])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", outer], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(workers)] == ["ready\n"] * workers
    return process


STOPPABLE = """
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(1))
say("ready")
while not asked:
    time.sleep(0.01)
say("saved")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_the_workers_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, STOPPABLE)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.split()) == (0, ["saved", "saved"])
    assert "Traceback" not in err


def test_the_second_interrupt_ends_everything(tmp_path: Path) -> None:
    deaf = "signal.signal(signal.SIGTERM, lambda *_: say('heard'))\nsay('ready')\nwhile True: time.sleep(0.01)"
    process = start(tmp_path, deaf)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in "12"] == ["heard\n", "heard\n"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "LAUNCH-FAIL" not in err  # nobody has failed


def test_a_second_interrupt_after_all_have_saved_is_no_failure(tmp_path: Path) -> None:
    """The worker has ended; its output is still being copied, as a child of it goes on."""
    after = """
worker = os.getpid()
if os.fork() == 0:
    while os.getppid() == worker:
        time.sleep(0.01)
    say("alone")
    sys.stdin.readline()
"""
    process = start(tmp_path, STOPPABLE + after, f", log_dir=Path({str(tmp_path)!r})", 1, stdin=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in "12"] == ["saved\n", "alone\n"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate("\n", timeout=120)
    assert process.returncode == 0, err


def test_workers_do_not_outlive_their_supervisor(tmp_path: Path) -> None:
    process = start(tmp_path, "say('ready')\ntime.sleep(600)")
    process.kill()
    # Both ends of the pipe are the workers': it closes when the last of them is gone.
    process.communicate(timeout=120)


def test_early_requests_do_not_kill_a_worker_that_is_still_importing(tmp_path: Path) -> None:
    process = start(tmp_path, STOPPABLE.replace("(signal.SIGTERM, signal.SIGUSR1)", "[signal.SIGTERM]"))
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)  # passed on after SIGUSR1, of which the number is lower, if both are pending
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out.split()) == (0, ["saved", "saved"])


STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[1,3]", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]",
}  # fmt: skip
BY_HAND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (STEP, Node(8, nodes=2, node_rank=1, master_addr="n1", master_port=20174)),
        # The ports of the step before, of training and preflight, may be in use.
        ({**STEP, "SLURM_STEP_ID": "4"}, Node(8, nodes=2, node_rank=1, master_addr="n1", master_port=20176)),
        (BY_HAND, Node(8, 2, 1, "a", 1234, patience=300)),
        ({**STEP, "spares": "1"}, Node(8, 1, 1, "n1", 20174, 1)),
        ({**STEP, "spares": "2"}, "--spare_nodes 2: the step has 2 nodes"),
        ({**BY_HAND, "NODE_RANK": "2", "spares": "1"}, Node(8, 2, 2, "a", 1234, 1, 300)),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "16"}, "one per node: --ntasks-per-node=1"),
        ({"NNODES": "2"}, "needs NODE_RANK (0 to 1"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2 is not from 0 to 1"),
        ({"NNODES": "two"}, "NNODES='two' is not a number"),
    ],
)
def test_a_nodes_rank_comes_from_the_step_or_by_hand(environ: dict[str, str], found: Node | str) -> None:
    spares = int(environ.get("spares", "0"))
    if isinstance(found, Node):
        assert agent.find_node(environ, 8, spares) == found
        return
    with pytest.raises(ConfigError) as refused:
        agent.find_node(environ, 8, spares)
    assert found in str(refused.value)


P5, GB200 = "p5.48xlarge", "p6e-gb200.36xlarge"


@pytest.mark.parametrize(
    ("kind", "nproc", "gpus", "efa", "nodes", "given", "visible", "result"),
    [
        (P5, None, 8, 32, 1, True, None, 8),
        (P5, 2, 8, 32, 1, True, None, 2),
        (P5, None, 8, 0, 1, True, None, 8),
        ("", None, 0, 0, 1, True, None, 1),
        ("", None, 4, 0, 1, True, None, 4),
        ("", 3, 0, 0, 1, True, None, 3),
        (GB200, None, 4, 0, 1, True, None, "x86_64 processors, and a p6e-gb200.36xlarge has aarch64"),
        (P5, None, 7, 32, 1, True, None, "7 of 8 GPUs"),
        (P5, None, 8, 31, 1, True, None, "31 of 32 EFA adapters"),
        (P5, None, 8, 0, 2, True, None, "0 of 32 EFA adapters"),
        # The machine's own type does not overrule the user.
        (P5, 2, 0, 0, 2, False, None, 2),
        (P5, None, 7, 0, 1, False, None, "7 of 8 GPUs"),
        (P5, None, 2, 0, 1, False, "0,1", 2),
        # A choice of the environment is no fault of a node, which would be left out of the next start.
        (P5, None, 2, 0, 1, True, "0,1", "2 of 8 GPUs .*CUDA_VISIBLE_DEVICES=0,1"),
        (P5, 8, 2, 0, 1, True, "0,1", "2 of 8 GPUs .*CUDA_VISIBLE_DEVICES=0,1"),
    ],
)
def test_node_is_compared_with_its_type(
    kind: str, nproc: int | None, gpus: int, efa: int, nodes: int, given: bool, visible: str | None, result: int | str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(agent.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(agent, "ADAPTERS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for number in range(efa):
        (tmp_path / f"rdmap{number}s0").mkdir()
    instance = find(kind) if kind else None
    if isinstance(result, int):
        assert agent.check_node(instance, nproc, gpus, nodes=nodes, stated=given) == result
        return
    with pytest.raises(SmpTrainError, match=result) as refused:
        agent.check_node(instance, nproc, gpus, nodes=nodes, stated=given)
    assert isinstance(refused.value, ConfigError if "processors" in result or visible else agent.BadNodeError)


@pytest.mark.parametrize(
    ("counts", "odd"),
    [
        ([(8, 32)] * 3, []),
        ([(8, 32), (7, 32), (8, 32)], ["n2"]),
        ([(7, 32), (8, 32)], ["n1"]),
        ([(8, 32), (8, 32), (8, 0)], ["n3"]),
        ([(8, 0), None, (8, 0)], ["n2"]),
    ],
)
def test_the_node_that_is_not_as_the_others_is_named_by_all(
    counts: list[tuple[int, int] | None], odd: list[str], tmp_path: Path
) -> None:
    hosts = [f"n{number}" for number in range(1, len(counts) + 1)]
    present = [(number, count) for number, count in enumerate(counts) if count]
    for number, count in present:  # the first ones see nobody else yet
        network_check.compare(tmp_path, hosts, number, *count, seconds=0)
    for number, count in present:
        names, message = network_check.compare(tmp_path, hosts, number, *count, seconds=0)
        assert names == odd
        wanted = "no word from n2 within 0 s" if None in counts else ".*: . GPUs and .* other nodes have 8 and 32"
        assert not odd or re.match(wanted, message), message


def first_node(logs: Path, processes: int) -> None:
    """Leave what the first node of the step leaves."""
    logs.mkdir(parents=True)
    network_check.compare(logs, ["n1", "n3"], 0, processes, 0, seconds=0)


REFUSED: dict[str, tuple[list[str], dict[str, str], int, str, str]] = {
    "nodes differ": (["--nproc=1", "--"], STEP, 75, "node", "n3: 1 GPUs"),
    "no container": (["--inside", "--"], {}, 75, "node", "pyxis is not installed on this compute node"),
    "too large": (
        [f"--instance_type={P5}", "--", "--model_type=llama_v2", "--model_size=70b"], {}, 2, "configuration",
        "weights, gradients and",
    ),
    "a flag": (["--", "--max_stepz", "1"], {}, 2, "configuration", "--max_stepz"),
    # What the first node can write, this one cannot.
    "no folder, node 1": (["--"], STEP, 75, "node", "/file/run/logs/12.0.3"),
    "no folder, node 0": (["--"], STEP | {"SLURM_NODEID": "0"}, 2, "configuration", "/file/run/logs/12.0.3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_task_names_what_it_refuses(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, environ, code, cause, complaint = REFUSED[case]
    run = tmp_path / ("file/run" if "folder" in case else "run")
    (tmp_path / "file").write_text("no folder")
    for name, value in {"SLURMD_NODENAME": "n3", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(agent, "INSIDE", str(tmp_path / ("none" if case == "no container" else "")))
    monkeypatch.setattr(agent, "count_gpus", lambda: 8)
    monkeypatch.setattr(agent, "count_efa", lambda: 32)
    monkeypatch.setattr(agent, "supervise", lambda *_, **__: pytest.fail("started"))
    if case == "nodes differ":
        first_node(run / "logs/12.0.3", 2)
    failures = tmp_path / "failures"
    words = ["--failures", str(failures), *words, "--use_synthetic_data=1", f"--run_dir={run}"]
    assert agent.main(words) == code
    error, line = capsys.readouterr().err.splitlines()[-2:]
    assert complaint in error
    assert line == f"smp-train: LAUNCH-FAIL node=n3 rank=-1 rc={code} cause={cause}"
    (left,) = failures.glob(f"*/failed-*-node-{environ.get('SLURM_NODEID', 0)}")
    assert f"smp-train: {left.read_text()}" == f"{line}\n"
    if case == "no container":
        assert (run / "launches.jsonl").exists(), "a start that counts: pyxis will be missing the next time too"


def test_a_task_gives_its_processes_what_the_instance_needs_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "product_name").write_text(f"{P5}\n")
    monkeypatch.setattr(instances, "PRODUCT", tmp_path / "product_name")
    monkeypatch.setattr(agent, "INSIDE", str(tmp_path))
    for name in ("NCCL_DEBUG", "HF_HOME", "HF_HUB_CACHE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("NCCL_DEBUG", "INFO"), ("HOME", str(tmp_path)), ("FI_PROVIDER", "efa")):
        monkeypatch.setenv(name, value)
    given: dict[str, str] = {}
    monkeypatch.setattr(agent, "supervise", lambda *_, environ, **__: (given.update(environ), (0, None))[1])
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "step_sec": 100.0}\n')
    words = ["--nproc=1", "--inside", "--time_left=1:00:00", "--", "--use_synthetic_data=1", f"--run_dir={run}"]
    assert agent.main(words) == 0
    assert (given["FI_EFA_USE_HUGE_PAGE"], given["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("0", "1")
    assert given["NCCL_DEBUG"] == "INFO", "the user's own"
    assert given["HF_HOME"] == f"{run}/huggingface"
    assert given["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith(f"{run}/logs/")
    err = capsys.readouterr().err
    assert "smp-train: warning: FI_PROVIDER=efa is set: the NCCL plugin finds EFA by itself" in err
    assert "warning: --checkpoint_freq 1000: that takes 27.8 h" in err
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    values = environment.output_places(str(run), "logs", os.environ, inside=True)
    assert "HF_HOME" not in values, "the image has its own"


def test_gpus_are_counted_as_the_job_sees_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for visible, count in (("0,1,2", 3), ("", 0), ("NoDevFiles", 0), ("GPU-1,GPU-2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert agent.count_gpus() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf 'GPU 0: H100\\nGPU 1: H100\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert agent.count_gpus() == 2
    fake.write_text("#!/bin/sh\necho 'Unable to determine the device handle' >&2; exit 9\n")
    with pytest.raises(agent.BadNodeError, match="Unable to determine"):
        agent.count_gpus()


def marker(step: int, generation: int = 1) -> bytes:
    return Marker(step, "llama_v2", generation, {META: FileRecord(2, "0" * 8)}).to_bytes()


def committed(folder: Path, step: int, name: str = "", generation: int = 1) -> None:
    checkpoint = folder / (name or f"llama_v2-{step}steps")
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMMITTED").write_bytes(marker(step, generation))


def newest(*parents: Path | str, in_s3: bool = True) -> int:
    policies = [[f"--{name}", *["1"] * len(parents)] for name in ("checkpoint_freq", "num_kept_checkpoints")]
    words = ["--run_name=mine", "--checkpoint_dir", *map(str, parents), *policies[0], *policies[1]]
    return flags.newest_step(parse(words, {}).args, in_s3=in_s3)


@pytest.mark.parametrize(
    ("words", "name", "run_dir"),
    [
        ([], "gpt_neox", "/from/runs/gpt_neox"),
        (["--model_type=llama_v2", "--model_size=7b"], "llama_v2-7b", "/from/runs/llama_v2-7b"),
        (["--run_dir", "out/mine"], "mine", "/from/out/mine"),
        (["--run_name=x", "--run_dir=/r/y"], "x", "/r/y"),
    ],
)
def test_flags_are_completed_to_survive_a_restart(words: list[str], name: str, run_dir: str) -> None:
    complete, resolved = flags.complete(words, base="/from")
    args = resolved.args
    assert (args.run_name, args.run_dir) == (name, run_dir)
    assert (args.checkpoint_dir, args.resume_from_checkpoint) == (["/from/checkpoints"], "/from/checkpoints")
    assert complete == flags.complete(complete)[0] == flags.complete(complete, base="/elsewhere")[0]


def test_what_the_user_or_sagemaker_gave_stays(tmp_path: Path) -> None:
    """Also once the run has checkpoints of its own, which training itself prefers."""
    committed(tmp_path / "x", 7)
    words = ["--run_name=x", "--checkpoint_dir", str(tmp_path), "--ckpt_load_path", "/other/checkpoint"]
    assert flags.complete(words, base="/from")[0] == [*words, "--run_dir=/from/runs/x"]
    environ = {"SM_TRAINING_ENV": "{}", "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data", "SM_HP_MODEL_TYPE": "llama_v2"}
    complete, resolved = flags.complete(["--lr=1"], environ)
    assert complete == ["--lr=1", "--run_name=llama_v2", "--resume_from_checkpoint=/opt/ml/checkpoints"]
    assert (resolved.args.checkpoint_dir, resolved.args.run_dir) == (["/opt/ml/checkpoints"], "/opt/ml/output/data")
    assert flags.complete([], {**environ, "SM_HP_RESUME_FROM_CHECKPOINT": "s3://b/x"})[0] == ["--run_name=llama_v2"]


def test_what_nodes_keep_to_themselves_is_not_what_a_run_resumes_from(tmp_path: Path) -> None:
    words = ["--run_dir", str(tmp_path / "x"), "--checkpoint_dir", "local:/nvme/fast", str(tmp_path / "shared")]
    freq = ["--checkpoint_freq", "5", "10", "--num_kept_checkpoints", "1", "2"]
    _, resolved = flags.complete(words)
    assert resolved.args.resume_from_checkpoint == str(tmp_path / "shared")
    job = slurm.read(["--nproc=1", "--use_synthetic_data=1", *words, *freq])[2]
    assert (job.written, job.checkpoints) == ([f"{tmp_path}/shared"], [f"{tmp_path}/shared/x"])


def test_files_that_flags_name_are_those_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "names.json").touch()
    words = ["--run_dir", str(tmp_path / "x"), "--smp_names", str(tmp_path / "names.json"), "--tokenizer", "org/name"]
    words += ["--tensorboard_dir", "{run_dir}/tb", "--model_dir", "s3://b/m"]
    job = slurm.read(["--nproc=1", "--use_synthetic_data=1", *words])[2]
    assert str(tmp_path / "names.json") in job.read
    assert not any("org/name" in path for path in job.read)
    assert str(tmp_path / "x/tb") in job.written
    assert not any("s3:" in path for path in job.written)


def test_newest_of_several_folders(tmp_path: Path) -> None:
    """Of the highest generation, then of the highest step, whatever names and clocks say."""
    for folder, step in (("a/mine", 10), ("b/mine", 9), ("b/mine", 100), ("b", 200), ("b/other", 300)):
        committed(tmp_path / folder, step)
    committed(tmp_path / "b/mine", 400, "best")
    (tmp_path / "b/mine/llama_v2-500steps").mkdir()
    (tmp_path / "b/mine/llama_v2-600steps").mkdir()
    (tmp_path / "b/mine/llama_v2-600steps/COMMITTED").write_bytes(b"\xff")
    (tmp_path / "file").touch()
    assert newest(tmp_path / "a", tmp_path / "b", "/nowhere", "local:/nvme") == 100
    assert [newest("/nowhere"), newest(tmp_path / "a"), newest(tmp_path / "file")] == [0, 10, 0]
    committed(tmp_path / "a/mine", 50, "llama_v2-50steps-3f", generation=2)
    assert newest(tmp_path / "a", tmp_path / "b") == newest(tmp_path / "b", tmp_path / "a") == 50


def test_newest_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    import moto

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    with moto.mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="bucket")
        for step, generation in ((5, 2), (10, 2), (70, 1)):
            s3.put_object(Bucket="bucket", Key=f"x/mine/llama-{step}steps/COMMITTED", Body=marker(step, generation))
        assert newest("s3://bucket/x", "local:/nvme") == 10
        assert newest("s3://bucket/x", in_s3=False) == 0, "who submits a run may have no access"
        with pytest.raises(SmpTrainError, match="s3://none/x/mine: ") as failed:
            newest("s3://none/x")
        assert failed.value.exit_code == 1, "a later start may be luckier"


def test_starts_of_one_job_without_a_new_checkpoint_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [f"--run_dir={tmp_path}", f"--checkpoint_dir={tmp_path}/checkpoints"]
    run = parse(["--use_synthetic_data=1", "--run_name=mine", *folders], {})
    (tmp_path / "logs").mkdir()

    def begin(job: str, start: str, limit: int | None = 2) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        agent.record_start(run, f"{job}.{start}", limit, in_s3=True)

    for job in ("1", "2"):
        for start in ("1.0", "2.0"):
            begin(job, start)
    committed(tmp_path / "checkpoints/other", 50)
    with pytest.raises(CrashLoopError, match="2 starts of job 2 brought no new checkpoint"):
        begin("2", "3.0")  # another run's commit is no progress of this one
    for restart in (2, 3):
        Starts(tmp_path, "2").remove(restart)  # Slurm ended them
    begin("2", "3.0")
    committed(tmp_path / "checkpoints/mine", 5)
    for start in ("4.0", "5.0", "6.0"):
        begin("2", start, 3)
    begin("2", "6.0", None)  # a person who starts it watches
    with pytest.raises(CrashLoopError, match="3 starts of job 2 "):
        begin("2", "7.0", 3)
    lines = [json.loads(line) for line in (tmp_path / "launches.jsonl").read_text().splitlines()]
    assert [line["attempt"] for line in lines][2:] == [f"2.{number}.0" for number in (1, 2, 3, 4, 5, 6, 6)]


def test_launch_local_passes_its_options_on_and_has_no_limit_of_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an interactive allocation every try is one of the same job."""
    for name in (*BY_HAND, "GREETING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    seen: dict[str, str] = {}
    monkeypatch.setattr(agent, "supervise", lambda *_, **__: (seen.update(os.environ), (0, None))[1])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = [word for name, value in BY_HAND.items() for word in (f"--{name.lower()}", value)]
    words += ["--nproc", "1", "--env", "GREETING=hello", "--use_synthetic_data", "1", "--run_dir", str(tmp_path)]
    assert [local.main(words) for _ in "12345"] == [0] * 5
    assert {**BY_HAND, "GREETING": "hello"}.items() <= seen.items()


@pytest.mark.parametrize(
    ("node", "ended", "verdict", "failure"),
    [
        (0, (0, "done"), None, None),
        (0, (75, "error"), {"nodes": ["n3"], "at_fault": True}, Failure(-1, "n3", 75, "node")),
        # The link, for which no node is left out.
        (0, (75, "error"), {"nodes": ["n1", "n3"], "at_fault": False}, Failure(-1, "n1,n3", 75, "network")),
        (1, (75, "error"), {"nodes": ["n3"], "at_fault": True}, None),  # the first node reports for all
        (0, (75, "error"), "", Failure(-1, "here", 75, "network")),  # a full disk leaves an empty file
        (1, (74, "error"), None, Failure(-1, "here", 75, "network")),  # who does not reach it reports itself
        (1, (1, "error"), None, Failure(1, "here", 1, "error")),  # torch, say, could not be imported
    ],
)
def test_preflight_names_the_node_at_fault(
    node: int, ended: tuple[int, str], verdict: Any, failure: Failure | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, cause = ended

    def supervise(command: list[str], place: Node, environ: dict[str, str], **_: Any) -> tuple[int, Failure | None]:
        assert command[-2:] == ["--efa", "32"]
        assert place.master_port == 20088, "a port of its own"
        if verdict is not None:
            (tmp_path / "preflight.json").write_text(json.dumps(verdict) if verdict else "")
        return code, Failure(node, "here", code, cause) if code else None

    monkeypatch.setattr(network_check, "supervise", supervise)
    of_run = Node(1, nodes=2, node_rank=node, master_addr="n1", master_port=20087)
    result = network_check.run(of_run, 60, "auto", 32, STEP, tmp_path)
    assert result == (failure.code if failure else code, failure)
    assert capsys.readouterr().err == (f"smp-train: {failure.line()}\n" if failure else "")


def test_nsys_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NSYS_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match="nsys"):
        nsys.command(tmp_path, ["x"])
    for folder in (tmp_path / "target-linux-x64", tmp_path):
        folder.mkdir(exist_ok=True)
        (folder / "nsys").write_text("#!/bin/sh\n")
        (folder / "nsys").chmod(0o755)
        monkeypatch.setattr(nsys.platform, "machine", lambda: "x86_64")
        command = nsys.command(tmp_path / "run/report", ["python", "-m", "x"])
        assert command[:2] == [str(folder / "nsys"), "profile"]
        assert command[-4:] == [str(tmp_path / "run/report"), "python", "-m", "x"]


def test_report_of_nsys_is_named_by_start_node_and_host(tmp_path: Path) -> None:
    double = tmp_path / "nsys"
    double.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\n')
    double.chmod(0o755)
    words = ["--nproc=1", "--profile=nsys", "--", "--use_synthetic_data", "1", "--run_dir", str(tmp_path / "run")]
    first_node(tmp_path / "run/logs/12.2.3", 1)
    environ = {**os.environ, **STEP, "SLURM_RESTART_COUNT": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "smp_train.launch.node_agent", *words]
    assert subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode == 0
    assert f"--output {tmp_path}/run/profile/12.2.3_node1_{socket.gethostname()} " in (tmp_path / "called").read_text()
    assert (tmp_path / "run/profile").is_dir(), "nsys does not make folders"


def test_a_broken_image_is_a_cause_that_is_not_tried_again(tmp_path: Path) -> None:
    """One of torch's libraries is not there: known before the first step."""
    (tmp_path / "site/torch").mkdir(parents=True)
    (tmp_path / "site/torch/__init__.py").write_text('raise ImportError("libcudnn.so.9: cannot open")')
    words = ["--nproc", "2", "--", "--use_synthetic_data=1", f"--run_dir={tmp_path}/run"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}/site:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "smp_train.launch.node_agent", *words],
        capture_output=True, text=True, check=False, timeout=240, env=environ,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "libcudnn.so.9" in done.stderr
    assert "rc=2 cause=configuration" in done.stderr
