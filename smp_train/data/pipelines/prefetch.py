"""Reading ahead of the training loop, in a thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class _Ahead:
    """The part of a `Prefetch` that its thread holds: it must not keep the `Prefetch` itself alive."""

    def __init__(self, steps: Iterator[Any], depth: int, unblock: Callable[[], None]) -> None:
        self.steps = steps
        self.depth = depth
        self.unblock = unblock
        self.ready: deque[Any] = deque()
        self.changed = threading.Condition()
        self.stopped = False
        self.error: BaseException | None = None
        self.finished = False

    def run(self) -> None:
        try:
            for item in self.steps:
                with self.changed:
                    self.changed.wait_for(lambda: self.stopped or len(self.ready) < self.depth)
                    if self.stopped:
                        return
                    self.ready.append(item)
                    self.changed.notify_all()
        except BaseException as error:
            self.error = error
        finally:
            with self.changed:
                self.finished = True
                self.changed.notify_all()

    def stop(self, thread: threading.Thread) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()
        self.unblock()
        # The collector may run this in the thread itself.
        if thread is not threading.current_thread():
            thread.join()
        # With its traceback it would hold this, and all that the iterator holds, until the collector comes by.
        self.error = None


class Prefetch(Iterator[Any]):
    """Runs an iterator in a thread, ``depth`` items ahead; an error in it is raised here, in its place.

    A thread and not processes: reading and decompressing give up the interpreter lock, and sending batches
    between processes costs more than making them. Stopped by `close`, by being dropped, and at exit; ``unblock`` is
    called then, to end what the iterator may be waiting for.
    """

    def __init__(self, steps: Iterator[Any], depth: int, unblock: Callable[[], None] = lambda: None) -> None:
        self._ahead = _Ahead(steps, depth, unblock)
        thread = threading.Thread(target=self._ahead.run, name="smp-train-data", daemon=True)
        thread.start()
        # At exit too: a thread inside torch while the interpreter is torn down ends the process with an
        # abort.
        self.close = weakref.finalize(self, self._ahead.stop, thread)

    def __next__(self) -> Any:
        ahead = self._ahead
        with ahead.changed:
            ahead.changed.wait_for(lambda: ahead.ready or ahead.finished or ahead.stopped)
            if ahead.ready:
                item = ahead.ready.popleft()
                ahead.changed.notify_all()
                return item
        if ahead.error is not None:
            raise ahead.error
        raise StopIteration
