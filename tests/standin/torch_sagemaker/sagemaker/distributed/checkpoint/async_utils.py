"""Saves that have been asked for and are not written yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests import standin


class AsyncCallsQueue:
    """Writes each save, of the state as it was copied, when it is finalised.

    Who does not wait is told "not yet" the first time he asks after a save: real ones take their time.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, Callable[[], None]]] = []
        self._count = 0
        self._asked = False

    def schedule(self, write: Callable[[], None]) -> None:
        self._calls.append((self._count, write))
        self._asked = False
        self._count += 1

    def maybe_finalize_async_calls(
        self, blocking: bool = False, process_group: Any = None, skip_sync: bool = False
    ) -> list[int]:
        """Return the numbers of the saves that were finished by this."""
        ready = blocking or self._asked
        standin.record(
            "maybe_finalize_async_calls", blocking=blocking, queue=id(self), pending=len(self._calls), ready=ready,
            ranks=None if process_group is None else dist.get_process_group_ranks(process_group),
        )  # fmt: skip
        self._asked = True
        done: list[int] = []
        while ready and self._calls:
            number, write = self._calls.pop(0)
            write()
            done.append(number)
        return done
