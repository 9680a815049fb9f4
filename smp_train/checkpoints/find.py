"""Find out what a location holds, and open the checkpoint it refers to."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from smp_train.checkpoints.checkpoint import Checkpoint, Damaged, opened, verified
from smp_train.checkpoints.collective import on_main
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.format import BEGUN, BEST, COMMITTED, DAMAGED, META, NODE_LOCAL, parse_folder_name
from smp_train.checkpoints.owner import claims_in
from smp_train.distributed.agree import rank
from smp_train.errors import CheckpointError, first_few
from smp_train.storage import is_s3, normal, parent_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Location:
    """A path or S3 prefix, and what it holds.

    Attributes:
        path: the location in normal form.
        kind: ``checkpoint`` (finished or not), ``run`` (a run's folder), ``runs`` (a folder with the folders of several
            runs), ``other`` (no checkpoint of this program) or ``nothing``.
        name: the checkpoint's name in its run's folder; empty for other kinds.
    """

    path: str
    kind: str
    name: str = ""

    @property
    def runs(self) -> list[str]:
        """Names of the runs in a folder of runs."""
        return list(_runs_in(self.path)) if self.kind == "runs" else []

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return open_folder(parent_of(self.path)[0] if self.name else self.path)


def locate(location: str | os.PathLike[str]) -> Location:
    """Return what a location holds; ``<run folder>/best`` means the run's best checkpoint. Not collective."""
    path = normal(location)
    parent, name = parent_of(path)
    if name == BEST and is_run_folder(run := open_folder(parent)):
        name = best_of(run)
        return Location(os.path.join(parent, name), "checkpoint", name)
    files, folders = open_folder(path).storage.level()
    if not files and not folders and (is_s3(path) or not os.path.exists(path)):
        return Location(path, "nothing")
    if {COMMITTED, BEGUN, META} & set(files) and name:
        return Location(path, "checkpoint", name)
    if is_run_folder(open_folder(path)):
        return Location(path, "run")
    is_runs = parse_folder_name(name) is None and any(True for _ in _runs_in(path))
    return Location(path, "runs" if is_runs else "other")


def _runs_in(path: str) -> Iterator[str]:
    for name in open_folder(path).storage.level()[1]:
        if not name.startswith(".") and is_run_folder(open_folder(f"{path}/{name}")):
            yield name


def is_run_folder(folder: RunFolder) -> bool:
    """Return whether a job has claimed a folder, or the folder holds an attempt of this program."""
    if claims_in(folder):
        return True
    storage = folder.storage
    return any(storage.exists(f"{name}/{file}") for name in folder.names() for file in (COMMITTED, BEGUN))


def best_of(folder: RunFolder) -> str:
    """Return the name of a run's best checkpoint, which the newest checkpoint records. Raises `CheckpointError`."""
    committed = folder.committed()
    for newest in committed[:1]:
        step = (opened(folder, newest.name).meta.get("best") or {}).get("step")
        names = [checkpoint.name for checkpoint in committed if checkpoint.step == step]
        if names:
            return names[0]
        if step is not None:
            raise CheckpointError(f"{folder.location}: step {step} was the best, and is not kept without --keep_best 1")
    raise CheckpointError(f"{folder.location}: no best checkpoint is known; train with --validation_freq")


def newest_in(location: str | os.PathLike[str]) -> tuple[RunFolder, str]:
    """Return the checkpoint that a location means, as its run's folder and its name. Does not open it. Not collective.

    A run's folder, or a parent of just one run, means the run's newest checkpoint. Raises `CheckpointError`.
    """
    target = locate(location)
    if target.kind == "runs":
        runs = [os.path.join(target.path, run) for run in target.runs]
        if len(runs) > 1:
            raise CheckpointError(f"{target.path} holds {len(runs)} runs; name one of them: {first_few(runs)}")
        target = Location(runs[0], "run")
    if target.kind == "checkpoint":
        return target.folder, target.name
    if target.kind == "run":
        for newest in target.folder.committed()[:1]:
            return target.folder, newest.name
        raise CheckpointError(f"{target.path} holds no committed checkpoint")
    if target.kind == "nothing":
        raise CheckpointError(f"{target.path} does not exist; give a checkpoint or a run's folder of checkpoints")
    file = not is_s3(target.path) and os.path.isfile(target.path)
    reason = "is a file" if file else "holds no checkpoint of this program"
    raise CheckpointError(f"{target.path} {reason}; give a checkpoint or a run's folder of checkpoints")


def open_checkpoint(location: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint that a location means (see `newest_in`), but verify only file sizes and meta.json.

    Not collective. Raises `CheckpointError` if it is not committed, or if a size or meta.json contradicts COMMITTED.
    """
    folder, name = newest_in(location)
    try:
        return opened(folder, name)
    except CheckpointError as error:
        raise _with_others(error, folder, name) from None


def open_verified(location: str | os.PathLike[str]) -> Checkpoint:
    """Open and verify the checkpoint that a location means (see `newest_in`), so that its tensors can be read.

    All code that reads weights from this program's checkpoints calls this function. Collective. Raises
    `CheckpointError` on every rank if the checkpoint is missing, uncommitted or damaged, or is one rank's part only.
    """
    path = normal(location)
    folder, name = on_main(f"cannot open {path}", lambda: newest_in(path))
    try:
        checkpoint = verified(folder, name)
    except Damaged as error:
        raise _with_others(error, folder, name) from None
    if NODE_LOCAL in checkpoint.meta:
        raise CheckpointError(
            f"{checkpoint.path} is one rank's part of a checkpoint, and only its run can use it; give a checkpoint "
            "from a folder that all nodes share"
        )
    return checkpoint


def _with_others(error: CheckpointError, folder: RunFolder, name: str) -> CheckpointError:
    names = [checkpoint.name for checkpoint in folder.committed() if checkpoint.name != name]
    known = f"complete ones in {folder.location}: {first_few(names)}" if names else ""
    return type(error)(f"{error}; {known or f'no other complete one is in {folder.location}'}")


def open_intact(location: str, name: str, *, strict: bool, mark: bool) -> Checkpoint | None:
    """Open and verify one checkpoint of a run's folder; return None, with a warning, if it is damaged. Collective.

    With ``strict``, raises `CheckpointError` instead. Otherwise ``mark`` adds the file DAMAGED to a damaged checkpoint.
    """
    folder = open_folder(location)
    try:
        return verified(folder, name)
    except Damaged as damage:
        if strict:
            raise _with_others(damage, folder, name) from None
        if rank() == 0:
            logger.warning("%s; trying the next older one", damage)
            if mark:
                try:
                    if not folder.is_marked_damaged(name):
                        folder.put(name, DAMAGED, f"{damage}\n".encode())
                except (OSError, CheckpointError) as error:
                    logger.warning("%s/%s cannot be marked as damaged: %s", location, name, error)
        return None
