"""The short version of the soak (tests/soak.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import soak


@pytest.mark.slow
@pytest.mark.core
def test_a_training_that_is_killed_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    done = soak(3, s3=False, seed=3, folder=tmp_path)
    assert sum(done.killed.values()) == 3
