"""``--auto``: degrees, activation checkpointing, offloading and micro-batch, chosen for the machine of a run."""

from __future__ import annotations

import json
import logging
import subprocess
from dataclasses import asdict, replace
from typing import Any

import torch

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved, validate
from smp_train.arguments.chosen import CHOSEN, given, words
from smp_train.arguments.groups import flags
from smp_train.arguments.model_flags import FinetuneArguments, ModelArguments, ParallelArguments
from smp_train.distributed import Runtime, child
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.errors import ConfigError, redacted
from smp_train.models.resolve import names_model
from smp_train.telemetry.run_folder import RunFolder

log = logging.getLogger("smp_train")
OFF = "off"
WAITED_FOR = 0.9
"""Of --distributed_timeout_minutes, in which the other ranks wait for rank 0's search."""
PLANNED = (ModelArguments, ParallelArguments, FinetuneArguments)
"""Groups of the flags that a plan depends on; --auto itself is in one."""


def choose(
    resolved: Resolved, ranks: Runtime, device: torch.device, folder: RunFolder
) -> tuple[Resolved, dict[str, Any] | None]:  # fmt: skip
    """Return the settings with what was chosen, and what ``run.json`` says of the choice, None without ``--auto``.

    A start of a run that has chosen before takes the same, where what was `asked` is the same; on another number of
    devices it chooses again, for the same global batch. Collective.

    Raises:
        ConfigError: nothing fits, or it cannot be planned.
    """
    args = resolved.args
    if args.auto == OFF or args.evaluate_only:
        return resolved, None
    # A program's own loss takes all logits.
    planned = args if resolved.own.loss is None else replace(args, chunked_loss=False)
    what = f"choosing settings (--auto {args.auto})"
    of_device, of_host = zip(*distributed.gather(what, lambda: memory_of(device, ranks)), strict=True)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    memory, host = min(of_device), min(of_host) if gpu else None
    question = asked(planned, given(resolved), ranks, gpu, memory)
    found = distributed.on_main(
        what, lambda: _kept(folder, question) or _planned(planned, question, memory, host, folder)
    )  # fmt: skip
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


def asked(args: Arguments, given: frozenset[str], ranks: Runtime, gpu: str, memory: int) -> dict[str, Any]:
    """Return what a choice depends on, as ``run.json`` holds it: flags other than a default, devices, their memory.

    ``gpu`` is empty on a CPU, whose free memory differs from start to start: there it is left out.
    """
    settings = {
        name: getattr(args, name) for name, flag in flags().items()
        if flag.group in PLANNED and name not in CHOSEN and getattr(args, name) != flag.default
    }  # fmt: skip
    found = {
        "given": {name: getattr(args, name) for name in sorted(given)}, "settings": settings,
        "devices": ranks.world_size, "per_node": ranks.local_world_size, "gpu": gpu,
        "gib": round(memory / 2**30) if gpu else None,
    }  # fmt: skip
    return dict(json.loads(redacted(json.dumps(found))))


def _kept(folder: RunFolder, question: dict[str, Any]) -> dict[str, Any] | None:
    """Return the choice of an earlier start of the run, where it was for the same; not collective."""
    before = folder.read_run().get("auto")
    if not isinstance(before, dict) or any(before.get(name) != value for name, value in question.items()):
        return None
    return before | {"kept": True}


def _planned(
    args: Arguments, question: dict[str, Any], memory: int, host: int | None, folder: RunFolder
) -> dict[str, Any]:  # fmt: skip
    """Return the choice, computed in a subprocess so that the fake process group stays out of this; not collective."""
    if not names_model(args):
        raise ConfigError(f"--auto {args.auto} needs the flags of the model, such as --model_type and --model_size")
    before = folder.read_run().get("auto") or {}
    request = {
        **question, "args": asdict(args), "memory": memory, "host_memory": host,
        "batch": before.get("rows") if before.get("given") == question["given"] else None,
    }  # fmt: skip
    log.info(
        "Choosing settings for %d devices of %.2f GiB (--auto); it takes a minute or two", question["devices"],
        memory / 2**30,
    )  # fmt: skip
    seconds = 60 * WAITED_FOR * args.distributed_timeout_minutes
    answers, said = folder.logs / "auto.json", folder.logs / "auto.log"
    with child.started("smp_train.planning.choice", request, answers, said, CUDA_VISIBLE_DEVICES="") as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"--auto {args.auto}: no answer within {seconds:.0f} s; give the settings that `smp-train plan "
                "--search` finds, or a longer --distributed_timeout_minutes"
            ) from None
    try:
        answer: dict[str, Any] = json.loads(answers.read_text(encoding="utf-8"))
    except ValueError:
        last = (said.read_text(errors="replace").strip().splitlines() or ["it ended without a message"])[-1]
        raise ConfigError(f"--auto {args.auto}: planning failed: {last}; see {said}") from None
    if "error" in answer:
        raise ConfigError(f"--auto {args.auto}: {answer['error']}")
    return question | answer
