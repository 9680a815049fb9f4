"""Checkpoints by several processes: failures, on all ranks. From any mesh to another: test_round_trips."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.folder import RunFolder
from smp_train.errors import CheckpointError
from smp_train.models.hub_state import gather_state
from smp_train.storage import base
from tests.checkpoint_files import committed, flipped, manager, names, resumed
from tests.harness import run, same_message
from tests.small_model import digests, group, prepare, same_on_all, train


def after_evaluation(folder: str) -> list[str]:
    """Save and load while the root's parameters are gathered from a forward pass alone; return what differs."""
    with group():
        model, optimizer = prepare("fsdp", seed=1)
        train(model, optimizer, range(1))
        expected = digests(model, optimizer)
        with torch.no_grad():
            model(torch.zeros(4, dtype=torch.long))
        manager(folder, 1, 1, "m").save(1, gather_state(model, optimizer), {})
        other, fresh = prepare("fsdp", seed=2)
        with torch.no_grad():
            other(torch.zeros(4, dtype=torch.long))
        open_verified(folder).load(gather_state(other, fresh))
        return [name for name, value in digests(other, fresh).items() if value != expected[name]]


def test_a_save_or_load_right_after_an_evaluation_is_whole(tmp_path):
    assert run(after_evaluation, 2, str(tmp_path)) == [["model.seen"]] * 2, "the buffer counts forward passes"


# --- failures: every rank stops, with the failing rank's message


def failing(folder: str, scenario: str) -> str:
    """Return the message of the CheckpointError that this rank got."""
    with group():
        rank = dist.get_rank()
        state = {"model": {"w": torch.full((1000,), float(rank)), f"only{rank}": torch.ones(3)}}

        def on_stage(stage: str) -> None:
            if scenario == "full" and stage == "write" and rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            if scenario == "unpicklable" and stage == "write" and rank == 1:
                raise RuntimeError("held", lambda: None)
            if scenario == "commit" and stage == "commit":
                raise PermissionError(errno.EACCES, "Permission denied")

        if scenario == "lost" and rank == 0:
            sizes = RunFolder.sizes
            RunFolder.sizes = lambda *a: {k: v for k, v in sizes(*a).items() if not k.startswith("__1_")}

        base.VISIBLE_WITHIN_SECONDS = 0.3
        mine = f"{folder}/node{rank}" if scenario in ("unshared", "probe") else folder
        saver = manager(f"{mine}/run" if scenario in ("unshared", "probe") else mine, 1, 2, "m", on_stage=on_stage)
        if scenario == "mount":
            state = {"model": {f"w{rank}": torch.ones(400_000)}}
        try:
            if scenario == "probe":
                saver.check_folders()
            saver.save(6, state, {})
        except CheckpointError as error:
            dist.barrier()  # the group is still usable: nobody was left inside a collective
            return re.sub(r"/node\d", "", str(error))
        return "saved"


SCENARIOS = {
    "full": r"cannot save .*m-6steps: rank 1 on .*No space left on device",
    "unpicklable": r"cannot save .*m-6steps: rank 1 on .*RuntimeError: \('held'",
    "lost": r"rank 1 on .* wrote __1_0.distcp, which rank 0 does not see",
    "commit": r"rank 0 on .*Permission denied",
    "unshared": r"rank 1 on .* does not see .*the nodes do not share",
    "probe": r"rank 1 on .* is not the folder that rank 0 sees",
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_failure_on_one_rank_stops_all_with_its_message(tmp_path, scenario):
    manager(tmp_path, 1, 2, "m").save(3, {"model": {"w": torch.ones(2)}}, {})
    message = same_message(run(failing, 2, str(tmp_path), scenario))
    assert "\n" not in message
    assert re.search(SCENARIOS[scenario], message)
    assert names(tmp_path) == ["m-3steps"]
    assert open_verified(tmp_path).step == 3


def find_damaged(folder: str) -> tuple[int, str]:
    with group():
        saver = manager(folder, 1, 2, "m")
        for step in (3, 6):
            saver.save(step, {"model": {f"w{dist.get_rank()}": torch.full((50,), float(step))}}, {})
        path = Path(folder, "m-6steps", "__1_0.distcp")
        if dist.get_rank() == 0:
            path.write_bytes(flipped(path.read_bytes()))
        dist.barrier()
        with pytest.raises(CheckpointError) as refusal:
            resumed(folder, strict=True)
        return resumed(folder).step, str(refusal.value)


def test_damage_that_one_rank_sees_is_acted_on_by_all(tmp_path):
    step, message = same_on_all(run(find_damaged, 2, str(tmp_path)))
    assert step == 3
    assert "__1_0.distcp has CRC-32" in message
    assert committed(tmp_path) == ["m-6steps", "m-3steps"]
    assert (tmp_path / "m-6steps" / "DAMAGED").exists()
