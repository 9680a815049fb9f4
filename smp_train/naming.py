"""Identity of a run: its name, id and folders, and the run whose checkpoints it resumes from."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.run_name import CHECKPOINTS, RUNS, fresh_names, named
from smp_train.checkpoints import Checkpoint, RunId
from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.discovery import is_one_checkpoint, newest_readable
from smp_train.checkpoints.manifest import parse_folder_name
from smp_train.checkpoints.node_local import is_node_local, storage_of
from smp_train.checkpoints.runs import Origin, origin, summary
from smp_train.distributed import Runtime
from smp_train.distributed.environment import LAUNCH
from smp_train.errors import CheckpointError, ConfigError, DataError, redacted
from smp_train.models.resolve import resolve
from smp_train.storage import normal
from smp_train.telemetry.metrics import read_metrics
from smp_train.telemetry.run_folder import RunFolder


@dataclass(frozen=True)
class Start:
    """The identity of a run and the origin of its first step."""

    run: RunId
    origin: Origin | None
    """The checkpoints to resume from; None for a fresh start."""
    made: bool = False
    """Whether this start drew the name and made the run folder."""

    @property
    def continues(self) -> bool:
        """Whether this is the run that wrote these checkpoints, rather than a new one that starts from them."""
        return self.origin is not None and self.origin.run.name == self.run.name

    def forget(self, kind: type[BaseException] | None, *_: object) -> None:
        """Be the exit of a context: remove folders that this start made where configuration or data end it.

        Where it has written ``run.json``, or anything but an empty folder of checkpoints, that stays.
        """
        folder = RunFolder(os.path.join(RUNS, self.run.name))
        if self.made and kind is not None and issubclass(kind, ConfigError | DataError) and not folder.read_run():
            shutil.rmtree(folder.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(CHECKPOINTS, self.run.name))


def settle(resolved: Resolved, ranks: Runtime) -> tuple[Resolved, Start]:
    """Determine the run's name, id and folders; collective.

    The name is the one given, else that of the run to resume, else that of the run in an explicit run folder, else a
    fresh one. The id is that of the checkpoints to resume if they are of a run of this name, else a fresh one. An
    evaluation does not take the name of the run to resume, whose run folder may be in use by training.
    """
    start = distributed.on_main("choosing the run's name", lambda: _choose(resolved))
    resolved = named(resolved, start.run.name, "the run that is resumed" if start.continues else "a fresh name")
    if start.origin is not None and normal(resolved.args.resume_from_checkpoint or "") != start.origin.place:
        resolved.args.resume_from_checkpoint = start.origin.place
    return resolved, start


def _choose(resolved: Resolved) -> Start:
    args = resolved.args
    name = args.run_name
    if not name and args.run_dir:
        name = RunFolder(args.run_dir).run_name()
    found = None if args.resume_from_checkpoint is None else _origin(args, args.resume_from_checkpoint, name)
    if found is not None and found.run.name and not name and not args.evaluate_only:
        name = found.run.name
        found = _origin(args, args.resume_from_checkpoint or "", name)  # its own folder may hold a later one
    made = not name and not args.run_dir
    name = name or fresh_name(args)
    if found is not None and found.run.id and found.run.name == name:
        return Start(found.run, found)
    return Start(RunId.fresh(name), found, made)


def _origin(args: Arguments, place: str, name: str) -> Origin | None:
    durable = [folder for folder in args.checkpoint_dir if not is_node_local(folder)]
    near = [storage_of(folder) for folder in args.checkpoint_dir if is_node_local(folder)]
    places, own = [place], durable
    if not args.checkpoint_dir or args.checkpoint_dir == [f"{CHECKPOINTS}/{name}"]:
        own = [f"{CHECKPOINTS}/{name}"] if name else []
        if normal(place) == normal(CHECKPOINTS):  # the folder of all runs
            inside = [each for each in open_folder(CHECKPOINTS).names() if parse_folder_name(each) is None]
            places += own if name else [f"{CHECKPOINTS}/{each}" for each in inside]
            own = [*own, CHECKPOINTS]
    if is_one_checkpoint(normal(place)):  # that one, and no other
        own = []
    return origin(places, name=name, own=own, near=near, model_type=lambda: resolve(args).model_type)


def fresh_name(args: Arguments) -> str:
    """Return an unused name and create its run folder; with an explicit run folder, the name derived from that."""
    if args.run_dir:
        return next(fresh_names(args))
    try:
        os.makedirs(RUNS, exist_ok=True)
        for name in fresh_names(args):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(RUNS, name))
                return name
    except OSError as failure:
        raise ConfigError(f"{RUNS}: cannot make the run folder ({failure.strerror}); set --run_dir") from None
    raise AssertionError("there is always a next number")


def output(args: Arguments) -> str:
    """Return a line on where the run writes."""
    run = args.run_dir
    return (
        f"Run folder: {run} (metrics.jsonl, logs; `smp-train report {shlex.quote(run)}` draws it); "
        f"checkpoints: {', '.join(args.checkpoint_dir)}"
    )


def checkpoints_line(args: Arguments, start: Start, found: Checkpoint | None) -> str:
    """Return a line on the content of the checkpoint folders and the run's use of them. Not collective."""
    run = start.run
    held = [f"{folder} holds {summary(folder, run)}" for folder in args.checkpoint_dir if not is_node_local(folder)]
    if args.evaluate_only:
        of = "the initial weights" if found is None else f"step {found.step} of {found.path}"
        return f"Checkpoints: {'; '.join(held)}. Run {run.name} ({run.id}) evaluates {of} and saves nothing"
    if found is None:
        does = "begins at step 0"
    elif start.continues:
        does = f"goes on from its step {found.step}"
    else:
        does = f"begins from step {found.step} of {found.path}"
    kept = ", ".join(f"the newest {keep}" if keep > 0 else "all" for keep in args.num_kept_checkpoints)
    keeps = f"keeps {kept} of its own and leaves all others alone"
    return f"Checkpoints: {'; '.join(held)}. Run {run.name} ({run.id}) {does}, {keeps}"


def in_the_way(resolved: Resolved, start: Start, ranks: Runtime) -> str:
    """Return a warning of a new run in the run folder of another that has trained, "" where there is none.

    Not collective, and before ``run.json`` is written.
    """
    folder = RunFolder(resolved.args.run_dir)
    before = folder.read_run()
    whose, config = before.get("run") or {}, before.get("config") or {}
    if resolved.args.evaluate_only or start.continues or whose.get("id", start.run.id) == start.run.id:
        return ""
    step = max((each.get("step") or 0 for each in read_metrics(folder.path)), default=0)
    if not step:
        return ""
    run, places = RunId(whose["name"], whose["id"]), config.get("checkpoint_dir") or []
    durable = [place for place in places if not is_node_local(place)]
    found = None
    with contextlib.suppress(CheckpointError, OSError):  # what cannot be read is no reason to end
        found = next(filter(None, (newest_readable(place, run) for place in durable)), None)
    said = f"{folder.path} holds another run, {run.name} ({run.id}), up to step {step}; this start is a new run in it"
    if found is None:
        return f"{said}, and reports show both as one; to keep them apart, give another --run_name or --run_dir"
    flags = {"resume_from_checkpoint": durable[:1], "checkpoint_dir": places}
    if not resolved.given("run_name") or resolved.by_keywords or resolved.args.run_name != run.name:
        flags["run_name"] = [run.name]
    how = _again(resolved, ranks, flags)
    return f"{said}. To go on from step {found.step} of that one: {how}"


def how_to_resume(resolved: Resolved, ranks: Runtime) -> str:
    """Return the command that resumes this run, the same one or with flags added."""
    args = resolved.args
    folder = next(folder for folder in args.checkpoint_dir if not is_node_local(folder))
    from_there = normal(args.resume_from_checkpoint or "") == normal(folder)
    if from_there and (resolved.given("run_name") or resolved.given("run_dir")):
        return f"run the same {'program' if resolved.by_keywords else 'command'} again to go on"
    named = {} if resolved.given("run_name") and not resolved.by_keywords else {"run_name": [args.run_name]}
    there = {} if from_there and not resolved.by_keywords else {"resume_from_checkpoint": [folder]}
    return f"to go on: {_again(resolved, ranks, named | there)}"


def _again(resolved: Resolved, ranks: Runtime, flags: dict[str, list[str]]) -> str:
    """Return the command, or the call, that this run was started with, and ``flags`` added."""
    if resolved.by_keywords:
        given = ((name, values if len(values) > 1 else values[0]) for name, values in flags.items())
        return redacted(f"train(..., {', '.join(f'{name}={value!r}' for name, value in given)})")
    words = list(sys.orig_argv)
    if ranks.launcher in ("torchrun", LAUNCH):
        with contextlib.suppress(OSError):  # torchrun itself
            words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return redacted(shlex.join([*words, *(word for name, values in flags.items() for word in (f"--{name}", *values))]))
