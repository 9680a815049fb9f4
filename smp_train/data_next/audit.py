"""Proof by a run's ``data_audit`` files that it used each sample once per epoch and left no step out."""

from __future__ import annotations

from pathlib import Path


def audit(run: Path, rows: int | None = None) -> int:
    """Check that a run used each sample once per epoch and left no step out; print the result, return the exit code."""
    raise NotImplementedError
