"""Training flags as launchers complete them: all files of a run below its run folder, and always resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from smp_train import storage
from smp_train.arguments import Resolved, parse, validate
from smp_train.arguments.aliases import ALIASES
from smp_train.arguments.parse import canonical, read_config, read_smp_config
from smp_train.arguments.run_name import CHECKPOINT_NAME
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.distributed.degrees import fewest_ranks
from smp_train.errors import SmpTrainError
from smp_train.models.resolve import settled_flags

RESUME = {"resume_from_checkpoint", *(a.name for a in ALIASES if a.ours == ("resume_from_checkpoint",))}


def without(words: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without the flags ``names`` and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        dropping = _name(word) in names if word.startswith("--") else dropping
        kept += [] if dropping else [word]
    return kept


def _name(word: str) -> str:
    return canonical(word[2:].partition("=")[0])


def as_words(name: str, value: Any) -> list[str]:
    """Return a flag and its value, of any type that a file or a mapping gives it, as words of a command line."""
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [] if value is None else [f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"]


def inline_files(words: Sequence[str]) -> list[str]:
    """Return ``words`` with ``--config`` and ``--smp_config`` expanded to flags, for a container without these files.

    The command line's own flags come last, and so take precedence.
    """
    args = parse(words, {}).args
    files = [
        *(read_config(args.config) if args.config else []),
        *(read_smp_config(args.smp_config) if args.smp_config else []),
    ]
    named = {_name(word) for word in words if word.startswith("--")}
    flags = [word for given in files if given.name not in named for word in as_words(given.name, given.value)]
    return [*flags, *without(words, {"config", "smp_config"})]


def named(words: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Return ``words`` with a name for the run, so that the same launch again goes on with it.

    A run without one is called as its run folder, and without that as the model.
    """
    resolved = parse(words, {} if environ is None else environ)
    if resolved.args.run_name:
        return list(words)
    folder = os.path.basename(os.path.normpath(resolved.args.run_dir)) if resolved.given("run_dir") else ""
    return [*words, f"--run_name={folder or resolved.args.label}"]


def newest_committed(folders: Sequence[str], run_name: str = "", *, in_s3: bool = False) -> tuple[int, str | None]:
    """Return (step, folder) of the newest committed checkpoint of a run below ``folders``; (0, None) without one.

    ``in_s3``: ask S3 too, for folders that are there; they are passed over otherwise.
    """
    found: tuple[int, str | None] = (0, None)
    for folder in folders if in_s3 else [folder for folder in folders if "://" not in folder]:
        with suppress(OSError):  # of no use to this machine
            step = _newest_step(storage.at(folder, SmpTrainError), run_name)
            found = max(found, (step, folder), key=lambda each: each[0])
    return found


def _newest_step(folder: storage.Storage, run_name: str) -> int:
    """Return the step of the run's newest committed checkpoint in a folder, 0 without one.

    Raises `SmpTrainError`, which a later start may not meet again, when S3 cannot be asked.
    """
    names = folder.level()[1]
    steps = ((int(match["step"]), name) for name in names if (match := CHECKPOINT_NAME.fullmatch(name)))
    for step, name in sorted(steps, reverse=True):
        marker = f"{name}/COMMITTED"
        if folder.exists(marker) and _is_of(folder.read(marker), run_name):
            return step
    return 0


def _is_of(committed: bytes, run_name: str) -> bool:
    """Return whether COMMITTED is of a run of that name, or says nothing of its run."""
    try:
        run = json.loads(committed).get("run", {})
        return not run_name or run.get("name", run_name) in ("", run_name)
    except (ValueError, AttributeError):
        return True


def complete(
    words: Sequence[str], environ: Mapping[str, str] | None = None, *, in_s3: bool = False
) -> tuple[list[str], Resolved]:
    """Return ``words`` with what makes the run survive being started again, and how they then read.

    The run has a name, and its checkpoints go below the run folder, unless the flags say otherwise. It resumes from
    its own newest checkpoint as soon as there is one, also where the user named another one to start from: that has
    been used by then. ``in_s3`` is for where the run starts: a machine that only submits it may have no access.

    Raises `ConfigError` as `smp_train.arguments.parse` does.
    """
    environ = {} if environ is None else environ
    completed = named(words, environ)
    resolved = parse(completed, environ)
    if not resolved.given("checkpoint_dir") and resolved.sources["checkpoint_dir"] != "SageMaker":
        completed.append(f"--checkpoint_dir={resolved.args.run_dir}/checkpoints")
    # What a node keeps on its own disk is found by the run itself, beside the folder that all share.
    own = [place for place in parse(completed, environ).args.checkpoint_dir if not place.startswith(NODE_LOCAL)]
    ask = in_s3 and resolved.given("resume_from_checkpoint")
    _, folder = newest_committed(own, resolved.args.run_name, in_s3=ask)
    if own and (folder is not None or not resolved.given("resume_from_checkpoint")):
        completed = without(completed, RESUME)
        completed.append(f"--resume_from_checkpoint={folder or own[0]}")
    return completed, parse(completed, environ)


def check(words: Sequence[str]) -> None:
    """Raise `ConfigError` for training flags that are wrong for any number of processes."""
    args = parse(words, {}).args
    validate(args, fewest_ranks(args))
    settled_flags(args)  # an unknown preset
