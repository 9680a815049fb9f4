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
        self._listed = {(file.name, file.size, file.version) for file in files.files}
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
        """Delete files that killed conversions left behind, and files of shards that were changed or removed."""
        tables = f"-{_digest_of_files(self.files.files)}-"
        needed_pairs: dict[str, bool] = {}
        for folder, prefix in self.folders:
            try:
                now, names = FolderStorage(folder).now(), os.listdir(folder)  # now: the time on the file server's clock
            except OSError:  # the folder does not exist or cannot be written
                continue
            for name in names:
                path = os.path.join(folder, name)
                stem, suffix = os.path.splitext(path)
                # Another job may have deleted the file, or another user may own it.
                with contextlib.suppress(OSError):
                    needed = now - os.stat(path).st_mtime < STALE_SECONDS
                    if name.startswith(prefix + tables) and suffix == ".tab":
                        needed = True
                    elif name.startswith(prefix) and suffix in (".tok", ".idx"):
                        # Decide once per pair: with its first file deleted, a pair would look incomplete and new.
                        needed = needed_pairs.setdefault(stem, stem in needed_pairs or self._is_needed(stem, needed))
                    elif not name.startswith(prefix) and suffix != PARTIAL:
                        continue
                    if not needed:
                        os.unlink(path)

    def _is_needed(self, base: str, new: bool) -> bool:
        """Return whether a job may still read a token file: it holds a listed shard or is ``new``."""
        file = self._scanned.get(base) or read_index(base)
        if file is None:  # damaged, incomplete, or written by a different version of this program
            return new
        if any((header.source, header.size, header.version) in self._listed for header in file.headers):
            return True
        # Even a new file is not needed if all its shards are still listed, but have changed.
        names = {name for name, _, _ in self._listed}
        return new and not all(header.source in names for header in file.headers)


def user_folder() -> str:
    """Return the folder of this user's caches, for data whose folder cannot be written. Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.access(base if os.path.isdir(base) else os.path.dirname(base), os.W_OK):
        return os.path.join(base, "smp_train", "tokens")
    return os.path.join(private_folder("smp_train"), "tokens")
