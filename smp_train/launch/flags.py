"""Training flags as launchers complete them: everything of a run below its run folder, and always resumable."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_train.arguments import Resolved, parse
from smp_train.arguments.aliases import ALIASES
from smp_train.arguments.parse import canonical, read_config, read_smp_config

RESUME = {"resume_from_checkpoint", *(a.name for a in ALIASES if a.ours == ("resume_from_checkpoint",))}


def without(words: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without the flags ``names`` and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = canonical(word[2:].partition("=")[0]) in names
        if not dropping:
            kept.append(word)
    return kept


def inline_files(words: Sequence[str]) -> list[str]:
    """Return ``words`` with what ``--config`` and ``--smp_config`` say as flags: the container has not these files.

    What the command line says itself comes last, and so still wins.
    """
    args = parse(words, {}).args
    files = [
        *(read_config(args.config) if args.config else []),
        *(read_smp_config(args.smp_config) if args.smp_config else []),
    ]
    said = {name for word in words if word.startswith("--") for name in [canonical(word[2:].partition("=")[0])]}
    flags: list[str] = []
    for given in files:
        if given.value is None or given.name in said:
            continue
        if isinstance(given.value, list):
            flags += [f"--{given.name}", *map(str, given.value)]
        else:
            flags.append(f"--{given.name}={json.dumps(given.value) if isinstance(given.value, dict) else given.value}")
    return [*flags, *without(words, {"config", "smp_config"})]


def newest_committed(folders: Sequence[str]) -> tuple[int, str | None]:
    """Return (step, folder) of the newest committed checkpoint below local ``folders``; (0, None) without one."""
    found: tuple[int, str | None] = (0, None)
    for folder in folders:
        if "://" in folder:
            continue
        for marker in Path(folder).glob("*steps/COMMITTED"):
            match = re.search(r"-(\d+)steps$", marker.parent.name)
            if match and int(match[1]) > found[0]:
                found = int(match[1]), folder
    return found


def complete(words: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[list[str], Resolved]:
    """Return ``words`` with what makes the run survive being started again, and how they then read.

    Checkpoints go below the run folder unless told otherwise. The run resumes from its own newest checkpoint as
    soon as there is one, also where the user named another one to start from: that has been used by then.

    Raises `ConfigError` as `smp_train.arguments.parse` does.
    """
    environ = {} if environ is None else environ
    resolved = parse(words, environ)
    completed = list(words)
    if resolved.sources["checkpoint_dir"] == "default":
        completed.append(f"--checkpoint_dir={resolved.args.run_dir}/checkpoints")
    own = parse(completed, environ).args.checkpoint_dir
    _, folder = newest_committed(own)
    if folder is not None or not resolved.given("resume_from_checkpoint"):
        completed = without(completed, RESUME)
        completed.append(f"--resume_from_checkpoint={folder or own[0]}")
    return completed, parse(completed, environ)
