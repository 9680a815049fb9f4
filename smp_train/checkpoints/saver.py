"""How the tree of a checkpoint is written and read: by torch's DCP, or through what a backend's library has for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smp_train.checkpoints.commit import CLAIM, CheckpointFolder
from smp_train.checkpoints.dcp.trees import load_together, save_state, save_together
from smp_train.checkpoints.manifest import METADATA, FileRecord
from smp_train.distributed import alone
from smp_train.errors import CheckpointError
from smp_train.models.smp_names import HubModel, Ranks

HUGGING_FACE = "huggingface"
SMP_NAMES = "smp"
"""`Saver.names` of models that ``torch.sagemaker.transform`` has rebuilt under SMP's parameter names."""


@dataclass(frozen=True)
class Saver:
    """Ranks write and read one tree through torch's DCP; a save may run in a thread while training goes on."""

    hub: HubModel | None = None
    """The model on the hub, where parameters have SMP's names here; None where they have the hub's."""
    ranks: Ranks = field(default_factory=Ranks)
    """SMP's tensor and expert rank, where each of them holds parameters of its own."""
    part: str = ""
    """Sub-folder of the tree that this rank belongs to, where ranks do not share one."""
    writes: bool = True
    """Whether this rank takes part in writing; replicas of those that do need not."""

    @property
    def names(self) -> str:
        """Whose names the parameters have."""
        return HUGGING_FACE if self.hub is None else SMP_NAMES

    def save(self, state: dict[str, Any], *, storage_writer: Any) -> None:
        """Write a tree; collective."""
        save_together(state, storage_writer=storage_writer)

    def load(self, state: dict[str, Any], *, storage_reader: Any, planner: Any) -> None:
        """Fill ``state`` from a tree; collective."""
        load_together(state, storage_reader=storage_reader, planner=planner)

    def write(
        self, state: dict[str, Any], storage: CheckpointFolder, staged: str, on_stage: Callable[[str], None]
    ) -> dict[str, FileRecord]:
        """Write ``state`` into the attempt ``staged`` and return the files that this rank has written; collective."""
        if not self.writes:
            return {}
        writer = storage.writer(self.folder(staged))
        writer.on_stage = on_stage
        save_state(state, writer, self.save)
        return self._placed(writer.records)

    def folder(self, staged: str) -> str:
        """Return the folder of this rank's tree."""
        return os.path.join(staged, self.part) if self.part else staged

    def _placed(self, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
        return {os.path.join(self.part, file): record for file, record in records.items()}


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
        """Return whether what was begun is written, and wait for that when asked to; on the ranks that write."""
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

    def save(self, state: dict[str, Any], *, storage_writer: Any) -> None:
        """See `Library.save`."""
        self.library.save(state, storage_writer=storage_writer)

    def load(self, state: dict[str, Any], *, storage_reader: Any, planner: Any) -> None:
        """Fill ``state`` from a tree; each rank reads by itself."""
        with alone():
            load_together(state, storage_reader=storage_reader, planner=planner)

    def prepare(self, storage: CheckpointFolder, staged: str) -> None:
        """Make the folder of this rank's tree, on the rank that leads; not collective, and before all that is."""
        if self.part and self.leads:
            storage.make(self.folder(staged))

    def begin(self, state: dict[str, Any], storage: CheckpointFolder, staged: str) -> None:
        """Begin to write ``state`` in the background."""
        if self.writes:
            self.library.begin(state, os.path.join(storage.location, self.folder(staged)))

    def listed(self, storage: CheckpointFolder, staged: str) -> tuple[str, dict[str, int]] | None:
        """Return this rank's tree and the files (name: size) that `begin` brought about for it, on the rank that leads.

        Raises `CheckpointError` where there is no index among them. Not collective.
        """
        if not self.leads:
            return None
        files = storage.sizes(self.folder(staged))
        files.pop(CLAIM, None)
        if METADATA not in files:
            raise CheckpointError(f"what the saver of the backend's library wrote has no {METADATA}")
        return self.part, files

    def written(self, storage: CheckpointFolder, staged: str, files: Mapping[str, int]) -> dict[str, FileRecord]:
        """Make this rank's share of the ``files`` of its tree durable, and return their records; not collective."""
        mine = sorted(files)[self.which :: self.among] if self.writes else []
        return self._placed({file: storage.secure(self.folder(staged), file, files[file]) for file in mine})
