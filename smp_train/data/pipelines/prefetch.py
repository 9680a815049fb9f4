"""Reading ahead of the training loop, in a thread."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class Prefetch(Iterator[Any]):
    """Runs an iterator in a thread, ``depth`` items ahead; an error in it is raised here, in its place.

    A thread and not processes: reading and decompressing give up the interpreter lock, and sending batches
    between processes costs more than making them. Its creator must close it, which calls ``unblock`` to release an
    iterator that waits.
    """

    def __init__(self, steps: Iterator[Any], depth: int, unblock: Callable[[], None] = lambda: None) -> None:
        self._steps, self._depth, self._unblock = steps, depth, unblock
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._stopped = self._finished = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="smp-train-data", daemon=True)
        self._thread.start()
        # A thread inside torch while the interpreter is torn down ends the process with an abort.
        atexit.register(self.close)

    def _run(self) -> None:
        try:
            for item in self._steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
                    if self._stopped:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread, and wait for its end."""
        atexit.unregister(self.close)
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        self._unblock()
        # The collector may run this in the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join()
        # Its traceback would keep the iterator's objects alive until the next garbage collection.
        self._error = None

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished or self._stopped)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration
