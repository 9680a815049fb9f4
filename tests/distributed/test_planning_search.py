"""`smp-train plan --search` against steps of every setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.system.command import warm

FLAGS = ["--model_type=llama_v2", "--hidden_width=2048", "--num_layers=24", "--num_heads=16", "--vocab_size=32000",
         "--max_context_width=2048", "--context_parallel_degree=1", "--tensor_parallel_degree=1",
         "--sm_activation_offloading=0"]  # fmt: skip
"""1.4 B parameters: 22 GB of state."""
MACHINE = "g5.12xlarge"


@pytest.mark.slow
def test_the_best_is_that_of_all_settings(tmp_path: Path) -> None:
    costs = ["--tokens=1B", "--price_per_hour=3"]
    with warm(tmp_path, "plan", *FLAGS, "--instance_type", MACHINE, "--search", "--json", *costs) as command:
        assert command.code() == 0
        assert "searching settings for 4 devices" in command.err
        found = json.loads(command.out)
    assert found["cost"]["price"] == pytest.approx(3 * found["cost"]["hours"])
    assert found["cost"]["training"] == pytest.approx(1e9 / found["best"][0]["tokens_per_second"] / 3600)
    every = harness.run(all_settings, 1)[0]
    fitting = {words: seconds for words, (needed, seconds) in every.items() if needed <= 24 * 10**9}
    assert 0 < len(fitting) < len(every)
    first = found["best"][0]
    assert first["step_seconds"] == pytest.approx(min(fitting.values()), rel=0.005)
    for plan in found["best"]:
        assert (plan["needed"], plan["step_seconds"]) == pytest.approx(every[plan["words"]])
        assert plan["words"] in fitting
    assert found["stepped"] < len(every)
    assert sum(found["lost"].values()) == len(every) - len(found["best"])


def all_settings() -> dict[str, Any]:
    """Return of each setting, by its flags, the bytes needed and the seconds of a step."""
    from smp_train.arguments import parse
    from smp_train.arguments.flag import command_line
    from smp_train.arguments.tuning import fixed_flags
    from smp_train.launch import instances
    from smp_train.planning.best import planned_run
    from smp_train.planning.estimate import estimate
    from smp_train.planning.search import Search
    from smp_train.planning.space import Space
    from smp_train.planning.step_time import machine_of

    resolved = parse(FLAGS, {})
    space = Space(planned_run(resolved.args, 4, 4, gpu=True), fixed_flags(resolved))
    search = Search(space, 0, machine_of(instances.find(MACHINE)))
    found = {}
    for setting in space.settings()[0]:
        plan = search.plan(setting, estimate(space.applied(setting)))
        assert plan.time is not None
        found[command_line(space.flags(setting))] = (plan.memory.needed, plan.time.step_seconds)
    return found
