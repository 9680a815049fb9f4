"""Training flags, completed so that a run that is started again resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from smp_train.arguments import Arguments, Resolved, parse
from smp_train.arguments.groups import flags
from smp_train.arguments.parse import canonical, read_config, read_smp_config
from smp_train.arguments.run_name import CHECKPOINTS
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.checkpoints.folder import folder_of_run
from smp_train.errors import CheckpointError, SmpTrainError


def flag_name(argument: str) -> str:
    """Return the name of a flag as a command line has it, with underscores."""
    return canonical(argument[2:].partition("=")[0])


def without(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without the flags ``names`` and their values."""
    remaining: list[str] = []
    dropping = False
    for argument in arguments:
        dropping = flag_name(argument) in names if argument.startswith("--") else dropping
        remaining += [] if dropping else [argument]
    return remaining


def as_arguments(name: str, value: Any) -> list[str]:
    """Return a flag and its value, of any type from a file or a mapping, as arguments of a command line."""
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [] if value is None else [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def inline_files(arguments: Sequence[str]) -> list[str]:
    """Return a command line with ``--config`` and ``--smp_config`` expanded to flags: a container lacks these files.

    The command line's flags come last, and so take precedence.
    """
    args = parse(arguments, {}).args
    settings = read_config(args.config) if args.config else []
    settings += read_smp_config(args.smp_config) if args.smp_config else []
    overridden = {flag_name(argument) for argument in arguments if argument.startswith("--")}
    flags: list[str] = []
    for setting in settings:
        flags += as_arguments(setting.name, setting.value) if setting.name not in overridden else []
    return [*flags, *without(arguments, {"config", "smp_config"})]


def complete(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None, *, base: str = ""
) -> tuple[list[str], Resolved]:
    """Return training flags completed so that a restarted run resumes, as arguments and parsed; idempotent.

    - A run without a name takes the name of its run folder, else of its model.
    - A relative run folder and the default --checkpoint_dir are placed below ``base``, an absolute path.
    - Without --resume_from_checkpoint the run resumes from the first --checkpoint_dir that outlives a node. A flag that
      the user gave is kept at every restart, because training prefers the run's newest checkpoint.

    Raises `ConfigError` as `smp_train.arguments.parse` does.
    """
    environ = {} if environ is None else environ
    completed, resolved = list(arguments), parse(arguments, environ)
    if not resolved.args.run_name:
        name = os.path.basename(os.path.normpath(resolved.args.run_dir)) if resolved.given("run_dir") else ""
        completed.append(f"--run_name={name or resolved.args.label}")
    run_dir = parse(completed, environ).args.run_dir
    if base and not os.path.isabs(run_dir):
        completed = [*without(completed, {"run_dir"}), f"--run_dir={os.path.normpath(os.path.join(base, run_dir))}"]
    if base and not resolved.given("checkpoint_dir"):
        completed.append(f"--checkpoint_dir={os.path.join(base, CHECKPOINTS)}")
    durable = durable_folders(parse(completed, environ).args)
    if durable and not resolved.given("resume_from_checkpoint"):
        completed.append(f"--resume_from_checkpoint={durable[0]}")
    return completed, parse(completed, environ)


def durable_folders(args: Arguments) -> list[str]:
    """Return the run's --checkpoint_dir that outlive a node: folders of shared file systems, and S3."""
    return [folder for folder in args.checkpoint_dir if not folder.startswith(NODE_LOCAL)]


def shared_folders(args: Arguments) -> list[str]:
    """Return the run's --checkpoint_dir on file systems that its nodes share."""
    return [folder for folder in durable_folders(args) if "://" not in folder]


def paths_of(args: Arguments, use: str) -> list[str]:
    """Return the values of the flags whose row has this ``use`` as ``path``: ``read`` or ``written``."""
    values = [getattr(args, name) for name, flag in flags().items() if flag.path == use]
    return [path for value in values if value for path in (value if isinstance(value, list) else [value])]


def newest_step(args: Arguments, *, in_s3: bool) -> int:
    """Return the step of the run's newest committed checkpoint that outlives a node, 0 without a checkpoint.

    Without ``in_s3``, checkpoints in S3 are left out: this machine may lack access, or the packages that read S3.

    Raises `SmpTrainError` if S3 does not answer, and never `CheckpointError`, which would end the job for good.
    """
    parents = durable_folders(args) if in_s3 else shared_folders(args)
    try:
        folders = [folder_of_run(parent, args.run_name) for parent in parents]
        newest = [checkpoint[:2] for folder in folders for checkpoint in folder.committed()[:1]]
        return max(newest, default=(0, 0))[1]
    except CheckpointError as error:
        raise SmpTrainError(str(error)) from None
    except OSError:  # this machine cannot read a folder
        return 0


def start_line(args: Arguments) -> str:
    """Return a line on whether the launched run goes on or is new, as far as this machine sees its checkpoints."""
    if step := newest_step(args, in_s3=False):
        return f"run {args.run_name} goes on from its step {step}; another --run_name begins a new run"
    folder = args.checkpoint_dir[0]
    unseen = "" if os.path.isdir(os.path.dirname(folder)) else f", unless {folder} holds checkpoints of it"
    origin = args.resume_from_checkpoint
    begins = "" if origin is None or origin in args.checkpoint_dir else f" and begins from {origin}"
    return f"run {args.run_name} is new{begins}{unseen}; the same command goes on with it"
