"""Hugging Face data sets on disk, as ``save_to_disk`` of ``datasets`` wrote them: mapped, and read without a copy.

Files are checked once, and what was found is kept beside the token caches. They are mapped as ``load_from_disk`` maps
them, by pyarrow alone: ``datasets`` takes twenty times as long to import, and copies what is in S3 elsewhere.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import os
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from smp_train.data import bad_rows, s3
from smp_train.data.arrow_file import Checked, Part, check, parts_of
from smp_train.data.atomic_file import atomic_file
from smp_train.data.source import Row, Source
from smp_train.data.targets import NO_GAPS
from smp_train.data.token_cache import TokenCache, share
from smp_train.data.token_dataset import refuse_mixed, totals
from smp_train.data.utils import Shard
from smp_train.errors import DataError
from smp_train.progress import Progress
from smp_train.storage.prefetch import prefetched

CHECKED = ".checked"
CHECK_VERSION = 5
"""Version of `Checked`: a file that another version checked is checked again."""
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


def _sealed(text: str) -> str:
    """Return the content of a file that keeps a check: of a damaged one, or of another version, the digest differs."""
    return f"{text}\n{hashlib.blake2b(f'{CHECK_VERSION} {text}'.encode(), digest_size=16).hexdigest()}\n"


def _known(caches: TokenCache, shard: Shard) -> Checked | None:
    for base in caches.bases(shard):
        with contextlib.suppress(OSError, ValueError):
            kept = Path(base + CHECKED).read_text()
            text = kept.partition("\n")[0]
            if kept == _sealed(text):
                return Checked(**json.loads(text))
    return None


def check_share(caches: TokenCache, location: str, rank: int, world: int, threads: int = 1) -> int:
    """Check this rank's share of the files that have not been; return how many that were.

    Raises DataError at the first malformed row, except where ``caches`` are to leave those out.
    """
    missing = [shard for shard in share(files_of(location), rank, world) if _known(caches, shard) is None]

    def checked(shard: Shard) -> Shard:
        found = check(shard.path, caches.vocab_size, (lambda row, why: None) if caches.skip_bad else None)
        try:
            with atomic_file(caches.destination.base(shard) + CHECKED) as file:
                file.write(_sealed(json.dumps(asdict(found))).encode())
        except OSError as error:
            raise caches.destination.unwritable(error) from None
        return shard

    # Threads: what takes time, reading and NumPy's passes over large arrays, releases the interpreter lock.
    with Progress("checking", sum(shard.size for shard in missing), "B", rank == 0) as progress:
        with contextlib.closing(prefetched(checked, missing, threads)) as done:
            for shard in done:
                progress.update(shard.size)
    return len(missing)


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
        self._parts: list[Part] = []
        self._first_parts = [0]
        """The number of the first part of each file."""
        for shard, found in zip(files, checked, strict=True):
            for part in parts_of(shard.path):
                left_out = found.left_out
                ours = slice(*(bisect.bisect_left(left_out, end) for end in (part.first, part.first + len(part))))
                self._parts += part.without(left_out[ours])
            self._first_parts.append(len(self._parts))
        self._starts = [0, *accumulate(map(len, self._parts))]
        """Rows before each part."""
        self.shards = [range(self._starts[a], self._starts[b]) for a, b in pairwise(self._first_parts)]
        """Rows of each file."""
        if [len(rows) for rows in self.shards] != [found.rows for found in checked]:
            raise DataError(f"{files[0].path}: its check is damaged; remove the files *{CHECKED} and start again")
        digest = hashlib.blake2b(digest_size=16)
        for found in checked:
            digest.update(f"{found.digest} {found.rows} {found.tokens}\n".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a file, without padding at its ends."""
        parts = self._parts[slice(*self._first_parts[shard : shard + 2])]
        return np.concatenate([np.empty(0, dtype=np.int64), *(part.lengths() for part in parts)])

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the gaps of a file; none, without reading it, where no row begins with so long a one."""
        if self.checked[shard].latest < beginning:
            return NO_GAPS
        numbers = range(*self._first_parts[shard : shard + 2])
        first = self.shards[shard].start
        parts = [self._parts[n].gaps() + np.array([self._starts[n] - first, 0, 0]) for n in numbers]
        return np.concatenate([NO_GAPS, *parts])

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (number of the part, row within it)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def row(self, index: int) -> Row:
        """Return one row; its ids are a view of the file."""
        number, row = self._locate(index)
        return self._parts[number].row(row)

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows into int64 [rows, tokens]; False when one is not just ``tokens`` long and all counted."""
        for slot, index in enumerate(indices):
            row = self.row(index)
            if row.counted is not None or row.labels is not None or row.input_ids.size != into.shape[1]:
                return False
            into[slot] = row.input_ids
        return True

    def name(self, index: int) -> str:
        """Return ``file:row``, counted from 1."""
        number, row = self._locate(index)
        file = self.files[bisect.bisect_right(self._first_parts, number) - 1]
        return f"{file.name}:{self._parts[number].first + row + 1}"

    def report(self) -> dict[str, int | str]:
        """Totals, as of token shards."""
        return totals(self.files, self.checked)


def open_hf_dataset(caches: TokenCache, location: str, max_bad: float | None = None) -> HfRows:
    """Open a checked data set; the files whose check this rank cannot see are checked first.

    ``max_bad`` is the fraction of rows that may be left out because they are malformed; None tolerates none.
    """
    files = files_of(location)
    check_share(caches, location, 0, 1)
    found = [_known(caches, shard) for shard in files]
    checked = [one for one in found if one is not None]
    if len(checked) < len(files):
        raise DataError(
            f"{files[found.index(None)].path}: its check vanished; is something clearing the --data_cache_dir?"
        )
    source = HfRows(files, checked)
    bad_rows.judge(
        [(shard.path, one.skipped, one.first_bad) for shard, one in zip(files, checked, strict=True)],
        len(source), max_bad,
    )  # fmt: skip
    if not len(source):
        raise DataError(f"{location}: the data set has no row; save it again with save_to_disk")
    return source


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
