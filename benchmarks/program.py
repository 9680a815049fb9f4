"""The program under test, in this process: a run opened from flags, and stepped as `train_lib` steps it.

Its functions, not its command: a run ends with a checkpoint, which would take longer than what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smp_train import arguments, distributed, train_lib, train_utils
from smp_train.build_run import build_run
from smp_train.models.initialization import initialise
from smp_train.run import results
from smp_train.run import step as run_step
from smp_train.run.state import Run
from smp_train.telemetry.metrics import read_metrics

Flags = Mapping[str, Any]
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Where compiled code is kept, if not in the run folder."""
ROOT = Path(__file__).parents[1]
TINY: Flags = {
    "model_type": "llama_v3", "vocab_size": 512, "hidden_width": 64, "num_layers": 3, "num_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_context_width": 64, "torch_compile_backend": "aot_eager",
}  # fmt: skip
SMALL_GPU: Flags = {**TINY, "bf16": 0, "use_torch_compile": 1}
"""The same, compiled as on a GPU by default."""
STEADY: Flags = {"lr_decay_style": "constant", "warmup": 0, "max_steps": 1_000_000, "use_synthetic_data": 1}
"""A learning rate that does not depend on how far a run is meant to go."""


def words(flags: Flags) -> list[str]:
    """Return flags as a command line; None leaves one out."""
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="smp-train-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def below(folder: Path) -> dict[str, Any]:
    """Return the flags that keep a run's output in a folder."""
    return {"run_dir": folder / "run", "checkpoint_dir": folder / "checkpoints"}


@contextmanager
def opened(command_line: Sequence[str]) -> Iterator[Run]:
    """Build the run of a command line, without `SM_HP_*`, and close it; collective.

    Numbers are read a step later on a CPU too, so that a rehearsal goes the GPU's way.
    """
    run_step.ASYNCHRONOUS_DEVICES.add("cpu")
    ranks = distributed.detect()
    resolved = arguments.parse(list(command_line), {})
    arguments.validate(resolved.args, ranks.world_size, ranks.local_world_size)
    limit = 60 * resolved.args.distributed_timeout_minutes
    device = distributed.start(ranks, distributed_backend=resolved.args.distributed_backend, timeout_seconds=limit)
    with ExitStack() as held:
        held.callback(distributed.stop)
        run = build_run(resolved, ranks, device, held)
        held.pop_all()
    try:
        yield run
    finally:
        run.close()


def whole(tensor: Tensor) -> Tensor:
    """Return a parameter, gathered where it is sharded, on the host; collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def numbers(flags: Flags, steps: int, *, cpu_weights: bool = True) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each of the first steps of a run in one process.

    A GPU would draw other initial weights than the CPU: with ``cpu_weights`` it gets the CPU's.
    """
    with scratch() as folder:
        with opened(words({**STEADY, **below(folder), **flags, "logging_freq": 1})) as run, stepping(run) as one:
            if cpu_weights:
                initialise(run.model, run.args.seed, torch.device("cpu"))
            for _ in range(steps):
                one()
        return [(record["loss"], record["grad_norm"]) for record in logged(folder)]


@contextmanager
def stepping(run: Run) -> Iterator[Callable[[], None]]:
    """Yield what makes the next step as `train_lib.fit` does; at the end the last one is logged."""
    run.read_from_here()

    def one() -> None:
        train_lib.step(run)
        train_utils.collect_garbage(run.progress.step)

    with train_utils.garbage_collected_together():
        yield one
    results.finish_pending_step(run)
    run.batches.close()


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of the run whose output is below a folder."""
    return [record for record in read_metrics(folder / "run") if "event" not in record]


def speed(flags: Flags, *, warm: int, steps: int) -> dict[str, Any]:
    """Return what the log of a run says of its speed and memory after ``warm`` steps: medians, and the highest peak."""
    with scratch() as folder:
        with opened(words({**STEADY, **below(folder), **flags})) as run, stepping(run) as one:
            for _ in range(warm + steps):
                one()
            args, how = run.args, "compiled" if run.backend.compiled else "eager"
        records = logged(folder)
    apart = records[1]["step"] - records[0]["step"]
    timed = [record for record in records if record["step"] - apart >= warm]
    middle = {
        name: statistics.median(record[name] for record in timed) if timed[0][name] is not None else None
        for name in ("step_sec", "tokens_per_sec_per_device", "mfu")
    }
    return {
        "settings": f"{args.train_batch_size} rows, {args.activation_checkpointing}, {how}",
        "step ms": 1000 * (middle["step_sec"] or 0), "tokens/s/GPU": middle["tokens_per_sec_per_device"],
        "MFU": middle["mfu"], "peak GiB": max(record["memory_gib"] for record in timed), "loss": timed[-1]["loss"],
    }  # fmt: skip


def command(*line: str, folder: Path, module: Sequence[str] = ("smp_train",)) -> subprocess.Popen[str]:
    """Start ``python -m smp_train LINE`` as a user does, its output in files of ``folder``.

    ``module``: another module to run, with the arguments that precede LINE.
    """
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environ.pop(COMPILED, None)
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", *module, *line], cwd=folder, env=environ, stdout=out, stderr=err, text=True
        )


def write_rows(folder: Path, lengths: Sequence[int], *, vocab: int) -> Path:
    """Write a shard of rows of these lengths in the package's format, learnable: a token decides most of the next."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.Generator(np.random.Philox(key=7))
    with (folder / "rows.jsonl").open("w") as file:
        for length in lengths:
            ids, noise = [int(draws.integers(vocab))], draws.integers(vocab, size=length)
            for place in range(1, length):
                ids.append(int(noise[place]) if noise[place] % 4 == 0 else (ids[-1] * 5 + 1) % vocab)
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * length}) + "\n")
    return folder
