"""The process group: its device, its backends, and the meeting of its ranks. torch is imported when a group starts."""

from __future__ import annotations

import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from smp_train.distributed import agree, generation, host
from smp_train.distributed.environment import Runtime
from smp_train.errors import ConfigError, LostPeerError, SmpTrainError
from smp_train.progress import Progress

if TYPE_CHECKING:
    import torch

RENDEZVOUS_SECONDS = 600.0
"""How long ranks may take to find each other; a slow node may still be unpacking its container."""
ANSWER_SECONDS = 2.0
"""How long a failing rank waits for an answer of the store."""
ROUND = "smp_train"
"""Key in the store: the prefix of the keys of the newest round of meeting, which rank 0 chose."""
CLOSED = "met"
"""Key in a round: rank 0 has closed the round, since all ranks have met or never can."""
MISMATCH = "odd"
"""Key in a round: the reason why its ranks cannot form one world."""

_attempted = False
_form: Callable[[], None]
"""Forms the process group; set by `start`."""
_serving: dict[tuple[str, int], Any] = {}
"""Stores that this process serves, by address; peers may use one to meet again before rank 0 has left the old group."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of this process's group met: the store, and the prefix of their keys in it."""

    runtime: Runtime
    prefix: str
    store: Any
    """A second connection, as a thread may be waiting in the group's connection. It is opened early: if the store goes
    away while torch connects, torch logs a page of C++ frames."""


_meeting: Meeting | None = None


def start(
    runtime: Runtime, *, distributed_backend: str = "auto", timeout_seconds: float,
    rendezvous_seconds: float = RENDEZVOUS_SECONDS, one_queue: bool = False, mixed: bool = True,
) -> torch.device:  # fmt: skip
    """Choose this process's device and form the process group, also in a world of one.

    On GPUs the group has two backends, NCCL and gloo; without ``mixed`` it has only NCCL, and a second group has gloo.
    ``one_queue`` is passed to `host.prepare`. Ranks have ``rendezvous_seconds`` to find each other, but at most
    ``timeout_seconds``, which is the time-out of collectives. Raises `ConfigError` if the device does not exist, and
    `LostPeerError` if the ranks do not meet.
    """
    host.prepare(one_queue=one_queue)
    import torch.distributed as dist

    global _attempted
    _attempted = True
    device = device_of(runtime, distributed_backend)
    backend = _group_backend(device, distributed_backend)
    backend = backend if mixed else backend.rpartition(":")[2]
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # `watch` reads collectives from the flight recorder
        newer = hasattr(sys.modules["torch"]._C._distributed_c10d, "_dump_fr_trace_json")
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE" if newer else "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    # Before 2.6, torch warns that objects go through the group's CPU backend, as they should.
    warnings.filterwarnings("ignore", message="Multiple backends are registered")
    limit = min(rendezvous_seconds, timeout_seconds)
    timeout = timedelta(seconds=timeout_seconds)
    # A mesh takes no time-out: these are the defaults for its groups. A time-out set later does not reach gloo.
    dist.distributed_c10d.default_pg_timeout = timeout
    if dist.distributed_c10d.default_pg_nccl_timeout is not None:
        dist.distributed_c10d.default_pg_nccl_timeout = timeout

    def form() -> None:
        try:
            store = dist.HashStore() if runtime.world_size == 1 else meet(runtime, limit)
            place = renumbered(runtime)
            # Torch names a group by the number of groups before it, and counts one that it could not form. The name
            # must be the same on all ranks, of which one may just have started.
            dist.distributed_c10d._world.group_count = 0
            # No device_id: DeviceMesh would split the group, and torch 2.8 and 2.9 cannot split one with two backends.
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
            )
            agree.host_group = None if mixed else dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError, OSError) as problem:
            reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            # The settings are fine if a node was slow or lost: another start may succeed.
            kind = SmpTrainError if "address already in use" in reason.lower() else LostPeerError
            raise kind(
                f"rank {runtime.rank} of {runtime.world_size} on {runtime.hostname} could not form the process group "
                f"at {runtime.master_addr}:{runtime.master_port} within {limit:g} s: {reason[:200]}; check that all "
                f"ranks were started, that {runtime.master_addr} is reachable from here and the port is free there"
            ) from problem

    global _form
    _form = form
    with Progress(f"Waiting for all {runtime.world_size} ranks", shown=runtime.is_main and runtime.world_size > 1):
        form()
    return device


def form_again() -> None:
    """End the process group, and form it as `start` did, with the ranks of the newest generation."""
    stop()
    _form()


def renumbered(runtime: Runtime) -> Runtime:
    """Return this process's place in the generation that it has joined, if dead ranks are replaced."""
    return runtime if generation.member is None else generation.member.runtime


def start_attempted() -> bool:
    """Return whether this process has tried to meet its peers; until then, all ranks do the same."""
    return _attempted


def meeting() -> Meeting | None:
    """Return where the ranks met; None before that, and in a world of one."""
    return _meeting


def meet(runtime: Runtime, seconds: float) -> Any:
    """Return the store at master_addr:master_port once all ranks have reported in it; raises `RuntimeError`.

    Under torchrun the agent serves the store, otherwise rank 0. An agent's store, with the keys of the earlier start,
    survives a restart of the workers. TORCHELASTIC_RESTART_COUNT does not identify a start, since only agents whose
    worker failed count it. So rank 0 of each start opens a new round, and closes it when all ranks have reported in it,
    or a rank with a different world size. Other ranks report in the newest open round, until a round that they reported
    in is closed. If dead ranks are replaced, ranks meet in generations instead (`distributed.generation`).
    """
    import torch.distributed as dist

    global _meeting
    if (member := generation.begin(runtime, seconds)) is not None:
        store, prefix = member.join(seconds)
        _meeting = Meeting(member.runtime, prefix, store)
        return store
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, serves = (runtime.master_addr, runtime.master_port), runtime.is_main and not agent_serves

    def connect(timeout: float, size: int | None = None, *, serve: bool = False) -> Any:
        store = dist.TCPStore(*address, size, serve, timedelta(seconds=seconds), wait_for_workers=False)
        store.set_timeout(timedelta(seconds=timeout))
        return store

    store = _serving.get(address) or connect(seconds, None if agent_serves else runtime.world_size, serve=serves)
    if serves:
        _serving[address] = store
    deadline, pause = time.monotonic() + seconds, 0.01  # the deadline counts from here, as rank 0 may have started late
    everyone = [f"here/{rank}" for rank in range(runtime.world_size)]
    prefix = f"{ROUND}/{uuid.uuid4().hex}" if runtime.is_main else ""
    if runtime.is_main:
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
            _meeting = Meeting(runtime, prefix, dist.PrefixStore(prefix, connect(ANSWER_SECONDS)))
            return joined
        time.sleep(pause)
        pause = min(0.05 if runtime.is_main else 0.5, 1.5 * pause)
    joined = dist.PrefixStore(prefix, store)
    absent = [str(rank) for rank, key in enumerate(everyone) if not joined.check([key])] if prefix else ["0"]
    raise RuntimeError(f"no word from rank{'s' if len(absent) > 1 else ''} {', '.join(absent[:8]) or '0'}")


def _report(joined: Any, runtime: Runtime) -> None:
    """Register this rank in a round; report a mismatch if its world size differs, for example as a node lacks a GPU."""
    size = str(runtime.world_size)
    first_size = joined.compare_set("world", "", size).decode()
    if first_size != size:
        joined.set(
            MISMATCH,
            f"ranks of {runtime.hostname} are of a world of {size}, others of {first_size}: start as many on each node",
        )
    joined.set(f"here/{runtime.rank}", runtime.hostname)


def device_of(runtime: Runtime, distributed_backend: str) -> torch.device:
    """Return this process's device, and make a GPU the current device. Raises `ConfigError` if it does not exist."""
    import torch

    if distributed_backend == "gloo" or not torch.cuda.is_available():
        if distributed_backend in ("nccl", "smddp"):
            raise ConfigError(
                f"--distributed_backend {distributed_backend} needs a GPU and none is visible on {runtime.hostname}; "
                "use auto, or gloo to train on the CPU"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # With --gpus-per-task, Slurm shows each task only one GPU.
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
    """Form the process group as `start` does, and end it after the body.

    If the body fails on one of several ranks the group stays, since its end would wait for peers that may never come.
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
    """End the process group, if any; never raises."""
    agree.host_group = None
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        if sys.modules["torch"].__version__ < "2.6":
            # This torch joins gloo's threads while it holds the GIL, which they need to free the last collective's
            # tensors. Nothing shows whether they are done, so give them time.
            time.sleep(0.2)
        with suppress(Exception):  # a peer may have left already
            if generation.member is None:
                dist.destroy_process_group()
            else:
                generation.member.leave(dist.destroy_process_group)
