"""Saving through SMP's own checkpoint modules, by the recipes of its documentation.

Ranks that hold the same shards form a replication group, of which replication rank 0 writes. Ranks of one shard group
write one tree together. Tensor and expert ranks hold parameters under SMP's own names and splits, and each writes its
own tree, ``tp<rank>_ep<rank>``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from smp_train.backends import smp_choices, smp_library
from smp_train.checkpoints.saver import Library, LibrarySaver, Saver
from smp_train.distributed import gather
from smp_train.errors import ConfigError
from smp_train.models.smp_names import HubModel, Ranks

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
