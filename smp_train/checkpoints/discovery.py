"""Which checkpoint to start from: the newest committed one that is intact."""

from __future__ import annotations

import json
import logging
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from smp_train.checkpoints.aws.names import HubReader, RankReader, Tree
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.commit import CheckpointFolder, absent, open_folder, parent_of
from smp_train.checkpoints.dcp.index import INDEX
from smp_train.checkpoints.dcp.storage import Reader
from smp_train.checkpoints.dcp.trees import load_state, saved_entries
from smp_train.checkpoints.manifest import (
    COMMITTED,
    META,
    METADATA,
    NODE_LOCAL,
    TOKENIZER,
    Committed,
    FileRecord,
    RunId,
    checksum_of,
    name_before,
    parse_folder_name,
)
from smp_train.checkpoints.runs import committed, committed_names, last_run, run_of
from smp_train.checkpoints.saver import HUGGING_FACE, Saver
from smp_train.distributed.agree import rank, world_size
from smp_train.errors import CheckpointError, first_few, one_line
from smp_train.models.hugging_face import config_of
from smp_train.models.smp_names import HubModel, Ranks
from smp_train.progress import MOVED
from smp_train.storage import is_s3, normal
from smp_train.storage.patience import TRANSIENT

logger = logging.getLogger(__name__)

TORCHS = Saver()


class Damaged(CheckpointError):
    """A committed checkpoint whose files are not those that were committed."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. ``meta`` is what was given to `CheckpointManager.save`."""

    path: str
    step: int
    meta: dict[str, Any]
    committed: Committed
    _storage: CheckpointFolder = field(repr=False, compare=False)
    _name: str = field(repr=False, compare=False)
    verified: bool = field(default=False, compare=False, kw_only=True)
    """Whether all checksums have been compared, as `find` does. Tensors are only read from a verified checkpoint."""

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """Fill ``state`` (see `gather_state`) in place, whatever mesh it is laid out on. Collective.

        ``saver`` says whose names ``state`` has, on which of SMP's ranks, and through what it is read. Raises
        `CheckpointError` on every rank when names or shapes differ, or when any rank cannot read its part. Saved
        entries under top-level names that ``state`` does not have are left alone.
        """
        load_state(state, self.reader_of(state, saver), self.path, load=saver.load)

    def reader_of(self, state: dict[str, Any], saver: Saver = TORCHS) -> Reader:
        """Return a reader of its tensors under the parameter names of ``state``, as `load` needs it."""
        if self.names == saver.names and self.trees.get(saver.part) == saver.ranks:
            return self.reader(saver.part)
        return self._translated(self._readers(), state, saver)

    def _readers(self) -> list[Tree]:
        return [Tree(ranks, self.reader(part)) for part, ranks in self.trees.items()]

    def _translated(self, trees: list[Tree], state: dict[str, Any], saver: Saver) -> Reader:
        """Return a reader of ``trees`` under the parameter names of ``state``: the hub's, or SMP's on this rank."""
        shapes = {name: tuple(value.shape) for name, value in state["model"].items()}
        if saver.hub is None:
            return HubReader(trees, HubModel.of(self.model_config(), shapes))
        same = [Tree(Ranks(), tree.reader) for tree in trees if tree.ranks == saver.ranks]
        if self.names == saver.names and same:  # written by the same rank, under the same names
            return HubReader(same, replace(saver.hub, shapes=shapes))
        return RankReader(HubReader(trees, saver.hub), state, saver.ranks, saver.hub)

    @property
    def durable(self) -> bool:
        """Whether it outlives a node."""
        return True

    @property
    def names(self) -> str:
        """Whose names the parameters have in it."""
        return str(self.meta.get("names", HUGGING_FACE))

    def model_config(self) -> Any:
        """Return transformers' configuration of its model. Raises `CheckpointError` where it does not say."""
        try:
            return config_of(self.meta["model_config"])
        except Exception as error:  # whatever a configuration of unknown origin may lead to
            what = f"lacks {error}" if isinstance(error, KeyError) else one_line(error)
            raise CheckpointError(f"{self.path} does not say which model it is: meta.json {what}") from None

    def tokenizer(self) -> dict[str, bytes]:
        """Return the verified files of the run's tokenizer by name; empty if the run knew of no tokenizer."""
        files = {}
        for name in self.committed.files:
            if name.startswith(TOKENIZER):
                files[name.removeprefix(TOKENIZER)] = data = self._storage.read(self._folder, name)
                self._verify_file(name, checksum_of([data]))
        return files

    @property
    def parts(self) -> list[str]:
        """Sub-folders of its trees: one, without a name, unless ranks of SMP had parameters of their own."""
        return sorted(os.path.dirname(name) for name in self.committed.files if os.path.basename(name) == METADATA)

    @property
    def trees(self) -> dict[str, Ranks]:
        """The ranks of SMP that wrote its trees, by sub-folder."""
        return Ranks.of_folders(self.parts or [""])

    def reader(self, part: str = "") -> Reader:
        """Return the reader of the tensors in the sub-folder ``part`` of this `verified` checkpoint."""
        if not self.verified:
            raise RuntimeError(f"{self.path}: open the checkpoint with `find`, which verifies it, to read its tensors")
        return self._reader(part)

    def entries(self) -> list[Mapping[str, Any]]:
        """Return the metadata of each tree's entries by name. Raises `CheckpointError` if an index is damaged."""
        for name in (posixpath.join(part, file) for part in self.parts for file in (METADATA, INDEX)):
            if name in self.committed.files:
                self._verify_file(name, self._storage.checksum(self._folder, name, self.committed.files[name].size))
        return [saved_entries(self._reader(part)) for part in self.parts]

    def _verify_file(self, name: str, record: FileRecord) -> None:
        if record != self.committed.files[name]:
            raise Damaged(f"checkpoint {self.path} is damaged: {name} is not what was written (CRC-32)")

    def _reader(self, part: str) -> Reader:
        below = f"{part}/" if part else ""
        files = {n[len(below) :]: r.size for n, r in self.committed.files.items() if n.startswith(below)}
        return self._storage.reader(posixpath.join(self._folder, part), files)

    @property
    def _folder(self) -> str:
        return posixpath.join(self._name, self.committed.root)

    def verify(self, rank: int = 0, world: int = 1) -> list[str]:
        """Recompute the checksums of this rank's share of the files; one line per difference. No collective.

        `MOVED` counts the bytes. Raises `CheckpointError` if a file cannot be read for a reason other than damage.
        """
        problems = []
        largest_first = sorted(self.committed.files.items(), key=lambda item: (-item[1].size, item[0]))
        share = largest_first[rank::world]
        MOVED.begin(sum(record.size for _, record in share))
        for name, record in share:
            try:
                found = self._storage.checksum(self._folder, name, record.size)
            except OSError as error:
                remedy = "every node must see the checkpoint folder"
                if error.errno in TRANSIENT:
                    remedy = "the file system does not answer; nothing was changed: start the same command again"
                raise CheckpointError(
                    f"{os.path.join(self.path, name)} cannot be read: {error.strerror or error}; {remedy}"
                ) from None
            MOVED.done += record.size
            if found != record:
                problems.append(f"{name} has CRC-32 {found.crc32}, {record.crc32} was written")
        return problems


def find(
    location: str | os.PathLike[str],
    *,
    missing_ok: bool = False,
    strict: bool = False,
    run: RunId | None = None,
    rename: bool = True,
) -> Checkpoint | None:
    """Find and verify a checkpoint to resume from or to read. Collective: every rank gets the same answer.

    ``location`` is a folder of checkpoints, of which the newest committed one of ``run`` by step is taken (where it
    is not given, of the run that committed last), or one checkpoint. None means that there is nothing to resume from:
    the folder holds no such checkpoint, or it does not exist and ``missing_ok`` is set.

    Sizes and checksums are compared with those recorded, each rank reading its share. A damaged one in a folder of
    checkpoints is renamed to ``*.damaged`` (without ``rename``, for another run's, left as it is) and the next older
    one is taken, with a warning; with ``strict`` it is an error. Raises `CheckpointError` on every rank: nothing at
    ``location``; the one checkpoint asked for is not committed or is damaged; every committed one is damaged (starting
    afresh would hide the loss); it is one rank's part. Raises `ConfigError` for an unsupported kind of location.
    """
    place = normal(location)
    names = on_main("cannot resume", lambda: _candidates(place, missing_ok, run))
    if names is None:
        return None
    folder, candidates, single = names
    storage = open_folder(folder)
    for position, name in enumerate(candidates):
        try:
            checkpoint = open_intact(storage, name)
        except Damaged as damage:
            if strict or single:
                others = committed_names(storage) if single else candidates[position + 1 :]
                raise CheckpointError(f"{damage}{_others([o for o in others if o != name], folder)}") from None
            if rename:
                on_main("cannot resume", partial(_set_aside, storage, name, str(damage)))
            elif rank() == 0:
                logger.warning("%s; it is left as it is, trying the next older one", damage)
            continue
        if NODE_LOCAL in checkpoint.meta:
            raise CheckpointError(
                f"{checkpoint.path} is one rank's part of a checkpoint, and only its run can use it; give a checkpoint "
                "from a folder that all nodes share"
            )
        return checkpoint
    if candidates:
        raise CheckpointError(
            f"cannot resume: every checkpoint in {folder} is damaged; they are kept there{' as *.damaged' * rename}. "
            "To start afresh, give another --checkpoint_dir or move them away"
        )
    return None


def open_checkpoint(location: str | os.PathLike[str]) -> Checkpoint:
    """Open the committed checkpoint at ``location`` for its metadata: only the sizes of files are compared.

    Not collective. Raises `CheckpointError` if it is not committed or a size differs.
    """
    place = normal(location)
    folder, name = parent_of(place)
    storage = open_folder(folder)
    if not name or not storage.has(name, COMMITTED):
        raise CheckpointError(f"{place} is not a complete checkpoint: it has no {COMMITTED} file")
    return _checkpoint(storage, name, _open(storage, name))


def newest_readable(location: str, run: RunId | None) -> Checkpoint | None:
    """Return the newest committed checkpoint of ``run``, or of the last one, with files of their sizes; else None.

    Nothing is verified or renamed. Not collective.
    """
    found = _candidates(normal(location), True, run)
    if found is None:
        return None
    storage = open_folder(found[0])
    for name in found[1]:
        opened = _open(storage, name)
        if not isinstance(opened, str):
            return Checkpoint(os.path.join(storage.location, name), opened[0].step, opened[1], opened[0], storage, name)
    return None


def _candidates(place: str, missing_ok: bool, run: RunId | None) -> tuple[str, list[str], bool] | None:
    """Return (folder, names newest first, whether one checkpoint was asked for), or None for nothing."""
    problem = absent(place)
    if problem is not None:
        if missing_ok and problem == "does not exist":
            return None
        raise CheckpointError(f"{place} {problem}; give a folder of checkpoints or one checkpoint")
    if is_one_checkpoint(place):
        folder, name = parent_of(place)
        storage = open_folder(folder)
        if not storage.has(name, COMMITTED):
            others = committed_names(storage)
            raise CheckpointError(
                f"{place} is not a complete checkpoint: it has no {COMMITTED} file, so saving it was cut short"
                f"{_others(others, folder)}"
            )
        return folder, [name], True
    storage = open_folder(place)
    entries = committed(storage)
    run = last_run(entries) if entries and run is None else run
    names = [entry.name for entry in entries if entry.run == run]
    if not names:
        damaged = [name for name in storage.aside() if run is None or run_of(storage, name)[0] == run]
        if damaged:
            raise CheckpointError(
                f"{place} holds only damaged checkpoints ({damaged[-1]}); "
                "to start afresh, give another --checkpoint_dir or move them away"
            )
    return place, names, False


def is_checkpoint_folder(location: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint of this program, finished or not, or a folder with such in it."""
    place = normal(location)
    if absent(place) is not None:
        return False
    return is_one_checkpoint(place, other_programs=False) or any(map(parse_folder_name, open_folder(place).names()))


def is_one_checkpoint(place: str, other_programs: bool = True) -> bool:
    """Return whether ``place``, in normal form, is one checkpoint, finished or not, rather than a folder of them."""
    folder, name = parent_of(place)
    if not name:
        return False
    storage = open_folder(folder)
    if storage.has(name, COMMITTED) or storage.has(name, META):
        return True
    if not other_programs:
        return False
    if not is_s3(place) and any(Path(place).glob("*.distcp")):
        return True
    named_so = parse_folder_name(name_before(name)) is not None
    return named_so and not any(parse_folder_name(name) for name in open_folder(place).names())


def open_intact(storage: CheckpointFolder, name: str) -> Checkpoint:
    """Open and verify a checkpoint, so that its tensors can be read. Collective; raises `Damaged` on every rank."""
    label = os.path.join(storage.location, name)
    checkpoint = _checkpoint(storage, name, on_main(f"cannot read {label}", lambda: _open(storage, name)))
    shares = gather("cannot verify", lambda: checkpoint.verify(rank(), world_size()))
    problems = [problem for share in shares for problem in share]
    if problems:
        raise Damaged(f"checkpoint {label} is damaged: {first_few(problems, '; ')}")
    return replace(checkpoint, verified=True)


def _checkpoint(storage: CheckpointFolder, name: str, opened: tuple[Committed, dict[str, Any]] | str) -> Checkpoint:
    """Return the checkpoint that `_open` has opened; raises `Damaged` where it could not."""
    path = os.path.join(storage.location, name)
    if isinstance(opened, str):
        raise Damaged(f"checkpoint {path} is damaged: {opened}")
    committed, meta = opened
    return Checkpoint(path, committed.step, meta, committed, storage, name)


def _open(storage: CheckpointFolder, name: str) -> tuple[Committed, dict[str, Any]] | str:
    """Return the contents of COMMITTED and meta.json, or what is wrong with them or with the sizes."""
    try:
        committed = Committed.from_bytes(storage.read(name, COMMITTED))
    except ValueError as error:
        return str(error)
    folder = posixpath.join(name, committed.root)
    problems = committed.size_problems(storage.sizes(folder))
    if problems:
        return first_few(problems, "; ")
    data = storage.read(folder, META)
    if checksum_of([data]) != committed.files[META]:
        return f"{META} is not what was written (CRC-32)"
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"{META} is not readable: {error}"
    if not isinstance(meta, dict):
        return f"{META} is not an object"
    for what, said in (("step", committed.step), ("model_type", committed.model_type)):
        if meta.get(what, said) != said:
            return f"{COMMITTED} says {what} {said}, and {META} {meta[what]}"
    return committed, meta


def _set_aside(storage: CheckpointFolder, name: str, why: str) -> None:
    try:
        kept = storage.set_aside(name)
    except (OSError, CheckpointError) as error:
        reason = getattr(error, "strerror", None) or error
        logger.warning("%s; not renamed (%s), trying the next older one", why, reason)
    else:
        logger.warning("%s; kept as %s, trying the next older one", why, kept)


def _others(names: list[str], folder: str) -> str:
    if not names:
        return f"; no other complete one is in {folder}"
    return f"; complete ones in {folder}: {first_few(names)}"
