"""What only a GPU can tell, in parts of at most eight minutes, for a machine that is borrowed and has no network.

Each part runs its cells in order of worth and leaves out those that no longer fit in its time. Results are JSON and
Markdown in ``--out``. ``--rehearse`` runs every cell's whole path on a CPU at sizes that take seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import ledger
from benchmarks.cells import FAILED, WRONG, run_cells, table
from benchmarks.parts import Setting
from benchmarks.program import COMPILED, scratch
from smp_train.errors import ConfigError
from smp_train.telemetry.metrics import peak_flops

PARTS = {
    "right": "whether a GPU's numbers are the CPU's, and what a run survives",
    "ladder": "share of the peak, tokens per second and memory: the defaults, then each switch",
    "peers": "the same training by other programs, in turn (on a CPU too)",
    "profile": "operators, streams and host waits of three steps",
    "memory": "peak by phase and owner",
    "io": "seconds of saving, loading, converting and starting",
}
ABOUT = ("device", "peak FLOP/s", "torch", "transformers", "python")
SECONDS = 470.0
REHEARSAL_SECONDS = 3600.0
"""Of each part: a rehearsal leaves nothing out, on a machine however busy."""


def main(argv: Sequence[str]) -> int:
    """Run the parts; return 1 where one of `right` was wrong, or a rehearsal failed anywhere."""
    parser = argparse.ArgumentParser(
        prog="smp-train bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"  {part:<9}{about}" for part, about in PARTS.items()),
    )  # fmt: skip
    parser.add_argument("--part", nargs="+", dest="parts", choices=PARTS, required=True, help=", ".join(PARTS))
    parser.add_argument("--out", default="bench-gpu", help="folder of the results (default bench-gpu)")
    parser.add_argument("--rehearse", action="store_true", help="run everything on a CPU at tiny sizes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"most of each part (default {SECONDS:.0f})")
    parser.add_argument("--processes", type=int, default=1, help="of each driver of `peers` (default 1)")
    parser.add_argument("--untied", action="store_true", help="of `peers`: a model with a head of its own")
    parser.add_argument("--only", default="", help="run the cells whose name contains this")
    options = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and not options.rehearse
    if not (cuda or options.rehearse or options.parts == ["peers"]):
        raise ConfigError("bench gpu: there is no GPU here; --rehearse tries every part on the CPU")
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with scratch() as folder:
        setting = Setting(
            "cuda" if cuda else "cpu", options.rehearse, str(out), str(folder), options.processes, options.untied
        )
        bad = [measure(name, setting, options, argv) for name in options.parts]
    return int(any(bad))


def measure(name: str, setting: Setting, options: argparse.Namespace, argv: Sequence[str]) -> bool:
    """Run a part and write its results; return whether `right` was wrong, or a rehearsal failed."""
    part = importlib.import_module(f"benchmarks.parts.{name}")
    cells = [cell for cell in part.cells(setting) if options.only in cell.name or cell.needed]
    out, began = Path(setting.out), time.monotonic()
    seconds = REHEARSAL_SECONDS if setting.rehearse else options.seconds
    # What one cell compiles serves the next one, and all peers alike.
    environ = {COMPILED: f"{setting.scratch}/compiled"}
    records = run_cells(name, cells, seconds=seconds, log=out / f"{name}.log", see=see, environ=environ)
    facts = {**machine(setting.device == "cuda"), "command": shlex.join(["smp-train", "bench", "gpu", *argv]),
             "part": name, "minutes": (time.monotonic() - began) / 60}  # fmt: skip
    write(out, name, facts, records, list(part.summary(records)) if hasattr(part, "summary") else [])
    if name == "right":
        text = ledger.report({**facts, **environment()}, records)
        (out / "report.md").write_text(text)
        print(f"{text}\nAttach {out / 'report.md'} to a bug report.", flush=True)
    states = {record["state"] for record in records}
    return (WRONG in states and name == "right") or (setting.rehearse and bool({WRONG, FAILED} & states))


def machine(cuda: bool) -> dict[str, Any]:
    """Return what the figures depend on."""
    device = torch.cuda.get_device_name(0) if cuda else f"CPU ({platform.machine()})"
    return {
        "date": time.strftime("%Y-%m-%d"), "device": device, "peak FLOP/s": peak_flops(device) if cuda else None,
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip


def environment() -> dict[str, Any]:
    """Return what else a bug report needs: versions, and the variables that libraries read."""
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    packages = {name: ledger.version(name) for name in ("triton", "torchao", "flash_attn")}
    asked = ("CUDA_", "NCCL_", "PYTORCH_", "TORCH_")
    return {
        "GPUs": torch.cuda.device_count(), "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, nccl)), **packages,
        "variables": " ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(asked)),
    }  # fmt: skip


def see(record: dict[str, Any]) -> None:
    """Print a record as it comes."""
    told = {name: value for name, value in record.items() if not isinstance(value, list | dict)}
    print(json.dumps(told, default=str), flush=True)


def write(
    out: Path, name: str, facts: dict[str, Any], records: list[dict[str, Any]], sums: list[dict[str, Any]]
) -> None:
    """Write the results of a part as JSON, and as Markdown to be pasted."""
    whole = {"facts": facts, "cells": records, "summary": sums}
    (out / f"{name}.json").write_text(json.dumps(whole, default=str, indent=1))
    about = ", ".join(f"{key} {value}" for key, value in facts.items() if key in ABOUT and value is not None)
    text = f"### `{name}`, {facts['date']}\n\n{about}; {facts['minutes']:.1f} minutes.\n\n`{facts['command']}`\n\n"
    if sums:
        text += table(sums, lead=()) + "\n\n"
    (out / f"{name}.md").write_text(text + table(records) + "\n")
