"""Token files as one data set: any row of a folder of shards by its number."""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Generator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from smp_train.data import bad_rows
from smp_train.data.arrow_file import Checked
from smp_train.data.conversion import convert as convert_shards
from smp_train.data.shard import Shard
from smp_train.data.source import Row, Source
from smp_train.data.targets import NO_GAPS
from smp_train.data.token_cache import TokenCache, share
from smp_train.data.token_file import GAPS, REBUILT, Header, ShardRows, TokenFile, read_index
from smp_train.errors import DataError

LEFT_OUT = "; such lines were left out when this was made: make it again, or accept that with --bad_rows skip"


class TokenShards(Source):
    """Rows of shards in token files, numbered through the shards in order of their names.

    Args:
        shards: the files they are of, for messages.
        found: token file of each, and its number there.
        cure: what to do about a damaged file.
    """

    def __init__(self, shards: list[Shard], found: list[tuple[TokenFile, int]], cure: str = REBUILT) -> None:
        self.files = shards
        self.found = found
        self.cure = cure
        self.headers: list[Header] = [file.headers[number] for file, number in found]
        refuse_mixed([(shard.path, header.labelled) for shard, header in zip(shards, self.headers, strict=True)])
        self._starts = [0, *accumulate(header.rows for header in self.headers)]
        self.shards = [range(a, b) for a, b in pairwise(self._starts)]
        self._opened: dict[int, ShardRows] = {}
        digest = hashlib.blake2b(digest_size=16)
        for header in self.headers:
            digest.update(f"{header.digest} {header.rows} {header.tokens} {header.dtype}\n".encode())
        self.fingerprint = digest.hexdigest()
        """Digest of all rows in order; where the shards live and how they are compressed does not matter."""

    def __len__(self) -> int:
        return self._starts[-1]

    def _rows(self, shard: int) -> ShardRows:
        """Return the rows of a shard. Its index stays in memory: rows of a thousand shards come in no order."""
        opened = self._opened.get(shard)
        if opened is None:
            opened = self._opened[shard] = ShardRows(*self.found[shard], self.cure)
        return opened

    _index = _rows
    """The rows of a shard, for its index alone."""

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a shard, without padding at its ends."""
        header = self.headers[shard]
        if header.mask == "none" and header.row_length is not None:
            return np.full(header.rows, header.row_length, dtype=np.int64)
        return self._index(shard).lengths()

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the gaps of a shard; none, without reading its index, where no row begins with so long a one."""
        if GAPS[0] not in self.headers[shard].arrays or self.headers[shard].latest < beginning:
            return NO_GAPS
        return self._index(shard).gaps()

    def _locate(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect.bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def row(self, index: int) -> Row:
        """Read one row. Raises DataError when the token file is damaged."""
        shard, row = self._locate(index)
        return self._rows(shard).row(row)

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows into int64 [rows, tokens], faster than one by one; False when one is not just ``tokens`` long and
        all counted: then read them one by one. Raises DataError as `row`.
        """
        scratch = np.empty(0, dtype=np.uint16)
        for place, index in enumerate(indices):
            shard, row = self._locate(index)
            rows = self._rows(shard)
            if scratch.size != into.shape[1] or scratch.dtype != rows.dtype:
                scratch = np.empty(into.shape[1], dtype=rows.dtype)
            if not rows.fill(row, into[place], scratch):
                return False
        return True

    def name(self, index: int) -> str:
        """Return ``shard-file:line``."""
        shard, row = self._locate(index)
        header = self.headers[shard]
        return f"{header.source}:{self._index(shard).line(row) if 'lines' in header.arrays else row + 1}"

    def report(self) -> dict[str, int | str]:
        """Totals: shards, rows, tokens, attended and counted ones, and the longest row with its shard and line."""
        return totals(self.files, self.headers)


def totals(files: Sequence[Shard], headers: Sequence[Header | Checked]) -> dict[str, int | str]:
    """Return the totals of files of rows."""
    longest = max(range(len(headers)), key=lambda i: headers[i].longest)
    return {
        "shards": len(files),
        "rows": sum(header.rows for header in headers),
        "tokens": sum(header.tokens for header in headers),
        "attended_tokens": sum(header.attended for header in headers),
        "counted_tokens": sum(header.counted for header in headers),
        "labelled": any(header.labelled for header in headers),
        "lines_left_out": sum(header.skipped for header in headers),
        "longest": headers[longest].longest,
        "longest_at": f"{files[longest].path}:{headers[longest].longest_line}",
    }


def convert(
    cache: TokenCache, shards: list[Shard], *, rank: int = 0, world: int = 1, processes: int = 1
) -> Generator[int, None, None]:
    """Convert this rank's share of the shards that have no token file, as `conversion.convert`. No collectives."""
    # Partitioned before looking for token files: those appear while ranks look, and all ranks must partition one list.
    missing = cache.missing(share(shards, rank, world))
    if missing:
        yield from convert_shards(cache.destination, missing, processes=processes, shown=rank == 0)


def open_converted(cache: TokenCache, shards: list[Shard], max_bad: float | None) -> TokenShards:
    """Open shards that have all been converted.

    ``max_bad`` is the fraction of lines that may have been left out because they are malformed; None tolerates none.
    Raises DataError.
    """
    for shard in cache.missing(shards):
        raise DataError(f"{shard.path}: its token cache vanished; is something clearing the --data_cache_dir?")
    source = TokenShards(shards, [found for found in map(cache.find, shards) if found is not None])
    judge(source, max_bad)
    return source


def open_prepared(
    location: str, vocab_size: int, max_bad: float | None = None, cure: str = "copy or make it again"
) -> TokenShards:
    """Open a folder of ``.tok`` and ``.idx`` files, in order of the names of the shards they were made from.

    ``max_bad`` is the fraction of lines that may have been left out when they were made; None tolerates none.
    ``cure`` is what to do about a damaged file.
    """
    found = []
    for name in sorted(os.listdir(location)):
        if name.endswith(".idx") and name[0] not in "._":
            path = os.path.join(location, name)
            file = read_index(path[: -len(".idx")])
            if file is None:
                raise DataError(f"{path}: damaged, of another version, or without its .tok; make it or copy it again")
            found += [(file, number) for number in range(len(file.headers))]
    found = in_order(found, vocab_size)
    headers = [file.headers[number] for file, number in found]
    shards = [Shard(file.path, header.source, header.size, 0) for (file, _), header in zip(found, headers, strict=True)]
    source = TokenShards(shards, found, cure)
    judge(source, max_bad, LEFT_OUT)
    return source


def in_order(found: list[tuple[TokenFile, int]], vocab_size: int) -> list[tuple[TokenFile, int]]:
    """Sort prepared shards by name. Raises DataError for two of one name, and for another vocabulary."""

    def source(one: tuple[TokenFile, int]) -> str:
        return one[0].headers[one[1]].source

    for file, number in found:
        made_for = file.headers[number].vocab_size
        if made_for > vocab_size:
            raise DataError(
                f"{file.base}.idx: was made for a vocabulary of {made_for}, the model has {vocab_size}; "
                "use the tokenizer of the model, or set --vocab_size"
            )
    ordered = sorted(found, key=lambda one: (source(one), one[0].base))
    for one, other in pairwise(ordered):
        if source(one) == source(other):
            raise DataError(
                f"{one[0].path}: {other[0].path} holds the same shard, {source(one)}; remove one of the two"
            )
    return ordered


def refuse_mixed(labelled: list[tuple[str, bool]]) -> None:
    """Raise DataError when of the files of one place, (path, has labels), some have labels and some have none."""
    with_labels = [path for path, has in labelled if has]
    if 0 < len(with_labels) < len(labelled):
        without = next(path for path, has in labelled if not has)
        raise DataError(
            f"{without}: has no labels, but {with_labels[0]} has; put them into two folders and give both to "
            "--training_dir, or write the labels of all"
        )


def judge(source: TokenShards, max_bad: float | None, then: str = "") -> None:
    """Raise DataError where too many lines were left out, as `bad_rows.judge`."""
    left_out = [
        (f"{shard.path}: {header.source}" if then else shard.path, header.skipped, header.first_bad)
        for shard, header in zip(source.files, source.headers, strict=True)
    ]
    bad_rows.judge(left_out, len(source), max_bad, then)
