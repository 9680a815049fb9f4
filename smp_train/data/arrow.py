"""Hugging Face ``datasets`` saved to disk, read from their Arrow files without a copy.

Files are checked once, and what was found is kept beside the token caches, with where in the file every list is;
afterwards a row is a slice of the mapped file. On storage that another machine may write to, a file is read with pread
instead: when it is truncated or gone, a mapped one ends the process with no message.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO

import numpy as np

from smp_train.data import bad_rows, s3
from smp_train.data.arrow_file import Checked, Column, Lists, check, targets_of
from smp_train.data.conversion import SLACK_SECONDS
from smp_train.data.index import Caches, clock, refuse_mixed, share
from smp_train.data.mounts import is_local
from smp_train.data.source import Row, Source
from smp_train.data.targets import NO_GAPS, attended_spans, of_rows_from, row_gaps
from smp_train.data.token_cache import atomic_file
from smp_train.data.utils import Progress, Shard, open_file
from smp_train.errors import ConfigError, DataError, install

CHECKED = ".checked"
STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"
OPEN_FILES = 256


def files_of(location: str) -> tuple[list[Shard], list[Shard]]:
    """Return (data files, index files) of a folder that ``save_to_disk`` wrote, in order. Raises DataError."""
    folder = Path(location)
    try:
        state = json.loads((folder / STATE).read_text())
        names = [entry["filename"] for entry in state["_data_files"]]
        indices = [entry["filename"] for entry in state.get("_indices_data_files") or ()]
        found = []
        for name in [*names, *indices]:
            status = (folder / name).stat()
            found.append(Shard(str(folder / name), name, status.st_size, status.st_mtime_ns))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{location}: not a whole data set ({error}); save it again with save_to_disk") from None
    if not names:
        raise DataError(f"{location}: the data set has no file; save it again with save_to_disk")
    return found[: len(names)], found[len(names) :]


def _known(caches: Caches, shard: Shard) -> Checked | None:
    for base in caches.bases(shard):
        try:
            found = Checked.read(json.loads(Path(base + CHECKED).read_text()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        if found is not None:
            return found
    return None


def check_share(caches: Caches, location: str, rank: int, world: int, threads: int = 1) -> int:
    """Check this rank's share of the files that have not been; return how many that were.

    Raises DataError at the first row that is none, but where ``caches`` are to leave those out; and, behind each file,
    what a peer has met in its own.
    """
    files = files_of(location)[0]
    missing = [shard for shard in share(files, rank, world) if _known(caches, shard) is None]
    if not missing:
        return 0
    since = clock(caches.folder) - SLACK_SECONDS
    caches.forget_failures(missing)

    def checked(shard: Shard) -> Checked:
        try:
            return check(shard.path, caches.vocab_size, (lambda row, why: None) if caches.skip_bad else None)
        except DataError as error:
            caches.leave_word(shard, error)
            raise

    # Threads: what takes time, reading and NumPy's passes over large arrays, gives up the interpreter lock.
    pool = ThreadPoolExecutor(threads, thread_name_prefix="smp-train-check")
    with Progress("checking", sum(shard.size for shard in missing), "B", rank == 0) as progress, _cancelling(pool):
        for shard, found in zip(missing, pool.map(checked, missing), strict=True):
            caches.raise_failure(files, since)
            try:
                with atomic_file(caches.base(shard) + CHECKED) as file:
                    file.write(json.dumps(asdict(found)).encode())
            except OSError as error:
                raise caches.unwritable(error) from None
            progress.update(shard.size)
    return len(missing)


@contextmanager
def _cancelling(pool: ThreadPoolExecutor) -> Iterator[None]:
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)


class _Files:
    """Some open files, for reads at a place; those not used for longest are closed when there are too many."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, IO[bytes]] = OrderedDict()
        # One thread reads ahead while another may ask for a row.
        self._lock = threading.Lock()

    def read(self, path: str, size: int, offset: int) -> bytes:
        """Read bytes. Raises DataError when they are not there."""
        with self._lock:
            file = self._open.pop(path, None) or open_file(path)
            self._open[path] = file
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            try:
                data = os.pread(file.fileno(), size, offset)
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror}); is its file system still there?") from None
        if len(data) != size:
            raise DataError(f"{path}: is shorter than when it was opened; start again when the data is complete")
        return data


class _Column:
    """The lists of one batch in a file that is mapped, or read from where ``mapped`` is None."""

    def __init__(self, path: str, place: Lists, mapped: np.ndarray | None, files: _Files) -> None:
        self._path, self._place, self._mapped, self._files = path, place, mapped, files
        self._type = np.dtype(place.values_type)

    def __len__(self) -> int:
        return self._place.rows

    def _array(self, kind: np.dtype, offset: int, count: int) -> np.ndarray:
        if self._mapped is not None and count:
            return np.frombuffer(self._mapped, kind, count, offset)
        return np.frombuffer(self._files.read(self._path, count * kind.itemsize, offset), kind)

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each list begins among the numbers, one more than rows."""
        place = self._place
        if place.starts < 0:
            return np.arange(place.rows + 1, dtype=np.int64) * place.size
        return self._array(np.dtype(place.starts_type), place.starts, place.rows + 1)

    @cached_property
    def _view(self) -> np.ndarray:
        return self._array(self._type, self._place.values, int(self.starts[-1]))

    def numbers(self, first: int, last: int) -> np.ndarray:
        """Return the numbers of the rows from ``first`` to before ``last``, end to end."""
        begin, end = int(self.starts[first]), int(self.starts[last])
        if self._mapped is not None:
            return self._view[begin:end]
        return self._array(self._type, self._place.values + begin * self._type.itemsize, end - begin)

    def all_rows(self) -> Column:
        """Return the numbers of all rows."""
        return self.numbers(0, len(self)), self.starts.astype(np.int64) - int(self.starts[0])


class ArrowRows(Source):
    """Rows of the Arrow files of one data set, as slices of mapped memory where the files are on a local disk.

    Args:
        files: data files, in order.
        checked: what the check found of each.
        indices: files that say which row comes where, when the data set was shuffled or filtered before it was saved.
    """

    def __init__(self, files: list[Shard], checked: list[Checked], indices: list[Shard]) -> None:
        self.files = files
        self.checked = checked
        self._ids: list[_Column] = []
        self._masks: list[_Column | None] = []
        self._labels: list[_Column | None] = []
        self._columns_of = [0]
        opened = _Files()
        for shard, found in zip(files, checked, strict=True):
            mapped = np.memmap(shard.path, dtype=np.uint8, mode="r") if is_local(shard.path) else None
            for ids, *others in found.batches:
                self._ids.append(_Column(shard.path, ids, mapped, opened))
                for columns, place in zip((self._masks, self._labels), others, strict=True):
                    columns.append(None if place is None else _Column(shard.path, place, mapped, opened))
            self._columns_of.append(len(self._ids))
        refuse_mixed([(shard.path, found.labelled) for shard, found in zip(files, checked, strict=True) if found.rows])
        self._starts = [0, *accumulate(len(column) for column in self._ids)]
        self._file_starts = [0, *accumulate(found.rows + len(found.left_out) for found in checked)]
        if self._starts[-1] != self._file_starts[-1]:
            raise DataError(f"{files[0].path}: its check is damaged; remove the files *{CHECKED} and start again")
        self.shards = [range(a, b) for a, b in pairwise([0, *accumulate(found.rows for found in checked)])]
        """Rows of each file; all of them as one when an index puts them in another order."""
        kept = self._kept()
        if indices:
            order = np.concatenate([_index(one) for one in indices]).astype(np.int64)
            kept = order if kept is None else order[np.isin(order, kept)]
            self.shards = [range(kept.size)]
        self._order = kept
        digest = hashlib.blake2b(digest_size=16)
        for found in checked:
            digest.update(f"{found.digest} {found.rows} {found.tokens}\n".encode())
        if indices:
            digest.update(np.asarray(kept).tobytes())
        self.fingerprint = digest.hexdigest()

    def _kept(self) -> np.ndarray | None:
        """Return the stored rows that are used, int64; None when all are."""
        left_out = [
            start + row for start, found in zip(self._file_starts, self.checked, strict=False) for row in found.left_out
        ]
        if not left_out:
            return None
        return np.delete(np.arange(self._starts[-1]), left_out)

    def __len__(self) -> int:
        return self._starts[-1] if self._order is None else self._order.size

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a file, without padding at its ends."""
        span = self._columns(shard)
        none = np.empty(0, dtype=np.int64)
        sizes = np.concatenate([none, *(self._column_lengths(number) for number in span)])
        if self._order is None:
            return sizes
        rows = self.shards[shard]
        return sizes[self._order[rows.start : rows.stop] - self._starts[span.start]]

    def _column_lengths(self, number: int) -> np.ndarray:
        mask = self._masks[number]
        if mask is None:
            return np.diff(self._ids[number].starts.astype(np.int64))
        attended, starts = mask.all_rows()
        return np.diff(starts) if attended.all() else attended_spans(attended, starts)[1]

    def _columns(self, shard: int) -> range:
        if len(self.shards) != len(self.files):
            return range(len(self._ids))
        return range(*self._columns_of[shard : shard + 2])

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the gaps of a file; none, without reading it, where no row begins with so long a one."""
        files = self.checked if len(self.shards) != len(self.files) else [self.checked[shard]]
        if max(found.latest for found in files) < beginning:
            return NO_GAPS
        span, rows = self._columns(shard), self.shards[shard]
        gaps = np.concatenate([NO_GAPS, *(self._column_gaps(number) for number in span)])
        if self._order is None:
            return of_rows_from(-self._starts[span.start], gaps)
        # Rows are in another order, and may be there twice.
        stored = self._order[rows.start : rows.stop]
        first = np.searchsorted(gaps[:, 0], stored)
        counts = np.searchsorted(gaps[:, 0], stored, side="right") - first
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found = gaps[np.repeat(first, counts) + within]
        found[:, 0] = np.repeat(np.arange(len(rows)), counts)
        return found

    def _column_gaps(self, number: int) -> np.ndarray:
        mask, labels = (
            None if column is None else column.all_rows() for column in (self._masks[number], self._labels[number])
        )
        starts = self._ids[number].starts.astype(np.int64)
        starts -= starts[0]
        targets, attended = targets_of(starts, mask, labels)
        if targets is None:
            return NO_GAPS
        return of_rows_from(self._starts[number], row_gaps(targets, attended, starts))

    def _stored(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return index if self._order is None else int(self._order[index])

    def row(self, index: int) -> Row:
        """Return one row; of a mapped file its ids are a view. Raises DataError when it cannot be read."""
        stored = self._stored(index)
        number = bisect.bisect_right(self._starts, stored) - 1
        row = stored - self._starts[number]
        ids, mask, labels = (
            None if column is None else column.numbers(row, row + 1)
            for column in (self._ids[number], self._masks[number], self._labels[number])
        )
        assert ids is not None, "every batch has ids"
        return Row(ids, None if mask is None or mask.all() else mask.astype(bool), labels=labels)

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows into int64 [rows, tokens]; False when one is not just ``tokens`` long and all counted."""
        for place, index in enumerate(indices):
            row = self.row(index)
            if row.counted is not None or row.labels is not None or row.input_ids.size != into.shape[1]:
                return False
            into[place] = row.input_ids
        return True

    def name(self, index: int) -> str:
        """Return ``file:row``, counted from 1."""
        stored = self._stored(index)
        number = bisect.bisect_right(self._file_starts, stored) - 1
        return f"{self.files[number].name}:{stored - self._file_starts[number] + 1}"

    def report(self) -> dict[str, int | str]:
        """Totals, as of token shards."""
        longest = max(range(len(self.checked)), key=lambda i: self.checked[i].longest)
        return {
            "shards": len(self.files),
            "rows": len(self),
            "tokens": sum(found.tokens for found in self.checked),
            "attended_tokens": sum(found.attended for found in self.checked),
            "counted_tokens": sum(found.counted for found in self.checked),
            "labelled": any(found.labelled for found in self.checked),
            "lines_left_out": sum(len(found.left_out) for found in self.checked),
            "longest": self.checked[longest].longest,
            "longest_at": f"{self.files[longest].path}:{self.checked[longest].longest_row}",
        }


def _index(shard: Shard) -> np.ndarray:
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(f"Arrow files need the package pyarrow: {install('hf')}") from None
    try:
        with pa.OSFile(shard.path) as file:
            return np.asarray(pa.ipc.open_stream(file).read_all().column(0).to_numpy())
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{shard.path}: not a whole Arrow file ({why}); copy it again") from None


def open_arrow(caches: Caches, location: str, max_bad: float | None = None) -> ArrowRows:
    """Open a checked data set, checking what this rank cannot see the check of.

    ``max_bad`` is the fraction of rows that may be left out because they are none; None tolerates none.
    """
    files, indices = files_of(location)
    check_share(caches, location, 0, 1)
    checked = []
    for shard in files:
        found = _known(caches, shard)
        if found is None:
            raise DataError(f"{shard.path}: its check vanished; is something clearing the --data_cache_dir?")
        checked.append(found)
    rows = sum(found.rows for found in checked)
    left_out = [
        (shard.path, len(found.left_out), found.first_bad) for shard, found in zip(files, checked, strict=True)
    ]
    bad_rows.judge(left_out, rows, max_bad)
    if not rows:
        raise DataError(f"{location}: the data set has no row; save it again with save_to_disk")
    return ArrowRows(files, checked, indices)


def is_arrow(names: set[str]) -> bool:
    """Tell by the names in a folder whether ``save_to_disk`` wrote it."""
    return STATE in names and INFO in names


def columns(location: str) -> set[str]:
    """Return the columns of a data set, by what ``save_to_disk`` wrote of it; none where that cannot be read."""
    path = f"{location.rstrip('/')}/{INFO}"
    try:
        text = s3.read_small(path) if s3.is_s3(path) else Path(path).read_bytes()
        return set(json.loads(text or b"{}")["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def refuse_dict(location: str, names: set[str]) -> None:
    """Say which folder to give when several splits were saved as one."""
    if DICT in names:
        splits = sorted(name for name in os.listdir(location) if os.path.isdir(os.path.join(location, name)))
        raise DataError(f"{location}: holds the splits {', '.join(splits)}; give the folder of one of them")
