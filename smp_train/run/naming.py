"""The start of a run: its name, its claim on the checkpoint folders, and the checkpoint that it goes on from.

One rule: a run goes on from its own newest checkpoint; if it has none, it begins from the run or checkpoint that
--resume_from_checkpoint itself is; else at step 0. The name decides whose checkpoints are the run's own. A start
without that flag is a new run, unless it is a restart of the run's job; `launch` always passes the flag.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.run_name import RUNS, named
from smp_train.checkpoints.checkpoint import Checkpoint, Damaged, opened
from smp_train.checkpoints.collective import root_cause
from smp_train.checkpoints.find import Location, locate, newest_in, open_checkpoint
from smp_train.checkpoints.folder import Committed, RunFolder, folder_of_run, open_folder
from smp_train.checkpoints.format import parse_folder_name
from smp_train.checkpoints.node_local import is_node_local
from smp_train.checkpoints.owner import InUse, Ownership, claim_file, look_at_owner, owner_of
from smp_train.checkpoints.pretrained import kind_of
from smp_train.distributed import Runtime
from smp_train.distributed.environment import LAUNCH
from smp_train.distributed.job import Job
from smp_train.errors import CheckpointError, ConfigError, DataError, first_few, redacted
from smp_train.models.flops import count_parameters
from smp_train.models.resolve import names_model, resolve
from smp_train.storage import is_s3, normal, parent_of
from smp_train.storage.probe import check_writable
from smp_train.telemetry.run_folder import RunFolder as OutputFolder


class Candidate(NamedTuple):
    """A committed checkpoint that the run may go on from; the newest is the largest."""

    generation: int
    step: int
    folder: str
    name: str


@dataclass(frozen=True)
class Start:
    """What a run is called and what its first step follows."""

    name: str
    continues: bool
    """Whether the run goes on from its own checkpoints, if it has any."""
    candidates: tuple[Candidate, ...] = ()
    """Its own durable checkpoints, newest first; if it has none, those of the run or checkpoint that it begins from."""
    is_own: bool = True
    """Whether the candidates are the run's own."""
    described: Checkpoint | None = None
    """The newest candidate that can be opened, for its metadata."""
    taken_name: str = ""
    """The name that the flags give, if another run has that name already."""
    went_back: bool = False
    """Whether --resume_from_checkpoint names an older checkpoint of the run itself."""
    is_one_checkpoint: bool = False
    """Whether --resume_from_checkpoint names the candidate, so that no other one takes its place if it is damaged."""
    elsewhere: str | None = None
    """The location of --resume_from_checkpoint if it holds no checkpoint for this run; AWS's sample's may be there."""
    other_runs: tuple[str, ...] = ()
    """Runs in the folder of --resume_from_checkpoint, if this run has nothing to go on from."""
    pretrained: str | None = None
    """The checkpoint that --pretrained_checkpoint_file means."""
    made_run_folder: bool = False
    """Whether ``runs/<name>`` did not exist before."""
    generation: int = 0
    owner: Ownership | None = None
    """On rank 0 of a run that saves."""

    @property
    def newest(self) -> Candidate | None:
        """The first candidate."""
        return self.candidates[0] if self.candidates else None

    def forget(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave a context: if the start failed in it for its input, delete the folders that it made."""
        if kind is not None and issubclass(kind, ConfigError | DataError | CheckpointError) and self.owner is not None:
            _undo(self.owner)
            if self.made_run_folder and not OutputFolder(f"{RUNS}/{self.name}").read_run():
                shutil.rmtree(f"{RUNS}/{self.name}", ignore_errors=True)


def _undo(owner: Ownership) -> None:
    """Release a claim, and delete the run's folders that hold nothing else."""
    owner.release()
    for folder in owner.folders:
        with contextlib.suppress(OSError, CheckpointError):
            if owner.generation == 1 and not folder.names():
                folder.storage.delete(claim_file(owner.generation))
                os.rmdir(folder.location)  # a folder in S3 is gone by now


def settle(resolved: Resolved, ranks: Runtime) -> tuple[Resolved, Start]:
    """Choose the run's name and the checkpoints to go on from, and claim its folders; collective.

    Rank 0 searches once and the other ranks get the answer.
    """
    owners: list[Ownership] = []

    def choose() -> Start:
        try:
            return _choose(resolved, owners)
        except BaseException as error:
            for owner in owners:
                _undo(owner)
            if isinstance(error, OSError):
                what = f"cannot start: {root_cause(error)}; give another --checkpoint_dir"
                raise CheckpointError(what) from error
            raise

    start = distributed.on_main("choosing the run's name", choose)
    if owners:
        start = replace(start, owner=owners[0])
    resolved = named(resolved, start.name, "the model's type and parameters")
    return replace(resolved, args=_with_pretrained(resolved.args, start.pretrained)), start


def _choose(resolved: Resolved, owners: list[Ownership]) -> Start:
    args = resolved.args
    asked = None if args.resume_from_checkpoint is None else locate(args.resume_from_checkpoint)
    pretrained = _pretrained(args)
    args = _with_pretrained(args, pretrained)
    base, is_given = _base_name(resolved, args, asked)
    parents = [parent for parent in args.checkpoint_dir if not is_node_local(parent)]
    if args.evaluate_only:
        start = _origin(base, asked, [folder_of_run(parent, base) for parent in parents], asked is not None, None)
        # Its records do not belong into the run folder of the run that it evaluates.
        is_that_run = any(candidate.folder.endswith(f"/{base}") for candidate in start.candidates)
        name = base if is_given and not is_that_run else f"{base}-evaluation"
        return replace(start, name=name, pretrained=pretrained, described=_newest_readable(start))
    job = Job.current()
    while True:
        name = _free_name(args, base, parents, job, is_given=is_given, asked=asked)
        owner = Ownership([folder_of_run(parent, name) for parent in parents], job)
        for folder in owner.folders:
            check_writable(folder.storage, "checkpoint_dir")
        parts = [folder_of_run(parent, name) for parent in args.checkpoint_dir if is_node_local(parent)]
        above = max((part.generation for folder in parts for part in folder.committed()[:1]), default=0)
        try:
            owner.acquire(force=args.break_checkpoint_lock, above=above)
        except InUse:
            if is_given or asked is not None:
                raise
            continue  # another start has taken the name since
        owners[:] = [owner]
        if asked is not None or owner.restarted or not any(owner.committed):
            break
        owner.release()  # another run has taken the name since, and has ended
    start = _origin(name, asked, owner.folders, asked is not None or owner.restarted, owner)
    return replace(
        start, pretrained=pretrained, generation=owner.generation, taken_name=base if name != base else "",
        made_run_folder=not os.path.exists(f"{RUNS}/{name}"), described=_newest_readable(start),
    )  # fmt: skip


def _newest_readable(start: Start) -> Checkpoint | None:
    for candidate in start.candidates:
        with contextlib.suppress(Damaged):
            return opened(open_folder(candidate.folder), candidate.name)
    return None


def _pretrained(args: Arguments) -> str | None:
    """Return the path of the checkpoint of ours that a flag names as the weights; else --pretrained_checkpoint_file.

    The flag may name the checkpoint by its run or as the run's best.
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
    """Return the settings with the checkpoint that `_pretrained` returned."""
    if checkpoint == args.pretrained_checkpoint_file:
        return args
    if args.pretrained_checkpoint_file is None:  # a flag for models names the checkpoint
        args = replace(args, finetune=True, hf_pretrained_model_name_or_dir=None, pretrained_model_name=None)
    return replace(args, pretrained_checkpoint_file=checkpoint)


def _base_name(resolved: Resolved, args: Arguments, asked: Location | None) -> tuple[str, bool]:
    """Return the name by flags or by the model, and whether the user gave it.

    A name that a launcher derives (`Arguments.label`) is not the user's.
    """
    if args.run_name:
        return args.run_name, args.run_name != args.label
    if resolved.given("run_dir") and (name := OutputFolder(args.run_dir).run_name()):
        return name, False
    if asked is not None and not names_model(args):
        runs = asked.runs
        if len(runs) > 1:
            raise ConfigError(
                f"--resume_from_checkpoint {args.resume_from_checkpoint}: holds {len(runs)} runs, and no flag names "
                f"the run or its model; give --run_name, one of {first_few(runs, most=8)}"
            )
        if runs:
            return runs[0], False
        if asked.kind in ("run", "checkpoint"):
            checkpoint = open_checkpoint(asked.path)
            return f"{checkpoint.marker.model_type}-{_rounded(count_parameters(checkpoint.model_config()))}", False
    spec = resolve(args)
    return f"{spec.model_type}-{_rounded(count_parameters(spec.config))}", False


def _rounded(parameters: int) -> str:
    """Return a count as models are called: 6.7b, 124.4m, 31.9k."""
    for unit, size in (("b", 10**9), ("m", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}".removesuffix(".0") + unit
    return str(parameters)


def _free_name(
    args: Arguments, base: str, parents: Sequence[str], job: Job, *, is_given: bool, asked: Location | None
) -> str:
    """Return the run's name: ``base``, or ``base-2`` and so on for a new run if a name of ours is taken.

    Raises `ConfigError` for a taken name that the user gave.
    """
    if asked is not None:
        return base
    free = None
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        folders = [folder_of_run(parent, name) for parent in parents]
        former = owner_of(folders)
        if former is not None and job.is_restart_of(former.job):
            return name
        tiers = [folder_of_run(parent, name) for parent in args.checkpoint_dir]
        taken = next((folder for folder in tiers if folder.has_committed()), None)
        if is_given and taken is not None:
            raise ConfigError(
                f"--run_name {name}: is taken by a run at step {taken.committed()[0].step} in {taken.location}; to go "
                f"on with it, add --resume_from_checkpoint {parents[0]}; for a new run give another --run_name"
            )
        in_use = not is_given and any(look_at_owner(folder, job)[1] is not False for folder in folders)
        if free is None and taken is None and not in_use:
            free = name
        if is_given or (free is not None and former is None and taken is None):
            break
    return base if is_given else free or base


def _origin(
    name: str, asked: Location | None, folders: Sequence[RunFolder], continues: bool, owner: Ownership | None
) -> Start:
    """Return what the run goes on from."""
    found = owner.committed if owner is not None else [folder.committed() for folder in folders]
    own = [candidate for folder, each in zip(folders, found, strict=True) for candidate in _candidates(folder, each)]
    own.sort(reverse=True)
    parent, checkpoint = parent_of(asked.path) if asked is not None else ("", "")
    is_checkpoint = asked is not None and asked.kind in ("checkpoint", "nothing") and parse_folder_name(checkpoint)
    if asked is not None and is_checkpoint and _real(parent) in [_real(folder.location) for folder in folders]:
        # A restart of the job that went back goes on from what the job has saved since.
        job_began = owner.began if owner is not None and owner.restarted else sys.maxsize
        since = [candidate for candidate in own if candidate.generation >= job_began]
        target = [candidate for candidate in own if candidate.name == checkpoint] if since else _one_candidate(asked)
        return Start(name, True, (*since, *target), went_back=not since, is_one_checkpoint=not since)
    if not continues:
        return Start(name, False)
    if own or asked is None:
        return Start(name, True, tuple(own))
    if asked.kind == "runs" and (candidates := _candidates(open_folder(os.path.join(asked.path, name)))):
        return Start(name, True, tuple(candidates), is_own=False)
    if asked.kind == "run" and (candidates := _candidates(asked.folder)):
        return Start(name, True, tuple(candidates), is_own=False)
    if asked.kind == "checkpoint":
        return Start(name, True, tuple(_one_candidate(asked)), is_own=False, is_one_checkpoint=True)
    will_exist = {path for folder in folders for path in (folder.location, folder.location.removesuffix(f"/{name}"))}
    if asked.kind == "nothing" and asked.path not in will_exist:
        raise CheckpointError(f"{asked.path} does not exist; give a folder of runs, a run's folder, or one checkpoint")
    if not is_s3(asked.path) and os.path.isfile(asked.path):
        raise CheckpointError(f"{asked.path} is a file; give a run's folder of checkpoints, or one checkpoint")
    others = tuple(run for run in asked.runs if run != name)
    return Start(name, True, is_own=False, elsewhere=asked.path, other_runs=others)


def _real(path: str) -> str:
    return path if is_s3(path) else os.path.realpath(path)


def _candidates(folder: RunFolder, committed: Sequence[Committed] | None = None) -> list[Candidate]:
    committed = folder.committed() if committed is None else committed
    return [Candidate(*checkpoint[:2], folder.location, checkpoint.name) for checkpoint in committed]


def _one_candidate(asked: Location) -> list[Candidate]:
    """Return the checkpoint that --resume_from_checkpoint names. Raises `CheckpointError` if it is not committed."""
    open_checkpoint(asked.path)
    return [candidate for candidate in _candidates(asked.folder) if candidate.name == asked.name]


# --- what the log says


def _durable(args: Arguments) -> str:
    """Return the first --checkpoint_dir that outlives a node."""
    return next(parent for parent in args.checkpoint_dir if not is_node_local(parent))


def output(args: Arguments) -> str:
    """Return a line on where the run writes."""
    run, parents = args.run_dir, ", ".join(args.checkpoint_dir)
    report = f"`smp-train report {shlex.quote(run)}` draws it"
    return f"Run folder: {run} (metrics.jsonl, logs; {report}); checkpoints: {args.run_name} in {parents}"


def start_line(args: Arguments, start: Start, found: Checkpoint | None) -> str:
    """Return a line on what the run goes on from, and what it keeps."""
    if args.evaluate_only:
        model = "the initial weights" if found is None else f"step {found.step} of {found.path}"
        return f"Run {start.name} evaluates {model} and saves nothing"
    kept = ", ".join(f"the newest {keep}" if keep > 0 else "all" for keep in args.num_kept_checkpoints)
    other = "the same command goes on with it"
    if not start.continues:
        other = f"--resume_from_checkpoint {_durable(args)} goes on with {'that run' if start.taken_name else 'it'}"
    if found is None:
        begins = f"is new{f' ({start.taken_name} is taken)' if start.taken_name else ''}: it begins at step 0"
    elif start.is_own:
        begins = f"goes {'back to' if start.went_back else 'on from'} its step {found.step} ({found.path})"
        other = "another --run_name begins a new run"
    else:
        begins = f"is new: it begins from step {found.step} of {found.path}"
    return f"Run {start.name} {begins}, and keeps {kept} of its checkpoints; {other}"


def nothing_found(args: Arguments, start: Start) -> str:
    """Return a line for a run that asked to go on and has nothing to go on from."""
    line = f"Run {start.name} has no committed checkpoint in {args.resume_from_checkpoint}: it begins at step 0"
    if not start.other_runs:
        return line
    others = first_few(start.other_runs, most=8)
    return f"{line}; runs there: {others} (to go on with one, give its --run_name)"


def other_run_in_folder(args: Arguments, start: Start) -> str:
    """Return a warning if the run folder holds the records of a run of another name, else ""."""
    other = OutputFolder(args.run_dir).run_name()
    if other in ("", start.name) or args.evaluate_only:
        return ""
    return (
        f"{args.run_dir} holds records of run {other}, and reports show both runs as one; to go on with that run give "
        f"--run_name {other} --resume_from_checkpoint {args.checkpoint_dir[0]}, to keep them apart another --run_dir"
    )


def how_to_resume(resolved: Resolved, start: Start, ranks: Runtime) -> str:
    """Return the command that goes on with this run: the same one, or with flags added."""
    args = resolved.args
    parent = _durable(args)
    asks = normal(args.resume_from_checkpoint or "") == normal(parent)
    flags = {} if asks else {"resume_from_checkpoint": parent}
    if start.taken_name:
        flags["run_name"] = args.run_name
    if not flags:
        return f"run the same {'program' if resolved.by_keywords else 'command'} again to go on"
    return f"to go on: {_again(resolved, ranks, flags)}"


def _again(resolved: Resolved, ranks: Runtime, flags: dict[str, str]) -> str:
    """Return the command, or the call, that started this run, with ``flags`` added."""
    if resolved.by_keywords:
        return redacted(f"train(..., {', '.join(f'{name}={value!r}' for name, value in flags.items())})")
    words = list(sys.orig_argv)
    if ranks.launcher in ("torchrun", LAUNCH):
        with contextlib.suppress(OSError):  # torchrun itself
            words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return redacted(shlex.join([*words, *(word for name, value in flags.items() for word in (f"--{name}", value))]))
