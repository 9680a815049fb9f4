"""A run on SMP goes back to its checkpoint, and on as if the updates since then had been held back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.smp import numbers, smp, train_on_smp
from tests.training import records


def train_on_smp_with_a_spike(command_line: list[str], held: tuple[int, ...]) -> None:
    """Train on SMP; the loss of step 5 is nan, or the updates of the steps in ``held`` are held back from outside."""
    from smp_train import train_lib, train_utils

    train_step, open_run = train_utils.train_step, train_lib.build_run
    runs: list[Any] = []
    odd = [False]

    def build(*given: Any) -> Any:
        runs.append(open_run(*given))
        backend = runs[0].backend
        loss = backend.loss

        def planted(model: Any, batch: Any) -> Any:
            loss_sum, router = loss(model, batch)
            return loss_sum * (float("nan") if odd[0] else 1.0), router

        backend.loss = planted
        return runs[0]

    def step(*given: Any, **named: Any) -> Any:
        at = runs[0].progress.step + 1
        odd[0] = at == 5 and not held
        named["skip_update"] = named["skip_update"] + (at in held)
        return train_step(*given, **named)

    train_lib.build_run = build
    train_utils.train_step = step  # type: ignore[assignment]
    train_on_smp(command_line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "mesh"),
    [(2, {}), (4, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2})],
    ids=["untransformed", "tp2 shard2"],
)
def test_a_rollback_on_smp(world: int, mesh: dict[str, Any], tmp_path: Path) -> None:
    back, told = tmp_path / "back", tmp_path / "told"
    common = {"max_steps": 7, "lr_decay_iters": 7, "checkpoint_freq": 3, "on_spike": "rollback", **mesh}
    harness.run(train_on_smp_with_a_spike, world, smp(told, **common), (4, 5))
    harness.run(train_on_smp_with_a_spike, world, smp(back, **common), ())
    assert [(event["step"], event["action"]) for event in records(back) if event.get("event") == "spike"] == [
        (5, "rollback")
    ]
    assert numbers(back)[5:] == numbers(told)[5:]
