"""Record of the samples of each step on each rank, which shows that each sample was used exactly once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smp_train.storage.json_lines import LineWriter
from smp_train.telemetry.logging_utils import writing


class DataAudit:
    """Appends the samples that this rank consumed in each step to ``data_audit-rank<r>.jsonl``.

    A line is ``{"step": 12, "samples": ["train-00003.json.gz:17", ...], "attempt": 1, "dp_rank": 0, "dp_size": 8}``
    with the samples in order of use. ``attempt`` numbers the starts of the run and is equal on all ranks. A later
    attempt's lines replace all ranks' earlier lines for the same steps. Ranks of equal ``dp_rank`` read the same
    samples.
    """

    def __init__(self, run_dir: str | Path, rank: int, attempt: int, dp_rank: int, dp_size: int) -> None:
        self._writer = {"attempt": attempt, "dp_rank": dp_rank, "dp_size": dp_size}
        self._path = Path(run_dir) / f"data_audit-rank{rank}.jsonl"
        with writing(self._path, "the audit there"):
            self._lines = LineWriter(self._path)

    def step(self, step: int, samples: Sequence[str], **counts: int) -> None:
        """Record a finished update's samples and nonzero ``counts``. `check` raises the error of a failed write."""
        self._write({"step": step, "samples": list(samples), **{name: n for name, n in counts.items() if n}})

    def skip(self, first: int, last: int) -> None:
        """Record that the updates of steps ``first`` to ``last`` are not in the weights. `check` raises the error."""
        self._write({"skipped": [first, last]})

    def check(self) -> None:
        """Raise `ConfigError` if a record could not be written. Other ranks can go on until this is called."""
        if self._lines.failure is not None:
            with writing(self._path, "the audit there"):
                raise self._lines.failure

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._lines.write(json.dumps(record | self._writer))
