"""Saves in the background: of the step they were asked at, committed like any other, their failures not lost."""

from __future__ import annotations

import errno
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from smp_train.checkpoints.find import open_verified
from smp_train.distributed import host_copy
from smp_train.errors import CheckpointError
from smp_train.models.hub_state import gather_state
from tests.checkpoint_files import committed, manager, names
from tests.harness import run, same_message
from tests.small_model import digests, group, prepare, same_on_all
from tests.small_model import train as updates
from tests.training import exact, flags, same, saved, train


@contextmanager
def late_copies() -> Iterator[None]:
    """Copy the state of a save no sooner than this thread has updated it, or waits for the copy so as not to."""
    trains, updated, copy = threading.get_ident(), threading.Event(), host_copy._copy

    def late(*args: Any) -> None:
        updated.clear()
        while not (updated.wait(0.001) or waits(trains)):
            pass
        copy(*args)

    host_copy._copy = late
    hook = register_optimizer_step_post_hook(lambda *_: updated.set())
    try:
        yield
    finally:
        host_copy._copy = copy
        hook.remove()


def waits(thread: int) -> bool:
    """Return whether a thread is held by `Background`, for a copy or for the end of a save."""
    frame, names = sys._current_frames()[thread], set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "wait" in names and not names.isdisjoint({"staged", "result"})


def torn(folder: str, layout: str) -> list[dict[str, str]]:
    """Save three times, each time training on at once while copy and writer are held up; what differs from before."""
    with group(), late_copies():
        written = threading.Event()
        saver = manager(folder, 1, 9, "m", asynchronous=True, on_stage=lambda stage: written.wait(600))
        model, optimizer = prepare(layout, seed=1)
        optimizer.register_step_pre_hook(lambda *_: saver.staged())
        updates(model, optimizer, range(1))
        expected = []
        for step in (1, 2, 3):
            written.clear()
            expected.append(digests(model, optimizer))
            assert saver.save(step, gather_state(model, optimizer), {}) == []
            updates(model, optimizer, range(step, step + 2))
            assert not saver.poll()
            written.set()
            while not saver.poll():
                time.sleep(0.001)
            assert [saved.step for saved in saver.finish()] == [step]
        problems = []
        for step, before in zip((1, 2, 3), expected, strict=True):
            other, fresh = prepare(layout, seed=2)
            open_verified(f"{folder}/m-{step}steps").load(gather_state(other, fresh))
            found = digests(other, fresh)
            problems.append({key: value for key, value in before.items() if found[key] != value})
        return problems


@pytest.mark.parametrize(
    ("world", "layout"), [(1, "plain"), (2, "fsdp"), pytest.param(4, "tensor", marks=pytest.mark.slow)]
)
def test_what_is_saved_is_the_step_it_was_asked_at(tmp_path: Path, world: int, layout: str) -> None:
    assert same_on_all(run(torn, world, str(tmp_path), layout)) == [{}, {}, {}]


def failing(folder: str) -> tuple[str, int]:
    with group():
        fail = [True]

        def on_stage(stage: str) -> None:
            if stage == "write" and dist.get_rank() == 1 and fail[0]:
                raise OSError(errno.ENOSPC, "No space left on device")

        saver = manager(folder, 1, 2, "m", asynchronous=True, on_stage=on_stage)
        state = {"model": {f"w{dist.get_rank()}": torch.ones(9)}}
        saver.save(1, state, {})
        with pytest.raises(CheckpointError) as failure:
            saver.finish()
        fail[0] = False
        saver.save(2, state, {})
        return str(failure.value), len(saver.finish())


def test_a_failure_in_the_background_is_that_of_all_ranks(tmp_path: Path) -> None:
    failures, saves = zip(*run(failing, 2, str(tmp_path)), strict=True)
    message = same_message(list(failures))
    assert "m-1steps: rank 1 on" in message
    assert "No space left on device" in message
    assert saves == (1, 1)
    assert names(tmp_path) == ["m-2steps"]


def test_without_memory_for_a_copy_saves_are_synchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("smp_train.checkpoints.background.free_host_bytes", lambda: 100)
    saver = manager(tmp_path, 1, 2, "m", asynchronous=True)
    assert saver.save(1, {"model": {"w": torch.ones(999)}}, {}) == [f"{tmp_path}/m-1steps"]
    assert "saves are synchronous" in caplog.text


def test_a_save_on_a_disk_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_train.checkpoints.save.ABANDON_SECONDS", 0.1)
    answers = threading.Event()
    saver = manager(tmp_path, 1, 2, "m", asynchronous=True, on_stage=lambda stage: answers.wait(600))
    try:
        saver.save(1, {"model": {"w": torch.ones(9)}}, {})
        given_up = threading.Thread(target=saver.abandon, daemon=True)
        given_up.start()
        given_up.join(20)
        assert not given_up.is_alive()
        assert not saver.busy()
    finally:
        answers.set()


def train_with_late_copies(command_line: list[str]) -> int:
    with late_copies():
        return train(command_line)


@pytest.mark.slow
def test_a_run_with_asynchronous_saves_writes_the_same_checkpoints(tmp_path: Path) -> None:
    for kind in ("sharded", "async_sharded"):
        options = {"checkpoint_type": kind, "checkpoint_freq": 1, "num_kept_checkpoints": 9, "max_steps": 4}
        run(train if kind == "sharded" else train_with_late_copies, 2, flags(tmp_path / kind, **options))
    assert exact(tmp_path / "async_sharded") == exact(tmp_path / "sharded")
    for step in (1, 2, 3, 4):
        same(saved(tmp_path / "async_sharded", step), saved(tmp_path / "sharded", step))


def uncopied(folder: str, fault: str) -> list[str]:
    """Return what this rank is told of a save whose copy cannot be begun, or completed, on rank 1."""
    with group():
        if dist.get_rank() == 1:

            def fail(*_: Any) -> None:
                raise RuntimeError("the device is gone")

            if fault == "begin":
                host_copy.Stager.begin = fail  # type: ignore[assignment]
            else:
                host_copy._copy = fail
        saver = manager(folder, 1, 2, "m", asynchronous=True)
        model, optimizer = prepare("fsdp", seed=1)
        try:
            saved = saver.save(1, gather_state(model, optimizer), {})
            saver.staged()
            saver.finish()
        except CheckpointError as error:
            return [str(error)]
        return [*saved, str(saver.asynchronous)]


def test_a_copy_that_fails_on_one_rank_stops_all_or_none(tmp_path: Path) -> None:
    said = same_message([said for (said,) in run(uncopied, 2, str(tmp_path / "copy"), "copy")])
    assert re.search(r"rank 1 on .*: cannot copy the state to host memory: RuntimeError: the device is gone", said)
    assert committed(tmp_path / "copy") == []
    assert same_on_all(run(uncopied, 2, str(tmp_path / "begin"), "begin")) == [f"{tmp_path}/begin/m-1steps", "False"]
    assert open_verified(tmp_path / "begin").step == 1
