"""Saving through SMP's own checkpoint modules, by the recipes of its documentation.

Ranks that hold the same shards form a replication group, of which replication rank 0 writes. Ranks of one shard group
write one tree together. Tensor and expert ranks hold parameters under SMP's own names and splits, and each writes its
own tree, ``tp<rank>_ep<rank>``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smp_train.backends import smp_choices, smp_library
from smp_train.checkpoints.collective import gather as agree
from smp_train.checkpoints.dcp.trees import load_together, save_together
from smp_train.checkpoints.folder import RunFolder
from smp_train.checkpoints.format import BEGUN, METADATA
from smp_train.checkpoints.saver import Records, Saver
from smp_train.distributed import gather
from smp_train.distributed.agree import alone, any_rank, unless
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.smp_names import HubModel, Ranks
from smp_train.storage import is_s3
from smp_train.storage.checksum import FileRecord
from smp_train.storage.folder import sync_folder

logger = logging.getLogger("smp_train.smp")


def each_tree_once(by_rank: list[tuple[str, bool, tuple[int, ...]]]) -> bool:
    """Return whether the writers of each tree are exactly one shard group.

    ``by_rank``: for each rank its tree, whether it writes, and the ranks of its shard group.
    """
    for tree in {name for name, _, _ in by_rank}:
        writers = [(rank, group) for rank, (name, writes, group) in enumerate(by_rank) if writes and name == tree]
        groups = {group for _, group in writers}
        if len(groups) != 1 or set(groups.pop()) != {rank for rank, _ in writers}:
            return False
    return True


class Library:
    """Writes the tree of a group of ranks; this base class writes for a group of one, through torch's DCP."""

    asynchronous = False
    """Whether it can write in the background: `begin` and `ended`."""
    takes_writer = True
    """Whether `save` takes any ``storage_writer``; if not, every save is by `begin` and `ended`."""

    def save(self, state: dict[str, Any], *, storage_writer: Any) -> None:
        """Write as ``torch.distributed.checkpoint.save`` does; on the ranks that write."""
        with alone():
            save_together(state, storage_writer=storage_writer)

    def begin(self, state: dict[str, Any], folder: str) -> None:
        """Copy the state and begin to write it to a folder; on the ranks that write."""
        raise NotImplementedError

    def ended(self, wait: bool) -> bool:
        """Return whether the save is written; ``wait`` for that. On the ranks that write."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LibrarySaver(Saver):
    """The ranks of a group, ``which`` of ``among`` this is, write a tree through a backend's library."""

    library: Library
    which: int = 0
    among: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that write its tree."""
        return self.which == 0 and self.writes

    @property
    def threads(self) -> bool:
        """See `Saver.threads`: the library's collectives stay in the main thread."""
        return False

    def save(self, state: dict[str, Any], *, storage_writer: Any) -> None:
        """See `Library.save`."""
        self.library.save(state, storage_writer=storage_writer)

    def load(self, state: dict[str, Any], *, storage_reader: Any, planner: Any) -> None:
        """Fill ``state`` from a tree; each rank reads by itself."""
        with alone():
            load_together(state, storage_reader=storage_reader, planner=planner)

    def _prepare(self, folder: RunFolder, attempt: str) -> None:
        """Make the folder of each tree on the rank that leads; collective."""
        what = f"cannot save {os.path.join(folder.location, attempt)}"

        def make() -> None:
            if self.part and self.leads and not is_s3(folder.location):
                tree = Path(folder.location, self.tree(attempt))
                tree.mkdir(exist_ok=True)
                sync_folder(tree.parent)

        agree(what, make)

    def write(
        self, state: dict[str, Any], folder: RunFolder, attempt: str, on_stage: Callable[[str], None]
    ) -> dict[str, FileRecord]:
        """See `Saver.write`."""
        self._prepare(folder, attempt)
        return super().write(state, folder, attempt, on_stage)

    def writes_alone(self, asynchronous: bool, folders: Sequence[RunFolder]) -> bool:
        """See `Saver.writes_alone`: in the background, or because the library takes no writer."""
        wanted = asynchronous or not self.library.takes_writer
        return wanted and self.library.asynchronous and not any(is_s3(folder.location) for folder in folders)

    def begin(
        self, state: dict[str, Any], folder: RunFolder, attempt: str, commit: Callable[[Records], list[Any]]
    ) -> LibrarySave:
        """See `Saver.begin`."""
        self._prepare(folder, attempt)
        what, failure = f"cannot save {os.path.join(folder.location, attempt)}", None
        try:
            if self.writes:
                self.library.begin(state, os.path.join(folder.location, self.tree(attempt)))
        except Exception as error:
            failure = error
        agree(what, partial(unless, failure, None))
        return LibrarySave(self, folder, attempt, commit)

    def listed(self, folder: RunFolder, attempt: str) -> tuple[str, dict[str, int]] | None:
        """Return this rank's tree and the files (name: size) that `begin` wrote for it, on the rank that leads.

        Raises `CheckpointError` if there is no index among them. Not collective.
        """
        if not self.leads:
            return None
        files = folder.sizes(self.tree(attempt))
        files.pop(BEGUN, None)
        if METADATA not in files:
            raise CheckpointError(f"what the saver of the backend's library wrote has no {METADATA}")
        return self.part, files

    def secured(self, folder: RunFolder, attempt: str, files: Mapping[str, int]) -> dict[str, FileRecord]:
        """Make this rank's share of its tree's files durable and return their records; not collective."""
        tree, records = self.tree(attempt), {}
        for file in sorted(files)[self.which :: self.among] if self.writes else ():
            if not is_s3(folder.location):
                path = Path(folder.location, tree, file)
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
                sync_folder(path.parent)
            records[file] = folder.checksum(tree, file, files[file])
        return self.renamed(records)


class LibrarySave:
    """A save that the library writes in the background; with the methods of `Background`.

    A failure of the library on one rank is kept until the save is ended, where all ranks learn of it.
    """

    def __init__(
        self, saver: LibrarySaver, folder: RunFolder, attempt: str, commit: Callable[[Records], list[Any]]
    ) -> None:
        self._saver, self._folder, self._attempt, self._commit = saver, folder, attempt, commit
        self._ended = not saver.writes
        self._failure: Exception | None = None

    def staged(self) -> None:
        """Return at once: the library copied the state before it returned."""

    def running(self) -> bool:
        """Return whether this rank has not seen it end."""
        return not self._ended

    def ended_everywhere(self) -> bool:
        """Return whether every rank that writes has ended; collective."""
        self._ask(wait=False)
        return not any_rank(not self._ended)

    def _ask(self, *, wait: bool) -> None:
        if self._ended:
            return
        try:
            self._ended = self._saver.library.ended(wait) or wait
        except Exception as error:
            self._failure, self._ended = error, True

    def result(self) -> list[Any]:
        """Wait for the end, commit, and return what was saved; collective."""
        self._ask(wait=True)
        what = f"cannot save {os.path.join(self._folder.location, self._attempt)}"
        failure, tree = self._failure, None
        try:
            if failure is None:
                tree = self._saver.listed(self._folder, self._attempt)
        except (OSError, CheckpointError) as error:
            failure = error
        trees = [each for each in agree(what, lambda: tree) if each is not None]
        files = dict(trees).get(self._saver.part, {})
        # The commit reports the failing rank.
        return self._commit(lambda: unless(failure, None) or self._saver.secured(self._folder, self._attempt, files))

    def abandon(self, seconds: float) -> None:
        """Do nothing: what the library wrote is not committed."""


class SmpLibrary(Library):
    """SMP's savers, for the ranks of a shard group. Raises `ConfigError` where this SMP has none."""

    def __init__(self, group: Any, coordinator: int, *, asynchronous: bool) -> None:
        self._saving = smp_library.part("distributed.checkpoint.state_dict_saver", "saving through SMP", "2.5")
        calls = smp_library.part("distributed.checkpoint.async_utils", "saving through SMP", "2.5")
        self._queue = calls.AsyncCallsQueue()
        self._group = group
        self._own = {"process_group": group, "coordinator_rank": coordinator}
        self.asynchronous = asynchronous

    def save(self, state: dict[str, Any], *, storage_writer: Any) -> None:
        """See `Library.save`."""
        self._saving.save(state, storage_writer=storage_writer, **self._own)

    def begin(self, state: dict[str, Any], folder: str) -> None:
        """See `Library.begin`."""
        self._saving.async_save(state, checkpoint_id=folder, queue=self._queue, **self._own)

    def ended(self, wait: bool) -> bool:
        """See `Library.ended`."""
        return bool(self._queue.maybe_finalize_async_calls(blocking=wait, process_group=self._group))


def make(state: Any, root: Any, *, sharded: bool, hub: HubModel | None, ranks: Ranks, in_folders: bool) -> Saver:
    """Return how this rank saves and loads; collective.

    Args:
        state: ``torch.sagemaker.state``.
        root: The FSDP module.
        sharded: Whether parameters are sharded over the ranks of its process group.
        hub: The model on the hub where this one is SMP's own implementation, else None.
        ranks: This rank's tensor and expert rank. With several of these, each writes its own tree.
        in_folders: Whether all checkpoints are saved to folders. S3 takes our own writer: objects that SMP's
            asynchronous saver puts there could be recorded in COMMITTED only by reading them again.
    """
    per_rank = max(ranks.tensors, ranks.experts) > 1
    by_torch = Saver(hub=hub, ranks=ranks, part=ranks.folder if per_rank else "")
    first = state.ranker.get_rep_rank(dist.get_rank()) == 0
    if not sharded:
        # Each rank holds its whole tree. A tree that all ranks share is written by torch's DCP.
        if not per_rank:
            return by_torch
        return LibrarySaver(hub=hub, ranks=ranks, part=by_torch.part, writes=first, library=Library())
    group = root.process_group
    process_groups = smp_library.part("utils.process_group_utils", "--backend smp")
    members = process_groups.get_global_ranks(group)
    if not each_tree_once(gather("choosing how to save", lambda: (by_torch.part, first, tuple(members)))):
        if per_rank:
            raise ConfigError("SMP's replication ranks name no one writer of each shard: nothing can be saved")
        return by_torch  # the layout is torch's own: --sharding_strategy hybrid_shard without a degree
    if not in_folders and not per_rank:
        logger.info("Checkpoints: torch's own saver, which --checkpoint_dir in S3 has a writer for")
        return by_torch
    try:
        library = SmpLibrary(group, min(members), asynchronous=in_folders)
    except ConfigError as missing:
        if per_rank:
            raise
        logger.info("Checkpoints: torch's own saver; %s", missing)
        return by_torch
    library.takes_writer = smp_choices.takes_writer(library.save if first else None)
    if not library.takes_writer and not in_folders:
        raise ConfigError(
            "--checkpoint_dir in S3 with shards of tensor or expert ranks: this SMP's saver writes to folders only; "
            "give a folder, or use --backend native"
        )
    which = members.index(dist.get_rank())
    return LibrarySaver(
        hub=hub, ranks=ranks, part=by_torch.part, writes=first, library=library, which=which, among=len(members)
    )
