"""A committed checkpoint: its metadata, its verification, and the reading of its tensors."""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from smp_train.checkpoints.aws.names import HubReader, RankReader, Tree
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.dcp.storage import Reader, TreeReader
from smp_train.checkpoints.dcp.trees import load_state, saved_entries
from smp_train.checkpoints.folder import RunFolder
from smp_train.checkpoints.format import COMMITTED, DAMAGED, META, METADATA, TOKENIZER, Marker
from smp_train.checkpoints.saver import HUGGING_FACE, Saver
from smp_train.distributed.agree import rank, replays, world_size
from smp_train.errors import CheckpointError, first_few, one_line
from smp_train.models.hugging_face import config_of
from smp_train.models.smp_names import HubModel, Ranks
from smp_train.progress import MOVED
from smp_train.storage.checksum import FileRecord, checksum_of
from smp_train.storage.patience import TRANSIENT

TORCHS = Saver()


class Damaged(CheckpointError):
    """A committed checkpoint whose contents contradict its COMMITTED."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. ``meta`` is the metadata that `CheckpointManager.save` stored."""

    path: str
    meta: dict[str, Any]
    marker: Marker
    folder: RunFolder = field(repr=False, compare=False)
    name: str = field(repr=False, compare=False)
    verified: bool = field(default=False, compare=False)
    """Whether all checksums have been compared; tensors are read from a verified checkpoint only."""

    @property
    def step(self) -> int:
        """The step at which the checkpoint was saved."""
        return self.marker.step

    @property
    def durable(self) -> bool:
        """Whether the checkpoint outlives the loss of a node."""
        return True

    @property
    def names(self) -> str:
        """The naming scheme of the checkpoint's parameters, such as Hugging Face's."""
        return str(self.meta.get("names", HUGGING_FACE))

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """Fill ``state`` (see `gather_state`) in place, on any mesh. Collective.

        ``saver`` knows the naming scheme of ``state``, this process's SMP rank, and how to read. Raises
        `CheckpointError` on every rank when names or shapes differ, or when a rank cannot read its part. Saved entries
        under a top-level name that ``state`` lacks, such as ``optim``, are ignored.
        """
        load_state(state, self.reader_of(state, saver), self.path, load=saver.load)

    def reader_of(self, state: dict[str, Any], saver: Saver = TORCHS) -> Reader:
        """Return the reader that `load` needs: it reads the tensors under the parameter names of ``state``."""
        if self.names == saver.names and self.trees.get(saver.part) == saver.ranks:
            return self.reader(saver.part)
        return self._translated(self._readers(), state, saver)

    def _readers(self) -> list[Tree]:
        return [Tree(ranks, self.reader(part)) for part, ranks in self.trees.items()]

    def _translated(self, trees: list[Tree], state: dict[str, Any], saver: Saver) -> Reader:
        """Return a reader of ``trees`` under the parameter names in ``state``: the hub's, or those of this SMP rank."""
        shapes = {name: tuple(value.shape) for name, value in state["model"].items()}
        if saver.hub is None:
            return HubReader(trees, HubModel.from_config(self.model_config(), shapes))
        same_ranks = [Tree(Ranks(), tree.reader) for tree in trees if tree.ranks == saver.ranks]
        if self.names == saver.names and same_ranks:
            return HubReader(same_ranks, replace(saver.hub, shapes=shapes))
        return RankReader(HubReader(trees, saver.hub), state, saver.ranks, saver.hub)

    def model_config(self) -> Any:
        """Return transformers' configuration of the model. Raises `CheckpointError` if the metadata lacks it."""
        try:
            return config_of(self.meta["model_config"])
        except Exception as error:  # a configuration of unknown origin may raise any kind of exception
            reason = f"lacks {error}" if isinstance(error, KeyError) else one_line(error)
            raise CheckpointError(f"{self.path} does not say which model it is: meta.json {reason}") from None

    def tokenizer(self) -> dict[str, bytes]:
        """Return the verified files of the run's tokenizer by name; empty if the run knew no tokenizer."""
        files = {}
        for name in self.marker.files:
            if name.startswith(TOKENIZER):
                files[name.removeprefix(TOKENIZER)] = data = self.folder.read(self.name, name)
                self._verify_file(name, checksum_of([data]))
        return files

    @property
    def parts(self) -> list[str]:
        """The trees' sub-folders. There is one, with an empty name, unless SMP's ranks have different parameters."""
        return sorted(os.path.dirname(name) for name in self.marker.files if os.path.basename(name) == METADATA)

    @property
    def trees(self) -> dict[str, Ranks]:
        """For each tree's sub-folder, the tensor rank and expert rank (of SMP) that wrote the tree."""
        return Ranks.of_folders(self.parts or [""])

    def reader(self, part: str = "") -> Reader:
        """Return the reader of the tensors in the sub-folder ``part`` of this verified checkpoint."""
        if not self.verified:
            raise RuntimeError(f"{self.path}: open the checkpoint with `open_verified` to read its tensors")
        return self._reader(part)

    def _reader(self, part: str) -> TreeReader:
        prefix = f"{part}/" if part else ""
        files = {n[len(prefix) :]: r.size for n, r in self.marker.files.items() if n.startswith(prefix)}
        return TreeReader(self.folder.storage, posixpath.normpath(posixpath.join(self.name, part)), files)

    def entries(self) -> list[Mapping[str, Any]]:
        """Return, for each tree, the metadata of its entries by name. Raises `CheckpointError` for a damaged index."""
        readers = {part: self._reader(part) for part in self.parts}
        for part, reader in readers.items():
            name = posixpath.join(part, reader.index_file)
            self._verify_file(name, self.folder.checksum(self.name, name, self.marker.files[name].size))
        return [saved_entries(reader) for reader in readers.values()]

    def _verify_file(self, name: str, record: FileRecord) -> None:
        if record != self.marker.files[name]:
            raise Damaged(f"checkpoint {self.path} is damaged: {name} is not what was written (CRC-32)")

    def verify(self, rank: int = 0, world: int = 1) -> list[str]:
        """Recompute the checksums of this rank's share of the files; return a line per difference. Not collective.

        `MOVED` counts the bytes. A failed read raises `CheckpointError`; it is not counted as damage.
        """
        problems = []
        largest_first = sorted(self.marker.files.items(), key=lambda item: (-item[1].size, item[0]))
        share = largest_first[rank::world]
        MOVED.begin(sum(record.size for _, record in share))
        for name, record in share:
            try:
                stored = self.folder.checksum(self.name, name, record.size)
            except OSError as error:
                remedy = "every node must see the checkpoint folder"
                if error.errno in TRANSIENT:
                    remedy = "the file system does not answer; nothing was changed: start the same command again"
                raise CheckpointError(
                    f"{os.path.join(self.path, name)} cannot be read: {error.strerror or error}; {remedy}"
                ) from None
            MOVED.done += record.size
            if stored.size != record.size:  # no damage, as rank 0 saw the right size; the read was cut short
                raise CheckpointError(f"{os.path.join(self.path, name)} was read short; start the same command again")
            if stored != record:
                problems.append(f"{name} has CRC-32 {stored.crc32}, {record.crc32} was written")
        return problems


def opened(folder: RunFolder, name: str) -> Checkpoint:
    """Open a committed checkpoint; only file sizes and meta.json are checked against COMMITTED. Not collective.

    Raises `Damaged` if these differ or COMMITTED cannot be parsed, `CheckpointError` if COMMITTED is missing.
    """
    path = os.path.join(folder.location, name)
    content = folder.storage.read_if_there(f"{name}/{COMMITTED}")
    if content is None:
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {COMMITTED} file")
    source = ""
    try:
        marker = Marker.from_bytes(content)
        problems = marker.size_problems(folder.sizes(name))
        if not problems:
            source, data = f"{META}: ", folder.read(name, META)
            if checksum_of([data]) != marker.files[META]:
                raise ValueError("is not what was written (CRC-32)")
            meta = json.loads(data)
            for key, value in (("step", marker.step), ("model_type", marker.model_type)):
                if meta.get(key, value) != value:
                    raise ValueError(f"has {key} {meta[key]}, and {COMMITTED} {value}")
            return Checkpoint(path, meta, marker, folder, name)
    except (ValueError, AttributeError, RecursionError) as error:
        problems = [f"{source}{error}"]
    raise Damaged(f"checkpoint {path} is damaged: {first_few(problems, '; ')}")


def verified(folder: RunFolder, name: str) -> Checkpoint:
    """Open a checkpoint and check all its checksums; each rank reads its share of the files. Collective.

    Raises `Damaged` on every rank if a file contradicts COMMITTED, `CheckpointError` if a file cannot be read.
    """
    path = os.path.join(folder.location, name)

    def read() -> Checkpoint | str:
        damage = folder.storage.read_if_there(f"{name}/{DAMAGED}")
        if damage is not None:
            cause = " ".join(damage.decode(errors="replace").split())
            return f"{cause} (file {DAMAGED}; delete it if the checkpoint has been repaired)"
        try:
            return opened(folder, name)
        except Damaged as error:
            return str(error)

    checkpoint = on_main(f"cannot read {path}", read)
    if isinstance(checkpoint, str):
        raise Damaged(checkpoint)
    shares = gather("cannot verify", lambda: [] if replays() else checkpoint.verify(rank(), world_size()))
    problems = [problem for share in shares for problem in share]
    if problems:
        raise Damaged(f"checkpoint {path} is damaged: {first_few(problems, '; ')}")
    return replace(checkpoint, verified=True)
