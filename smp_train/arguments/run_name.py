"""The name of a run, and the folders that follow from it."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_train.arguments.groups import Arguments
    from smp_train.arguments.parse import Resolved

RUNS, CHECKPOINTS = "runs", "checkpoints"
"""Folders that hold the folders of runs, by default."""
CHECKPOINT_NAME = re.compile(r"(?P<model_type>.+)-(?P<step>\d+)steps(-(?P<attempt>[0-9a-f]+))?")
"""Names of the checkpoints in a run's folder of checkpoints."""
BEST = "best"
"""The name by which every verb finds a run's best checkpoint in that folder."""


def is_run_name(text: str) -> bool:
    """Return whether a text can name a run: it becomes a folder below ``runs/`` and ``checkpoints/``."""
    return text.isprintable() and not {"", ".", ".."} & set(text.split("/"))


def fresh_names(args: Arguments) -> Iterator[str]:
    """Yield names that no other run has now; with an explicit run folder the one that goes with it."""
    label = f"{args.label}-{time.strftime('%Y%m%d')}"
    if args.run_dir:
        yield f"{label}-{hashlib.sha256(os.path.realpath(args.run_dir).encode()).hexdigest()[:6]}"
        return
    for number in itertools.count(1):
        name = f"{label}-{number}"
        if not any(os.path.exists(os.path.join(folder, name)) for folder in (RUNS, *args.checkpoint_dir)):
            yield name


def named(resolved: Resolved, name: str, source: str) -> Resolved:
    """Return the settings of a run of that name, with the folders that follow; ``source``: where the name is from."""
    args = dataclasses.replace(resolved.args, run_name=name)
    sources = dict(resolved.sources)
    if not resolved.args.run_name:
        sources["run_name"] = source
    if args.run_dir != resolved.args.run_dir:
        sources["run_dir"] = "follows from --run_name"
    return dataclasses.replace(resolved, args=args, sources=sources)
