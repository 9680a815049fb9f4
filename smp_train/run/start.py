"""The start of a run: its name, its claim on the checkpoint folders, and the checkpoints that it may resume from.

One rule: a run resumes from its own newest checkpoint; without a checkpoint of its own, from the run or checkpoint that
--resume_from_checkpoint names; else it begins at step 0. Checkpoints under the run's name are its own. A start without
that flag is a new run, unless it is a restart of the run's job; `launch` always passes the flag.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.run_name import RUNS, with_run_name
from smp_train.checkpoints.checkpoint import Checkpoint, Damaged, opened
from smp_train.checkpoints.collective import root_cause
from smp_train.checkpoints.find import Location, locate, newest_in, open_checkpoint
from smp_train.checkpoints.folder import Committed, RunFolder, folder_of_run, open_folder
from smp_train.checkpoints.format import parse_folder_name
from smp_train.checkpoints.node_local import is_node_local
from smp_train.checkpoints.owner import InUse, Ownership, claim_file
from smp_train.checkpoints.pretrained import kind_of
from smp_train.distributed import Runtime
from smp_train.distributed.job import Job
from smp_train.errors import CheckpointError, ConfigError, DataError
from smp_train.run.naming import base_name, new_run_name
from smp_train.storage import is_s3, normal, parent_of
from smp_train.storage.probe import check_writable
from smp_train.telemetry.run_folder import RunFolder as OutputFolder


class Candidate(NamedTuple):
    """A committed checkpoint that the run may resume from; the newest is the largest."""

    generation: int
    step: int
    folder: str
    name: str


@dataclass(frozen=True)
class Start:
    """A run's name, its claim, and the checkpoints that it may resume from."""

    name: str
    continues: bool
    """Whether the run resumes if there is a checkpoint: as the flag asks, or because its job was restarted."""
    candidates: tuple[Candidate, ...] = ()
    """Durable checkpoints, newest first: the run's own, or those of the run or checkpoint that it begins from."""
    is_own: bool = True
    """Whether the candidates are this run's own checkpoints, not another run's."""
    newest_readable: Checkpoint | None = None
    """The newest candidate with readable metadata; its tensors are not verified."""
    taken_name: str = ""
    """The name that the flags give, if another run has that name already."""
    went_back: bool = False
    """Whether --resume_from_checkpoint names an older checkpoint of the run itself."""
    is_one_checkpoint: bool = False
    """Whether --resume_from_checkpoint names this one checkpoint: if it is damaged, no other checkpoint is used."""
    without_candidate: str | None = None
    """--resume_from_checkpoint, if this run finds no checkpoint there; it may hold checkpoints of AWS's sample."""
    other_runs: tuple[str, ...] = ()
    """Runs in the folder of --resume_from_checkpoint, if this run has no checkpoint there."""
    pretrained: str | None = None
    """Path of the checkpoint that --pretrained_checkpoint_file refers to."""
    made_run_folder: bool = False
    """Whether this start created the folder ``runs/<name>``."""
    generation: int = 0
    owner: Ownership | None = None
    """The run's claim on its folders; set on rank 0 if the run saves, else None."""

    @property
    def newest(self) -> Candidate | None:
        """The first candidate."""
        return self.candidates[0] if self.candidates else None

    def delete_new_folders(self, error: type[BaseException] | None, *_: object) -> None:
        """Exit callback of a context: delete the folders that this start made, if its input was refused."""
        refused = error is not None and issubclass(error, ConfigError | DataError | CheckpointError)
        if refused and self.owner is not None:
            _withdraw(self.owner)
            if self.made_run_folder and not OutputFolder(f"{RUNS}/{self.name}").read_run():
                shutil.rmtree(f"{RUNS}/{self.name}", ignore_errors=True)


def _withdraw(owner: Ownership) -> None:
    """Release a claim, and delete the run's folders of checkpoints that hold nothing else."""
    owner.release()
    for folder in owner.folders:
        with contextlib.suppress(OSError, CheckpointError):
            if owner.generation == 1 and not folder.names():
                folder.storage.delete(claim_file(owner.generation))
                os.rmdir(folder.location)  # fails in S3, where deleting the claim deletes the folder


def choose_start(resolved: Resolved, ranks: Runtime) -> tuple[Resolved, Start]:
    """Choose the run's name, claim its folders, and list the checkpoints to resume from; collective.

    Rank 0 searches, and broadcasts the result. Returns the settings with that name.
    """
    owners: list[Ownership] = []

    def choose() -> Start:
        try:
            return _choose(resolved, owners)
        except BaseException as error:
            for owner in owners:
                _withdraw(owner)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot start: {root_cause(error)}; give another --checkpoint_dir") from error
            raise

    start = distributed.on_main("choosing the run's name", choose)
    if owners:
        start = replace(start, owner=owners[0])
    resolved = with_run_name(resolved, start.name, "the model's type and parameters")
    return replace(resolved, args=_with_pretrained(resolved.args, start.pretrained)), start


def _choose(resolved: Resolved, owners: list[Ownership]) -> Start:
    """Return the start; append the acquired claim to ``owners`` as soon as it is held. Not collective."""
    args = resolved.args
    resumed = None if args.resume_from_checkpoint is None else locate(args.resume_from_checkpoint)
    pretrained = _pretrained_checkpoint(args)
    args = _with_pretrained(args, pretrained)
    base, is_given = base_name(resolved, args, resumed)
    parents = [parent for parent in args.checkpoint_dir if not is_node_local(parent)]
    if args.evaluate_only:
        start = _find_candidates(base, resumed, [folder_of_run(parent, base) for parent in parents])
        # The evaluation's records do not belong in the run folder of the evaluated run.
        is_evaluated_run = any(candidate.folder.endswith(f"/{base}") for candidate in start.candidates)
        name = base if is_given and not is_evaluated_run else f"{base}-evaluation"
        return replace(start, name=name, pretrained=pretrained, newest_readable=_newest_readable(start))
    job = Job.current()
    while True:
        name = base if resumed is not None else new_run_name(args, base, parents, job, is_given=is_given)
        owner = Ownership([folder_of_run(parent, name) for parent in parents], job)
        for folder in owner.folders:
            check_writable(folder.storage, "checkpoint_dir")
        parts = [folder_of_run(parent, name) for parent in args.checkpoint_dir if is_node_local(parent)]
        above = max((part.generation for folder in parts for part in folder.committed()[:1]), default=0)
        try:
            owner.acquire(force=args.break_checkpoint_lock, above=above)
        except InUse:
            if is_given or resumed is not None:
                raise
            continue  # another start has claimed the name in the meantime
        owners[:] = [owner]
        if resumed is not None or owner.restarted or not any(owner.committed):
            break
        owner.release()  # another run has claimed the name in the meantime, and has ended
    start = _find_candidates(name, resumed, owner.folders, owner)
    return replace(
        start, pretrained=pretrained, generation=owner.generation, taken_name=base if name != base else "",
        made_run_folder=not os.path.exists(f"{RUNS}/{name}"), newest_readable=_newest_readable(start),
    )  # fmt: skip


def _newest_readable(start: Start) -> Checkpoint | None:
    for candidate in start.candidates:
        with contextlib.suppress(Damaged):
            return opened(open_folder(candidate.folder), candidate.name)
    return None


def _pretrained_checkpoint(args: Arguments) -> str | None:
    """Return the path of this program's checkpoint that a flag names as weights; else --pretrained_checkpoint_file.

    The flag may name the checkpoint by its run, or as the run's best.
    """
    file, folder = args.pretrained_checkpoint_file, args.finetune_checkpoint_load_dir
    model = args.hf_pretrained_model_name_or_dir or (args.pretrained_model_name if args.finetune else None)
    location = file if args.finetune and (file or folder) else model
    if not location or kind_of(location) != "ours":
        return file
    run, name = newest_in(location)
    path = os.path.join(run.location, name)
    if args.lora_rank is not None and name != parent_of(normal(location))[1]:
        raise ConfigError(
            f"{location} may mean another checkpoint on a resume, and adapters belong to one; name it, such as {path}"
        )
    return path


def _with_pretrained(args: Arguments, checkpoint: str | None) -> Arguments:
    """Return the settings with the path that `_pretrained_checkpoint` returned."""
    if checkpoint == args.pretrained_checkpoint_file:
        return args
    if args.pretrained_checkpoint_file is None:  # the checkpoint was named by a model flag
        args = replace(args, finetune=True, hf_pretrained_model_name_or_dir=None, pretrained_model_name=None)
    return replace(args, pretrained_checkpoint_file=checkpoint)


def _find_candidates(
    name: str, resumed: Location | None, folders: Sequence[RunFolder], owner: Ownership | None = None
) -> Start:
    """Return the start of a run with its candidates, by the module's rule; ``folders`` are the run's own."""
    committed = owner.committed if owner is not None else [folder.committed() for folder in folders]
    own_candidates = sorted(chain(*map(_candidates, folders, committed)), reverse=True)
    if resumed is None:
        continues = owner is not None and owner.restarted
        return Start(name, continues, tuple(own_candidates) if continues else ())
    parent, checkpoint = parent_of(resumed.path)
    is_checkpoint = resumed.kind in ("checkpoint", "nothing") and parse_folder_name(checkpoint)
    if is_checkpoint and _real(parent) in [_real(folder.location) for folder in folders]:
        # If the job went back to an older checkpoint and was restarted, resume from what it has saved since.
        job_began = owner.began if owner is not None and owner.restarted else sys.maxsize
        since = [candidate for candidate in own_candidates if candidate.generation >= job_began]
        if not since:
            return Start(name, True, _one_candidate(resumed), went_back=True, is_one_checkpoint=True)
        target = [candidate for candidate in own_candidates if candidate.name == checkpoint]
        return Start(name, True, (*since, *target))
    if own_candidates:
        return Start(name, True, tuple(own_candidates))
    if resumed.kind == "checkpoint":
        return Start(name, True, _one_candidate(resumed), is_own=False, is_one_checkpoint=True)
    if resumed.kind in ("run", "runs"):
        path = resumed.path if resumed.kind == "run" else os.path.join(resumed.path, name)
        if candidates := candidates_in(open_folder(path)):
            return Start(name, True, candidates, is_own=False)
    will_exist = {path for folder in folders for path in (folder.location, folder.location.removesuffix(f"/{name}"))}
    if resumed.kind == "nothing" and resumed.path not in will_exist:
        raise CheckpointError(
            f"{resumed.path} does not exist; give a folder of runs, a run's folder, or one checkpoint"
        )  # fmt: skip
    if not is_s3(resumed.path) and os.path.isfile(resumed.path):
        raise CheckpointError(f"{resumed.path} is a file; give a run's folder of checkpoints, or one checkpoint")
    other_runs = tuple(run for run in resumed.runs if run != name)
    return Start(name, True, is_own=False, without_candidate=resumed.path, other_runs=other_runs)


def _real(path: str) -> str:
    return path if is_s3(path) else os.path.realpath(path)


def candidates_in(folder: RunFolder) -> tuple[Candidate, ...]:
    """Return the committed checkpoints of a run's folder, newest first."""
    return _candidates(folder, folder.committed())


def _candidates(folder: RunFolder, committed: Sequence[Committed]) -> tuple[Candidate, ...]:
    return tuple(Candidate(*checkpoint[:2], folder.location, checkpoint.name) for checkpoint in committed)


def _one_candidate(location: Location) -> tuple[Candidate, ...]:
    """Return the checkpoint at a location. Raises `CheckpointError` if it is not committed."""
    open_checkpoint(location.path)
    return tuple(candidate for candidate in candidates_in(location.folder) if candidate.name == location.name)
