"""How the tree of a checkpoint is written and read: by torch's DCP, or through what a backend's library has for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smp_train.checkpoints.commit import CLAIM, CheckpointFolder
from smp_train.checkpoints.dcp import save_state
from smp_train.checkpoints.record import METADATA, FileRecord
from smp_train.distributed.agree import rank
from smp_train.errors import CheckpointError
from smp_train.models.smp_names import HubModel, Ranks

HUGGING_FACE = "huggingface"
SMP_NAMES = "smp"
"""Whose names parameters have once ``torch.sagemaker.transform`` has made the model its own."""


@dataclass(frozen=True)
class Saver:
    """One rank's part in writing and reading; as it stands, all ranks write one tree through torch's DCP."""

    hub: HubModel | None = None
    """The model on the hub, where parameters have SMP's names here; None where they have the hub's."""
    ranks: Ranks = field(default_factory=Ranks)
    """SMP's tensor and expert rank, where each of them holds parameters of its own."""
    part: str = ""
    """Sub-folder of the tree that this rank belongs to, where ranks do not share one."""
    writes: bool = True
    """Whether this rank takes part in writing; replicas of those that do need not."""
    place: tuple[int, int] | None = None
    """(which, of how many) this rank is among those that write its tree; None for its place among all ranks."""
    save: Callable[..., None] | None = None
    """Takes ``(state, storage_writer=...)``, as ``torch.distributed.checkpoint.save`` does; None for that."""
    load: Callable[..., None] | None = None
    """Takes ``(state, storage_reader=..., planner=...)``, as ``torch.distributed.checkpoint.load`` does."""
    begin: Callable[[dict[str, Any], str], None] | None = None
    """Copies the state and begins to write it to a folder; on ranks that write. None: nothing but `save`."""
    ended: Callable[[bool], bool] | None = None
    """Tells whether what was begun is written, and waits for that when asked to; on ranks that write."""
    in_background: bool = True
    """Whether `save` may run in a thread while training goes on."""

    @property
    def names(self) -> str:
        """Whose names the parameters have."""
        return HUGGING_FACE if self.hub is None else SMP_NAMES

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that write its tree."""
        return (self.place or (rank(), 0))[0] == 0 and self.writes

    def prepare(self, storage: CheckpointFolder, staged: str) -> None:
        """Make the folder of this rank's tree, on the rank that leads; not collective, and before all that is."""
        if self.part and self.leads:
            storage.make(self.folder(staged))

    def write(
        self, state: dict[str, Any], storage: CheckpointFolder, staged: str, on_stage: Callable[[str], None]
    ) -> dict[str, FileRecord]:
        """Write ``state`` into the folder ``staged`` and return the files that this rank answers for; collective."""
        if not self.writes:
            return {}
        folder = self.folder(staged)
        writer = storage.writer(folder)
        writer.on_stage = on_stage
        save_state(state, writer, self.save)
        return self._placed(writer.records)

    def folder(self, staged: str) -> str:
        """Return the folder of this rank's tree."""
        return os.path.join(staged, self.part) if self.part else staged

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
        if not self.writes or self.place is None:
            return {}
        which, among = self.place
        folder = self.folder(staged)
        return self._placed({file: storage.secure(folder, file, files[file]) for file in sorted(files)[which::among]})

    def _placed(self, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
        return {os.path.join(self.part, file): record for file, record in records.items()}
