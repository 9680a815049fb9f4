"""`make demo`: real text to shards, training on two processes, a stop half way, a resume, and the report.

Prints every command as it could be typed. Ends with exit code 0 only when all that it claims came true.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

from smp_train.telemetry.metrics import history, read_metrics
from smp_train.telemetry.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent  # not resolved: the environment's own folder
DEMO = Path("demo")
MARKER = ".made-by-make-demo"

STEPS = 300  # one pass over 1,200 rows in global batches of 2 processes x 2
LOGGING_FREQ = 2
MARGIN = 0.5  # nats by which the losses must end below the unigram entropy
DATA_WAIT = 0.01  # of a step, at most, that may go by in waiting for its data

TOKENIZER_SIZE = 2048
SEQ_LEN = 512


class DemoFailed(Exception):
    """Something that the demo claims did not come true."""


def prepare_command() -> list[str]:
    """Turn the standard library's source into 6 shards of 200 rows to train on, and one held out."""
    return [
        str(BIN / "smp-train"), "prepare",
        "--input", sysconfig.get_paths()["stdlib"], "--pattern", "*.py",
        "--exclude", "site-packages", "dist-packages", "test", "tests", "idle_test",
        "--train_tokenizer", str(TOKENIZER_SIZE), "--seq_len", str(SEQ_LEN),
        "--max_rows", "1200", "--rows_per_shard", "200", "--validation_shards", "1",
        "--output", str(DEMO / "data"),
    ]  # fmt: skip


def train_command() -> list[str]:
    """Train a Llama of 0.9 million parameters; the same command starts and resumes it."""
    return [
        str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2", "-m", "smp_train", "train",
        "--model_type", "llama_v2", "--vocab_size", str(TOKENIZER_SIZE), "--max_context_width", str(SEQ_LEN),
        "--hidden_width", "128", "--num_layers", "2", "--num_heads", "4", "--num_key_value_heads", "2",
        "--intermediate_size", "352", "--bf16", "0", "--activation_checkpointing", "0",
        "--sharding_strategy", "full_shard", "--train_batch_size", "2", "--max_steps", str(STEPS),
        "--lr", "5e-3", "--min_lr", "5e-4", "--warmup", "15", "--weight_decay", "0.1",
        "--training_dir", str(DEMO / "data/train"), "--test_dir", str(DEMO / "data/test"),
        "--validation_freq", "50", "--validation_batches", "5", "--val_batch_size", "4",
        "--checkpoint_dir", str(DEMO / "checkpoints"), "--checkpoint_freq", "100",
        "--resume_from_checkpoint", str(DEMO / "checkpoints"),
        "--run_dir", str(DEMO / "run"), "--logging_freq", str(LOGGING_FREQ),
    ]  # fmt: skip


def heading(text: str) -> None:
    """Print the title of a step."""
    print(f"\n=== {text}", flush=True)


def show(command: list[str]) -> None:
    """Print a command as it can be pasted into a shell at the root of the repository."""
    root = str(ROOT) + os.sep
    print("$ " + shlex.join(word.removeprefix(root) for word in command) + "\n", flush=True)


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a process group of its own; whatever is left of it afterwards is killed."""
    show(command)
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            # torchrun ends its workers on SIGTERM, and only then itself.
            _signal_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def finish(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait for a command to end well."""
    name = shlex.join(cast("list[str]", process.args)[:3])
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"{name} ... was still running after {timeout:.0f} s") from None
    if code != 0:
        raise DemoFailed(f"{name} ... ended with exit code {code}")


def wait_for_step(process: subprocess.Popen[bytes], run: RunFolder, step: int, timeout: float) -> None:
    """Follow `metrics.jsonl` until ``step`` has been logged, while the command is running."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if (run.path / "metrics.jsonl").exists() and last_step(run) >= step:
            return
        try:
            code = process.wait(0.25)
        except subprocess.TimeoutExpired:
            continue
        raise DemoFailed(f"the training ended by itself before step {step} (exit code {code})")
    raise DemoFailed(f"the training had not reached step {step} after {timeout:.0f} s")


def last_step(run: RunFolder) -> int:
    """Return the last step that the run has logged, 0 before the first."""
    return max((record["step"] for record in read_metrics(run.path) if "event" not in record), default=0)


def marked_step(marker: Path) -> int | None:
    """Return the step that `DONE` or `STOPPED` names, None without the marker."""
    return cast(int, json.loads(marker.read_text())["step"]) if marker.exists() else None


def stop_half_way(
    run: RunFolder, checkpoints: Path, command: list[str], *, half: int, timeout: float
) -> int:
    """Train until ``half``, send SIGTERM to rank 0, and return the step at which the run saved."""
    with started(command) as process:
        wait_for_step(process, run, half, timeout)
        pid = run.read_run()["pid"]
        heading(f"Stop it half way: kill -TERM {pid} (rank 0)")
        os.kill(pid, signal.SIGTERM)
        finish(process, 60)
    step = marked_step(run.stopped)
    if step is None:
        raise DemoFailed(f"there is no {run.stopped} after the stop")
    saved = list(checkpoints.glob(f"*-{step}steps/COMMITTED"))
    if not saved:
        raise DemoFailed(f"STOPPED says step {step}, but no checkpoint of that step is committed")
    print(f"\nExit code 0, {run.stopped}: {run.stopped.read_text().strip()}, saved in {saved[0].parent}")
    return step


def check(run: RunFolder, entropy: float, *, stopped_at: int, steps: int) -> dict[str, float]:
    """Check the whole run and return its losses; the last of training is a mean, as its batches are small."""
    records = history(read_metrics(run.path))
    logged = steps_of(run)
    evaluated = [record for record in records if record.get("event") == "evaluate"]
    resumed = [record["step"] for record in records if record.get("event") == "resume"]
    numbers = [record["step"] for record in logged]
    losses = {
        "first train": logged[0]["loss"],
        "last train": mean(record["loss"] for record in logged[-20:]),
        "last validation": evaluated[-1]["loss"],
    }
    below = entropy - MARGIN
    claims = {
        f"the run resumed at step {stopped_at}": resumed == [stopped_at],
        f"DONE says step {steps}": marked_step(run.done) == steps,
        "STOPPED is gone": marked_step(run.stopped) is None,
        "the steps follow one another, none missing, none twice": numbers == sorted(set(numbers))
        and set(range(LOGGING_FREQ, steps + 1, LOGGING_FREQ)) <= set(numbers),
        f"the training loss ends below {below:.3f}": losses["last train"] < below,
        f"the validation loss ends below {below:.3f}": losses["last validation"] < below,
        f"a step waits for its data less than {DATA_WAIT:.0%} of its time": data_wait(logged) < DATA_WAIT,
    }
    failed = [claim for claim, true in claims.items() if not true]
    if failed:
        raise DemoFailed(
            f"not true: {'; '.join(failed)} (losses: {losses}, unigram entropy: {entropy:.3f}, "
            f"waiting for data: {data_wait(logged):.2%})"
        )
    return losses


def steps_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return the logged steps of a run."""
    return [record for record in history(read_metrics(run.path)) if "event" not in record]


def data_wait(logged: list[dict[str, Any]]) -> float:
    """Return the part of a step that goes by in waiting for data: the median, as other programs share the machine."""
    return median(record["data_wait_sec"] / record["step_sec"] for record in logged)


def start_afresh(folder: Path) -> None:
    """Make an empty demo folder, deleting an earlier one only when this program has made it."""
    marker = folder / MARKER
    if folder.is_symlink() or (folder.exists() and not marker.is_file()):
        raise DemoFailed(f"{folder.resolve()} was not made by this demo: move it away first")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    marker.touch()


def summary(entropy: float, losses: dict[str, float], wait: float, seconds: float) -> None:
    """Print the result and where everything is."""
    heading(f"Done in {seconds:.0f} s, every claim checked")
    print(f"  unigram entropy of the text   {entropy:.3f} nats per token (what word counts alone can reach)")
    for name, loss in losses.items():
        print(f"  {name + ' loss':<30}{loss:.3f}")
    print(f"  {'waiting for data':<30}{wait:.2%} of a step (median)")
    checkpoints = sorted(path.parent.name for path in DEMO.glob("checkpoints/*/COMMITTED"))
    for name, where in (
        ("report", DEMO / "run/report.png"),
        ("metrics", DEMO / "run/metrics.jsonl"),
        ("configuration", DEMO / "run/run.json"),
        ("logs", DEMO / "run/logs"),
        ("token shards", DEMO / "data"),
        ("checkpoints", f"{DEMO / 'checkpoints'}: {', '.join(checkpoints)}"),
    ):
        print(f"  {name:<30}{where}")


def demo() -> None:
    """Run the whole demo in the root of the repository."""
    began = time.monotonic()
    start_afresh(DEMO)
    run = RunFolder(DEMO / "run")

    heading("Turn the source text of Python's standard library into token shards")
    with started(prepare_command()) as process:
        finish(process, 180)
    entropy = float(json.loads((DEMO / "data/_manifest.json").read_bytes())["unigram_entropy_nats"]["train"])

    heading("Train a small Llama on two processes (FSDP2, gloo)")
    stopped_at = stop_half_way(run, DEMO / "checkpoints", train_command(), half=STEPS // 2, timeout=600)

    heading(f"Start the same command again: it resumes at step {stopped_at} and finishes")
    with started(train_command()) as process:
        finish(process, 600)
    losses = check(run, entropy, stopped_at=stopped_at, steps=STEPS)

    heading("Draw the report")
    with started([str(BIN / "smp-train"), "report", str(run.path)]) as process:
        finish(process, 120)
    wait = data_wait(steps_of(run))
    summary(entropy, losses, wait, time.monotonic() - began)


def main() -> int:
    """Run the demo and return its exit code."""
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children are ended too
    try:
        demo()
    except DemoFailed as failure:
        print(f"\nThe demo failed: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
