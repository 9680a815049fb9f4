"""Loading in place."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from .state_dict_saver import led_by_first, note


def load(
    state_dict: dict, *, checkpoint_id: Any = None, storage_reader: Any = None, planner: Any = None,
    process_group: Any = None, coordinator_rank: int = 0,
) -> None:  # fmt: skip
    """Fill ``state_dict`` from a folder, or from what ``storage_reader`` reads."""
    if checkpoint_id is None and storage_reader is None:
        raise ValueError("give checkpoint_id or storage_reader")
    note("load", checkpoint_id, process_group, coordinator_rank, storage_reader)
    reader = storage_reader or FileSystemReader(checkpoint_id)
    with led_by_first(process_group) as coordinator:
        _load_state_dict(state_dict, reader, process_group, coordinator, False, planner or DefaultLoadPlanner())
