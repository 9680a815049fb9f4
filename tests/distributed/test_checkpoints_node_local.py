"""Saves to each node's own disk: used where every rank finds its part, and never instead of a newer durable one."""

from __future__ import annotations

import errno
import shutil
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from smp_train.checkpoints import node_local
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.errors import CheckpointError
from smp_train.models.hub_state import gather_state
from smp_train.run.resume import find_checkpoint
from smp_train.run.start import Candidate, Start
from smp_train.storage.folder import FolderStorage
from tests.checkpoint_files import committed, flipped, names
from tests.harness import RankFailed, run
from tests.small_model import digests, group, prepare, same_on_all
from tests.small_model import train as updates
from tests.training import exact, flags, records, train

MESH = {"shard": 2}


def folders(folder: str) -> list[str]:
    return [f"local:{folder}/near", f"{folder}/far"]


def found(folder: str, mesh: Any = MESH) -> Any:
    """Return the checkpoint that a start goes on from."""
    far = open_folder(f"{folder}/far/run")
    candidates = tuple(Candidate(*each[:2], far.location, each.name) for each in far.committed())
    args = SimpleNamespace(
        strict_resume=0, evaluate_only=0, checkpoint_dir=folders(folder), resume_from_checkpoint=folder
    )
    return find_checkpoint(cast(Any, args), cast(Any, None), Start("run", True, candidates), mesh)[0]


def write(folder: str, layout: str, buddy: int = 0) -> dict[int, dict[str, str]]:
    """Save steps 2 and 3 near, and step 2 far; return the digests of each."""
    with group():
        near, far = folders(folder)
        policies = [Policy(near, 1, 2), Policy(far, 2, 2)]
        manager = CheckpointManager(policies, run_name="run", model_type="m", asynchronous=True, buddy=buddy)
        model, optimizer = prepare(layout, seed=1)
        optimizer.register_step_pre_hook(lambda *_: manager.staged())
        seen = {}
        for step in (1, 2, 3):
            updates(model, optimizer, range(step, step + 1))
            seen[step] = digests(model, optimizer)
            manager.save(step, gather_state(model, optimizer), {"mesh": MESH})
        saved = manager.finish()
        assert [(each.step, each.durable) for each in saved] == [(1, False), (2, False), (2, True), (3, False)]
        manager.close()
        return seen


def read(folder: str, layout: str, mesh: Any = MESH) -> tuple[int, str, dict[str, str], list[str]]:
    """Return the step that is found, its tier, the digests of what is loaded, and the durable files read for it."""
    with group():
        files: list[str] = []
        checksum = RunFolder.checksum

        def counted(self: RunFolder, name: str, file: str, size: int) -> Any:
            files.extend([f"{name}/{file}"] * ("/far/" in self.location))
            return checksum(self, name, file, size)

        RunFolder.checksum = counted  # type: ignore[method-assign]
        model, optimizer = prepare(layout, seed=2)
        checkpoint = found(folder, mesh)
        checkpoint.load(gather_state(model, optimizer))
        where = Path(checkpoint.path).relative_to(folder).parts[0]
        return checkpoint.step, where, digests(model, optimizer), files


def finds(folder: Path, world: int, layout: str, step: int, tier: str, seen: Any, mesh: Any = MESH) -> None:
    """Expect a checkpoint on all ranks, bit for bit; a durable one is verified only when it is chosen, by shares."""
    results = run(read, world, str(folder), layout, mesh)
    assert [result[:3] for result in results] == [(step, tier, seen[step])] * world
    files = [file for *_, read_by_rank in results for file in read_by_rank]
    assert len(set(files)) == len(files), "each rank reads its share"
    assert {file.partition("/")[0] for file in files} == ({f"m-{step}steps"} if tier == "far" else set())


@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp"), pytest.param(4, "tensor", marks=pytest.mark.slow)])
def test_the_same_ranks_resume_from_their_own_disks(tmp_path: Path, world: int, layout: str) -> None:
    seen = same_on_all(run(write, world, str(tmp_path), layout))
    near = tmp_path / "near" / "run"
    assert sorted(path.name for path in near.iterdir()) == [f"rank{r:05d}" for r in range(world)]
    assert names(near / "rank00001") == ["m-2steps", "m-3steps"]
    finds(tmp_path, world, layout, 3, "near", seen)
    for part in ("near/run/rank00001", "near/run/rank00001/m-3steps"):
        with pytest.raises(CheckpointError, match=r"m-3steps is one rank's part of a checkpoint"):
            main(["export", str(tmp_path / part), str(tmp_path / "out")])
    if layout == "fsdp":
        durable_instead(tmp_path, seen)


def durable_instead(folder: Path, seen: dict[int, dict[str, str]]) -> None:
    """On another mesh, after damage, and without a part, the durable one of step 2 is taken, or the near one of it."""
    finds(folder, 2, "fsdp", 2, "far", seen, {"shard": 1, "replicate": 2})
    finds(folder, 1, "plain", 2, "far", seen)
    path = folder / "near" / "run" / "rank00001" / "m-3steps" / "__0_0.distcp"
    path.write_bytes(flipped(path.read_bytes()))
    finds(folder, 2, "fsdp", 2, "near", seen)
    shutil.rmtree(folder / "near" / "run" / "rank00001")  # its node was replaced
    finds(folder, 2, "fsdp", 2, "far", seen)


@pytest.mark.parametrize("newer", [True, False])
def test_an_intact_local_step_is_taken_where_all_durable_ones_are_damaged(tmp_path: Path, newer: bool) -> None:
    seen = same_on_all(run(write, 2, str(tmp_path), "fsdp"))
    path = tmp_path / "far" / "run" / "m-2steps" / "__0_0.distcp"
    path.write_bytes(flipped(path.read_bytes()))
    if not newer:
        for rank in (0, 1):
            shutil.rmtree(tmp_path / "near" / "run" / f"rank{rank:05d}" / "m-3steps")
    finds(tmp_path, 2, "fsdp", 3 if newer else 2, "near", seen)
    for rank in (0, 1):
        shutil.rmtree(tmp_path / "near" / "run" / f"rank{rank:05d}")
    with pytest.raises(RankFailed, match=r"every checkpoint in .* is damaged"):
        run(read, 2, str(tmp_path), "fsdp")
    assert (tmp_path / "far" / "run" / "m-2steps" / "DAMAGED").exists()
    assert (tmp_path / "far" / "run" / "m-2steps" / "COMMITTED").exists()


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [pytest.param(1, marks=pytest.mark.core), 2])
def test_a_lost_node_gets_its_parts_from_the_next_one(tmp_path: Path, per_node: int) -> None:
    """Nodes share a folder here: a node's disk is its ranks' folders."""
    world, near = 2 * per_node, tmp_path / "near" / "run"
    seen = same_on_all(run(write, world, str(tmp_path), "fsdp", per_node))
    disks = [near / f"rank{rank:05d}" for rank in range(world)]
    copies = [disks[rank - per_node] / f"copy-of-rank{rank:05d}" for rank in range(world)]
    assert [names(folder) for folder in disks + copies] == [["m-2steps", "m-3steps"]] * 2 * world
    shutil.copytree(near, tmp_path / "kept")

    def lose_second_node() -> None:
        shutil.rmtree(near)
        shutil.copytree(tmp_path / "kept", near)
        for disk in disks[per_node:]:
            shutil.rmtree(disk)

    lose_second_node()
    finds(tmp_path, world, "fsdp", 3, "near", seen)
    assert all(names(disk) == ["m-3steps"] for disk in disks[per_node:])
    lose_second_node()
    damage(copies[-1] / "m-3steps")
    finds(tmp_path, world, "fsdp", 2, "near", seen)
    lose_second_node()
    shutil.rmtree(copies[-1])
    finds(tmp_path, world, "fsdp", 2, "far", seen)
    damage(disks[0] / "m-3steps")
    finds(tmp_path, world, "fsdp", 2, "far", seen)  # the first node has no copy of its own parts


def damage(checkpoint: Path) -> None:
    (path,) = checkpoint.glob("*.distcp")
    path.write_bytes(flipped(path.read_bytes()))


def copying(folder: str) -> list[str]:
    """Save four steps, and fail to write a copy of the second one and to read a part of the third one."""
    with group():
        near, far = folders(folder)
        Path(far).mkdir(exist_ok=True)
        begin, ranges = RunFolder.begin, FolderStorage.ranges

        def fail_to_begin(self: RunFolder, *args: Any) -> str:
            if "/copy-of-rank" in self.location and dist.get_rank() == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            return begin(self, *args)

        def fail_to_read(self: FolderStorage, spans: Any) -> Any:
            if dist.get_rank() == 0:
                raise OSError(errno.EIO, "Input/output error")
            return ranges(self, spans)

        manager = CheckpointManager([Policy(near, 1, 2), Policy(far, 9, 1)], run_name="run", model_type="m", buddy=1)
        for step, failing_begin, failing_ranges in (
            (1, begin, ranges), (2, fail_to_begin, ranges), (3, begin, fail_to_read), (4, begin, ranges),
        ):  # fmt: skip
            RunFolder.begin, FolderStorage.ranges = failing_begin, failing_ranges  # type: ignore[method-assign]
            manager.save(step, {"model": {f"w{dist.get_rank()}": torch.ones(3)}}, {"mesh": MESH})
        assert len(manager.finish()) == 4
        return names(Path(folder) / "near" / "run" / "rank00001" / "copy-of-rank00000")


@pytest.mark.slow
def test_a_save_counts_without_its_copy(tmp_path: Path) -> None:
    assert same_on_all(run(copying, 2, str(tmp_path))) == ["m-1steps", "m-4steps"]
    for rank in (0, 1):
        assert committed(tmp_path / "near" / "run" / f"rank{rank:05d}") == ["m-4steps", "m-3steps"]


def stalling(folder: str, asynchronous: bool) -> list[str]:
    """Save two steps, while rank 1 takes no piece of the first copy before rank 0 has given it up."""
    with group():
        near, far = folders(folder)
        Path(far).mkdir(exist_ok=True)
        given_up, store = Path(folder) / "given up", node_local.store
        node_local.PIECE_TIMEOUT = timedelta(seconds=1)

        def stall(*args: Any) -> str:
            while not given_up.exists():
                time.sleep(0.01)
            return store(*args)

        def store_or_give_up(*args: Any) -> str:
            try:
                return store(*args)
            finally:
                given_up.touch()

        node_local.store = stall if dist.get_rank() == 1 else store_or_give_up
        policies = [Policy(near, 1, 2), Policy(far, 9, 1)]
        manager = CheckpointManager(policies, run_name="run", model_type="m", buddy=1, asynchronous=asynchronous)
        for step in (1, 2):
            manager.save(step, {"model": {f"w{dist.get_rank()}": torch.ones(3)}}, {"mesh": MESH})
            assert len(manager.finish()) == 1
        return names(Path(folder) / "near" / "run" / "rank00001" / "copy-of-rank00000")


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_counts_without_a_copy_that_stalls(tmp_path: Path, asynchronous: bool) -> None:
    assert same_on_all(run(stalling, 2, str(tmp_path), asynchronous)) == ["m-2steps"]
    for rank in (0, 1):
        assert committed(tmp_path / "near" / "run" / f"rank{rank:05d}") == ["m-2steps", "m-1steps"]


def committing(folder: str) -> tuple[int, int]:
    """Keep one step; the first rank commits the second step and the other one fails to; then both do."""
    with group():
        near, far = folders(folder)
        Path(far).mkdir(exist_ok=True)
        fail = [False]

        def on_stage(stage: str) -> None:
            if fail[0] and stage == "commit" and dist.get_rank() == 1:
                raise OSError(errno.EIO, "Input/output error")

        policies = [Policy(near, 1, 1), Policy(far, 9, 1)]
        manager = CheckpointManager(policies, run_name="run", model_type="m", on_stage=on_stage)
        state = {"model": {f"w{dist.get_rank()}": torch.ones(3)}}
        manager.save(1, state, {"mesh": MESH})
        fail[0] = True
        with pytest.raises(CheckpointError, match="Input/output error"):
            manager.save(2, state, {"mesh": MESH})
        first = found(folder).step
        fail[0] = False
        manager.save(2, state, {"mesh": MESH})
        return first, found(folder).step


def test_there_is_always_a_step_that_all_ranks_have(tmp_path: Path) -> None:
    assert same_on_all(run(committing, 2, str(tmp_path))) == (1, 2)
    for rank, attempts in (("rank00000", ["m-2steps-2"]), ("rank00001", ["m-2steps"])):
        assert committed(tmp_path / "near" / "run" / rank) == attempts, "the first attempt failed on rank 1"


@pytest.mark.slow
def test_a_run_goes_on_from_its_nodes_disks(tmp_path: Path) -> None:
    common = {"attn_pdrop": 0.1, "lr_decay_iters": 6}
    run(train, 2, flags(tmp_path / "straight", **common, checkpoint_freq=10, max_steps=6))
    folder = tmp_path / "tiers"
    far = folder / "far"
    words = flags(folder, **common, checkpoint_dir=None, max_steps=None, resume_from_checkpoint=far)
    words += ["--checkpoint_dir", f"local:{folder / 'near'}", str(far)]
    words += ["--checkpoint_freq", "1", "10", "--num_kept_checkpoints", "2", "2"]
    run(train, 2, [*words, "--max_steps=4"])
    shutil.rmtree(far / "run" / "llama_v2-4steps")  # as if it had been killed after step 4
    run(train, 2, [*words, "--max_steps=6"])
    assert exact(folder) == exact(tmp_path / "straight")
    (resumed,) = [record for record in records(folder) if record.get("event") == "resume"]
    assert (resumed["step"], "near" in resumed["checkpoint"]) == (4, True)
    shutil.rmtree(far / "run" / "llama_v2-6steps")  # killed between the last save near and the last one far
    run(train, 2, [*words, "--max_steps=6"])
    assert open_verified(far).step == 6
