"""A set of shards of which `--shuffle window:K` has two windows at hand, and knows of the rest the number of rows.

The global order needs the rows of every shard before the first is trained on. Where `smp-train prepare` left its
manifest, or the indexes of prepared tokens lie in S3, they are known; else every shard is read once, checked, counted
and forgotten again, its index kept.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from smp_train.data import conversion, formats, manifest, s3, token_cache
from smp_train.data.index import TokenShards, judge_bad_rows, share
from smp_train.data.locked import Held, Scratch, claim, hold
from smp_train.data.shard_reader import MissingTokens, ShardReader
from smp_train.data.source import Row
from smp_train.data.staging import PreparedStage, Stage, Stager, free_bytes, needs_bytes, other_rows
from smp_train.data.token_cache import Header, atomic_file, settle
from smp_train.data.utils import Shard, list_shards
from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

STAGED_AGAIN = "start again, and it is staged again; is something clearing the --data_cache_dir?"
SLOT = "slot"
"""What the folder of one job is called, with a number."""
T = TypeVar("T")
_LENGTHS = struct.Struct("<QQ")


class StagedShards(TokenShards):
    """Rows of shards that are staged while those before them are read.

    Args:
        files: the shards.
        found: (base name, header) of each, in the stage or where it is whole.
        stager: has them at hand.
    """

    def __init__(self, files: list[Shard], found: list[tuple[str, Header]], stager: Stager) -> None:
        super().__init__(files, found)
        self.stager = stager

    def _index(self, number: int) -> ShardReader:
        reader = self._readers.get(number)
        if reader is None:
            tok = None if number in self.stager.here else self.stager.stage.tok(self.files[number])
            reader = ShardReader(self._bases[number], tok=tok, cure=self._cure if tok is None else STAGED_AGAIN)
            if reader.header.digest != self.headers[number].digest:
                raise other_rows(self.files[number])
            self._readers[number] = reader
        return reader

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a shard, without padding at its ends."""
        header = self.headers[shard]
        if header.mask == "none" and header.row_length is not None:
            return np.full(header.rows, header.row_length, dtype=np.int64)
        # Its index alone, and not kept: there may be more of them than memory.
        return self._reader_of_index(shard).lengths()

    def _reader_of_index(self, shard: int) -> ShardReader:
        return ShardReader(self._bases[shard], tok="")

    def row(self, index: int) -> Row:
        """Read one row, waiting for its shard. Raises DataError."""
        return self._at_hand([index], lambda: super(StagedShards, self).row(index))

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows as `TokenShards.fill`, waiting for their shards. Raises DataError."""
        return self._at_hand(indices, lambda: super(StagedShards, self).fill(indices, into))

    def _at_hand(self, indices: list[int], read: Callable[[], T]) -> T:
        numbers = dict.fromkeys(self._locate(index)[0] for index in indices)
        for number in numbers:
            self.stager.wait(number)
        try:
            return read()
        except MissingTokens:
            # Removed by something else since it was first seen: it is staged again while this waits.
            for number in numbers:
                self.stager.look_again(number)
                self.stager.wait(number)
            return read()

    def want(self, needed: list[int], following: list[int]) -> None:
        """Take it that ``needed`` are read next, then ``following``, and no other shard. Raises DataError."""
        for number in self.stager.want(needed, following):
            with self._lock:
                reader = self._readers.pop(number, None)
                if reader is not None:
                    self._files.drop(reader)

    def rest(self) -> None:
        """Give up what is being staged."""
        self.stager.stop()


class Windows:
    """One place under ``--shuffle window:K``, on its way to being opened. No method is collective.

    In this order, each on all ranks before the next on any: `claim` a slot by one rank for each disk, `enter` it by
    those that share that disk, `count` this rank's share of all, `indexes` of those to `take` by one rank of each node
    that has not `known` them, `count` what is left on a node, `open`, agreed on which shards are there `whole`.

    Args:
        location, vocab_size, cache_dir, zipped, max_bad: as of `formats.open_place`.
        prepared: they are prepared tokens in S3, not shards.
        window: shards of a window.
    """

    def __init__(
        self,
        location: str,
        *,
        prepared: bool,
        window: int,
        vocab_size: int,
        cache_dir: str | None = None,
        zipped: bool | None = None,
        max_bad: float | None = None,
    ) -> None:
        self.location, self.window, self.max_bad, self.vocab_size = location, window, max_bad, vocab_size
        self.prepared = prepared
        kind = PreparedStage if self.prepared else Stage
        self.stage = kind(location, vocab_size, cache_dir, skip_bad=max_bad is not None)
        if self.prepared:
            objects = s3.list_folder(location)[0]
            self.shards = [shard for shard in objects if shard.name.endswith(".tok") and shard.name[0] not in "._"]
            self._indexes = {shard.name: shard for shard in objects if shard.name.endswith(".idx")}
            _refuse_unpaired(self.shards, self._indexes)
        else:
            self.shards = list_shards(location, zipped)
        self._said: dict[str, Header] = {}
        """What the manifest says of each shard."""
        self._slot: Held | None = None

    def reaches_further(self) -> bool:
        """Tell whether there is more than two windows hold; then look for a manifest that knows it."""
        if len(self.shards) <= 2 * self.window:
            return False
        if not self.prepared:
            self._said = _from_manifest(self.location, self.shards, self.vocab_size)
            if self._said:
                name = manifest.MANIFEST
                logger.info("%s: the rows of %d shards are those of its %s", self.location, len(self._said), name)
        return True

    def listing(self) -> str:
        """Return what every rank must have found alike: the shards, in their order."""
        return json.dumps([[shard.name, shard.size, shard.etag] for shard in self.shards])

    def claim(self) -> str:
        """Take a slot for this job, and return its folder, for the ranks that share it to `enter`. Raises DataError."""
        try:
            self._slot = claim(self.stage.folder, SLOT)
        except OSError as error:
            raise self._unwritable(error) from None
        self.stage.slot = self._slot.path
        return self._slot.path

    def enter(self, path: str) -> None:
        """Share the slot that another rank of this job has claimed. Raises DataError."""
        if self._slot is None:
            try:
                self._slot = hold(path)
            except OSError as error:
                raise self._unwritable(error) from None
            self.stage.slot = path

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"{self.stage.folder}: cannot be written ({error.strerror}); free some space or give a "
            "--data_cache_dir that can be written"
        )

    def known(self, shard: Shard) -> bool:
        """Tell whether the rows of a shard are known on this node."""
        if self.prepared:
            return isinstance(self.stage, PreparedStage) and self.stage.find_index(shard) is not None
        return shard.name in self._said or self.stage.counted(shard) is not None

    def count(self, rank: int, world: int, *, local_world: int, processes: int = 1) -> int:
        """Count this rank's share of the shards whose rows are not known; return how many. Raises DataError."""
        # Dealt before looking, as for a conversion.
        missing = [shard for shard in share(self.shards, rank, world) if not self.known(shard)]
        if not missing:
            return 0
        try:
            scratch = Scratch(self.stage.slot)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self.stage.work, self.stage.counting = scratch.path, True
            if self.prepared:
                return self._bring_indexes(missing)
            here = max(1, self.window // local_world)
            return conversion.run(
                self.stage, missing, peers=self.shards, processes=min(processes, here), shown=rank == 0,
                what="counting rows", at_once=min(s3.AT_ONCE, here),
            )  # fmt: skip
        finally:
            self.stage.counting = False
            scratch.remove()

    def _bring_indexes(self, missing: list[Shard]) -> int:
        assert isinstance(self.stage, PreparedStage)
        by_index = {shard.name[: -len(".tok")] + ".idx": shard for shard in missing}
        for index, copy in s3.staged([self._indexes[name] for name in by_index], self.stage.work):
            shard = by_index[index.name]
            try:
                settle(copy, self.stage.base(shard) + ".idx")
            except OSError as error:
                raise self._unwritable(error) from None
            header = self.stage.find_index(shard)
            if header is None or header.tok_bytes != shard.size:
                raise DataError(
                    f"{index.path}: is damaged, of another version, or of another .tok; make both or copy them again"
                )
        return len(missing)

    def indexes(self, rank: int, world: int) -> bytes:
        """Return the index files of this rank's share of shards, for nodes that have not counted them."""
        parts = []
        for shard in share(self.shards, rank, world):
            if shard.name not in self._said:
                found = (self.stage.base(shard), None) if self.prepared else self.stage.counted(shard)
                if found is not None:
                    name, content = shard.name.encode(), Path(found[0] + ".idx").read_bytes()
                    parts += [_LENGTHS.pack(len(name), len(content)), name, content]
        return b"".join(parts)

    def take(self, indexes: bytes) -> None:
        """Keep index files that another node has made. Raises DataError."""
        by_name = {shard.name: shard for shard in self.shards}
        for name, content in _unpacked(indexes):
            if name in by_name and not self.known(by_name[name]):
                try:
                    with atomic_file(self.stage.base(by_name[name]) + ".idx") as file:
                        file.write(content)
                except OSError as error:
                    raise self._unwritable(error) from None

    def whole(self) -> list[bool]:
        """Tell of each shard whether this rank sees its ids where an unbounded run has left them."""
        return [not self.prepared and self.stage.whole.find(shard) is not None for shard in self.shards]

    def open(self, rank: int, world: int, whole: list[bool]) -> TokenShards:
        """Open the set.

        Args:
            rank: this one of the ``world`` that share the slot.
            world: how many do.
            whole: which shards all of those see `whole`: they must agree on what there is to stage.

        Raises DataError.
        """
        assert self._slot is not None, "it was claimed or entered"
        found, here = [], set()
        for number, shard in enumerate(self.shards):
            if whole[number]:
                here.add(number)
            found.append(self._known(shard, whole[number]))
        if self.prepared:
            order = formats.in_order([(header, base) for base, header in found], self.vocab_size)
            by_base = {base: shard for (base, _), shard in zip(found, self.shards, strict=True)}
            found = [(base, header) for header, base in order]
            self.shards = [by_base[base] for base, _ in found]
        if len(here) == len(self.shards):
            whole_source = TokenShards(self.shards, found)
            self._judge(whole_source)
            return whole_source
        self.stage.headers = {shard.name: header for shard, (_, header) in zip(self.shards, found, strict=True)}
        stager = Stager(
            self.stage, self.shards, here, rank=rank, world=world,
            at_once=max(1, min(s3.AT_ONCE, self.window) // world), slot=self._slot,
        )  # fmt: skip
        source = StagedShards(self.shards, found, stager)
        self._judge(source)
        try:
            stager.prepare()
        except OSError as error:
            raise self._unwritable(error) from None
        if rank == 0:
            self._say(source)
        return source

    def _judge(self, source: TokenShards) -> None:
        if self.prepared:
            bases = [self.stage.base(shard) for shard in self.shards]
            found = list(zip(source.headers, bases, strict=True))
            formats.judge_left_out(found, len(source), self.max_bad)
        else:
            judge_bad_rows(source, self.max_bad)

    def _known(self, shard: Shard, whole: bool) -> tuple[str, Header]:
        """Return (base name of the index, header) of a shard, all of which is there if it is ``whole``."""
        if whole:
            found = self.stage.whole.find(shard)
        elif shard.name in self._said:
            return self.stage.base(shard), self._said[shard.name]
        elif isinstance(self.stage, PreparedStage):
            header = self.stage.find_index(shard)
            found = None if header is None else (self.stage.base(shard), header)
        else:
            found = self.stage.counted(shard)
        if found is None:
            raise DataError(f"{shard.path}: its index vanished; is something clearing the --data_cache_dir?")
        return found

    def _say(self, source: StagedShards) -> None:
        needed, free = needs_bytes(source.headers, 2 * self.window), free_bytes(self.stage.slot)
        logger.info(
            "%s: %d shards, of which two windows of %d are kept in %s: at most %.2f GB, and what is being fetched",
            self.location, len(self.shards), self.window, self.stage.slot, needed / 1e9,
        )  # fmt: skip
        if needed > free:
            logger.warning(
                "%s: has room for %.2f GB of them only; lower the %d of --shuffle window:%d, or give another "
                "--data_cache_dir", self.stage.slot, free / 1e9, self.window, self.window,
            )  # fmt: skip


def _refuse_unpaired(shards: list[Shard], indexes: dict[str, Shard]) -> None:
    """Raise DataError for a .tok without .idx, and for the other, whose rows would be left out."""
    wanted = {shard.name[: -len(".tok")] + ".idx": shard for shard in shards}
    for name, shard in wanted.items():
        if name not in indexes:
            raise DataError(f"{shard.path}: its .idx is not beside it; make both or copy them again")
    for name, index in indexes.items():
        if name not in wanted:
            raise DataError(f"{index.path}: its .tok is not beside it; make both or copy them again")


def _unpacked(indexes: bytes) -> Iterator[tuple[str, bytes]]:
    view, place = memoryview(indexes), 0
    while place < len(view):
        name, content = _LENGTHS.unpack_from(view, place)
        place += _LENGTHS.size
        yield bytes(view[place : place + name]).decode(), bytes(view[place + name : place + name + content])
        place += name + content


def look(location: str, dataset_type: str, *, window: int, vocab_size: int, **options: Any) -> Windows | None:
    """Return the windows of a place, or None where it is better at hand whole.

    That is where two windows hold it, and where reading it costs no disk. Raises DataError.
    """
    kind = formats.kind_of(location, dataset_type)
    formats.refuse_zipped(location, kind, options.get("zipped"))
    if kind == formats.ARROW and s3.is_s3(location):
        logger.warning("%s: a Hugging Face data set is copied whole, whatever --shuffle", location, extra=ALL_RANKS)
    if kind == formats.ARROW or (kind == formats.PREPARED and not s3.is_s3(location)):
        return None
    found = Windows(location, prepared=kind == formats.PREPARED, window=window, vocab_size=vocab_size, **options)
    return found if found.reaches_further() else None


def _from_manifest(location: str, shards: list[Shard], vocab_size: int) -> dict[str, Header]:
    """Return headers of all shards out of the manifest of `smp-train prepare` beside them; none unless it names all."""
    split = manifest.find(location)
    if split is None or any(split.size(shard.name) != shard.size for shard in shards):
        return {}
    dtype = token_cache.dtype_for(vocab_size).str
    try:
        return {
            shard.name: token_cache.header_of_block(
                split.shards[shard.name]["rows"], split.seq_len, dtype, split.shards[shard.name]["digests"][dtype],
                source=shard.name, size=shard.size, vocab_size=vocab_size,
            )
            for shard in shards
        }  # fmt: skip
    except (KeyError, TypeError):
        # Of an earlier version.
        return {}
