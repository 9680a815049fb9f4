"""The token cache of a location: its folder, the files in it, and which shards have none yet."""

from __future__ import annotations


def user_folder() -> str:
    """Return the folder of this user's caches, for data without a writable folder of its own. Raises ConfigError."""
    raise NotImplementedError
