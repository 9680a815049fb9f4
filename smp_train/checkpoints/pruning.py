"""Old checkpoints of a run are deleted, and what its interrupted saves left."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack

from smp_train.checkpoints.commit import UNKNOWN, CheckpointFolder, open_folder
from smp_train.checkpoints.discovery import open_checkpoint
from smp_train.checkpoints.manifest import RunId
from smp_train.checkpoints.owner import Owner
from smp_train.checkpoints.runs import committed, run_of
from smp_train.errors import CheckpointError, ConfigError

ABANDONED_SECONDS = 3600.0
"""Unfinished files that have not changed for so long belong to no save in progress."""


def deleting(
    storage: CheckpointFolder, *, run_name: str | None, keep: int, kinds: Collection[str], dry: bool
) -> Iterator[str]:
    """Delete all but the newest committed checkpoints of a run and its best; give a line for each that goes.

    Args:
        storage: The folder.
        run_name: Name or id of the run, needed where the folder holds several.
        keep: How many of each model type stay, at least 1.
        kinds: `DAMAGED` and `ABANDONED`: markers of checkpoints set aside that go as well.
        dry: Only say what would go.
    """
    if keep < 1:
        raise ConfigError(f"--keep {keep}: the last committed checkpoint is never deleted; give at least 1")
    runs = {entry.run for entry in committed(storage)}
    if run_name:
        # Of a run that committed nothing, what its saves left is known by the name.
        runs = {run for run in runs if run_name in (run.name, run.id)} or {RunId.fresh(run_name)}
    elif len(runs) > 1:
        known = ", ".join(sorted(f"{run} ({run.id or 'no id'})" for run in runs))
        raise ConfigError(f"{storage.location} holds checkpoints of several runs: {known}; name one with --run_name")
    for run in runs or {UNKNOWN}:
        yield from _of_run(open_folder(storage.location, run), keep=keep, kinds=kinds, dry=dry)


def _of_run(storage: CheckpointFolder, *, keep: int, kinds: Collection[str], dry: bool) -> Iterator[str]:
    deleted = "would delete" if dry else "deleted"
    with ExitStack() as stack:
        if not dry:
            owner = Owner(storage, advice="what interrupted saves left there stays")
            try:
                owner.acquire()
            except CheckpointError as held:
                yield str(held)
            else:
                stack.callback(owner.release)
                yield from storage.sweep(ABANDONED_SECONDS)
        seen: Counter[str] = Counter()
        entries = committed(storage, storage.run)
        best = _best_of(storage, entries[0].name) if entries else None
        for entry in entries:
            seen[entry.model_type] += 1
            if seen[entry.model_type] > keep and entry.step != best:
                if not dry:
                    storage.delete(entry.name)
                yield f"{deleted} {entry.name}"
        for kind in kinds:
            for name in storage.aside(kind):
                if run_of(storage, name)[0] in (storage.run, UNKNOWN):
                    if not dry:
                        storage.drop_aside(name, kind)
                    yield f"{deleted} {name}, which is {kind}"


def _best_of(storage: CheckpointFolder, newest: str) -> int | None:
    """Return the step that the run keeps by --keep_best, as its newest checkpoint says."""
    try:
        meta = open_checkpoint(os.path.join(storage.location, newest)).meta
        return meta["best"]["step"] if meta["arguments"]["keep_best"] else None
    except (CheckpointError, KeyError, TypeError):
        return None
