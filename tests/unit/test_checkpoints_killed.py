"""A kill, or a full disk, at any operation on files leaves every committed checkpoint intact; a later job goes on."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.folder import open_folder
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.errors import CheckpointError
from smp_train.run.start import Start
from tests.checkpoint_files import (
    committed,
    files,
    flipped,
    harm,
    keys,
    loaded,
    owning,
    resumed,
    save,
    split,
    state,
)
from tests.killing import operations_until_full, operations_until_killed
from tests.tiers import core


class Case(NamedTuple):
    """What there is before, what the process does that is killed, and the steps resumed from afterwards, in order."""

    before: Callable[[Path], object]
    work: Callable[[Path], object]
    steps: list[int]
    least: int
    """Operations that it has at least."""


def start(place: Path, step: int) -> None:
    """Start a job, save a step, keep one, and end."""
    with owning(place, force=True, keep=1) as saver:
        saver.save(step, state(step), {"tokens": step * 10})


def killed_in_a_save(place: Path) -> None:
    """Let there be step 3, and what a job left that was killed in its save of step 6."""
    start(place, 3)
    folder = open_folder(place)
    folder.put(folder.begin("llama_v2", 6, 1), "__0_0.distcp", b"half")


def damaged(place: Path) -> None:
    """Let there be steps 3 and 6, the newest one damaged."""
    save(place, 3, 6)
    harm(place, "llama_v2-6steps", ".distcp", flipped)


def two_tiers(place: Path) -> None:
    """Save step 6 on the node's disk, then in the shared folder, and keep one."""
    parent, name = split(place)
    policies = [Policy(f"local:{parent}/near", 1, 1), Policy(parent, 1, 1)]
    saver = CheckpointManager(policies, run_name=name, model_type="llama_v2")
    saver.save(6, state(6), {"tokens": 60})


CASES = {
    "first save": Case(lambda place: None, lambda place: start(place, 6), [0, 6], 40),
    "save": Case(lambda place: save(place, 1, 2, 3), lambda place: save(place, 6, keep=2), [3, 6], 40),
    "sweep and save": Case(killed_in_a_save, lambda place: start(place, 6), [3, 6], 50),
    "save of a step again": Case(lambda place: start(place, 6), lambda place: start(place, 6), [6], 40),
    "delete": Case(lambda place: save(place, 3, 6), lambda place: open_folder(place).delete("llama_v2-3steps"), [6], 6),
    "sweep": Case(killed_in_a_save, lambda place: open_folder(place).sweep(9), [3], 4),
    "mark": Case(damaged, resumed, [3], 4),
    "two tiers": Case(lambda place: save(place, 3), two_tiers, [3, 6], 60),
}


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that the kernel has; `operations_until_killed` counts these calls all the same."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.slow
@pytest.mark.parametrize("case", core(CASES, lambda case: case in ("sweep and save", "delete")))
def test_a_kill_at_any_operation_loses_nothing(tmp_path: Path, case: str) -> None:
    damaged = "llama_v2-6steps" if case == "mark" else ""
    assert ended_at_every_operation(tmp_path, CASES[case], operations_until_killed, damaged) == CASES[case].steps


@pytest.mark.slow
@pytest.mark.parametrize("case", ["first save", "save", "sweep and save", "save of a step again", "two tiers"])
def test_a_disk_that_is_full_at_any_operation_loses_nothing(tmp_path: Path, case: str) -> None:
    """The save fails, or is whole; once there is room again, a job goes on."""

    def work(place: Path) -> None:
        try:
            CASES[case].work(place)
        except (OSError, CheckpointError) as error:
            if os.strerror(errno.ENOSPC) not in str(error):
                raise

    full = CASES[case]._replace(work=work)
    assert ended_at_every_operation(tmp_path, full, operations_until_full) == full.steps


def ended_at_every_operation(
    tmp_path: Path, case: Case, operations_until: Callable[[Callable[[], object], int], int | None], damaged: str = ""
) -> list[int]:
    """End a case's work after each number of operations, and check what is left; return the steps resumed from."""
    case.before(tmp_path / "before" / "run")
    (tmp_path / "before").mkdir(exist_ok=True)
    after, outcomes, operations = 0, [], None
    while operations is None:
        place = tmp_path / str(after) / "run"
        shutil.copytree(tmp_path / "before", place.parent)
        operations = operations_until(lambda place=place: case.work(place), after)  # type: ignore[misc]
        for name in committed(place):
            if name != damaged:
                assert open_verified(place / name).name == name, f"ended after {after} operations"
        outcomes.append(loaded(place) if committed(place) else 0)
        start(place, 7)  # and a later job goes on, and tidies up
        assert loaded(place) == 7
        ours = files(*committed(place))
        assert [key for key in keys(place) if key not in ours and not key.endswith("DAMAGED")] == []
        after += 1
    assert outcomes == sorted(outcomes)
    assert operations >= case.least
    return sorted(set(outcomes))


def test_a_kill_at_any_operation_of_a_start_leaves_a_run_that_can_be_started(tmp_path: Path) -> None:
    """Also where the start fails by itself, and tidies up."""
    from smp_train.checkpoints.owner import Ownership
    from smp_train.errors import ConfigError

    def fail(place: Path) -> None:
        owner = Ownership([open_folder(place)])
        owner.acquire(force=True)
        Start("run", False, generation=owner.generation, owner=owner).delete_new_folders(ConfigError)

    for number, before in enumerate((lambda place: None, lambda place: start(place, 3))):
        after, operations = 0, None
        while operations is None:
            place = tmp_path / str(number) / str(after) / "run"
            before(place)
            operations = operations_until_killed(lambda place=place: fail(place), after)  # type: ignore[misc]
            assert [open_verified(place / name).step for name in committed(place)] == [3] * number
            start(place, 7)
            assert loaded(place) == 7
            after += 1
        assert operations > 6
