"""Retries after a file system's transient errors: a network file system fails while its server restarts."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT = frozenset(
    (
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH,
        errno.ENETDOWN, errno.ENETUNREACH, getattr(errno, "EREMOTEIO", errno.EIO),
    )
)  # fmt: skip
"""Error numbers of an unreachable file system. They are no evidence of damage."""
WAITS = (0.2, 1.0, 3.0, 9.0)
"""Seconds before each retry."""


def patiently(work: Callable[[], T], path: object) -> T:
    """Return the result of ``work``, which is retried after transient errors. Raises the last attempt's OSError.

    ``work`` must open its files by path, since an open handle stays stale after the server has restarted.
    """
    for attempt, seconds in enumerate(WAITS):
        try:
            return work()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            if attempt == 0:
                logger.warning("%s: %s; trying again for %.0f seconds", path, error.strerror, sum(WAITS))
        time.sleep(seconds)
    return work()
