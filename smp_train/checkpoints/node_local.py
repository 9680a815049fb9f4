"""The fast tier: each rank saves what it holds to its own node's disk, for a restart of the same ranks there.

A folder given as ``local:DIR`` is not shared between nodes. Rank R writes ``DIR/rank<R>/<name>/``, a checkpoint as any
other but for holding this rank's part alone, so that nothing goes over the network and no rank waits for another. It is
of use where every rank finds its own; after a node was replaced, or on another mesh, the durable ones are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from smp_train.arguments.training_flags import NODE_LOCAL as PREFIX
from smp_train.checkpoints.async_save import leaves, put
from smp_train.checkpoints.collective import gather
from smp_train.checkpoints.commit import UNKNOWN, CheckpointFolder, open_folder
from smp_train.checkpoints.discovery import TORCHS, Checkpoint, find, open_intact
from smp_train.checkpoints.manifest import NODE_LOCAL, RunId
from smp_train.checkpoints.runs import committed
from smp_train.checkpoints.saver import HUGGING_FACE, Saver
from smp_train.checkpoints.state import present
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.agree import alone, rank, unless, world_size
from smp_train.distributed.dtensor import local_tensor
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage import normal

logger = logging.getLogger(__name__)


def is_node_local(folder: str) -> bool:
    """Return whether a folder is each node's own."""
    return folder.startswith(PREFIX)


def storage_of(folder: str, run: RunId = UNKNOWN) -> CheckpointFolder:
    """Return the storage of this rank in a folder ``local:DIR``."""
    return open_folder(f"{folder.removeprefix(PREFIX)}/rank{rank():05d}", run)


def local_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with this rank's own tensors in place of distributed ones; they share their memory."""
    found: dict[str, Any] = {}
    for path, value in leaves(present(state)):
        if hasattr(value, "local_shards"):
            raise CheckpointError(f"{PREFIX} folders are not available on this backend; leave them out")
        put(found, path, local_tensor(value))
    return found


def check_saver(saver: Saver) -> None:
    """Raise `ConfigError` where a backend has its own way of saving: it knows nothing of a rank's part alone."""
    if saver != TORCHS:
        raise ConfigError(f"--checkpoint_dir {PREFIX}DIR is not available on this backend; leave it out")


def compatible_with(durable: Sequence[str], mesh: Any) -> dict[str, Any]:
    """Return the facts that must match for a rank's part to be loadable: ranks, mesh, durable folders and names."""
    ours = {"world_size": world_size(), "rank": rank(), "mesh": mesh, "durable": sorted(map(normal, durable))}
    return {**ours, "names": HUGGING_FACE}


class NodeLocalCheckpoint(Checkpoint):
    """A checkpoint of which each rank has its own part."""

    @property
    def durable(self) -> bool:
        """Whether it outlives a node."""
        return False

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """Fill ``state`` in place; it must be laid out as it was when it was saved. Collective."""

        def load_mine() -> None:
            with alone():
                Checkpoint.load(self, local_part(state), saver)

        gather(f"cannot load {self.path}", load_mine)


def find_newest(
    location: str, folders: Sequence[str], *, run: RunId, mesh: Any, strict: bool, rename: bool = True
) -> Checkpoint | None:
    """Return what to resume from at ``location``, or on the nodes' own disks where that is newer. Collective.

    In a folder only checkpoints of ``run`` count. ``folders`` are all that the run saves to; the nodes' own are looked
    at where ``location`` is one of the others. Errors are those of `find`.
    """
    found = find(location, strict=strict, run=run, rename=rename)
    near = [folder for folder in folders if is_node_local(folder)]
    durable = [folder for folder in folders if not is_node_local(folder)]
    if near and normal(location) in map(normal, durable):
        step = -1 if found is None else found.step
        found = _find_near(near, compatible_with(durable, mesh), run, step) or found
    return found


def _find_near(
    folders: Sequence[str], wanted: dict[str, Any], run: RunId, at_least: int
) -> NodeLocalCheckpoint | None:
    """Return the newest step, from ``at_least`` on, of which every rank has its part, intact. Collective."""

    def steps_of(folder: str) -> dict[int, str]:
        return {entry.step: entry.name for entry in reversed(committed(storage_of(folder), run))}

    parts = gather("cannot resume", lambda: list(map(steps_of, folders)))
    mine = parts[rank()]
    every = {(step, number) for part in parts for number, names in enumerate(part) for step in names}
    for step, number in sorted(every, reverse=True):
        if step < at_least:
            break
        if not all(step in part[number] for part in parts):
            logger.info("Step %d in %s is passed over: not every rank finds its part", step, folders[number])
            continue
        found, problem = _open(storage_of(folders[number]), mine[number][step], wanted)
        problems = [each for each in gather("cannot resume", partial(unless, None, problem)) if each]
        if not problems:
            return found
        logger.warning("Step %d in %s is passed over: %s", step, folders[number], problems[0], extra=ALL_RANKS)
    return None


def _open(
    storage: CheckpointFolder, name: str, wanted: dict[str, Any]
) -> tuple[NodeLocalCheckpoint | None, str | None]:
    """Return this rank's part, or what is wrong with it."""
    try:
        with alone():
            found = open_intact(storage, name)
    except (CheckpointError, OSError) as error:
        return None, str(error)
    if found.meta.get(NODE_LOCAL) != wanted:
        return None, "it was saved by another run, or on another mesh"
    part = NodeLocalCheckpoint(found.path, found.step, found.meta, found.committed, storage, name, verified=True)
    return part, None
