"""Ranks die at every point of a step: the others wait, a replacement takes the dead rank's place, nothing changes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from smp_train.distributed import heartbeat
from smp_train.launch.coordinator import End
from tests.harness import run
from tests.recovering import Death, Recovering
from tests.tiers import core
from tests.training import TINY, flags, read_checkpoint, records, same, steps, train

HYBRID: dict[str, Any] = {
    "sharding_strategy": "hybrid_shard", "hybrid_shard_degree": 2, "attn_pdrop": 0.1, "lr_decay_style": "constant",
    "distributed_timeout_minutes": 3,
}  # fmt: skip
EXACT = ("loss", "grad_norm", "lr", "tokens", "consumed")
STEP = [heartbeat.PHASES[phase] for phase in sorted(heartbeat.IN_A_STEP)]


def checkpoint(folder: Path) -> dict[str, Any]:
    """Return the entries of the last checkpoint of a run below ``folder``."""
    saved = (folder / "checkpoints" / TINY["run_name"]).glob("*steps*")
    return read_checkpoint(max((path for path in saved if (path / "COMMITTED").exists()), key=lambda path: int(path.name.split("-")[1].removesuffix("steps"))))


def check(folder: Path, deaths: list[Death], *, world: int = 4, replaced: int | None = None, **changes: Any) -> Recovering:
    """Train with and without ``deaths``, and compare: every logged step and the last checkpoint, bit for bit."""
    options = {**HYBRID, **changes}
    run(train, world, flags(folder / "straight", **options), timeout=300)
    with Recovering(folder / "log", world, *flags(folder, recovery="in_place", **options), deaths=deaths) as ranks:
        end = ranks.until_the_end()
    assert end == End(None), f"{end}\n{ranks.err}"
    assert sum(len(each.replaced) for each in ranks.generations) == (len(deaths) if replaced is None else replaced)
    expected = {record["step"]: [record[name] for name in EXACT] for record in steps(folder / "straight")}
    ours = steps(folder)
    assert {record["step"] for record in ours} == expected.keys()
    for record in ours:
        assert [record[name] for name in EXACT] == expected[record["step"]], record["step"]
    same(checkpoint(folder), checkpoint(folder / "straight"))
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize("victim", core([0, 1, 2, 3], lambda rank: rank == 0))
def test_a_rank_that_dies_at_any_point_of_a_step_is_replaced(tmp_path: Path, victim: int) -> None:
    deaths = [(victim, 3 + 2 * index, phase) for index, phase in enumerate(STEP)]
    check(tmp_path, deaths, max_steps=5 + 2 * len(STEP))
    recoveries = [record for record in records(tmp_path) if record.get("event") == "recovery"]
    assert [record["replaced"] for record in recoveries] == [[victim]] * len(STEP)
