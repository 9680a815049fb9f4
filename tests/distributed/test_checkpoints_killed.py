"""Kill -9 at every stage of a save, in a folder and in S3: what was committed is found, and training goes on from it.

A cell is who is killed, at which stage, where, and whether the save is in the background. Two ranks train and save
after every step, and are killed in the save of the third; then the same program starts again. Tested are the cells of
`FEW`, in which every two of these meet but for some who at some stage; with SMP_TRAIN_WHOLE_TABLE=1, as `make
test-table` has it, all of them.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train import distributed
from smp_train.checkpoints import folder as folder_module
from smp_train.checkpoints import save as save_module
from smp_train.checkpoints.find import open_checkpoint
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.owner import Ownership
from smp_train.distributed import host_copy
from smp_train.distributed.job import Job
from smp_train.models.hub_state import gather_state
from tests.checkpoint_files import committed, keys, manager, resumed
from tests.harness import RankFailed, run
from tests.s3_server import bucket, there
from tests.small_model import digests, group, prepare, same_on_all, train

WORLD, KILLED_IN, LAST = 2, 3, 4
ON_EVERY_RANK = ("copy", "write", "checksum")
STAGES = ("copy", "stage", "write", "checksum", "commit", "publish", "retain")
"""The copy is of saves in the background only. What is not `ON_EVERY_RANK` rank 0 does alone; the others wait."""


class Cell(NamedTuple):
    victims: tuple[int, ...]
    stage: str
    place: str
    asynchronous: bool

    def __str__(self) -> str:
        who = "all" if len(self.victims) == WORLD else f"rank{self.victims[0]}"
        return f"{who}-{self.stage}-{self.place}-{'async' if self.asynchronous else 'sync'}"

    @property
    def newest(self) -> int:
        """The step that is committed when this has happened."""
        published = self.stage == "retain"
        # A peer that is lost while rank 0 commits takes nothing back: all of it is written.
        goes_on = self.stage in ("commit", "publish") and 0 not in self.victims
        return KILLED_IN if published or goes_on else KILLED_IN - 1


WHO = ((0,), (1,), (0, 1))
PLACES = ("folder", "s3")
ALL = [cell for cell in itertools.starmap(Cell, itertools.product(WHO, STAGES, PLACES, (False, True)))
       if cell.asynchronous or cell.stage != "copy"]  # fmt: skip
FEW = [
    Cell((WHO[0], WHO[1 + i // 2 % 2])[j], stage, PLACES[(i + j) % 2], stage == "copy" or (i + i // 2 + j) % 2 == 1)
    for (i, stage), j in itertools.product(enumerate(STAGES), (0, 1))
]
"""Each stage meets rank 0 and one of the others who may be killed."""
CELLS = ALL if os.environ.get("SMP_TRAIN_WHOLE_TABLE") == "1" else FEW


class Killer:
    """Called with the stages that a rank comes to; kills ``cell.victims`` in the save ``KILLED_IN``.

    Making one is collective. Where all come to a stage and all are killed, they are when all have come there.
    """

    def __init__(self, cell: Cell, meeting: Path) -> None:
        self.cell, self.meeting, self.seen, self.rank = cell, meeting, 0, dist.get_rank()
        self.processes: list[Any] = [None] * WORLD
        dist.all_gather_object(self.processes, os.getpid())

    def __call__(self, stage: str) -> None:
        self.seen += stage == self.cell.stage
        if stage != self.cell.stage or self.seen != KILLED_IN:
            return
        if stage in ON_EVERY_RANK:
            if self.rank not in self.cell.victims:
                return
            if self.cell.victims == (self.rank,):
                os.kill(os.getpid(), signal.SIGKILL)
            (self.meeting / str(self.rank)).touch()
            while self.rank != 0 or len(list(self.meeting.iterdir())) < WORLD:
                time.sleep(0.002)
        for victim in reversed(self.cell.victims):
            os.kill(self.processes[victim], signal.SIGKILL)

    def before(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` as the work of ``stage``."""

        def reached(*args: Any) -> Any:
            self(stage)
            return function(*args)

        return reached


def training(place: str, asynchronous: bool, killer: Killer | None = None) -> dict[int, dict[str, str]]:
    """Start or go on, and save after every step; the state, hashed, as it was found and after every step."""
    job = Job("the job", restarts=0 if killer else 1)
    owners: list[Ownership] = []

    def acquire() -> int:
        owners.append(Ownership([open_folder(place)], job))
        owners[0].acquire()
        return owners[0].generation

    if killer is not None:
        RunFolder.begin = killer.before("stage", RunFolder.begin)  # type: ignore[method-assign]
        host_copy._copy = killer.before("copy", host_copy._copy)
    generation = distributed.on_main("starting", acquire)
    saver = manager(
        place, 1, 2, "m", owner=next(iter(owners), None), generation=generation, asynchronous=asynchronous,
        on_stage=killer or (lambda stage: None),
    )  # fmt: skip
    try:
        found = resumed(place, strict=True)
        model, optimizer = prepare("fsdp", seed=1 if found is None else 2)
        states = {}
        if found is not None:
            found.load(gather_state(model, optimizer))
            states[found.step] = digests(model, optimizer)
        optimizer.register_step_pre_hook(lambda *_: saver.staged())
        for step in range(found.step + 1 if found else 1, LAST + 1):
            train(model, optimizer, range(step, step + 1))
            if killer is None:
                states[step] = digests(model, optimizer)
            saver.save(step, gather_state(model, optimizer), {"step_was": step})
        saver.finish()
    finally:
        saver.close()
    return states


def killed(place: str, cell: Cell, meeting: Path) -> None:
    # Who outlives a peer lets what is being committed come to its end, however long that takes here.
    save_module.ABANDON_SECONDS = 600.0
    with group():
        training(place, cell.asynchronous, Killer(cell, meeting))


def all_in_turn(places: list[tuple[str, bool]]) -> list[dict[int, dict[str, str]]]:
    with group():
        return [training(place, asynchronous) for place, asynchronous in places]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the whole table
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_stage_loses_nothing_and_training_goes_on_as_if_it_had_not_been(
    server, tmp_path, monkeypatch, request, place
):
    root = bucket(server, monkeypatch, request.node.nodeid) if place == "s3" else str(tmp_path / "folder")
    cells = {f"{root}/{cell}": cell for cell in CELLS if cell.place == place}
    for where, cell in cells.items():
        meeting = tmp_path / "meeting" / str(cell)
        meeting.mkdir(parents=True)
        with pytest.raises(RankFailed) as failed:
            run(there, WORLD, server.url, killed, where, cell, meeting)
        for victim in cell.victims:
            assert f"rank {victim}: no result (exit code -9, late: False)" in str(failed.value), cell
        assert open_checkpoint(where).step == cell.newest, cell
        for name in committed(where):
            assert open_checkpoint(f"{where}/{name}").verify() == [], cell
    starts = [(f"{tmp_path}/straight", False), *((where, cell.asynchronous) for where, cell in cells.items())]
    straight, *resumed_states = same_on_all(run(there, WORLD, server.url, all_in_turn, starts, timeout=900))
    assert sorted(straight) == [1, 2, 3, 4]
    monkeypatch.setattr(folder_module, "IN_FLIGHT_SECONDS", -math.inf)
    for (where, cell), states in zip(cells.items(), resumed_states, strict=True):
        assert states == {step: straight[step] for step in range(cell.newest, LAST + 1)}, cell
        open_folder(where).sweep(10**6)  # in S3 its last requests may have been on their way: a start leaves them
        kept = committed(where)
        assert [open_checkpoint(f"{where}/{name}").step for name in kept] == [4, 3], cell
        assert {name.partition("/")[0] for name in keys(where)} == set(kept), cell
