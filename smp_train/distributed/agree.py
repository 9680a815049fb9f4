"""One decision of all ranks: a failure on one is a failure on all, and the values of one are known to all.

Every function is collective unless it says otherwise. torch is imported by the first call in a process group.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from smp_train.errors import EXIT_CODES, SmpTrainError, explained

T = TypeVar("T")

ALL_RANKS = {"all_ranks": True}
"""``extra=`` of a log record that every rank writes: the console shows rank 0's only."""

_thread = threading.local()
host_group: Any = None
"""Group of all ranks for values of the host; None: the default group."""


@contextmanager
def on_group(group: Any) -> Iterator[None]:
    """Let this thread's calls go through ``group``, which holds all ranks. Not collective."""
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = None


@contextmanager
def alone() -> Iterator[None]:
    """Let this thread be rank 0 of a world of one, for what each rank does by itself. Not collective."""
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = False


def group() -> Any:
    """Return the process group of this thread's calls; None is the default one. Not collective."""
    return getattr(_thread, "group", None) or host_group


def is_alone() -> bool:
    """Tell whether there is no process group, or this thread is `alone`. Not collective."""
    return _peers() is None


def _peers() -> Any:
    """Return torch.distributed, or None when alone; torch is not imported for asking."""
    dist = sys.modules.get("torch.distributed")
    if getattr(_thread, "alone", False) or dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return dist


def rank() -> int:
    """Return this process's rank; 0 when alone. Not collective."""
    return 0 if is_alone() else int(_peers().get_rank())


def world_size() -> int:
    """Return the number of ranks; 1 when alone. Not collective."""
    return 1 if is_alone() else int(_peers().get_world_size())


def here(message: str) -> str:
    """Prefix ``message`` with the rank and host it comes from, where there are several ranks. Not collective."""
    return message if world_size() == 1 else f"rank {rank()} on {socket.gethostname()}: {message}"


@contextmanager
def together(what: str) -> Iterator[None]:
    """Let a failure of one rank in the body be the failure of all, at the end of the body.

    The body must contain no collective. Failures are those of `gather`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as problem:
        failure = problem
    gather(what, partial(unless, failure, None))


def gather(what: str, work: Callable[[], T]) -> list[T]:
    """Run ``work``, which must contain no collective, on every rank; return what each returned, in order of ranks.

    If it raised on any rank, every rank raises the class of the lowest failing rank's error with its message,
    elsewhere prefixed with ``rank R on HOST:``; an error that is not ours becomes `SmpTrainError`, "while ``what``".
    """
    if is_alone():
        return [work()]
    value: Any = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as problem:
        failure = explained(problem)
    report = None
    if failure is not None:
        line = " ".join(str(failure).split())
        if not isinstance(failure, SmpTrainError):
            line = f"while {what}: {type(failure).__name__}: {line}"
        report = (getattr(failure, "exit_code", 1), socket.gethostname(), line)
    gathered: list[Any] = [None] * world_size()
    _peers().all_gather_object(gathered, (report, value), group=group())
    for failed, (reported, _) in enumerate(gathered):
        if reported is not None:
            code, host, line = reported
            own = failed == rank()
            error = EXIT_CODES.get(code, SmpTrainError)(line if own else f"rank {failed} on {host}: {line}")
            error.repeats = not own  # type: ignore[attr-defined]
            raise error from failure
    return [each for _, each in gathered]


def on_main(what: str, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone and return its result on every rank; failures are those of `gather`."""
    results: list[Any] = gather(what, lambda: work() if rank() == 0 else None)
    return results[0]


def unless(failure: Exception | None, value: T) -> T:
    """Return ``value``, or raise the ``failure`` there was, for `gather` to report. Not collective."""
    if failure is not None:
        raise failure
    return value


def any_rank(yes: bool) -> bool:
    """Tell whether ``yes`` holds on any rank."""
    return largest([int(yes)]) == [1]


def largest(values: Sequence[int]) -> list[int]:
    """Return the largest of each number over all ranks, which bring equally many."""
    if is_alone():
        return list(values)
    import torch

    merged = torch.tensor(values, dtype=torch.int64)
    _peers().all_reduce(merged, _peers().ReduceOp.MAX, group=group())
    return [int(value) for value in merged.tolist()]


def exchange(mine: bytes) -> Iterator[bytes]:
    """Yield what each rank brings, in order of ranks, one at a time in memory; every rank must go to the end."""
    if is_alone():
        yield mine
        return
    import torch

    for source, length in enumerate(gather("exchanging sizes", lambda: len(mine))):
        if length:
            content = torch.frombuffer(bytearray(mine if source == rank() else length), dtype=torch.uint8)
            _peers().broadcast(content, src=source, group=group())
            yield content.numpy().tobytes()
