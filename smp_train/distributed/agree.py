"""Agreement of all ranks: raises one rank's failure on all ranks, and sends one rank's values to all ranks.

Functions are collective unless their docstring has "Not collective".
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from smp_train.errors import EXIT_CODES, SmpTrainError, explained

T = TypeVar("T")

ALL_RANKS = {"all_ranks": True}
"""Pass as ``extra=`` to show a log record of any rank on the console; without it only rank 0's are shown."""

_thread = threading.local()
Results = list[tuple[str, bytes]]
"""Name and pickled result of collective calls, in order."""
_record: Results | None = None
"""The results since `record`; None if they are not recorded."""
_replayed: deque[tuple[str, bytes]] | None = None
host_group: Any = None
"""The group of all ranks for values in host memory; None for the default group."""


def replay(results: Sequence[tuple[str, bytes]] | None) -> None:
    """Make collective calls return the `recorded` ``results`` of the run's start, without peers; None ends this.

    A process that replaces a dead rank starts in this way, because the other ranks do not start again. Not
    collective.
    """
    global _replayed, _record
    _record = None
    _replayed = None if results is None else deque(results)


def record() -> None:
    """Record the results of collective calls from now on. Not collective."""
    global _record
    _record = []


def recorded() -> Results | None:
    """Return the results since `record`, and end the recording; None without a recording. Not collective."""
    global _record
    results, _record = _record, None
    return results


def replays() -> bool:
    """Return whether this process repeats a recorded start, without its peers. Not collective."""
    return _replayed is not None


def _next_result(call: str) -> Any:
    assert _replayed is not None
    made, results = _replayed.popleft() if _replayed else ("nothing", b"")
    if made != call:
        raise SmpTrainError(f"a replacement cannot repeat the start of the run: {call!r} is not {made!r}")
    return pickle.loads(results)


def _record_result(call: str, result: T) -> T:
    if _record is not None:
        _record.append((call, pickle.dumps(result)))  # pickled now, because the caller may change it
    return result


@contextmanager
def on_group(group: Any) -> Iterator[None]:
    """In the body, make this thread's calls use ``group``, which must contain all ranks. Not collective."""
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = None


@contextmanager
def alone() -> Iterator[None]:
    """In the body, make this thread act as rank 0 of a world of one. Not collective."""
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = False


def group() -> Any:
    """Return the process group that this thread's calls use; None for the default group. Not collective."""
    return getattr(_thread, "group", None) or host_group


def _peers() -> Any:
    """Return torch.distributed; None without a process group, or if this thread is `alone`. Imports nothing."""
    dist = sys.modules.get("torch.distributed")
    if getattr(_thread, "alone", False) or dist is None or not (dist.is_available() and dist.is_initialized()):
        return None
    return dist


def is_alone() -> bool:
    """Return whether there is no process group, or this thread is `alone`. Not collective."""
    return _peers() is None


def rank() -> int:
    """Return this process's rank; 0 when alone. Not collective."""
    return 0 if is_alone() else int(_peers().get_rank())


def world_size() -> int:
    """Return the number of ranks; 1 when alone. Not collective."""
    return 1 if is_alone() else int(_peers().get_world_size())


def with_rank(message: str) -> str:
    """Return ``message`` with this rank and host before it; unchanged when alone. Not collective."""
    return message if world_size() == 1 else f"rank {rank()} on {socket.gethostname()}: {message}"


@contextmanager
def together(action: str) -> Iterator[None]:
    """Raise a failure of one rank's body on all ranks, as `gather` does. The body must contain no collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as problem:
        failure = problem
    gather(action, partial(unless, failure, None))


def gather(action: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return all results, by rank. ``work`` must contain no collective.

    If ``work`` fails on any rank, all ranks raise the lowest failing rank's error, with its class and message. Other
    ranks add "rank R on HOST:". Any other exception becomes a `SmpTrainError`, "while ``action``".
    """
    if is_alone():
        return [work()]
    if replays():
        work()  # for its effects on this process
        return list(_next_result(action))
    value: Any = None
    failure: Exception | None = None
    report = None
    try:
        value = work()
    except Exception as problem:
        failure = explained(problem)
        line = " ".join(str(failure).split())
        if not isinstance(failure, SmpTrainError):
            line = f"while {action}: {type(failure).__name__}: {line}"
        report = (getattr(failure, "exit_code", 1), socket.gethostname(), line)
    gathered: list[Any] = [None] * world_size()
    _peers().all_gather_object(gathered, (report, value), group=group())
    for failed_rank, (report, _) in enumerate(gathered):
        if report is not None:
            code, host, line = report
            repeats = failed_rank != rank()
            error = EXIT_CODES.get(code, SmpTrainError)(f"rank {failed_rank} on {host}: {line}" if repeats else line)
            error.repeats = repeats
            raise error from failure
    return _record_result(action, [result for _, result in gathered])


def on_main(action: str, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone and return its result on every rank; failures are raised as `gather` does."""
    if not is_alone() and replays():
        first: T = _next_result(action)[0]  # rank 0 has done the work
        return first
    results: list[Any] = gather(action, lambda: work() if rank() == 0 else None)
    return results[0]


def unless(failure: Exception | None, value: T) -> T:
    """Return ``value``, or raise an earlier ``failure`` for `gather` to report. Not collective."""
    if failure is not None:
        raise failure
    return value


def any_rank(yes: bool) -> bool:
    """Return whether ``yes`` is true on any rank."""
    return largest([int(yes)]) == [1]


def largest(values: Sequence[int]) -> list[int]:
    """Return the maximum of each number over all ranks; every rank passes the same number of values."""
    if is_alone():
        return list(values)
    if replays():
        return list(_next_result("largest"))
    import torch

    merged = torch.tensor(values, dtype=torch.int64)
    _peers().all_reduce(merged, _peers().ReduceOp.MAX, group=group())
    return _record_result("largest", [int(value) for value in merged.tolist()])


def from_main(value: T) -> T:
    """Return rank 0's ``value`` on every rank, without the copy per rank that `gather` makes."""
    if is_alone():
        return value
    if replays():
        value = _next_result("from_main")
        return value
    values: list[Any] = [value if rank() == 0 else None]
    _peers().broadcast_object_list(values, src=0, group=group())
    received: T = values[0]
    return _record_result("from_main", received)
