"""The process group: how ranks meet, and which device each has. torch is imported when a group is started."""

from __future__ import annotations

import os
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from smp_train.distributed import agree, host
from smp_train.distributed.environment import Runtime
from smp_train.errors import ConfigError, LostPeerError, SmpTrainError
from smp_train.progress import Progress

if TYPE_CHECKING:
    import torch

RENDEZVOUS_SECONDS = 600.0
"""How long ranks may take to find each other, with the time in which a slow node unpacks its container."""
ANSWER_SECONDS = 2.0
"""How long a store may take to answer a rank that fails."""
ROUND = "smp_train"
"""Key in the store: the prefix of the keys of the newest round of meeting, as rank 0 names it."""
CLOSED = "met"
"""Key in a round: all ranks have met in it, or some never can."""
MISMATCH = "odd"
"""Key in a round: why its ranks do not fit together."""

_attempted = False
_serving: dict[tuple[str, int], Any] = {}
"""Stores that this process serves, by address: ranks may come to meet again while rank 0 still leaves the last time."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of this process's group met: the prefix of their keys in the store, and a way to it."""

    runtime: Runtime
    prefix: str
    store: Any
    """A connection besides the group's own, in which a thread may be waiting. It is made while rank 0 is there: torch
    logs a page of C++ where a store goes away as it connects, and nothing where it is gone later."""


_meeting: Meeting | None = None


def start(
    runtime: Runtime, *, distributed_backend: str = "auto", timeout_seconds: float,
    rendezvous_seconds: float = RENDEZVOUS_SECONDS, one_queue: bool = False, mixed: bool = True,
) -> torch.device:  # fmt: skip
    """Choose this process's device and form the process group, also in a world of one.

    On GPUs the group has two backends, NCCL and gloo; without ``mixed`` it has NCCL, and a second group has gloo.
    `host.prepare` comes first, with ``one_queue``. Ranks have ``rendezvous_seconds`` to find each other (at most
    ``timeout_seconds``); collectives have ``timeout_seconds`` from then on. Raises `ConfigError` when the device does
    not exist, and `LostPeerError` when the ranks do not meet.
    """
    host.prepare(one_queue=one_queue)
    import torch.distributed as dist

    global _attempted
    _attempted = True
    device = device_of(runtime, distributed_backend)
    backend = _group_backend(device, distributed_backend)
    backend = backend if mixed else backend.rpartition(":")[2]
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # collectives that the flight recorder keeps, for `watch`
        newer = hasattr(sys.modules["torch"]._C._distributed_c10d, "_dump_fr_trace_json")
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    # torch before 2.6, of a group for GPUs: objects go through its backend for the CPU, as they should.
    warnings.filterwarnings("ignore", message="Multiple backends are registered")
    limit = min(rendezvous_seconds, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    # The defaults of the groups that a mesh makes, which takes no timeout. One that is set later does not reach gloo.
    dist.distributed_c10d.default_pg_timeout = timeout
    if dist.distributed_c10d.default_pg_nccl_timeout is not None:
        dist.distributed_c10d.default_pg_nccl_timeout = timeout
    waiting = f"Waiting for all {runtime.world_size} ranks"
    try:
        with Progress(waiting, shown=runtime.is_main and runtime.world_size > 1):
            store = dist.HashStore() if runtime.world_size == 1 else meet(runtime, limit)
            # Without device_id: DeviceMesh splits a group that is bound to a device, and torch 2.8 and 2.9 cannot split
            # one with two backends.
            dist.init_process_group(
                backend, store=store, rank=runtime.rank, world_size=runtime.world_size, timeout=timeout
            )
            agree.host_group = None if mixed else dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        # A slow or lost node is no mistake in the settings: another start may succeed.
        kind = SmpTrainError if "address already in use" in reason.lower() else LostPeerError
        raise kind(
            f"rank {runtime.rank} of {runtime.world_size} on {runtime.hostname} could not form the process group at "
            f"{runtime.master_addr}:{runtime.master_port} within {limit:g} s: {reason[:200]}; check that all ranks "
            f"were started, that {runtime.master_addr} is reachable from here, and that the port is free there"
        ) from problem
    return device


def start_attempted() -> bool:
    """Tell whether this process has tried to meet its peers; before that, all ranks do the same."""
    return _attempted


def meeting() -> Meeting | None:
    """Return where the ranks met; None before that, and in a world of one."""
    return _meeting


def meet(runtime: Runtime, seconds: float) -> Any:
    """Return the store at master_addr:master_port once all ranks have reported in it; raises `RuntimeError`.

    Under torchrun the agent serves the store, else rank 0 does. An agent's store outlives a restart of its workers,
    with the keys of the former start, and TORCHELASTIC_RESTART_COUNT does not tell starts apart: an agent whose own
    worker failed counts the restart, one that only saw another node come back does not. So rank 0 of each start names
    a new round, and closes it once all ranks have reported in it, or one of another world size has. The others report
    in the newest round that is not closed, again if rank 0 names another, until one that they reported in is closed.
    """
    import torch.distributed as dist

    global _meeting
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, serves = (runtime.master_addr, runtime.master_port), runtime.is_main and not agent_serves
    store = _serving.get(address)
    if store is None:
        store = dist.TCPStore(
            *address, None if agent_serves else runtime.world_size, is_master=serves,
            timeout=timedelta(seconds=seconds), wait_for_workers=False,
        )  # fmt: skip
    if serves:
        _serving[address] = store
    deadline, pause = time.monotonic() + seconds, 0.01  # from here on: rank 0 may have started late
    everyone = [f"here/{rank}" for rank in range(runtime.world_size)]
    prefix = ""
    if runtime.is_main:
        prefix = f"{ROUND}/{uuid.uuid4().hex}"
        _report(dist.PrefixStore(prefix, store), runtime)
        store.set(ROUND, prefix)
    while time.monotonic() < deadline:
        newest = store.get(ROUND).decode() if store.check([ROUND]) else ""
        joined = dist.PrefixStore(newest, store)
        if newest != prefix and not joined.check([CLOSED]):
            prefix = newest
            _report(joined, runtime)
        if runtime.is_main and (joined.check(everyone) or joined.check([MISMATCH])):
            joined.set(CLOSED, "")
        if newest == prefix != "" and joined.check([CLOSED]):
            if joined.check([MISMATCH]):
                raise RuntimeError(joined.get(MISMATCH).decode())
            own = dist.TCPStore(*address, None, False, timedelta(seconds=seconds), wait_for_workers=False)
            own.set_timeout(timedelta(seconds=ANSWER_SECONDS))
            _meeting = Meeting(runtime, prefix, dist.PrefixStore(prefix, own))
            return joined
        time.sleep(pause)
        pause = min(0.05 if runtime.is_main else 0.5, 1.5 * pause)
    joined = dist.PrefixStore(prefix, store)
    absent = [str(rank) for rank, key in enumerate(everyone) if not joined.check([key])] if prefix else ["0"]
    raise RuntimeError(f"no word from rank{'s' if len(absent) > 1 else ''} {', '.join(absent[:8]) or '0'}")


def _report(joined: Any, runtime: Runtime) -> None:
    """Report this rank in a round, and a world size that is not that of the others: a node may lack a GPU."""
    size = str(runtime.world_size)
    others = joined.compare_set("world", "", size).decode()
    if others != size:
        joined.set(
            MISMATCH,
            f"ranks of {runtime.hostname} are of a world of {size}, others of {others}: start as many on each node",
        )
    joined.set(f"here/{runtime.rank}", runtime.hostname)


def device_of(runtime: Runtime, distributed_backend: str) -> torch.device:
    """Return this process's device, made current if it is a GPU; raises `ConfigError` where it does not exist."""
    import torch

    if distributed_backend == "gloo" or not torch.cuda.is_available():
        if distributed_backend in ("nccl", "smddp"):
            raise ConfigError(
                f"--distributed_backend {distributed_backend} needs a GPU and none is visible on {runtime.hostname}; "
                "use auto, or gloo to train on the CPU"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # Slurm may show each task its own GPU only (--gpus-per-task).
    index = 0 if runtime.launcher == "srun" and count == 1 else runtime.local_rank
    if index >= count or (runtime.local_world_size > count and runtime.launcher != "srun"):
        raise ConfigError(
            f"{runtime.local_world_size} processes on {runtime.hostname} but {count} visible GPU"
            f"{'s' if count > 1 else ''}: start {count} per node, or train on the CPU with --distributed_backend gloo"
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
                "--distributed_backend smddp: smdistributed.dataparallel cannot be imported here; it comes with "
                "SageMaker's images; use nccl"
            ) from None
        return "cpu:gloo,cuda:smddp"
    return "cpu:gloo,cuda:nccl"


@contextmanager
def started(runtime: Runtime, **settings: Any) -> Iterator[torch.device]:
    """Form the process group as `start` does for the body.

    When the body fails on one of several ranks the group stays: its end would wait for peers that may never come.
    """
    device = start(runtime, **settings)
    try:
        yield device
    except BaseException:
        if runtime.world_size == 1:
            stop()
        raise
    stop()


def stop() -> None:
    """End the process group if there is one; never raises."""
    agree.host_group = None
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        if sys.modules["torch"].__version__ < "2.6":
            # That torch joins the threads of a gloo group while it holds the GIL, which they may need to free the
            # tensors of the last collective. Nothing shows when they have: give them time.
            time.sleep(0.2)
        with suppress(Exception):  # a peer may be gone already
            dist.destroy_process_group()
