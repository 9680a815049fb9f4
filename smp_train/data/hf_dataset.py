"""Hugging Face data sets on disk, as ``save_to_disk`` of ``datasets`` wrote them: mapped, and read without a copy.

Files are checked once, and what was found is kept beside the token caches. They are mapped as ``load_from_disk`` maps
them, by pyarrow alone: ``datasets`` takes twenty times as long to import, and copies what is in S3 elsewhere.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data import bad_rows, s3
from smp_train.data.atomic_file import atomic_file
from smp_train.data.hf_dataset_check import CHECK_VERSION, Checked, Columns, batches, check, columns_of
from smp_train.data.progress import Progress
from smp_train.data.source import Row, Source
from smp_train.data.targets import NO_GAPS, attended_spans, of_rows_from, row_gaps
from smp_train.data.token_cache import TokenCache, share
from smp_train.data.token_dataset import refuse_mixed
from smp_train.data.utils import Shard
from smp_train.errors import DataError

CHECKED = ".checked"
STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"


def files_of(location: str) -> list[Shard]:
    """Return the files of a folder that ``save_to_disk`` wrote, in order. Raises DataError."""
    found = []
    try:
        state = json.loads(Path(location, STATE).read_text())
        for entry in state["_data_files"]:
            name = entry["filename"]
            if name != os.path.basename(name):
                raise ValueError(f"{STATE} names {name}, outside of the folder")
            status = Path(location, name).stat()
            found.append(Shard(os.path.join(location, name), name, status.st_size, status.st_mtime_ns))
        if state.get("_indices_data_files"):
            raise ValueError("an old release of datasets keeps the order of its rows in a file of its own")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{location}: not a whole data set ({error}); save it again with save_to_disk") from None
    if not found:
        raise DataError(f"{location}: the data set has no file; save it again with save_to_disk")
    return found


def _known(caches: TokenCache, shard: Shard) -> Checked | None:
    for base in caches.bases(shard):
        try:
            kept = json.loads(Path(base + CHECKED).read_text())
            if kept["version"] == CHECK_VERSION and (found := Checked(**kept)).fits():
                return found
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return None


def check_share(caches: TokenCache, location: str, rank: int, world: int, threads: int = 1) -> int:
    """Check this rank's share of the files that have not been; return how many that were.

    Raises DataError at the first malformed row, except where ``caches`` are to leave those out.
    """
    missing = [shard for shard in share(files_of(location), rank, world) if _known(caches, shard) is None]

    def checked(shard: Shard) -> None:
        found = check(shard.path, caches.vocab_size, (lambda row, why: None) if caches.skip_bad else None)
        try:
            with atomic_file(caches.destination.base(shard) + CHECKED) as file:
                file.write(json.dumps(asdict(found)).encode())
        except OSError as error:
            raise caches.destination.unwritable(error) from None

    # Threads: what takes time, reading and NumPy's passes over large arrays, releases the interpreter lock.
    pool = ThreadPoolExecutor(threads, thread_name_prefix="smp-train-check")
    with Progress("checking", sum(shard.size for shard in missing), "B", rank == 0) as progress:
        try:
            for shard, _ in zip(missing, pool.map(checked, missing), strict=True):
                progress.update(shard.size)
        finally:
            pool.shutdown(cancel_futures=True)
    return len(missing)


class _Batch:
    """One record batch; its columns are views that are made when they are first asked for."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @cached_property
    def columns(self) -> Columns:
        return columns_of(self._batch)

    def lengths(self) -> np.ndarray:
        """Return the tokens of each row, without padding at its ends."""
        attended = self.columns.targets()[1] if self.columns.mask is not None else None
        starts = self.columns.ids.all_rows().starts
        return np.diff(starts) if attended is None else attended_spans(attended, starts)[1]

    def gaps(self) -> np.ndarray:
        where, attended = self.columns.targets()
        return NO_GAPS if where is None else row_gaps(where, attended, self.columns.ids.all_rows().starts)


class HfRows(Source):
    """Rows of the Arrow files of one data set, as slices of mapped memory.

    Args:
        files: data files, in order.
        checked: what the check found of each.
    """

    def __init__(self, files: list[Shard], checked: list[Checked]) -> None:
        self.files = files
        self.checked = checked
        refuse_mixed([(shard.path, found.labelled) for shard, found in zip(files, checked, strict=True) if found.rows])
        of_files = [[_Batch(batch) for batch in batches(shard.path)] for shard in files]
        self._batches = [batch for of_file in of_files for batch in of_file]
        self._starts = [0, *accumulate(map(len, self._batches))]
        """Stored rows before each batch."""
        self._first_batch = [0, *accumulate(map(len, of_files))]
        self._file_starts = [self._starts[first] for first in self._first_batch]
        if self._file_starts[-1] != sum(found.rows + len(found.left_out) for found in checked):
            raise DataError(f"{files[0].path}: its check is damaged; remove the files *{CHECKED} and start again")
        self.shards = [range(a, b) for a, b in pairwise([0, *accumulate(found.rows for found in checked)])]
        """Rows of each file."""
        left_out = [
            start + row for start, found in zip(self._file_starts, checked, strict=False) for row in found.left_out
        ]
        self._kept = np.delete(np.arange(self._starts[-1]), left_out) if left_out else None
        """The stored rows that are used, int64; None when all are."""
        digest = hashlib.blake2b(digest_size=16)
        for found in checked:
            digest.update(f"{found.digest} {found.rows} {found.tokens}\n".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self.shards[-1].stop

    def _batches_of(self, shard: int) -> range:
        return range(*self._first_batch[shard : shard + 2])

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a file, without padding at its ends."""
        parts = [self._batches[number].lengths() for number in self._batches_of(shard)]
        sizes = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        return np.delete(sizes, self.checked[shard].left_out)

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the gaps of a file; none, without reading it, where no row begins with so long a one."""
        found = self.checked[shard]
        if found.latest < beginning:
            return NO_GAPS
        first_row = self._file_starts[shard]
        parts = [
            of_rows_from(self._starts[number] - first_row, self._batches[number].gaps())
            for number in self._batches_of(shard)
        ]
        gaps = np.concatenate([NO_GAPS, *parts])
        gaps = gaps[~np.isin(gaps[:, 0], found.left_out)]
        gaps[:, 0] -= np.searchsorted(found.left_out, gaps[:, 0])
        return gaps

    def _stored(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return index if self._kept is None else int(self._kept[index])

    def row(self, index: int) -> Row:
        """Return one row; its ids are a view of the file."""
        stored = self._stored(index)
        number = bisect.bisect_right(self._starts, stored) - 1
        row = stored - self._starts[number]
        columns = self._batches[number].columns
        mask = None if columns.mask is None else columns.mask.row(row)
        labels = None if columns.labels is None else columns.labels.row(row)
        return Row(
            columns.ids.row(row), None if mask is None or mask.all() else mask.astype(bool), labels=labels
        )

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


def open_hf_dataset(caches: TokenCache, location: str, max_bad: float | None = None) -> HfRows:
    """Open a checked data set; the files whose check this rank cannot see are checked first.

    ``max_bad`` is the fraction of rows that may be left out because they are malformed; None tolerates none.
    """
    files = files_of(location)
    check_share(caches, location, 0, 1)
    checked = []
    for shard in files:
        found = _known(caches, shard)
        if found is None:
            raise DataError(f"{shard.path}: its check vanished; is something clearing the --data_cache_dir?")
        checked.append(found)
    rows = sum(found.rows for found in checked)
    bad_rows.judge(
        [(shard.path, len(found.left_out), found.first_bad) for shard, found in zip(files, checked, strict=True)],
        rows, max_bad,
    )  # fmt: skip
    if not rows:
        raise DataError(f"{location}: the data set has no row; save it again with save_to_disk")
    return HfRows(files, checked)


def is_hf_dataset(names: set[str]) -> bool:
    """True when the names of files in a folder are those that ``save_to_disk`` writes."""
    return STATE in names and INFO in names


def columns(location: str) -> set[str]:
    """Return the names of columns that ``save_to_disk`` wrote down; none where they cannot be read."""
    path = f"{location.rstrip('/')}/{INFO}"
    try:
        text = s3.read_small(path) if s3.is_s3(path) else Path(path).read_bytes()
        return set(json.loads(text or b"{}")["features"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def refuse_dict(location: str, names: set[str]) -> None:
    """Raise DataError, with the folders to give instead, when several splits were saved as one."""
    if DICT in names:
        splits = sorted(name for name in os.listdir(location) if os.path.isdir(os.path.join(location, name)))
        raise DataError(f"{location}: holds the splits {', '.join(splits)}; give the folder of one of them")
