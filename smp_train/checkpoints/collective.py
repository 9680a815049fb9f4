"""Failures that one rank meets become failures of all ranks, with its message; nobody is left waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from smp_train.errors import CheckpointError, SmpTrainError

T = TypeVar("T")
_thread = threading.local()


@contextmanager
def on_group(group: Any) -> Iterator[None]:
    """Let this thread's exchanges go through ``group``, which holds all ranks: training uses the default one."""
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = None


@contextmanager
def alone() -> Iterator[None]:
    """Let this thread be the only rank of a world of one, for what each rank does by itself."""
    _thread.alone = True
    try:
        yield
    finally:
        _thread.alone = False


def is_alone() -> bool:
    """Return whether there is nobody to exchange with."""
    return getattr(_thread, "alone", False) or not dist.is_initialized()


def group() -> Any:
    """Return the group of this thread's exchanges; None is the default one."""
    return getattr(_thread, "group", None)


def rank() -> int:
    """Return the rank in the default group; 0 where there is none."""
    return 0 if is_alone() else dist.get_rank()


def world_size() -> int:
    """Return the size of the default group; 1 where there is none."""
    return 1 if is_alone() else dist.get_world_size()


def one_line(error: BaseException) -> str:
    """Say ``error`` in one line, naming the operating system's reason where there is one in its chain."""
    if isinstance(error, SmpTrainError):
        return str(error)
    if isinstance(error, CheckpointException):
        # DCP gathers what each rank raised, wraps it, and raises the same everywhere.
        failed, (cause, _) = min(error.failures.items())
        return one_line(cause) if isinstance(cause, SmpTrainError) else f"rank {failed}: {one_line(cause)}"
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    text = str(seen or error).strip().splitlines()
    return f"{type(seen or error).__name__}: {text[0] if text else '(no message)'}"


def here(message: str) -> str:
    """Prefix ``message`` with the rank and host it comes from, where there is more than one rank."""
    return message if world_size() == 1 else f"rank {rank()} on {socket.gethostname()}: {message}"


def exchange(what: str, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return what each returned, by rank. Collective; ``work`` must not be.

    Raises `CheckpointError` on every rank when any rank's ``work`` raised: ``what``, then the message of the
    lowest rank that failed.
    """
    value: Any = None
    failure: Exception | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    said = None if failure is None else here(one_line(failure))
    told: list[Any] = [(said, value)]
    if not is_alone():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (said, value), group=group())
    failures = [message for message, _ in told if message is not None]
    if failures:
        raise CheckpointError(f"{what}: {failures[0]}") from failure
    return [result for _, result in told]


def on_main(what: str, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone; every rank gets its result. Collective; failures as in `exchange`."""
    results: list[Any] = exchange(what, lambda: work() if rank() == 0 else None)
    return results[0]
