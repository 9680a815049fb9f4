"""The name of a run, and the folders that follow from it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

RUNS, CHECKPOINTS = "runs", "checkpoints"
"""Default parents of run folders, and of the runs' folders of checkpoints."""
CHECKPOINT_NAME = re.compile(r"(?P<model_type>.+)-(?P<step>\d+)steps(-(?P<attempt>[0-9a-f]+))?")
"""Names of the checkpoints in a run's folder of checkpoints."""


def is_run_name(text: str) -> bool:
    """Return whether a text can name a run: it becomes a folder below ``runs/`` and ``checkpoints/``.

    ``best`` is reserved: it names a checkpoint of any run.
    """
    return text.isprintable() and text.rpartition("/")[2] != "best" and not {"", ".", ".."} & set(text.split("/"))


def with_run_name(resolved: Resolved, name: str, source: str) -> Resolved:
    """Return the settings with the run's name and run folder; ``source`` is their source if no flag gave a name."""
    args, sources = resolved.args, resolved.sources
    if args.run_dir in ("", f"{RUNS}/{args.run_name}") and not resolved.given("run_dir"):
        resolved = resolved.with_values("follows from --run_name", run_dir=f"{RUNS}/{name}")
    return resolved.with_values(sources["run_name"] if args.run_name else source, run_name=name)
