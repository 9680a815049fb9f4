"""Names that another start takes between this one's look at the folders and its claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smp_train import arguments, distributed
from smp_train.checkpoints.owner import Ownership
from smp_train.errors import CheckpointError, ConfigError
from smp_train.run import naming
from tests.checkpoint_files import save
from tests.training import flags


def settled(monkeypatch: pytest.MonkeyPatch, other: Any, folder: Path, **changes: Any) -> naming.Start:
    """Choose a run's name while ``other`` is called with its folders before the first claim."""
    calls = [other]

    class Overtaken(Ownership):
        def acquire(self, **more: Any) -> None:
            for call in calls:
                calls.clear()
                call(self.folders)
            super().acquire(**more)

    monkeypatch.setattr(naming, "Ownership", Overtaken)
    ranks = distributed.detect({})
    start = naming.settle(arguments.parse(flags(folder, **{"run_name": None, **changes}), {}), ranks)[1]
    assert start.owner is not None
    start.owner.release()
    return start


def test_a_name_that_a_living_job_has_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living: list[Ownership] = []

    def take(folders: Any) -> None:
        living.append(Ownership(folders))
        living[0].acquire()

    assert settled(monkeypatch, take, tmp_path).name.endswith("k-2")
    living[0].check()
    living[0].release()
    with pytest.raises(CheckpointError, match="in use"):
        settled(monkeypatch, lambda folders: Ownership(folders).acquire(), tmp_path, run_name="given")


def test_a_name_that_a_finished_run_has_taken_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folders: Any) -> None:
        owner = Ownership(folders)
        owner.acquire()
        save(folders[0].location, 1)
        owner.release()

    assert settled(monkeypatch, run, tmp_path).name.endswith("k-2")
    with pytest.raises(ConfigError, match="--run_name given: is taken"):
        settled(monkeypatch, run, tmp_path, run_name="given")
