"""The choice of `--auto`: kept or made again, and judged by all ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train import auto, trial
from smp_train.arguments import parse, validate
from smp_train.errors import ConfigError
from smp_train.planning import choice
from smp_train.planning import search as searching
from smp_train.telemetry.metrics import peak_flops
from smp_train.telemetry.run_folder import RunFolder
from tests.unit.test_planning_search import GIB, LLAMA, pretended, space_of

ASKED = {"given": {"train_batch_size": 1}, "devices": 4, "per_node": 4}


def started(folder: Path, **changes: Any) -> RunFolder:
    found = RunFolder(folder)
    found.create()
    found.write_run(config={}, auto={**ASKED, "flags": {"tensor_parallel_degree": 2}, "rows": 8, **changes})
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"devices": 2}, {"per_node": 2}, {"given": {}}, {"given": {"train_batch_size": 2}}]
)
def test_a_choice_is_kept_for_the_same_machine_and_the_same_flags(tmp_path: Path, changes: dict[str, Any]) -> None:
    kept = auto._kept(started(tmp_path, **changes), ASKED)
    assert (kept is None) == bool(changes)
    if kept:
        assert (kept["kept"], kept["flags"]) == (True, {"tensor_parallel_degree": 2})


def test_nothing_is_kept_of_a_run_without_one(tmp_path: Path) -> None:
    assert auto._kept(RunFolder(tmp_path), ASKED) is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--use_synthetic_data"], "--model_type"), ([*LLAMA, "--fp8"], "--fp8")],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, flags: list[str], named: str) -> None:
    resolved = parse([*flags, "--auto"], {})
    if "--fp8" in flags:
        with pytest.raises(ConfigError, match=named):
            choice.choose(request(resolved, GIB))
        return
    with pytest.raises(ConfigError, match=f"--auto plan.*{named}"):
        auto._planned(resolved, None, GIB, ASKED, RunFolder(tmp_path))  # type: ignore[arg-type]


def test_the_backend_that_nothing_plans_is_refused_before_a_launch() -> None:
    words = [*LLAMA, "--use_synthetic_data", "--backend=smp"]
    validate(parse(words, {}).args, 4)
    with pytest.raises(ConfigError, match=r"--auto trial.*--backend native"):
        validate(parse([*words, "--auto", "trial"], {}).args, 4)


def test_a_search_ends_before_the_ranks_that_wait_for_it(tmp_path: Path) -> None:
    resolved = parse([*LLAMA, "--auto", "--distributed_timeout_minutes=0.0001"], {})
    with pytest.raises(ConfigError, match="--distributed_timeout_minutes"):
        auto._planned(resolved, torch.device("cpu"), GIB, ASKED, RunFolder(tmp_path))


def request(resolved: Any, memory: int) -> dict[str, Any]:
    found = {
        "args": dataclasses.asdict(resolved.args), "given": [], "devices": 4, "per_node": 4, "memory": memory,
        "gpu": "", "batch": 16,
    }  # fmt: skip
    return json.loads(json.dumps(found))


def test_the_answer_names_the_best_and_what_to_try_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    resolved = parse([*LLAMA, "--auto"], {})
    found = choice.choose(request(resolved, 24 * GIB))
    assert found["rows"] == 16
    assert found["flags"] == found["plan"]["flags"]
    assert found["flags"] in found["trial"]
    assert len(found["trial"]) > 2
    for flags in found["trial"]:
        assert flags["hybrid_shard_degree"] == found["flags"]["hybrid_shard_degree"]
        assert flags["train_batch_size"] * flags["gradient_accumulation_steps"] * 4 == 16
    assert "nothing fits" in choice.choose(request(resolved, GIB))["error"]


def test_a_setting_is_as_fast_as_its_slowest_rank_and_fails_with_any() -> None:
    flags: list[dict[str, Any]] = [{"train_batch_size": rows} for rows in (1, 2, 4)]
    lines: list[list[dict[str, Any]]] = [
        [{"step_seconds": 1.0}, {"step_seconds": 0.5}],
        [{"step_seconds": 1.5}, {"failed": "CUDA out of memory"}],
    ]
    first, second, third = trial.judged(flags, lines)
    assert first == {"flags": {"train_batch_size": 1}, "step_seconds": 1.5}
    assert second == {"flags": {"train_batch_size": 2}, "failed": "CUDA out of memory"}
    assert "not tried" in third["failed"]


def test_a_trial_prefers_to_the_plan_only_what_is_faster_than_noise() -> None:
    def took(*seconds: float) -> list[dict[str, Any]]:
        return [{"flags": {"train_batch_size": index}, "step_seconds": each} for index, each in enumerate(seconds)]

    planned = {"train_batch_size": 1}
    assert trial.fastest(took(0.99, 1.0, 1.5), planned) == planned
    assert trial.fastest(took(0.9, 1.0, 1.5), planned) == {"train_batch_size": 0}
    failed = [*took(1.0), {"flags": planned, "failed": "CUDA out of memory"}]
    assert trial.fastest(failed, planned) == {"train_batch_size": 0}
    assert trial.fastest(failed[1:], planned) is None


@pytest.mark.parametrize(
    ("gpu", "gib", "peak"),
    [("NVIDIA H100 80GB HBM3", 79, "H100"), ("NVIDIA A100-SXM4-40GB", 39, "A100"), ("NVIDIA H200", 139, "H200")],
)
def test_a_gpu_outside_of_ec2_has_the_rates_of_the_same_in_the_table(gpu: str, gib: int, peak: str) -> None:
    machine = choice.rates_of(gpu, gib * GIB, space_of(devices=4, per_node=4))
    assert machine is not None
    assert (machine.peak, machine.per_node) == (peak_flops(peak), 4)
    assert choice.rates_of(gpu, gib * GIB, space_of(devices=16, per_node=8)) is None  # its network is not known
    assert choice.rates_of("NVIDIA T4", 15 * GIB, space_of(devices=4, per_node=4)) is None
