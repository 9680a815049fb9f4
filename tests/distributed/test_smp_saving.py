"""Saves through SMP's modules that go wrong on one rank, or that a run which fails leaves behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import CheckpointError, SmpTrainError
from tests import harness
from tests.smp import install
from tests.training import flags, train

PARTED = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}


def failing(command_line: list[str], where: str) -> str:
    """Train with a fault on rank 1, or on rank 0 where only that does it, and return what this rank says."""
    import torch.distributed as dist

    from smp_train.checkpoints.folder import RunFolder

    install()
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue

    real = AsyncCallsQueue.maybe_finalize_async_calls
    checksum, mkdir = RunFolder.checksum, Path.mkdir

    def finalise(self: Any, *args: Any, **kwargs: Any) -> list[int]:
        done = real(self, *args, **kwargs)
        if dist.get_rank() == 1 and kwargs["blocking"]:
            raise RuntimeError("no room left there")
        return done

    def make(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.name.startswith("tp"):
            raise OSError(30, "Read-only file system")
        mkdir(self, *args, **kwargs)

    def unreadable(self: Any, name: str, file: str, size: int) -> Any:
        if file == ".metadata":
            raise OSError(5, "Input/output error")
        return checksum(self, name, file, size)

    if where == "finalise":
        AsyncCallsQueue.maybe_finalize_async_calls = finalise
    elif where == "make":
        Path.mkdir = make  # type: ignore[method-assign,assignment]
    else:
        RunFolder.checksum = unreadable  # type: ignore[method-assign]
    try:
        train(command_line)
    except CheckpointError as error:
        return str(error)
    return "it trained"


FAULTS: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "the library fails": ("finalise", 4, {**PARTED, "checkpoint_type": "async_sharded"}, "rank 1 .*no room left there"),
    "a folder cannot be made": ("make", 4, {**PARTED, "checkpoint_type": "sharded"}, "rank 0 .*Read-only file system"),
    "so when asynchronous": ("make", 4, {**PARTED, "checkpoint_type": "async_sharded"}, "rank 0 .*Read-only file"),
    "the index cannot be read": ("checksum", 2, {"checkpoint_type": "async_sharded"}, "rank 0 .*Input/output error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_what_fails_on_one_rank_stops_all(case: str, tmp_path: Path) -> None:
    where, world, changes, message = FAULTS[case]
    command = flags(tmp_path, backend="smp", max_steps=2, checkpoint_freq=1, **changes)
    rank, _, cause = message.partition(" .*")
    said = harness.same_message(harness.run(failing, world, command, where))
    assert re.match(rf"{rank} on \S+: cannot save .*llama_v2-1steps: .*{cause}", said), said
    assert not list((tmp_path / "checkpoints").rglob("COMMITTED"))


def diverging(command_line: list[str]) -> str:
    install()
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue

    real = AsyncCallsQueue.maybe_finalize_async_calls

    def slow(self: Any, blocking: bool = False, **kwargs: Any) -> list[int]:
        return real(self, blocking=blocking, **kwargs) if blocking else []

    AsyncCallsQueue.maybe_finalize_async_calls = slow
    try:
        train(command_line)
    except SmpTrainError as error:
        return str(error)
    return "it trained"


def test_a_run_that_diverges_keeps_the_save_under_way(tmp_path: Path) -> None:
    changes = {"checkpoint_freq": 1, "checkpoint_type": "async_sharded", "lr": 1e38, "grad_clip": 0, "warmup": 0}
    for said in harness.run(diverging, 2, flags(tmp_path, backend="smp", max_steps=3, **changes)):
        assert "step 2: the loss is nan" in said
    assert (tmp_path / "checkpoints" / "run" / "llama_v2-1steps" / "COMMITTED").exists()
