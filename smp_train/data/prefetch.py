"""Reading ahead of the training loop, in a thread."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any


class Prefetch(Iterator[Any]):
    """Runs an iterator in a thread, ``depth`` items ahead; raises its error when the failed item is due.

    A thread and not processes: reading and decompressing release the interpreter lock, and sending batches between
    processes costs more than making them. The creator must close it.
    """

    def __init__(self, steps: Iterator[Any], depth: int) -> None:
        self._steps, self._depth = steps, depth
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = self._finished = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="smp-train-data", daemon=True)
        self._thread.start()
        # A thread inside torch while the interpreter shuts down would abort the process.
        atexit.register(self.close)

    def _run(self) -> None:
        try:
            for item in self._steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if self._closed:
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
        """Stop the thread and wait until it has ended."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        # The garbage collector may call this in the thread itself.
        if self._thread is not threading.current_thread():
            self._thread.join()
        # Its traceback would keep the iterator's objects alive until the next garbage collection.
        self._error = None

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished or self._closed)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None:
            raise self._error
        raise StopIteration
