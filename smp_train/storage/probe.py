"""Short-lived files that show whether a rank can write to a folder and sees other ranks' files."""

from __future__ import annotations

import socket
import uuid

from smp_train.errors import CheckpointError
from smp_train.storage.base import Storage, wait_for

PROBE = ".probe-"
"""Prefix of the names of probe files."""
PROBE_SECONDS = 60.0
"""A probe older than this was left by a killed process."""


def put_probe(folder: Storage) -> str:
    """Write a probe and return its name."""
    probe = f"{PROBE}{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    folder.put(probe, b"smp-train\n")
    return probe


def check_probe(folder: Storage, probe: str) -> None:
    """Raise `CheckpointError` if this rank does not see rank 0's probe."""
    if not wait_for(lambda: folder.exists(probe)):
        raise CheckpointError(f"{folder.location} is not the folder that rank 0 sees; give one that all nodes share")


def check_writable(folder: Storage, flag: str) -> None:
    """Create a folder and write a file to it. Raises `CheckpointError`, which names ``flag``, if that fails."""
    try:
        folder.delete(put_probe(folder))
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write to {folder.location}: {reason}; give another --{flag}") from error
