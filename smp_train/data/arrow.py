"""Hugging Face ``datasets`` saved to disk, read from their Arrow files without a copy.

Files are checked once, column by column at the speed of memory, and what was found is kept beside the token caches;
afterwards a row is a slice of a mapped file. Mapped, because that is what zero-copy means: on storage where another
node may truncate a file in use, convert to shards instead.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data.index import Caches, share
from smp_train.data.source import Row, Source
from smp_train.data.token_cache import atomic_file
from smp_train.data.utils import Shard
from smp_train.errors import ConfigError, DataError

IDS, MASK = "input_ids", "attention_mask"
CHECKED = ".checked"
CHECK_VERSION = 1
STATE, INFO, DICT = "state.json", "dataset_info.json", "dataset_dict.json"


@dataclass(frozen=True)
class Checked:
    """What the check of one file found."""

    rows: int
    tokens: int
    counted: int
    longest: int
    longest_row: int
    digest: str


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


def _table(path: str) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError("Arrow files need the package pyarrow: pip install 'smp-train[hf]'") from None
    try:
        mapped = pa.memory_map(path)
        try:
            return pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(mapped).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a whole Arrow file ({' '.join(str(error).split())}); copy it again") from None


@dataclass(frozen=True)
class _Column:
    """One chunk of a column of lists: its numbers end to end, and where each row begins (one more than rows)."""

    values: np.ndarray
    starts: np.ndarray


def _columns(path: str, table: Any, name: str) -> list[_Column]:
    import pyarrow as pa

    chunks = []
    for chunk in table.column(name).chunks:
        kind = chunk.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            raise DataError(f"{path}: column {name} is {kind}; lists of integers are needed")
        if not pa.types.is_integer(kind.value_type):
            raise DataError(f"{path}: column {name} is {kind}; lists of integers are needed")
        if chunk.null_count or chunk.values.null_count:
            raise DataError(f"{path}: column {name} has empty places (null); leave those rows out")
        if pa.types.is_fixed_size_list(kind):
            starts = (np.arange(len(chunk) + 1) + chunk.offset) * kind.list_size
        else:
            starts = chunk.offsets.to_numpy()
        chunks.append(_Column(chunk.values.to_numpy(zero_copy_only=True), starts))
    return chunks


def _read(path: str) -> tuple[list[_Column], list[_Column] | None]:
    table = _table(path)
    if IDS not in table.column_names:
        has = ", ".join(table.column_names)
        raise DataError(f"{path}: no column {IDS} (it has {has}); turn text into tokens with: smp-train prepare")
    masks = _columns(path, table, MASK) if MASK in table.column_names else None
    return _columns(path, table, IDS), masks


def check(path: str, vocab_size: int) -> Checked:
    """Look at every token of a file. Raises DataError ``PATH: row N: reason; what to do``."""
    columns, masks = _read(path)
    digest = hashlib.blake2b(digest_size=16)
    rows = tokens = counted = longest = longest_row = 0
    for number, column in enumerate(columns):
        starts = column.starts.astype(np.int64)
        sizes = np.diff(starts)
        ids = column.values[starts[0] : starts[-1]]

        def refuse(place: int, why: str, before: int = rows) -> None:
            raise DataError(f"{path}: row {before + place + 1}: {why}")

        if sizes.size and sizes.min() < 2:
            refuse(int(sizes.argmin()), "a row of fewer than two tokens has none to predict; remove the row")
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            place = int(np.argmax((ids < 0) | (ids >= vocab_size)))
            row = int(np.searchsorted(starts - starts[0], place, side="right")) - 1
            refuse(
                row,
                f"token id {int(ids[place])} is outside the vocabulary [0, {vocab_size}); "
                "use the tokenizer of the model, or set --vocab_size",
            )
        digest.update(np.ascontiguousarray(ids).tobytes() + sizes.tobytes())
        counted += ids.size
        if masks is not None:
            mask = masks[number]
            edges = mask.starts.astype(np.int64)
            if (np.diff(edges) != sizes).any():
                refuse(int(np.argmax(np.diff(edges) != sizes)), f"{IDS} and {MASK} differ in length")
            bits = mask.values[edges[0] : edges[-1]]
            if bits.size and (bits.min() < 0 or bits.max() > 1):
                place = int(np.argmax((bits < 0) | (bits > 1)))
                row = int(np.searchsorted(edges - edges[0], place, side="right")) - 1
                refuse(row, f"{MASK} holds {int(bits[place])}; use 0 or 1")
            if bits.size and not bits.all():
                # Of each row, all but the first token: that one has nothing before it.
                total = np.concatenate([[0], np.cumsum(bits, dtype=np.int64)])
                begins = edges[:-1] - edges[0]
                learnt = total[edges[1:] - edges[0]] - total[begins + 1]
                if (learnt == 0).any():
                    why = f"{MASK} counts no token that has one before it; remove the row"
                    refuse(int(np.argmax(learnt == 0)), why)
                counted += int(total[-1]) - bits.size
                digest.update(np.packbits(bits.astype(bool)).tobytes())
        if sizes.size and sizes.max() > longest:
            longest, longest_row = int(sizes.max()), rows + int(sizes.argmax()) + 1
        rows += sizes.size
        tokens += ids.size
    return Checked(rows, tokens, counted, longest, longest_row, digest.hexdigest())


def _known(caches: Caches, shard: Shard) -> Checked | None:
    for base in caches.bases(shard):
        try:
            return Checked(**json.loads(Path(base + CHECKED).read_text()))
        except (OSError, ValueError, TypeError):
            continue
    return None


def check_share(caches: Caches, location: str, rank: int, world: int) -> int:
    """Check this rank's share of the files that have not been; return how many that were. Raises DataError."""
    done = 0
    for shard in share(files_of(location)[0], rank, world):
        if _known(caches, shard) is None:
            found = check(shard.path, caches.vocab_size)
            with atomic_file(caches.base(shard) + CHECKED) as file:
                file.write(json.dumps(asdict(found)).encode())
            done += 1
    return done


class ArrowRows(Source):
    """Rows of the Arrow files of one data set, as slices of mapped memory.

    Args:
        files: data files, in order.
        checked: what the check found of each.
        indices: files that say which row comes where, when the data set was shuffled or filtered before it was saved.
    """

    def __init__(self, files: list[Shard], checked: list[Checked], indices: list[Shard]) -> None:
        self.files = files
        self.checked = checked
        self._chunks: list[_Column] = []
        self._masks: list[_Column] | None = []
        for shard in files:
            columns, masks = _read(shard.path)
            self._chunks += columns
            self._masks = None if masks is None or self._masks is None else self._masks + masks
        self._starts = [0, *accumulate(column.starts.size - 1 for column in self._chunks)]
        self._file_starts = [0, *accumulate(found.rows for found in checked)]
        if self._starts[-1] != self._file_starts[-1]:
            raise DataError(f"{files[0].path}: changed since it was checked; start again when the data is complete")
        self._indices = (
            np.concatenate([_table(one.path).column(0).to_numpy() for one in indices]).astype(np.int64)
            if indices
            else None
        )
        digest = hashlib.blake2b(digest_size=16)
        for found in checked:
            digest.update(f"{found.digest} {found.rows} {found.tokens}\n".encode())
        if self._indices is not None:
            digest.update(self._indices.tobytes())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return self._starts[-1] if self._indices is None else self._indices.size

    @property
    def shards(self) -> list[range]:
        """Rows of each file; all of them as one when an index puts them in another order."""
        if self._indices is not None:
            return [range(len(self))]
        return [range(a, b) for a, b in pairwise(self._file_starts)]

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a file, without padding at its ends."""
        found = []
        for number, column in enumerate(self._chunks):
            sizes = np.diff(column.starts.astype(np.int64))
            mask = None if self._masks is None else self._masks[number]
            if mask is not None and not mask.values.all():
                for row in range(sizes.size):
                    places = np.flatnonzero(mask.values[mask.starts[row] : mask.starts[row + 1]])
                    sizes[row] = places[-1] - places[0] + 1
            found.append(sizes)
        sizes = np.concatenate(found)
        rows = self.shards[shard]
        return sizes[self._indices] if self._indices is not None else sizes[rows.start : rows.stop]

    def _stored(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return index if self._indices is None else int(self._indices[index])

    def row(self, index: int) -> Row:
        """Return one row; its ids are a view of the file."""
        stored = self._stored(index)
        number = bisect.bisect_right(self._starts, stored) - 1
        row = stored - self._starts[number]
        column = self._chunks[number]
        ids = column.values[column.starts[row] : column.starts[row + 1]]
        if self._masks is None:
            return Row(ids)
        mask = self._masks[number]
        counted = mask.values[mask.starts[row] : mask.starts[row + 1]]
        return Row(ids, None if counted.all() else counted.astype(bool))

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
            "counted_tokens": sum(found.counted for found in self.checked),
            "longest": self.checked[longest].longest,
            "longest_at": f"{self.files[longest].path}:{self.checked[longest].longest_row}",
        }


def open_arrow(caches: Caches, location: str) -> ArrowRows:
    """Open a checked data set, checking what this rank cannot see the check of."""
    files, indices = files_of(location)
    check_share(caches, location, 0, 1)
    checked = []
    for shard in files:
        found = _known(caches, shard)
        if found is None:
            raise DataError(f"{shard.path}: its check vanished; is something clearing the --data_cache_dir?")
        checked.append(found)
    return ArrowRows(files, checked, indices)


def is_arrow(names: set[str]) -> bool:
    """Tell by the names in a folder whether ``save_to_disk`` wrote it."""
    return STATE in names and INFO in names


def refuse_dict(location: str, names: set[str]) -> None:
    """Say which folder to give when several splits were saved as one."""
    if DICT in names:
        splits = sorted(name for name in os.listdir(location) if os.path.isdir(os.path.join(location, name)))
        raise DataError(f"{location}: holds the splits {', '.join(splits)}; give the folder of one of them")
