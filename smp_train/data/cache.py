"""The token cache of a data set: its folder, the token files in it, and the removal of files that are no longer needed.

Two jobs may convert the same shards at once, without locks: the name of a token file depends on its shards alone, and a
file gets this name, by a rename, only when it is complete.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from smp_train.data.files import DataFile, FileSet
from smp_train.data.source import digest_of
from smp_train.data.token_file import VERSION, TokenFile, read_index
from smp_train.errors import DataError
from smp_train.storage.folder import PARTIAL, FolderStorage
from smp_train.storage.paths import private_folder

logger = logging.getLogger("smp_train.data")

FOLDER_NAME = ".smp_train_cache"
STALE_SECONDS = 24 * 3600
"""Age at which a temporary file, or a token file whose shards were removed, is deleted: no running job needs it."""


def _digest_of_files(files: Sequence[DataFile]) -> str:
    return digest_of(*((file.name, file.size, file.version) for file in files))


class TokenCache:
    """The token files of one file set. They are read from all `folders`, and written to the first writable folder.

    Args:
        files: the file set.
        identity: digest of everything that decides how the file set's records become tokens.
        cache_dir: --data_cache_dir; default: a folder in the data's folder, or the user's cache.
    """

    def __init__(self, files: FileSet, identity: str, cache_dir: str | None) -> None:
        self.files = files
        first = files.files[0]
        # The path is from rank 0's list of files: on another rank, a relative location may mean another folder.
        root = first.path.removesuffix(first.name).rstrip("/")
        single = first.name if len(files.files) == 1 and files.location.endswith(first.name) else ""
        key = [VERSION, identity, first.config, first.split, single]
        if not first.remote:
            root = os.path.realpath(root)
        self.folders = [(cache_dir or user_folder(), digest_of(*key, root))]
        if not (first.remote or cache_dir):
            # This key does not contain the path of the data's folder, so the cache stays valid on another mount.
            self.folders.insert(0, (os.path.join(root, FOLDER_NAME), digest_of(*key)))
        self._scanned: dict[str, TokenFile] = {}
        self._stored: dict[tuple[str, int, str], tuple[TokenFile, int]] = {}

    @cached_property
    def destination(self) -> tuple[str, str]:
        """Return (folder, prefix of file names) for new files; creates the folder. Raises DataError."""
        reason = ""
        for number, (folder, prefix) in enumerate(self.folders):
            try:
                os.makedirs(folder, mode=0o775 if number == 0 else 0o700, exist_ok=True)
                ignore = Path(folder, ".gitignore")
                if os.path.basename(folder) == FOLDER_NAME and not ignore.exists():
                    ignore.write_text("*\n")
                return folder, prefix
            except OSError as error:
                reason = f"{folder}: cannot hold the token cache ({error.strerror})"
                logger.info("%s", reason)
        raise DataError(f"{reason}; give a --data_cache_dir that can be written")

    def base(self, shards: Sequence[DataFile]) -> str:
        """Return the path, without suffix, of a new token file; it depends on the names and versions of its shards."""
        folder, prefix = self.destination
        return os.path.join(folder, f"{prefix}-{_digest_of_files(shards)}")

    def table(self, fingerprint: str, layout: str, number: int) -> str:
        """Return the path of table ``number`` of the samples of the whole file set."""
        return f"{self.base(self.files.files)}-{digest_of(fingerprint, layout, number)}.tab"

    def missing(self, shards: Iterable[DataFile]) -> list[DataFile]:
        """Return the shards that no token file holds; reads the indexes that have appeared since the last call."""
        for folder, prefix in self.folders:
            for path in glob.iglob(f"{glob.escape(folder)}/{prefix}-*.idx"):
                base = path.removesuffix(".idx")
                file = None if base in self._scanned else read_index(base)
                if file is not None:
                    self._scanned[base] = file
                    for number, header in enumerate(file.headers):
                        self._stored[header.source, header.size, header.version] = file, number
        return [shard for shard in shards if self.stored(shard) is None]

    def stored(self, shard: DataFile) -> tuple[TokenFile, int] | None:
        """Return the token file that holds a shard, and the shard's number there; None unless `missing` has read it."""
        return self._stored.get((shard.name, shard.size, shard.version))

    def remove_stale(self) -> None:
        """Delete old files that killed conversions left behind, and old token files of changed or removed shards.

        Call it after `missing`, which reads the indexes.
        """
        listed = {(file.name, file.size, file.version) for file in self.files.files}
        needed = {
            os.path.basename(base)
            for base, file in self._scanned.items()
            if not listed.isdisjoint((header.source, header.size, header.version) for header in file.headers)
        }
        for folder, prefix in self.folders:
            tables = f"{prefix}-{_digest_of_files(self.files.files)}-"
            with contextlib.suppress(OSError):  # the folder does not exist or cannot be written
                oldest = FolderStorage(folder).now() - STALE_SECONDS  # on the file server's clock
                for path in Path(folder).iterdir():
                    is_needed = path.stem in needed or path.name.startswith(tables)
                    ours = path.name.startswith(prefix) or path.suffix == PARTIAL
                    # Another job may have deleted the file, or another user may own it.
                    with contextlib.suppress(OSError):
                        if ours and not is_needed and path.stat().st_mtime < oldest:
                            path.unlink()


def user_folder() -> str:
    """Return the folder of this user's caches, for data whose folder cannot be written. Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.access(base if os.path.isdir(base) else os.path.dirname(base), os.W_OK):
        return os.path.join(base, "smp_train", "tokens")
    return os.path.join(private_folder("smp_train"), "tokens")
