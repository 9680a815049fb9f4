"""The short versions of the soaks (tests/soak.py, tests/soak_recovery.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import soak_recovery
from tests.s3_server import environment
from tests.soak import soak


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("folder", marks=pytest.mark.core), "s3"])
def test_a_training_that_is_killed_at_random_moments_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "s3":
        pytest.importorskip("boto3")
        pytest.importorskip("moto.server")
        for name in environment("url"):
            monkeypatch.setenv(name, "")  # `soak` sets it; afterwards it is as before
    done = soak(3, s3=place == "s3", seed=3, folder=tmp_path)
    assert sum(done.killed.values()) - done.killed["a start"] == 3


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_at_random_moments_recovers(tmp_path: Path) -> None:
    done = soak_recovery.soak(5, seed=3, folder=tmp_path)
    assert done.kills.total() == 5
