"""Log lines of a start: where the run writes, what it resumes from, and how to resume it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path

from smp_train.arguments import Arguments, Resolved
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.node_local import is_node_local
from smp_train.distributed import Runtime
from smp_train.distributed.environment import LAUNCH
from smp_train.errors import first_few, redacted
from smp_train.run.start import Start
from smp_train.storage import normal
from smp_train.telemetry.run_folder import RunFolder


def _durable_parent(args: Arguments) -> str:
    """Return the first --checkpoint_dir that outlives a node."""
    return next(parent for parent in args.checkpoint_dir if not is_node_local(parent))


def output_line(args: Arguments) -> str:
    """Return the line on where the run writes."""
    run, parents = args.run_dir, ", ".join(args.checkpoint_dir)
    report = f"`smp-train report {shlex.quote(run)}` draws it"
    return f"Run folder: {run} (metrics.jsonl, logs; {report}); checkpoints: {args.run_name} in {parents}"


def start_line(args: Arguments, start: Start, checkpoint: Checkpoint | None) -> str:
    """Return the line on the ``checkpoint`` to begin from, the retention, and how to start anew or resume instead."""
    if args.evaluate_only:
        model = "the initial weights" if checkpoint is None else f"step {checkpoint.step} of {checkpoint.path}"
        return f"Run {start.name} evaluates {model} and saves nothing"
    retention = ", ".join(f"the newest {number}" if number > 0 else "all" for number in args.num_kept_checkpoints)
    otherwise = "the same command goes on with it"
    if not start.continues:
        run = "that run" if start.taken_name else "it"
        otherwise = f"--resume_from_checkpoint {_durable_parent(args)} goes on with {run}"
    if checkpoint is None:
        begins = f"is new{f' ({start.taken_name} is taken)' if start.taken_name else ''}: it begins at step 0"
    elif start.is_own:
        begins = f"goes {'back to' if start.went_back else 'on from'} its step {checkpoint.step} ({checkpoint.path})"
        otherwise = "another --run_name begins a new run"
    else:
        begins = f"is new: it begins from step {checkpoint.step} of {checkpoint.path}"
    return f"Run {start.name} {begins}, and keeps {retention} of its checkpoints; {otherwise}"


def nothing_to_resume_line(args: Arguments, start: Start) -> str:
    """Return the line for a run that asked to resume and has no checkpoint."""
    line = f"Run {start.name} has no committed checkpoint in {args.resume_from_checkpoint}: it begins at step 0"
    if not start.other_runs:
        return line
    return f"{line}; runs there: {first_few(start.other_runs, most=8)} (to go on with one, give its --run_name)"


def shared_folder_warning(args: Arguments, start: Start) -> str:
    """Return a warning if the run folder holds the records of a run with another name, else ""."""
    holder = RunFolder(args.run_dir).run_name()
    if holder in ("", start.name) or args.evaluate_only:
        return ""
    return (
        f"{args.run_dir} holds records of run {holder}, and reports show both runs as one; to go on with that run give "
        f"--run_name {holder} --resume_from_checkpoint {args.checkpoint_dir[0]}, to keep them apart another --run_dir"
    )


def how_to_resume(resolved: Resolved, start: Start, ranks: Runtime) -> str:
    """Return the command that resumes this run: the same one, or with flags added."""
    args = resolved.args
    parent = _durable_parent(args)
    flags = {} if normal(args.resume_from_checkpoint or "") == normal(parent) else {"resume_from_checkpoint": parent}
    if start.taken_name:
        flags["run_name"] = args.run_name
    if not flags:
        return f"run the same {'program' if resolved.by_keywords else 'command'} again to go on"
    if resolved.by_keywords:
        return redacted(f"to go on: train(..., {', '.join(f'{name}={value!r}' for name, value in flags.items())})")
    command = list(sys.orig_argv)
    if ranks.launcher in ("torchrun", LAUNCH):
        with contextlib.suppress(OSError):  # the parent process is torchrun; show its command
            command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    added = [token for name, value in flags.items() for token in (f"--{name}", value)]
    return redacted(f"to go on: {shlex.join([*command, *added])}")
