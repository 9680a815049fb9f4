"""Asynchronous saves: copy the state to host memory while training goes on, and write the copy in the background."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from smp_train.checkpoints.collective import gather
from smp_train.distributed.agree import ALL_RANKS, any_rank, is_alone, on_group, unless
from smp_train.distributed.failures import start_thread
from smp_train.distributed.host_copy import Stager, local_bytes
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.errors import CheckpointError

logger = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(hours=2)  # long, because all ranks wait for the slowest disk
MEMORY_SHARE = 0.6
"""Copies may take this share of a host's free memory; a state that needs more is saved synchronously."""


class BackgroundWriter:
    """Begins saves in the background. These saves communicate in a process group of their own."""

    def __init__(self) -> None:
        self._stager = Stager()
        self._group: Any = None
        self._began = False

    def begin(self, state: dict[str, Any], write: Callable[[dict[str, Any]], Any]) -> Background | None:
        """Copy ``state`` and begin to ``write`` it; collective.

        Returns None on all ranks, with a warning, if a host lacks memory for the copy.
        """
        action = "cannot copy the state to host memory"
        begun: list[tuple[dict[str, Any], Callable[[], None]]] = []
        try:
            if not self._began:
                _check_memory(state)
                self._group = None if is_alone() else dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
                self._began = True
            gather(action, lambda: begun.append(self._stager.begin(state)))
        except CheckpointError as failure:
            logger.warning("%s: saves are synchronous", failure, extra=ALL_RANKS)
            self._stager = Stager()
            return None
        ((copy, complete),) = begun

        def in_background(failure: Exception | None) -> Any:
            with on_group(self._group):
                gather(action, lambda: unless(failure, None))
                return write(copy)

        return Background(complete, in_background)


def _check_memory(state: dict[str, Any]) -> None:
    """Raise `CheckpointError` on every rank if a host cannot hold a copy of its ranks' tensors; collective."""
    host = socket.gethostname()
    needed: Counter[str] = Counter()
    free: dict[str, int] = {}
    for name, size, available in gather("cannot save", lambda: (host, local_bytes(state), free_host_bytes())):
        needed[name] += size
        free[name] = min(free.get(name, sys.maxsize), sys.maxsize if available is None else available)
    for name in sorted(free):
        if needed[name] > MEMORY_SHARE * free[name]:
            raise CheckpointError(
                f"{name} has {free[name] / 2**30:.1f} GiB of memory free, a copy of the state takes "
                f"{needed[name] / 2**30:.1f}"
            )


class Background:
    """Completes a copy and then writes it, in a thread. `result` raises the thread's failure."""

    def __init__(self, complete: Callable[[], None], write: Callable[[Exception | None], Any]) -> None:
        """Start the thread. ``write`` gets the failure of the copy, or None, and reports it to the other ranks."""
        self._staged = threading.Event()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> Any:
            failure = None
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                    # torch's writer waits for its stream every 10 MB. The default one would make it wait for training.
                    torch.cuda.set_stream(torch.cuda.Stream())
                complete()
            except Exception as error:
                failure = error
            finally:
                self._staged.set()
            return write(failure)

        self._future = start_thread(run, "smp-train-save")

    def staged(self) -> None:
        """Wait until the copy is complete, so that the original may change."""
        self._staged.wait()

    def running(self) -> bool:
        """Return whether the thread is still copying or writing."""
        return not self._future.done()

    def ended_everywhere(self) -> bool:
        """Return whether the thread has ended on every rank; collective."""
        return not any_rank(self.running())

    def result(self) -> Any:
        """Wait for the thread's end and return the result of ``write``; raises the thread's failure."""
        return self._future.result()

    def abandon(self, seconds: float | None = None) -> None:
        """Wait for the thread's end, at most ``seconds``, and ignore failures."""
        wait([self._future], seconds)
