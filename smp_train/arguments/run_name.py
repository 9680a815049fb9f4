"""The name of a run, and the folders that follow from it."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

RUNS, CHECKPOINTS = "runs", "checkpoints"
"""Default parents: of run folders, and of the runs' folders of checkpoints."""
CHECKPOINT_NAME = re.compile(r"(?P<model_type>.+)-(?P<step>\d+)steps(-(?P<attempt>[0-9a-f]+))?")
"""Names of the checkpoints in a run's folder of checkpoints."""


def is_run_name(text: str) -> bool:
    """Return whether a text can name a run: it becomes a folder below ``runs/`` and ``checkpoints/``.

    ``best`` is reserved: it names a checkpoint of any run.
    """
    return text.isprintable() and text.rpartition("/")[2] != "best" and not {"", ".", ".."} & set(text.split("/"))


def named(resolved: Resolved, name: str, source: str) -> Resolved:
    """Return the settings of a run of that name, with the run folder that follows; ``source`` tells its origin."""
    follows = resolved.args.run_dir == f"{RUNS}/{resolved.args.run_name}" and not resolved.given("run_dir")
    args = dataclasses.replace(resolved.args, run_name=name, run_dir="" if follows else resolved.args.run_dir)
    sources = dict(resolved.sources)
    if not resolved.args.run_name:
        sources["run_name"] = source
    if args.run_dir != resolved.args.run_dir:
        sources["run_dir"] = "follows from --run_name"
    return dataclasses.replace(resolved, args=args, sources=sources)
