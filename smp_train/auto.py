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

from smp_train import distributed, trial
from smp_train.arguments import Resolved, validate
from smp_train.arguments.chosen import given, words
from smp_train.distributed import Runtime
from smp_train.distributed.host import python_path
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.errors import ConfigError
from smp_train.models.resolve import names_model
from smp_train.telemetry.run_folder import RunFolder

log = logging.getLogger("smp_train")
OFF, TRIAL = "off", "trial"
WAITED_FOR = 0.9
"""Of --distributed_timeout_minutes, in which the other ranks wait for rank 0's search."""


def choose(
    resolved: Resolved, ranks: Runtime, device: torch.device, folder: RunFolder
) -> tuple[Resolved, dict[str, Any] | None]:  # fmt: skip
    """Return the settings with what was chosen, and what ``run.json`` says of the choice, None without ``--auto``.

    A start of a run that has chosen before takes the same, where it has as many devices and the same flags are given;
    on another number of devices it chooses again, for the same global batch. Collective.

    Raises:
        ConfigError: nothing fits, or it cannot be planned.
    """
    args = resolved.args
    if args.auto == OFF or args.evaluate_only:
        return resolved, None
    what = f"choosing settings (--auto {args.auto})"
    of_device, of_host = zip(*distributed.gather(what, lambda: memory_of(device, ranks)), strict=True)
    memory = min(of_device)
    host = min(of_host) if device.type == "cuda" else None
    asked: dict[str, Any] = {
        "given": {name: getattr(args, name) for name in sorted(given(resolved))},
        "devices": ranks.world_size, "per_node": ranks.local_world_size,
    }  # fmt: skip
    found = distributed.on_main(
        what, lambda: _kept(folder, asked) or _planned(resolved, device, memory, host, asked, folder)
    )  # fmt: skip
    if not found.get("kept"):
        candidates = found.pop("trial")
        if args.auto == TRIAL:
            found |= trial.run(args, ranks, candidates, found["flags"], folder.logs)
    chosen = replace(args, **found["flags"])
    sources = resolved.sources | dict.fromkeys(found["flags"], "--auto")
    if "hybrid_shard_degree" in found["flags"]:
        sources["sharding_strategy"] = "follows from --hybrid_shard_degree"
    resolved = replace(resolved, args=chosen, sources=sources)
    validate(chosen, ranks.world_size, ranks.local_world_size, resolved.own)
    how = "as at the start before" if found.get("kept") else f"of {memory / 2**30:.2f} GiB"
    log.info("--auto %s, on %d devices, %s: %s", args.auto, ranks.world_size, how, words(found["flags"]))
    return resolved, found


def memory_of(device: torch.device, ranks: Runtime) -> tuple[int, int]:
    """Return the bytes that this rank may take: of its device, which is the host without a GPU, and of the host."""
    free = free_host_bytes()
    if free is None:
        raise ConfigError("--auto: this system does not say how much memory is free; give the settings, without --auto")
    host = free // ranks.local_world_size
    return int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host, host


def _kept(folder: RunFolder, asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the choice of an earlier start of the run, where it was for the same; not collective."""
    before = folder.read_run().get("auto")
    if not isinstance(before, dict) or any(before.get(name) != value for name, value in asked.items()):
        return None
    return before | {"kept": True}


def _planned(
    resolved: Resolved, device: torch.device, memory: int, host: int | None, asked: dict[str, Any],
    folder: RunFolder,
) -> dict[str, Any]:  # fmt: skip
    """Return the choice of a process of its own, which the fake process group does not leave; not collective."""
    args = resolved.args
    if not names_model(args):
        raise ConfigError(f"--auto {args.auto} needs the flags of the model, such as --model_type and --model_size")
    before = folder.read_run().get("auto") or {}
    request = {
        **asked, "args": asdict(args), "memory": memory, "host_memory": host,
        "batch": before.get("rows") if before.get("given") == asked["given"] else None,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
    }  # fmt: skip
    log.info(
        "Choosing settings for %d devices of %.2f GiB (--auto); it takes a minute or two", asked["devices"],
        memory / 2**30,
    )  # fmt: skip
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    seconds = 60 * WAITED_FOR * args.distributed_timeout_minutes
    try:
        done = subprocess.run(
            [sys.executable, "-m", "smp_train.planning.choice"], input=json.dumps(request), env=environ, text=True,
            capture_output=True, check=False, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"--auto {args.auto}: no answer within {seconds:.0f} s; give the settings that `smp-train plan --search` "
            "finds, or a longer --distributed_timeout_minutes"
        ) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise ConfigError(f"--auto {args.auto}: planning failed: {said}") from None
    if "error" in answer:
        raise ConfigError(f"--auto {args.auto}: {answer['error']}")
    return asked | answer
