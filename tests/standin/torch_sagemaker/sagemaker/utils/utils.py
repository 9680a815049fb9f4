"""Timing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timeit(enabled: bool, label: str, rank: int) -> Iterator[None]:
    """Print how long the body took."""
    began = time.perf_counter()
    yield
    if enabled and rank == 0:
        print(f"{label}: {time.perf_counter() - began:.3f} s")
