"""How a checkpoint's tree is written and read. `Saver` uses torch's DCP; backends may override its methods."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from smp_train.checkpoints.dcp.storage import TreeWriter
from smp_train.checkpoints.dcp.trees import load_together, save_state, save_together
from smp_train.checkpoints.folder import RunFolder
from smp_train.checkpoints.format import BEGUN
from smp_train.models.smp_names import HubModel, Ranks
from smp_train.storage.checksum import FileRecord

HUGGING_FACE = "huggingface"
SMP_NAMES = "smp"
"""`Saver.names` of models that ``torch.sagemaker.transform`` has rebuilt under SMP's parameter names."""

Records = Callable[[], dict[str, FileRecord]]
"""Function that returns the records of the files that this rank wrote, or raises the error that stopped the writing."""


@dataclass(frozen=True)
class Saver:
    """Ranks write and read one tree through torch's DCP; a save may run in a thread while training goes on."""

    hub: HubModel | None = None
    """The model on the hub, if parameters have SMP's names here; None if they have the hub's names."""
    ranks: Ranks = field(default_factory=Ranks)
    """SMP's tensor and expert rank, if these ranks have different parameters."""
    part: str = ""
    """Sub-folder of this rank's tree, if ranks do not share a tree."""
    writes: bool = True
    """Whether this rank writes; False if it is a replica of a rank that writes."""

    @property
    def names(self) -> str:
        """Whose names the parameters have: SMP's or the hub's."""
        return HUGGING_FACE if self.hub is None else SMP_NAMES

    def save(self, state: dict[str, Any], *, storage_writer: Any) -> None:
        """Write a tree; collective."""
        save_together(state, storage_writer=storage_writer)

    def load(self, state: dict[str, Any], *, storage_reader: Any, planner: Any) -> None:
        """Fill ``state`` from a tree; collective."""
        load_together(state, storage_reader=storage_reader, planner=planner)

    def write(
        self, state: dict[str, Any], folder: RunFolder, attempt: str, on_stage: Callable[[str], None]
    ) -> dict[str, FileRecord]:
        """Write ``state`` into an attempt and return the files that this rank wrote; collective."""
        if not self.writes:
            return {}
        writer = TreeWriter(folder.storage, self.tree(attempt), begun=f"{attempt}/{BEGUN}")
        writer.on_stage = on_stage
        save_state(state, writer, self.save)
        return self.renamed(writer.records)

    def tree(self, attempt: str) -> str:
        """Return the folder of this rank's tree."""
        return os.path.join(attempt, self.part) if self.part else attempt

    def renamed(self, records: dict[str, FileRecord]) -> dict[str, FileRecord]:
        """Return the records of this rank's tree, keyed by each file's path in the attempt."""
        return {os.path.join(self.part, file): record for file, record in records.items()}

    def writes_alone(self, asynchronous: bool, folders: Sequence[RunFolder]) -> bool:
        """Return whether the backend writes by itself, with `begin`, rather than with `write`."""
        return False

    @property
    def threads(self) -> bool:
        """Whether `write` may run in a thread."""
        return True

    def begin(
        self, state: dict[str, Any], folder: RunFolder, attempt: str, commit: Callable[[Records], list[Any]]
    ) -> Any:
        """Begin to write in the background and return an object with the methods of `Background`. Collective.

        The object's `result` is the result of ``commit``.
        """
        raise NotImplementedError
