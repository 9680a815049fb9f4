"""`distributed.agree` for checkpoints: any failure of one rank becomes the same `CheckpointError` on all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from smp_train import distributed
from smp_train.errors import CheckpointError, SmpTrainError

T = TypeVar("T")

REMEDY = "free space and start the same command again"
"""What the user can do about a full disk."""


def root_cause(error: BaseException) -> str:
    """Return the cause of ``error`` in one line: the first `OSError` in its chain, or a rank's failure inside DCP."""
    if isinstance(error, SmpTrainError):
        return str(error)
    if isinstance(error, CheckpointException):
        # DCP gathers the failures of all ranks, wraps them, and raises the same exception on every rank.
        failed, (cause, _) = min(error.failures.items())
        return root_cause(cause) if isinstance(cause, SmpTrainError) else f"rank {failed}: {root_cause(cause)}"
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{seen.strerror}; {REMEDY}"
    text = str(seen or error).strip().splitlines()
    return f"{type(seen or error).__name__}: {text[0] if text else '(no message)'}"


def gather(action: str, work: Callable[[], T]) -> list[T]:
    """Call `distributed.gather`; a failure's message begins with ``action``. Collective, but ``work`` must not be."""
    return distributed.gather(action, lambda: _worded(action, work))


def on_main(action: str, work: Callable[[], T]) -> T:
    """Call `distributed.on_main`; a failure's message begins with ``action``. Collective, but ``work`` must not be."""
    return distributed.on_main(action, lambda: _worded(action, work))


def _worded(action: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        raise CheckpointError(f"{action}: {root_cause(error)}") from error
