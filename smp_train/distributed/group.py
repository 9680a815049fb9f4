"""The process group: how ranks meet, what device each has, and how one rank's failure becomes that of all.

torch is imported when a group is started, not before.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from smp_train.distributed.environment import Runtime
from smp_train.errors import EXIT_CODES, ConfigError, LostPeerError, SmpTrainError, explained

if TYPE_CHECKING:
    import torch

# How long ranks may take to find each other; a container being unpacked on a slow node counts.
RENDEZVOUS_SECONDS = 600.0
ROUND = "smp_train"
"""Key in the store under which rank 0 names the round in which the ranks of this start meet."""
MET = "met"
"""Key in a round: all ranks are there, and it is closed."""

_attempted = False


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of this process's group met, and which of them it is."""

    rank: int
    world_size: int
    hostname: str
    master_addr: str
    master_port: int
    prefix: str


_meeting: Meeting | None = None


def start(
    runtime: Runtime,
    *,
    distributed_backend: str = "auto",
    timeout_seconds: float,
    rendezvous_seconds: float = RENDEZVOUS_SECONDS,
) -> torch.device:
    """Choose this process's device and form the process group, also in a world of one.

    Ranks have ``rendezvous_seconds`` to find each other (at most ``timeout_seconds``); collectives have
    ``timeout_seconds`` from then on. Raises `ConfigError` when the device does not exist, and `LostPeerError`
    when the ranks do not meet.
    """
    import torch
    import torch.distributed as dist

    global _attempted
    _attempted = True
    device = _device(runtime, distributed_backend)
    backend = _group_backend(device, distributed_backend)
    where = f"{runtime.master_addr}:{runtime.master_port}"
    waited = min(rendezvous_seconds, timeout_seconds)
    try:
        store = dist.HashStore() if runtime.world_size == 1 else _meet(runtime, waited)
        dist.init_process_group(
            backend,
            store=store,
            rank=runtime.rank,
            world_size=runtime.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as problem:
        first_line = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        # Not the user's mistake as such: a node that is slow, or lost, while all start.
        kind = SmpTrainError if "address already in use" in first_line.lower() else LostPeerError
        raise kind(
            f"rank {runtime.rank} of {runtime.world_size} on {runtime.hostname} could not form the "
            f"process group at {where} "
            f"within {waited:g} s: {first_line[:200]}; check that all ranks were started, that "
            f"{runtime.master_addr} is "
            "reachable from here, and that the port is free there"
        ) from problem
    return torch.device(device)


def start_attempted() -> bool:
    """Say whether this process has tried to meet its peers; before that, all ranks do the same."""
    return _attempted


def meeting() -> Meeting | None:
    """Return where the ranks met; None before that, and in a world of one."""
    return _meeting


def _meet(runtime: Runtime, seconds: float) -> Any:
    """Return the store at master_addr:master_port once this rank has reached it.

    Under torchrun the agent already serves the store; otherwise rank 0 does. The wait in which every rank
    reports happens here, with the short time-out, so that a rank that never started is found in minutes.

    An agent's store outlives a restart of its workers, with the keys of the former start. TORCHELASTIC_RESTART_COUNT
    does not tell starts apart: an agent whose own worker failed counts the restart, one that only saw another node come
    back does not. So rank 0 names a round, and a rank that still reads the name of the former one finds it closed.
    """
    import torch.distributed as dist

    global _meeting
    limit = timedelta(seconds=seconds)
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store: Any = dist.TCPStore(
        runtime.master_addr,
        runtime.master_port,
        None if agent_serves else runtime.world_size,
        is_master=runtime.is_main and not agent_serves,
        timeout=limit,
        wait_for_workers=False,
    )
    prefix, absent = (_call if runtime.is_main else _join)(store, runtime, limit)
    joined = dist.PrefixStore(prefix, store)
    if joined.check(["odd"]):
        raise RuntimeError(joined.get("odd").decode())
    if absent:
        raise RuntimeError(
            f"no word from rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent[:8]))}"
        )
    _meeting = Meeting(
        runtime.rank, runtime.world_size, runtime.hostname, runtime.master_addr, runtime.master_port, prefix
    )
    return joined


def _call(store: Any, runtime: Runtime, limit: timedelta) -> tuple[str, list[int]]:
    """Name a round and wait for the others in it; return its prefix, and which ranks did not come."""
    import torch.distributed as dist

    prefix = f"{ROUND}/{uuid.uuid4().hex}"
    joined = dist.PrefixStore(prefix, store)
    _report(joined, runtime)
    store.set(ROUND, prefix)
    absent = _absent(joined, runtime.world_size, limit)
    if not absent:
        joined.set(MET, "")
    return prefix, absent


def _join(store: Any, runtime: Runtime, limit: timedelta) -> tuple[str, list[int]]:
    """Report in the round that rank 0 names and wait until all have; returns as `_call` does."""
    import torch.distributed as dist

    deadline, pause, prefix = time.monotonic() + limit.total_seconds(), 0.01, ""
    while time.monotonic() < deadline:
        newest = store.get(ROUND).decode() if store.check([ROUND]) else ""
        joined = dist.PrefixStore(newest, store)
        if newest == prefix != "" and joined.check([MET]):
            return prefix, []
        if newest != prefix and not joined.check([MET]):
            prefix = newest
            _report(joined, runtime)
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)
    joined = dist.PrefixStore(prefix, store)
    return prefix, [rank for rank in range(runtime.world_size) if not joined.check([f"here/{rank}"])] or [0]


def _report(joined: Any, runtime: Runtime) -> None:
    _same_world(joined, runtime)
    joined.set(f"here/{runtime.rank}", runtime.hostname)


def _same_world(store: Any, runtime: Runtime) -> None:
    """Raise, here and on those that wait, when a node starts fewer processes than the others: a GPU may be missing."""
    size = str(runtime.world_size)
    others = store.compare_set("world", "", size).decode()
    if others == size:
        return
    odd = f"ranks of {runtime.hostname} are of a world of {size}, others of {others}: start as many on each node"
    store.set("odd", odd)
    for rank in range(max(runtime.world_size, int(others))):
        store.set(f"here/{rank}", "")  # wakes who waits for a rank that nobody starts
    raise RuntimeError(odd)


def _absent(store: Any, world_size: int, limit: timedelta) -> list[int]:
    """Wait until every rank has reported; return those that have not when the time is up."""
    keys = [f"here/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, limit)
    except RuntimeError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _device(runtime: Runtime, distributed_backend: str) -> torch.device:
    import torch

    if distributed_backend == "gloo" or not torch.cuda.is_available():
        if distributed_backend in ("nccl", "smddp"):
            raise ConfigError(
                f"--distributed_backend {distributed_backend} needs a GPU and none is visible on "
                f"{runtime.hostname}; "
                "use auto, or gloo to train on the CPU"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm may show each task its own GPU only (--gpus-per-task).
    index = 0 if runtime.launcher == "srun" and count == 1 else runtime.local_rank
    if index >= count or (runtime.local_world_size > count and runtime.launcher != "srun"):
        raise ConfigError(
            f"{runtime.local_world_size} processes on {runtime.hostname} but {count} visible "
            f"GPU{'s' if count > 1 else ''}: "
            f"start {count} per node, or train on the CPU with --distributed_backend gloo"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _group_backend(device: torch.device, distributed_backend: str) -> str:
    if device.type == "cpu":
        return "gloo"
    if distributed_backend == "smddp":
        try:
            import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--distributed_backend smddp: smdistributed.dataparallel cannot be imported here; it "
                "comes with "
                "SageMaker's images; use nccl"
            ) from None
        return "cpu:gloo,cuda:smddp"
    return "cpu:gloo,cuda:nccl"


def _group() -> Any:
    """Return torch.distributed when a group is up; torch is not imported for asking."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def stop() -> None:
    """End the process group if there is one; never raises."""
    dist = _group()
    if dist is None:
        return
    try:
        dist.destroy_process_group()
    except Exception:  # at the end of a run there is nobody left to tell
        return


def rank() -> int:
    """Return this process's rank in the process group, 0 without one."""
    dist = _group()
    return int(dist.get_rank()) if dist else 0


def world_size() -> int:
    """Return the number of ranks in the process group, 1 without one."""
    dist = _group()
    return int(dist.get_world_size()) if dist else 1


def is_main() -> bool:
    """Return True on rank 0, and without a process group."""
    return rank() == 0


@contextmanager
def together(what: str) -> Iterator[None]:
    """Let a failure of one rank in the body be the failure of all, at the end of the body.

    The body must contain no collective. If it raised on any rank, every rank raises the class of the
    lowest failing rank's error with its message, elsewhere prefixed with ``rank R on HOST:``; an error
    that is not ours becomes `SmpTrainError`, "while ``what``". Costs one gather of two integers per rank
    when nothing failed.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as problem:
        if _group() is None:
            raise
        failure = explained(problem)
    if _group() is not None:
        _agree(what, failure)


def any_rank(yes: bool) -> bool:
    """Tell whether ``yes`` holds on any rank; collective, of one integer."""
    import torch
    import torch.distributed as dist

    if _group() is None:
        return yes
    votes = torch.tensor([int(yes)])
    dist.all_reduce(votes)
    return int(votes) > 0


def largest(values: Sequence[int]) -> list[int]:
    """Return the largest of each number over all ranks, which bring equally many; collective."""
    import torch
    import torch.distributed as dist

    if _group() is None:
        return list(values)
    merged = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(merged, dist.ReduceOp.MAX)
    return [int(value) for value in merged.tolist()]


def exchange(mine: bytes) -> Iterator[bytes]:
    """Yield what each rank brings, in order of ranks; collective, and every rank must go to the end."""
    import torch
    import torch.distributed as dist

    if _group() is None:
        yield mine
        return
    size = torch.tensor([len(mine)])
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    for source, length in enumerate(map(int, sizes)):
        if length:
            yield _broadcast(mine, length, source)


def _broadcast(mine: bytes, length: int, source: int) -> bytes:
    """Return what the rank ``source`` brings, of so many bytes; collective."""
    import torch
    import torch.distributed as dist

    text = torch.empty(length, dtype=torch.uint8)
    if dist.get_rank() == source:
        text.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    dist.broadcast(text, src=source)
    return text.numpy().tobytes()


def _agree(what: str, failure: Exception | None) -> None:
    import torch
    import torch.distributed as dist

    message, code = b"", 0
    if failure is not None:
        message, code = _message(what, failure).encode(), getattr(failure, "exit_code", 1)
    mine = torch.tensor([code, len(message)], dtype=torch.int64)
    statuses = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(statuses, mine)
    failing = [index for index, status in enumerate(statuses) if int(status[0])]
    if not failing:
        return
    lowest = failing[0]
    code, length = (int(number) for number in statuses[lowest])
    host, _, line = _broadcast(message, length, lowest).decode().partition("\n")
    here = dist.get_rank() == lowest
    error = EXIT_CODES.get(code, SmpTrainError)(line if here else f"rank {lowest} on {host}: {line}")
    error.repeats = not here  # type: ignore[attr-defined]
    raise error from failure


def _message(what: str, failure: Exception) -> str:
    """Return this host's name and, on the next line, what failed."""
    line = " ".join(str(failure).split())
    if not isinstance(failure, SmpTrainError):
        line = f"while {what}: {type(failure).__name__}: {line}"
    return f"{socket.gethostname()}\n{line}"
