"""A folder of shards as one data set: converts what is not converted yet, and reads any row of it.

Every rank calls `convert` for its share, all wait for each other, then every rank calls `open_source`.
There are no locks: a conversion depends on the shard alone and its files appear by renaming, so two jobs
that convert the same shard write the same bytes and the later one wins.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from smp_train.data import bad_rows, conversion, token_cache
from smp_train.data.open_files import OpenFiles
from smp_train.data.s3 import is_s3
from smp_train.data.shard_reader import REBUILT, ShardReader
from smp_train.data.source import Row, Source
from smp_train.data.targets import NO_GAPS
from smp_train.data.token_cache import GAPS, Header, cache_key
from smp_train.data.utils import Shard, list_shards
from smp_train.errors import DataError
from smp_train.storage.paths import private_folder

logger = logging.getLogger("smp_train.data")

BESIDE = ".smp_train_cache"
STALE_SECONDS = 3600
FAILED = ".err"


class Caches:
    """Where the caches of one data folder may be: read from any, written to the first that allows it."""

    def __init__(self, location: str, vocab_size: int, cache_dir: str | None, skip_bad: bool = False) -> None:
        self.vocab_size = vocab_size
        self.skip_bad = skip_bad
        # What one policy fails at, the other may not.
        self._failed = ".skip" + FAILED if skip_bad else FAILED
        if is_s3(location):
            # Named by the bucket and prefix alone: on every machine the same.
            self.places = [(cache_dir or own_folder(), location.rstrip("/"))]
        else:
            folder = os.path.realpath(location if os.path.isdir(location) else os.path.dirname(location) or ".")
            # Beside the data the folder is not part of the key: caches stay good when the data is mounted
            # elsewhere.
            self.places = (
                [(cache_dir, folder)] if cache_dir else [(os.path.join(folder, BESIDE), ""), (own_folder(), folder)]
            )
        self._writable: tuple[str, str] | None = None

    def _base(self, place: tuple[str, str], shard: Shard) -> str:
        return os.path.join(place[0], cache_key(shard, self.vocab_size, place[1]))

    def bases(self, shard: Shard) -> list[str]:
        """Return the names, without suffix, under which something kept about a shard may be."""
        return [self._base(place, shard) for place in self.places]

    def base(self, shard: Shard) -> str:
        """Return the name, without suffix, under which to keep something about a shard."""
        self._writable = self._writable or self._first_writable()
        return self._base(self._writable, shard)

    def find(self, shard: Shard) -> tuple[str, Header] | None:
        """Return (base name, header) of a shard's cache, or None."""
        for place in self.places:
            base = self._base(place, shard)
            opened = token_cache.read_header(base)
            if opened is not None and (opened[0].source, opened[0].size) == (shard.name, shard.size):
                return base, opened[0]
        return None

    @property
    def folder(self) -> str:
        """The folder caches are written to; made when it is first asked for."""
        self._writable = self._writable or self._first_writable()
        return self._writable[0]

    @property
    def copies(self) -> str:
        """The folder that objects of S3 are fetched into, to be converted."""
        return self.folder

    def _convert(self, shard: Shard, base: str, tick: Callable[[int], None], read_from: str | None) -> None:
        token_cache.write(shard, base, self.vocab_size, tick, read_from=read_from, skip_bad=self.skip_bad)

    def write(self, shard: Shard, tick: Callable[[int], None], read_from: str | None = None) -> None:
        """Convert a shard; a line that is no row leaves word of it beside the caches, for the peers."""
        base = self.base(shard)
        try:
            self._convert(shard, base, tick, read_from)
        except InterruptedError:
            raise
        except OSError as error:
            raise self.unwritable(error) from None
        except DataError as error:
            self.leave_word(shard, error)
            raise

    def unwritable(self, error: OSError) -> DataError:
        """Return the message about what could not be written here."""
        hint = "free some space or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
        return DataError(
            f"{self.folder}: cannot write the token cache ({error.strerror}); "
            f"{hint} a --data_cache_dir that can be written"
        )

    @property
    def words(self) -> str:
        """The folder in which word is left of shards that cannot be converted."""
        return self.folder

    def _word(self, shard: Shard) -> str:
        return os.path.join(self.words, os.path.basename(self.base(shard)) + self._failed)

    def leave_word(self, shard: Shard, error: Exception) -> None:
        """Tell the peers that a shard cannot be had."""
        with contextlib.suppress(OSError), token_cache.atomic_file(self._word(shard)) as file:
            file.write(str(error).encode())

    def forget_failures(self, shards: list[Shard]) -> None:
        """Remove what an earlier run left about shards that are about to be tried again."""
        for shard in shards:
            with contextlib.suppress(OSError):
                os.unlink(self._word(shard))

    def raise_failure(self, shards: list[Shard], since: float) -> None:
        """Raise the DataError that a peer has met in one of ``shards`` since a moment of the file server's clock."""
        with os.scandir(self.words) as entries:
            failed = {entry.path for entry in entries if entry.name.endswith(FAILED)}
        if not failed:
            return
        for shard in shards:
            path = self._word(shard)
            with contextlib.suppress(OSError):
                if path in failed and os.stat(path).st_mtime >= since:
                    raise DataError(Path(path).read_text())

    def _first_writable(self) -> tuple[str, str]:
        reasons = []
        for place in self.places:
            try:
                os.makedirs(place[0], mode=0o775 if place is self.places[0] else 0o700, exist_ok=True)
                sweep(place[0])
                ignore = Path(place[0], ".gitignore")
                if os.path.basename(place[0]) == BESIDE and not ignore.exists():
                    ignore.write_text("*\n")
            except OSError as error:
                reasons.append(f"{place[0]}: cannot hold the token cache ({error.strerror})")
                continue
            if reasons:
                logger.info("%s; using %s instead (--data_cache_dir chooses)", reasons[0], place[0])
            return place
        raise DataError(f"{reasons[-1]}; give a --data_cache_dir that can be written")


def own_folder() -> str:
    """Return where this user's caches go when they cannot be beside the data. Raises `ConfigError`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.access(base if os.path.isdir(base) else os.path.dirname(base), os.W_OK):
        return os.path.join(base, "smp_train", "tokens")
    return os.path.join(private_folder("smp_train"), "tokens")


def clock(folder: str) -> float:
    """Return the time now by the clock of the file server, not that of this node. OSError when not writable."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe.", suffix=".tmp") as probe:
        return os.fstat(probe.fileno()).st_mtime


def sweep(folder: str) -> None:
    """Remove what a killed or failed conversion left, an hour after its last write.

    Raises OSError when the folder cannot be written.
    """
    now = clock(folder)
    for entry in os.scandir(folder):
        ours = (entry.name.startswith(".") and entry.name.endswith(".tmp")) or entry.name.endswith(FAILED)
        # Gone by now, or another user's: not ours to remove.
        with contextlib.suppress(OSError):
            if ours and entry.stat().st_mtime < now - STALE_SECONDS:
                os.unlink(entry.path)


def share(shards: list[Shard], rank: int, world: int) -> list[Shard]:
    """Deal shards out, the largest first, each to whom has least so far; the same deal on every rank."""
    loads = [0] * world
    mine = []
    for shard in sorted(shards, key=lambda s: (-s.size, s.name)):
        least = loads.index(min(loads))
        loads[least] += shard.size
        if least == rank:
            mine.append(shard)
    return mine


def convert(
    location: str,
    *,
    vocab_size: int,
    cache_dir: str | None = None,
    zipped: bool | None = None,
    max_bad: float | None = None,
    rank: int = 0,
    world: int = 1,
    processes: int = 1,
) -> int:
    """Convert this rank's share of the shards that have no cache yet; return how many that were.

    No collectives: call it on every rank and wait for all before `open_source`. Raises DataError
    ``PATH:LINE: reason; what to do`` at the first bad line, on the rank whose share it is in, and within a second on
    every rank that writes to the same folder.
    """
    caches = Caches(location, vocab_size, cache_dir, skip_bad=max_bad is not None)
    shards = list_shards(location, zipped)
    # Dealt before looking: what is there changes while ranks look, and they must agree on the deal.
    missing = [shard for shard in share(shards, rank, world) if caches.find(shard) is None]
    return conversion.run(caches, missing, peers=shards, processes=processes, shown=rank == 0)


class TokenShards(Source):
    """Rows of converted shards, numbered through the shards in order of their names.

    Args:
        shards: the files.
        found: (base name of the cache, its header) of each.
        cure: what to do about a damaged file.
    """

    def __init__(self, shards: list[Shard], found: list[tuple[str, Header]], cure: str = REBUILT) -> None:
        self.files = shards
        self._cure = cure
        self._bases = [base for base, _ in found]
        self.headers = [header for _, header in found]
        refuse_mixed([(shard.path, header.labelled) for shard, header in zip(shards, self.headers, strict=True)])
        self._starts = [0, *accumulate(header.rows for header in self.headers)]
        self._readers: dict[int, ShardReader] = {}
        self._files = OpenFiles(len(shards))
        self._scratch = np.empty(0, dtype=np.uint16)
        # One thread reads ahead while another asks for names: no reader may be closed under the other's
        # hands.
        self._lock = threading.Lock()
        digest = hashlib.blake2b(digest_size=16)
        for header in self.headers:
            digest.update(f"{header.digest} {header.rows} {header.tokens} {header.dtype}\n".encode())
        self.fingerprint = digest.hexdigest()
        """Digest of all rows in order; where the shards live and how they are compressed does not matter."""

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def shards(self) -> list[range]:
        """Rows of each shard."""
        return [range(a, b) for a, b in pairwise(self._starts)]

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a shard, without padding at its ends."""
        with self._lock:
            return self._index(shard).lengths()

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the gaps of a shard; none, without reading its index, where no row begins with so long a one."""
        if GAPS[0] not in self.headers[shard].arrays or self.headers[shard].latest < beginning:
            return NO_GAPS
        return self._reader_of_index(shard).gaps()

    def _reader_of_index(self, shard: int) -> ShardReader:
        with self._lock:
            return self._index(shard)

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _index(self, number: int) -> ShardReader:
        """Return the reader of a shard. Its index stays in memory: rows of a thousand shards come in no order."""
        reader = self._readers.get(number)
        if reader is None:
            reader = self._readers[number] = ShardReader(self._bases[number], cure=self._cure)
        return reader

    def _reader(self, number: int) -> ShardReader:
        reader = self._index(number)
        self._files.use(reader)
        return reader

    def row(self, index: int) -> Row:
        """Read one row. Raises DataError when the cache under it is damaged."""
        with self._lock:
            number, row = self._locate(index)
            return self._reader(number).row(row)

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows into int64 [rows, tokens], faster than one by one; False when one is not just ``tokens`` long and
        all counted: then read them one by one. Raises DataError as `row`.
        """
        with self._lock:
            for place, index in enumerate(indices):
                number, row = self._locate(index)
                reader = self._reader(number)
                if self._scratch.size != into.shape[1] or self._scratch.dtype != reader.dtype:
                    self._scratch = np.empty(into.shape[1], dtype=reader.dtype)
                if not reader.fill(row, into[place], self._scratch):
                    return False
        return True

    def name(self, index: int) -> str:
        """Return ``shard-file:line``."""
        with self._lock:
            number, row = self._locate(index)
            return f"{self.headers[number].source}:{self._index(number).line(row)}"

    def report(self) -> dict[str, int | str]:
        """Totals: shards, rows, tokens, attended and counted ones, and the longest row with its shard and line."""
        longest = max(range(len(self.headers)), key=lambda i: self.headers[i].longest)
        return {
            "shards": len(self.files),
            "rows": len(self),
            "tokens": sum(header.tokens for header in self.headers),
            "attended_tokens": sum(header.attended for header in self.headers),
            "counted_tokens": sum(header.counted for header in self.headers),
            "labelled": any(header.labelled for header in self.headers),
            "lines_left_out": sum(header.skipped for header in self.headers),
            "longest": self.headers[longest].longest,
            "longest_at": f"{self.files[longest].path}:{self.headers[longest].longest_line}",
            "cache": str(Path(self._bases[0]).parent),
        }

    def close(self) -> None:
        """Close all files; they open again when a row is read."""
        with self._lock:
            self._files.close()


def open_source(
    location: str,
    *,
    vocab_size: int,
    cache_dir: str | None = None,
    zipped: bool | None = None,
    max_bad: float | None = None,
    rank: int = 0,
    world: int = 1,
    processes: int = 1,
) -> TokenShards:
    """Open a folder of shards, converting first whatever has no cache that this rank can see.

    After `convert` on all ranks nothing is missing, unless nodes keep caches of their own: then the ranks
    of a node share the rest, each starting at another shard and passing over what a neighbour has finished
    meanwhile. ``max_bad`` is the fraction of lines that may have been left out because they are no rows; None
    tolerates none. Raises DataError.
    """
    caches = Caches(location, vocab_size, cache_dir, skip_bad=max_bad is not None)
    shards = list_shards(location, zipped)
    missing = [shard for shard in shards if caches.find(shard) is None]
    turn = rank * len(missing) // world
    conversion.run(caches, missing[turn:] + missing[:turn], peers=shards, processes=processes, shown=rank == 0)
    found = [caches.find(shard) for shard in shards]
    for shard, cache in zip(shards, found, strict=True):
        if cache is None:
            raise DataError(
                f"{shard.path}: its token cache vanished; is something clearing the --data_cache_dir?"
            )
    source = TokenShards(shards, [cache for cache in found if cache is not None])
    judge_bad_rows(source, max_bad)
    return source


def refuse_mixed(labelled: list[tuple[str, bool]]) -> None:
    """Raise DataError when of the files of one place, (path, has labels), some have labels and some have none."""
    with_labels = [path for path, has in labelled if has]
    if 0 < len(with_labels) < len(labelled):
        without = next(path for path, has in labelled if not has)
        raise DataError(
            f"{without}: has no labels, but {with_labels[0]} has; put them into two folders and give both to "
            "--training_dir, or write the labels of all"
        )


def judge_bad_rows(source: TokenShards, max_bad: float | None) -> None:
    """Hold what conversions have left out against what may be, as `bad_rows.judge`."""
    left_out = [
        (shard.path, header.skipped, header.first_bad)
        for shard, header in zip(source.files, source.headers, strict=True)
    ]
    bad_rows.judge(left_out, len(source), max_bad)
