"""`io`: seconds of saving and loading, beside the steps and instead of them; of reading a shard; of starting."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.cells import Cell
from benchmarks.data import token_rows, write_shards
from benchmarks.parts import Setting
from benchmarks.parts.ladder import LLAMA_1B
from benchmarks.program import STEADY, TINY, Flags, below, command, logged, opened, scratch, stepping, words
from smp_train.checkpoints.find import open_verified
from smp_train.errors import ConfigError
from smp_train.run.saving import report_saves, save

EVERY = 8
"""Steps between two saves."""


def cells(setting: Setting) -> list[Cell]:
    """Return starts, saves, and the data."""
    base: Flags = {**TINY, "bf16": 0} if setting.rehearse else {**LLAMA_1B, "max_context_width": 4096}
    rows, length = (8, 64) if setting.rehearse else (1000, 4096)
    compiled, eager = ({**base, "use_torch_compile": on} for on in (1, 0))
    return [
        Cell("start to first step, eager", start, {"flags": eager}, 60),
        Cell("start to first step, compiled, then again", start, {"flags": compiled, "times": 2}, 120),
        Cell("save and load", saves, {"flags": {**base, "num_kept_checkpoints": 1, "checkpoint_freq": EVERY}}, 150),
        Cell("convert a json.gz shard", shard, {"rows": rows, "length": length}, 40),
    ]


def start(flags: Flags, times: int = 1) -> dict[str, Any]:
    """Time the command from its start to the log line of the first step, then kill it, and start it again."""
    seconds = []
    with scratch() as folder:
        for turn in range(times):
            here = folder / str(turn)
            here.mkdir()
            # The same run folder, where something may be kept for the next start; no checkpoint to read.
            given = {**STEADY, **flags, "run_dir": folder / "run", "checkpoint_dir": here, "logging_freq": 1}
            began = time.time()
            process = command("train", *words(given), folder=here)
            try:
                seconds.append(first_step(folder, began, process) - began)
            finally:
                process.kill()
                process.wait()
    return {"first s": seconds[0], **({"again s": seconds[1]} if times > 1 else {})}


def first_step(folder: Path, began: float, process: subprocess.Popen[str]) -> float:
    """Return when the first step was logged that was made since ``began``."""
    while process.poll() is None:
        time.sleep(0.02)
        with contextlib.suppress(ConfigError):  # no metrics yet
            times = [record["time"] for record in logged(folder) if record["time"] > began]
            if times:
                return float(times[0])
    raise RuntimeError(f"the command ended with code {process.returncode} before its first step")


def timed(one: Callable[[], Any]) -> float:
    """Make one step, or do anything else, and return its seconds, the device's work included."""
    began = time.perf_counter()
    one()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def saves(flags: Flags) -> dict[str, Any]:
    """Save in the background beside the steps, then with training standing still, then with DCP alone; load."""
    with scratch() as folder:
        with opened(words({**STEADY, **below(folder), **flags})) as run, stepping(run) as one:
            for _ in range(EVERY):
                timed(one)
            began = time.perf_counter()
            save(run, force=False)  # pays for the host buffers
            first = time.perf_counter() - began
            report_saves(run)
            undisturbed = statistics.median([timed(one) for _ in range(EVERY)])
            beside = []
            began = time.perf_counter()
            save(run, force=False)
            blocked = time.perf_counter() - began
            while run.checkpoints.busy():
                beside.append(timed(one))
            background = time.perf_counter() - began
            report_saves(run)
            state = run.backend.state_dict(run.model, run.optimizer)
            foreground = timed(partial(dcp.save, state, checkpoint_id=folder / "dcp"))
            shutil.rmtree(folder / "dcp")
            found = open_verified(folder / "checkpoints")
            assert found is not None, "it was saved above"
            read = partial(found.load, saver=run.backend.saver)
            loading = timed(partial(run.backend.load_state, run.model, run.optimizer, read))
            size = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    lost = sum(beside) - len(beside) * undisturbed
    return {
        "GB": size / 1e9, "step ms": 1000 * undisturbed, "steps beside the save": len(beside),
        "first blocked s": first, "blocked s": blocked, "lost beside s": lost, "saved after s": background,
        "dcp.save s": foreground,
        "blocked and lost, of dcp.save": (blocked + lost) / foreground, "load s": loading,
    }  # fmt: skip


def shard(rows: int, length: int) -> dict[str, Any]:
    """Convert two shards and read every row."""
    with scratch() as folder:
        write_shards(folder / "shards", rows, length)
        began = time.perf_counter()
        source = token_rows(folder / "shards")
        converted = time.perf_counter() - began
        began = time.perf_counter()
        for index in range(len(source)):
            source.row(index)
        read = time.perf_counter() - began
    tokens = 2 * rows * length
    return {"tokens": tokens, "convert tokens/s": tokens / converted, "read tokens/s": tokens / read}
