"""Cells of `right` for what runs on CUDA alone: process groups, copies by streams, the profiler, several GPUs."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cells import Skip, Wrong
from benchmarks.program import STEADY, Flags, below, command, logged, numbers, opened, scratch, words
from smp_train.distributed.host_copy import Stager
from smp_train.distributed.to_host import ToHost
from smp_train.parallel.activation_offloading import HostPool, Lane, Stored

GROUP_LIMIT = 17.0
"""Minutes of a collective, which no default of torch is."""
SPLITS: Mapping[str, Flags] = {
    "full_shard": {"train_batch_size": 1},
    "replicas": {"train_batch_size": 1, "sharding_strategy": "no_shard"},
    "tensor": {"tensor_parallel_degree": 2},
    "context": {"context_parallel_degree": 2},
    "compiled": {"train_batch_size": 1, "use_torch_compile": 1, "activation_checkpointing": "full"},
}
"""Flags by which two processes make the steps of one."""


def groups(flags: Flags) -> dict[str, Any]:
    """Look at every process group of a run, and let ranks meet in the ways that take a device of torch's choice."""
    wanted = 60 * GROUP_LIMIT
    with scratch() as folder:
        given = {**STEADY, **below(folder), **flags, "distributed_timeout_minutes": GROUP_LIMIT}
        with opened(words(given)) as run:
            device = run.backend.topology.device
            for group in dist.distributed_c10d._world.pg_map:
                backends = {each.type: group._get_backend(each) for each in group._device_types}
                limits = {each.options._timeout.total_seconds() for each in backends.values()}
                if not {"cpu", device.type} <= set(backends) or limits != {wanted} or group.bound_device_id is not None:
                    raise Wrong(f"a group of {group.size()}: {backends}, {limits} s, bound to {group.bound_device_id}")
            dist.barrier()
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, os.getpid())
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            if total.item() != dist.get_world_size() or os.getpid() not in told:
                raise Wrong(f"a sum of ones is {total.item()}, and ranks told each other {told}")
            count = len(dist.distributed_c10d._world.pg_map)
    if device.type == "cuda":
        if torch.cuda.current_device() != device.index:
            raise Wrong(f"the current device is {torch.cuda.current_device()}, not {device.index}")
        if not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]:
            raise Wrong("the allocator's segments do not grow")
    return {"groups": count}


def copies(device: str) -> dict[str, Any]:
    """Copy numbers to the host and back beside a busy device, in the three ways of a run."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    host = torch.arange(1 << 20, dtype=torch.float32)

    def fresh() -> torch.Tensor:
        """Return the numbers on the device, once it has been busy for a while."""
        load, numbers = torch.zeros(1 << 22, device=place), torch.zeros_like(host, device=place)
        for _ in range(200):
            load.add_(1)
        return numbers.copy_(host, non_blocking=True)

    def check(what: str, copied: torch.Tensor) -> None:
        if not torch.equal(copied.cpu(), host):
            raise Wrong(f"{what}: other numbers than were copied")

    source = fresh()
    read = ToHost(source)
    if device == "cuda":
        source.zero_()  # queued after the copy
    check("to the host", read.values())

    lane, pool = Lane(place), HostPool(pin_memory=device == "cuda")
    stored = Stored(fresh().view(torch.uint8), lane, pool)
    stored.send()
    stored.leave()
    torch.zeros_like(host, device=place)  # in the memory that was left, if it was left too early
    check("offloaded", stored.get().view(torch.float32))

    moment = fresh()
    state = {"model": {"w": moment}, "optim": {"state": {"w": {"exp_avg": moment}}}}
    copy, complete = Stager().begin(state)
    complete()
    check("staged", copy["optim"]["state"]["w"]["exp_avg"])
    check("staged", copy["model"]["w"])
    return {"MB": host.nbytes / 1e6}


def profiled(flags: Flags, train: Callable[..., Any]) -> dict[str, Any]:
    """Profile two steps and look for what the device did in the trace."""
    with scratch() as folder:
        train(folder, flags, max_steps=5, use_profiler=1, profile_start=2, profile_steps=2)
        trace = gzip.decompress(next((folder / "run" / "profile").glob("trace*.json.gz")).read_bytes())
        wanted = b'"kernel"' if torch.cuda.is_available() else b'"cpu_op"'
        if wanted not in trace:
            raise Wrong(f"no {wanted.decode()} in the trace")
        return {"trace MB": len(trace) / 1e6}


def two_processes(flags: Flags, limit: float, compared: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Make the steps of one process by two, split in every way."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        raise Skip("needs a GPU beside this one")
    steps = 3
    expected = numbers(flags, steps, cpu_weights=False)
    figures: dict[str, Any] = {}
    for name, split in SPLITS.items():
        with scratch() as folder:
            given = {**STEADY, **below(folder), **flags, **split, "max_steps": steps, "logging_freq": 1}
            launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "smp_train")
            process = command("train", *words(given), folder=folder, module=launcher)
            code = process.wait(200)
            if code != 0:
                raise Wrong(f"{name}: exit code {code}: {last_line(folder / 'stderr')}", **figures)
            found = [(record["loss"], record["grad_norm"]) for record in logged(folder)]
        figures[name] = compared(found, expected, limit)["difference"]
    return figures


def last_line(path: Path) -> str:
    """Return the last of the program's lines in a file, or the file's last line."""
    lines = path.read_text().splitlines()
    return next((line for line in reversed(lines) if line.startswith("smp-train")), lines[-1] if lines else "")
