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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

from smp_train.telemetry.metrics import history, read_metrics
from smp_train.telemetry.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent  # not resolved: the environment's own folder
DEMO = Path("demo")
CHECKPOINTS = DEMO / "checkpoints/demo"  # of the run, whose name is demo
RUN = RunFolder(DEMO / "run")
TIMEOUT = 600.0
MARKER = ".made-by-make-demo"

STEPS = 300  # one pass over 1,200 rows in global batches of 2 processes x 2
LOGGING_FREQ = 2
MARGIN = 0.5  # nats by which the losses must end below the unigram entropy
DATA_WAIT = 0.01  # of a step, at most, that may go by in waiting for its data

TOKENIZER_SIZE = 2048
PROMPT = "def main():\n    "
SEQ_LEN = 512


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
        "--intermediate_size", "352", "--activation_checkpointing", "0",
        "--sharding_strategy", "full_shard", "--train_batch_size", "2", "--max_steps", str(STEPS),
        "--lr", "5e-3", "--min_lr", "5e-4", "--warmup", "15", "--weight_decay", "0.1",
        "--training_dir", str(DEMO / "data/train"), "--test_dir", str(DEMO / "data/test"),
        "--validation_freq", "50", "--validation_batches", "5", "--val_batch_size", "4",
        "--checkpoint_dir", str(CHECKPOINTS.parent), "--checkpoint_freq", "100",
        "--resume_from_checkpoint", str(CHECKPOINTS.parent),
        "--run_name", CHECKPOINTS.name, "--run_dir", str(DEMO / "run"), "--logging_freq", str(LOGGING_FREQ),
    ]  # fmt: skip


def generate_command() -> list[str]:
    """Let the trained model continue a line of Python; it takes no flag of the model."""
    return [
        str(BIN / "smp-train"), "generate", "--checkpoint", str(CHECKPOINTS),
        "--prompt", PROMPT, "--num_tokens", "60",
    ]  # fmt: skip


def report_command() -> list[str]:
    """Write the page of the run."""
    return [str(BIN / "smp-train"), "report", str(RUN.path)]


def heading(text: str) -> None:
    """Print the title of a step."""
    print(f"\n=== {text}", flush=True)


def run(command: list[str], stop: Callable[[], bool] | None = None) -> None:
    """Show and run a command; once ``stop`` holds, ask rank 0 of the training to stop."""
    print("$ " + shlex.join(word.removeprefix(f"{ROOT}{os.sep}") for word in command) + "\n", flush=True)
    process, deadline = subprocess.Popen(command, start_new_session=True), time.monotonic() + TIMEOUT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if stop and stop():
                stop, pid = None, RUN.read_run()["pid"]
                heading(f"Stop it half way: kill -TERM {pid} (rank 0)")
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.25)
        if process.returncode != 0:
            end = f"ended with exit code {process.returncode}" if process.returncode else f"runs after {TIMEOUT:.0f} s"
            sys.exit(f"The demo failed: {shlex.join(command[:3])} ... {end}")
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers, and only then itself
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def marked(marker: Path) -> int | None:
    """Return the step that `DONE` or `STOPPED` names, None without the marker."""
    return int(json.loads(marker.read_text())["step"]) if marker.exists() else None


def half_way() -> bool:
    """Return whether half of the steps are logged."""
    logged = read_metrics(RUN.path) if (RUN.path / "metrics.jsonl").exists() else []
    return any(record["step"] >= STEPS // 2 for record in logged if "event" not in record)


def check(
    records: list[dict[str, Any]], entropy: float, stopped_at: int, steps: int
) -> tuple[dict[str, float], dict[str, bool]]:
    """Return the losses and the part of a step that waits for data, and whether each claim holds.

    The last loss of training is a mean, as its batches are small; the wait a median, as the machine may be shared.
    """
    records = history(records)
    logged = [record for record in records if "event" not in record]
    losses = {
        "first train loss": logged[0]["loss"],
        "last train loss": mean(record["loss"] for record in logged[-20:]),
        "last validation loss": [record["loss"] for record in records if record.get("event") == "evaluate"][-1],
    }
    numbers = [record["step"] for record in logged]
    wait = median(record["data_wait_sec"] / record["step_sec"] for record in logged)
    return {**losses, "waiting for data": wait}, {
        f"the run resumed at step {stopped_at}": [stopped_at]
        == [record["step"] for record in records if record.get("event") == "resume"],
        "the steps follow one another, none missing, none twice": numbers == sorted(set(numbers))
        and set(range(LOGGING_FREQ, steps + 1, LOGGING_FREQ)) <= set(numbers),
        f"the losses end below {entropy - MARGIN:.3f}": max([*losses.values()][1:]) < entropy - MARGIN,
        f"a step waits for its data less than {DATA_WAIT:.0%} of its time": wait < DATA_WAIT,
    }


def start_afresh(folder: Path) -> None:
    """Make an empty demo folder, deleting an earlier one only when this program has made it."""
    marker = folder / MARKER
    if folder.is_symlink() or (folder.exists() and not marker.is_file()):
        sys.exit(f"The demo failed: {folder.resolve()} was not made by this demo: move it away first")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    marker.touch()


def demo() -> None:
    """Run the whole demo in the root of the repository."""
    began = time.monotonic()
    start_afresh(DEMO)
    heading("Turn the source text of Python's standard library into token shards")
    run(prepare_command())
    entropy = float(json.loads((DEMO / "data/_manifest.json").read_bytes())["unigram_entropy_nats"]["train"])

    heading("Train a small Llama on two processes (FSDP2, gloo)")
    run(train_command(), stop=half_way)
    stopped_at = marked(RUN.stopped) or 0
    saved = [str(path.parent) for path in CHECKPOINTS.glob(f"*-{stopped_at}steps*/COMMITTED")]
    print(f"\n{RUN.stopped}: step {stopped_at}, saved in {', '.join(saved)}")

    heading(f"Start the same command again: it resumes at step {stopped_at} and finishes")
    run(train_command())
    numbers, claims = check(read_metrics(RUN.path), entropy, stopped_at, STEPS)
    claims["STOPPED named a step with a committed checkpoint, and is gone"] = bool(saved) and not RUN.stopped.exists()
    claims[f"DONE says step {STEPS}"] = marked(RUN.done) == STEPS
    failed = [claim for claim, true in claims.items() if not true]
    if failed:
        sys.exit(f"The demo failed: not true: {'; '.join(failed)} ({numbers}, unigram entropy: {entropy:.3f})")

    heading("Put a prompt through its checkpoint")
    run(generate_command())

    heading("Write its page")
    run(report_command())
    heading(f"Done in {time.monotonic() - began:.0f} s, every claim checked")
    print(f"  unigram entropy of the text   {entropy:.3f} nats per token (what word counts alone can reach)")
    for name, value in numbers.items():
        print(f"  {name:<30}" + (f"{value:.2%} of a step (median)" if name == "waiting for data" else f"{value:.3f}"))
    checkpoints = ", ".join(sorted(path.parent.name for path in CHECKPOINTS.glob("*/COMMITTED")))
    for name, where in (
        ("report", DEMO / "run/report.html"), ("metrics", DEMO / "run/metrics.jsonl"),
        ("configuration", DEMO / "run/run.json"), ("logs", DEMO / "run/logs"), ("token shards", DEMO / "data"),
        ("checkpoints", f"{CHECKPOINTS}: {checkpoints}"),
    ):  # fmt: skip
        print(f"  {name:<30}{where}")


if __name__ == "__main__":
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that children are ended too
    demo()
