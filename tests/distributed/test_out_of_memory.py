"""A rank that is out of memory in a step says who holds it, with exit code 1; and the rows of memory profiling."""

from __future__ import annotations

from pathlib import Path

from tests import harness
from tests.training import flags, train


def train_until_out_of_memory(command_line: list[str]) -> tuple[int, str]:
    import torch

    from smp_train import train_lib, train_utils
    from smp_train.errors import SmpTrainError

    train_step, steps = train_utils.train_step, [0]

    def planted(*args: object, **kwargs: object) -> object:
        steps[0] += 1
        if steps[0] == 2:
            train_lib.heartbeat.at(train_lib.heartbeat.BACKWARD)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated")
        return train_step(*args, **kwargs)  # type: ignore[arg-type]

    train_utils.train_step = planted  # type: ignore[assignment]
    try:
        train(command_line)
    except SmpTrainError as failure:
        return failure.exit_code, str(failure)
    raise AssertionError("trained on without memory")


def test_out_of_memory_names_owners_and_flags(tmp_path: Path) -> None:
    words = flags(tmp_path, activation_checkpointing="none", train_batch_size=2)
    ((code, said),) = harness.run(train_until_out_of_memory, 1, words)
    assert code == 1
    assert "\n" not in said
    assert "out of memory in step 2, backward: CUDA out of memory. Tried to allocate 2.00 GiB; " in said
    for owner in ("optimizer state", "gradients", "weights of 2 layers", "activations"):
        assert owner in said
    assert said.index("--activation_checkpointing full") < said.index("--train_batch_size 1")
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert log.count("memory GiB | ") == 5


def test_memory_profiling_has_rows_of_set_up_phases_and_saves(tmp_path: Path) -> None:
    harness.run(train, 1, flags(tmp_path, enable_memory_profiling=1, max_steps=5, checkpoint_freq=4))
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    rows = [line.split("| ")[1].strip() for line in log.splitlines() if "memory GiB | " in line]
    assert rows[:3] == ["before the model", "model built", "model and optimizer built"]
    for step in (1, 2, 3):
        for phase in ("forward", "backward", "the update"):
            assert f"step {step} of this start, {phase}" in rows
    assert not any(row.startswith("step 4 of") for row in rows)
    assert {"a save", "step 5"} <= set(rows)
