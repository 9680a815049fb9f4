"""A rank that is out of memory in a step says who holds it, with exit code 1; and the rows of memory profiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import harness
from tests.training import flags, train


def out_of_memory(command_line: list[str], where: str) -> tuple[int, str]:
    """Train until the second loss, or the build, takes more memory than there is; return exit code and message."""
    import torch

    from smp_train.backends.native import NativeBackend
    from smp_train.errors import SmpTrainError

    cross_entropy, losses = torch.nn.functional.cross_entropy, [0]

    def planted(*args: Any, **kwargs: Any) -> Any:
        losses[0] += 1
        if losses[0] == 2 or where == "build":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated")
        return cross_entropy(*args, **kwargs)

    if where == "build":
        NativeBackend.build = planted  # type: ignore[method-assign]
    torch.nn.functional.cross_entropy = planted  # type: ignore[assignment]
    try:
        train(command_line)
    except SmpTrainError as failure:
        return failure.exit_code, str(failure)
    raise AssertionError("trained on without memory")


def test_out_of_memory_names_owners_and_flags(tmp_path: Path) -> None:
    words = flags(tmp_path, activation_checkpointing="none", train_batch_size=16, chunked_loss=0)
    ((code, said),) = harness.run(out_of_memory, 1, words, "loss")
    assert code == 1
    assert "\n" not in said
    assert "out of memory in step 2, forward: CUDA out of memory. Tried to allocate 2.00 GiB; " in said
    for owner in ("activations", "logits", "optimizer state", "weights of 2 layers"):
        assert owner in said
    changes = said.partition("in this order: ")[2].split("; ")
    assert changes[:2] == ["--chunked_loss 1", "--activation_checkpointing full"]
    assert changes[2].startswith("--train_batch_size 8")
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert log.count("memory GiB | ") == 5


def test_out_of_memory_in_set_up_names_what_shares_the_state(tmp_path: Path) -> None:
    _, said = harness.run(out_of_memory, 2, flags(tmp_path, hybrid_shard_degree=1), "build")[0]
    assert "out of memory while the model is built: CUDA out of memory" in said
    assert "held by weights made so far" in said
    assert "in this order: --sharding_strategy full_shard --hybrid_shard_degree 0;" in said


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
