"""Record of the samples of each step on each rank; evidence that each sample is used exactly once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from smp_train.errors import ConfigError


class DataAudit:
    """Appends to ``data_audit-rank<r>.jsonl`` the identities of the samples that this rank consumed in each step.

    One line per optimizer step, ``{"step": 12, "samples": ["train-00003.json.gz:17", ...], "attempt": 1, "dp_rank": 0,
    "dp_size": 8}``, in order of use. A run that resumes from an earlier step writes later steps again, which replaces
    the lines of earlier attempts for these steps, those of ranks that no longer exist included.

    ``attempt`` numbers the starts of the run, equally on all ranks. Ranks of equal ``dp_rank`` read the same samples.
    """

    def __init__(self, run_dir: str | Path, rank: int, attempt: int, dp_rank: int, dp_size: int) -> None:
        self._writer = {"attempt": attempt, "dp_rank": dp_rank, "dp_size": dp_size}
        path = Path(run_dir) / f"data_audit-rank{rank}.jsonl"
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as failure:
            raise ConfigError(f"{path}: cannot write the audit there ({failure.strerror}); set --run_dir") from None

    def step(self, step: int, samples: Sequence[str]) -> None:
        """Record the samples of one finished update."""
        self._file.write(json.dumps({"step": step, "samples": list(samples), **self._writer}) + "\n")
        self._file.flush()

    def skip(self, first: int, last: int) -> None:
        """Record that the updates of the steps ``first`` to ``last`` are not in the weights."""
        self._file.write(json.dumps({"skipped": [first, last], **self._writer}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
