"""``--auto``: degrees, activation checkpointing, offloading and micro-batch, chosen for the machine of a run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import torch

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved, validate
from smp_train.arguments.flag import command_line
from smp_train.arguments.groups import flags
from smp_train.arguments.model_flags import FinetuneArguments, ModelArguments, ParallelArguments
from smp_train.arguments.tuning import SEARCHED, fixed_flags
from smp_train.distributed import Runtime
from smp_train.distributed.host import python_path
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.errors import ConfigError, redacted
from smp_train.models.resolve import names_model
from smp_train.telemetry.run_folder import RunFolder

log = logging.getLogger("smp_train")
OFF = "off"
SEARCH_SHARE = 0.9
"""Share of --distributed_timeout_minutes for rank 0's search, while all other ranks wait."""
PLANNED = (ModelArguments, ParallelArguments, FinetuneArguments)
"""The groups of flags that a plan depends on; --auto itself is in one of these groups."""


def choose(
    resolved: Resolved, ranks: Runtime, device: torch.device, folder: RunFolder
) -> tuple[Resolved, dict[str, Any] | None]:  # fmt: skip
    """Return the settings with the chosen flags, and the record of the choice for ``run.json``; collective.

    A later start of the run takes the same settings if its `question` is the same. On another number of devices it
    chooses again, for the same global batch. Without ``--auto`` the record is None.

    Raises:
        ConfigError: nothing fits, or the run cannot be planned.
    """
    args = resolved.args
    if args.auto == OFF or args.evaluate_only:
        return resolved, None
    # A program's own loss needs the logits of all tokens at once.
    planned = args if resolved.inputs.loss is None else replace(args, chunked_loss=False)
    task = f"choosing settings (--auto {args.auto})"
    device_bytes, host_bytes = zip(*distributed.gather(task, lambda: free_memory(device, ranks)), strict=True)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    memory, host = min(device_bytes), min(host_bytes) if gpu else None
    asked = question(planned, fixed_flags(resolved), ranks, gpu, memory)
    choice = distributed.on_main(
        task, lambda: earlier_choice(folder, asked) or search(planned, asked, memory, host, folder)
    )  # fmt: skip
    resolved = resolved.with_values("--auto", **choice["flags"])
    validate(resolved.args, ranks.world_size, ranks.local_world_size, resolved.inputs)
    how = "as at the start before" if choice.get("kept") else f"of {memory / 2**30:.2f} GiB"
    log.info("--auto %s, on %d devices, %s: %s", args.auto, ranks.world_size, how, command_line(choice["flags"]))
    return resolved, choice


def free_memory(device: torch.device, ranks: Runtime) -> tuple[int, int]:
    """Return the bytes of device and host memory that this rank may use; without a GPU, both are the host's."""
    free = free_host_bytes()
    if free is None:
        raise ConfigError("--auto: this system does not say how much memory is free; give the settings, without --auto")
    host = free // ranks.local_world_size
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host, host


def question(
    args: Arguments, fixed: frozenset[str], ranks: Runtime, gpu: str, memory: int
) -> dict[str, Any]:  # fmt: skip
    """Return the flags, devices and memory that a choice depends on, as written to ``run.json``.

    ``gpu`` is the name of the GPU, "" on a CPU. A CPU's free memory differs from start to start, so it is left out.
    """
    settings = {
        name: getattr(args, name) for name, flag in flags().items()
        if flag.group in PLANNED and name not in SEARCHED and getattr(args, name) != flag.default
    }  # fmt: skip
    asked = {
        "given": {name: getattr(args, name) for name in sorted(fixed)}, "settings": settings,
        "devices": ranks.world_size, "per_node": ranks.local_world_size, "gpu": gpu,
        "gib": round(memory / 2**30) if gpu else None,
    }  # fmt: skip
    return dict(json.loads(redacted(json.dumps(asked))))


def earlier_choice(folder: RunFolder, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the choice of an earlier start of the run if it answers the same question; not collective."""
    choice = folder.read_run().get("auto")
    if not isinstance(choice, dict) or any(choice.get(name) != value for name, value in asked.items()):
        return None
    return choice | {"kept": True}


def search(
    args: Arguments, asked: dict[str, Any], memory: int, host: int | None, folder: RunFolder
) -> dict[str, Any]:  # fmt: skip
    """Return the choice of a search in a subprocess, whose only process group is the fake one; not collective."""
    if not names_model(args):
        raise ConfigError(f"--auto {args.auto} needs the flags of the model, such as --model_type and --model_size")
    earlier = folder.read_run().get("auto") or {}
    request = {
        **asked, "args": asdict(args), "memory": memory, "host_memory": host,
        "batch": earlier.get("rows") if earlier.get("given") == asked["given"] else None,
    }  # fmt: skip
    log.info(
        "Choosing settings for %d devices of %.2f GiB (--auto); it takes a minute or two", asked["devices"],
        memory / 2**30,
    )  # fmt: skip
    seconds = 60 * SEARCH_SHARE * args.distributed_timeout_minutes
    messages = folder.logs / "auto.log"
    environ = {**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
    with messages.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "smp_train.planning.best", str(os.getpid())], input=json.dumps(request),
                stdout=subprocess.PIPE, stderr=output, text=True, timeout=seconds, env=environ, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--auto {args.auto}: no answer within {seconds:.0f} s; give the settings that `smp-train plan "
                "--search` finds, or a longer --distributed_timeout_minutes"
            ) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (messages.read_text(errors="replace").strip().splitlines() or ["it ended without a message"])[-1]
        raise ConfigError(f"--auto {args.auto}: planning failed: {last}; see {messages}") from None
    if "error" in answer:
        raise ConfigError(f"--auto {args.auto}: {answer['error']}")
    return asked | answer
