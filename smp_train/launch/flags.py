"""Training flags as launchers complete them, so that a run that is started again resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from smp_train import storage
from smp_train.arguments import Resolved, parse, validate
from smp_train.arguments.parse import canonical, read_config, read_smp_config
from smp_train.arguments.run_name import CHECKPOINT_NAME, CHECKPOINTS
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.distributed.degrees import fewest_ranks
from smp_train.errors import SmpTrainError
from smp_train.models.resolve import settled_flags


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


def complete(
    words: Sequence[str], environ: Mapping[str, str] | None = None, *, base: str = ""
) -> tuple[list[str], Resolved]:
    """Return ``words`` with what a restart of the run needs, and how they then read; complete words stay as they are.

    A run without a name gets the name of its run folder, or else of its model. With ``base``, an absolute path, a
    relative run folder and the default folder of checkpoints are below it. Without --resume_from_checkpoint the run
    resumes from its first folder of checkpoints that outlives a node. Training itself prefers the run's own newest
    checkpoint to any other, so a --resume_from_checkpoint of the user's is kept at every restart.

    Raises `ConfigError` as `smp_train.arguments.parse` does.
    """
    environ = {} if environ is None else environ
    completed, resolved = list(words), parse(words, environ)
    if not resolved.args.run_name:
        folder = os.path.basename(os.path.normpath(resolved.args.run_dir)) if resolved.given("run_dir") else ""
        completed.append(f"--run_name={folder or resolved.args.label}")
    run_dir = parse(completed, environ).args.run_dir
    if base and not os.path.isabs(run_dir):
        completed = [*without(completed, {"run_dir"}), f"--run_dir={os.path.normpath(os.path.join(base, run_dir))}"]
    if base and not resolved.given("checkpoint_dir"):
        completed.append(f"--checkpoint_dir={os.path.join(base, CHECKPOINTS)}")
    durable = [place for place in parse(completed, environ).args.checkpoint_dir if not place.startswith(NODE_LOCAL)]
    if durable and not resolved.given("resume_from_checkpoint"):
        completed.append(f"--resume_from_checkpoint={durable[0]}")
    return completed, parse(completed, environ)


def newest_step(parents: Sequence[str], run_name: str) -> int:
    """Return the step of the run's newest committed checkpoint below the folders ``parents``, 0 without one.

    The newest has the highest generation, and the highest step in that generation.

    Raises `SmpTrainError` when S3 cannot be asked: a later start may be able to ask it.
    """
    newest = (0, 0)
    for parent in parents:
        with suppress(OSError):  # this machine cannot read the folder
            run = storage.at(f"{parent}/{run_name}", SmpTrainError)
            for name in filter(CHECKPOINT_NAME.fullmatch, run.level()[1]):
                if run.exists(marker := f"{name}/COMMITTED"):
                    newest = max(newest, _generation_and_step(run.read(marker)))
    return newest[1]


def _generation_and_step(marker: bytes) -> tuple[int, int]:
    """Return (generation, step) of a COMMITTED marker; (0, 0) for a marker that cannot be read."""
    try:
        fields = json.loads(marker)
        return int(fields.get("generation", 1)), int(fields["step"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, 0


def check(words: Sequence[str]) -> None:
    """Raise `ConfigError` for training flags that are wrong for any number of processes."""
    args = parse(words, {}).args
    validate(args, fewest_ranks(args))
    settled_flags(args)  # an unknown preset
