"""Saving, at once or later."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper

from tests import standin

from ...state_handler import state
from .async_utils import AsyncCallsQueue


def note(what: str, folder: Any, group: Any, coordinator: int, storage: Any, **facts: Any) -> None:
    """Write a call of a saver or loader to the journal; ``storage``: None where SMP's own for ``folder`` is used."""
    if not state.ready:
        raise RuntimeError("torch.sagemaker.init has not been called")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if coordinator not in ranks:
        raise ValueError(f"coordinator_rank {coordinator} is not one of {ranks}")
    standin.record(
        what, folder=None if folder is None else Path(folder).name, ranks=ranks, coordinator=coordinator,
        storage=None if storage is None else type(storage).__name__,
        action=state.ranker.get_rep_rank(state.rank) == 0, **facts,
    )  # fmt: skip


def save(
    state_dict: dict, *, checkpoint_id: Any = None, storage_writer: Any = None, process_group: Any = None,
    coordinator_rank: int = 0,
) -> None:  # fmt: skip
    """Write; returns when all is written."""
    note("save", checkpoint_id, process_group, coordinator_rank, storage_writer)
    _write(state_dict, checkpoint_id, storage_writer, process_group)


def _write(state_dict: dict, folder: Any, writer: Any, group: Any) -> None:
    if folder is None and writer is None:
        raise ValueError("give checkpoint_id or storage_writer")
    writer = writer or dcp.FileSystemWriter(folder)
    with led_by_first(group) as coordinator:
        _save_state_dict(state_dict, writer, group, coordinator, False, dcp.DefaultSavePlanner())


@contextmanager
def led_by_first(group: Any) -> Iterator[int]:
    """Let DCP be coordinated by the first rank of ``group``, and yield it as this torch counts: in the group or not."""
    init = _DistWrapper.__init__
    if group is None or "global_coordinator_rank" in inspect.getsource(init):
        yield 0
        return

    def mended(self: Any, *args: Any, **kwargs: Any) -> None:
        # torch 2.5 compares a rank of the group with one of the world.
        init(self, *args, **kwargs)
        self.is_coordinator = dist.get_rank() == self.coordinator_rank

    _DistWrapper.__init__ = mended
    try:
        yield min(dist.get_process_group_ranks(group))
    finally:
        _DistWrapper.__init__ = init


def async_save(
    state_dict: dict, *, checkpoint_id: Any = None, storage_writer: Any = None, process_group: Any = None,
    coordinator_rank: int = 0, queue: AsyncCallsQueue,
) -> None:  # fmt: skip
    """Copy the state; it is written when its queue is finalised."""
    note("async_save", checkpoint_id, process_group, coordinator_rank, storage_writer, queue=id(queue))
    if queue._calls:
        raise RuntimeError("the save before was not finalised")
    own = _copied(state_dict, process_group)
    queue.schedule(lambda: _write(own, checkpoint_id, storage_writer, process_group))


def _copied(value: Any, group: Any) -> Any:
    """Return a copy with tensors of its own; a ShardedTensor's through its local parts."""
    if isinstance(value, dict):
        return {key: _copied(each, group) for key, each in value.items()}
    if hasattr(value, "local_shards"):
        from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

        shards = [Shard(shard.tensor.clone(), shard.metadata) for shard in value.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, copy.deepcopy(value.metadata()), process_group=value._process_group
        )
    return value.detach().clone() if hasattr(value, "detach") else value
