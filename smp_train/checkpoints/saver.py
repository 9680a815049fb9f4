"""How a backend's state becomes a checkpoint's tree: parameter names, the rank's part, writing and reading by DCP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from smp_train.checkpoints.dcp.storage import TreeWriter
from smp_train.checkpoints.dcp.trees import load_together, save_state
from smp_train.checkpoints.folder import RunFolder
from smp_train.checkpoints.format import BEGUN
from smp_train.distributed.agree import alone
from smp_train.models.smp_names import HubModel, Ranks
from smp_train.storage.checksum import FileRecord

HUGGING_FACE = "huggingface"
SMP_NAMES = "smp"
"""`Saver.names` of models that ``torch.sagemaker.transform`` has rebuilt under SMP's parameter names."""


@dataclass(frozen=True)
class Saver:
    """Ranks write and read one tree together, or one tree for each SMP tensor and expert rank."""

    hub: HubModel | None = None
    """The model on the hub, if parameters have SMP's names here; None if they have the hub's names."""
    ranks: Ranks = field(default_factory=Ranks)
    """SMP's tensor and expert rank, if these ranks have different parameters."""
    part: str = ""
    """Sub-folder of this rank's tree, if ranks do not share a tree."""

    @property
    def names(self) -> str:
        """Whose names the parameters have: SMP's or the hub's."""
        return HUGGING_FACE if self.hub is None else SMP_NAMES

    def load(self, state: dict[str, Any], *, storage_reader: Any, planner: Any) -> None:
        """Fill ``state`` from a tree; collective if all ranks read the same tree."""
        with alone() if self.part else nullcontext():
            load_together(state, storage_reader=storage_reader, planner=planner)

    def write(
        self, state: dict[str, Any], folder: RunFolder, attempt: str, on_stage: Callable[[str], None]
    ) -> dict[str, FileRecord]:
        """Write ``state`` into an attempt and return the files that this rank wrote; collective."""
        writer = TreeWriter(folder.storage, attempt, begun=f"{attempt}/{BEGUN}", part=self.part)
        writer.on_stage = on_stage
        save_state({self.part: state} if self.part else state, writer)
        return writer.records
