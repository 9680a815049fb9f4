"""The settings that a search chooses from, and the best of them, found without stepping all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest

from smp_train.arguments import parse
from smp_train.arguments.flag import command_line, show
from smp_train.arguments.tuning import fixed_flags
from smp_train.distributed.degrees import plan
from smp_train.launch import instances
from smp_train.models.state_memory import GIB
from smp_train.planning import search as searching
from smp_train.planning.best import planned_run, search, text
from smp_train.planning.memory import HOST_SLACK, Memory, PlannedRun
from smp_train.planning.search import Search, kind
from smp_train.planning.space import Space
from smp_train.planning.step_memory import Use
from smp_train.planning.step_time import machine_of
from smp_train.planning.work import Collective, Cost, Operation, Transfer, Work

LLAMA = ["--model_type=llama_v2", "--hidden_width=512", "--num_layers=8", "--num_heads=8", "--num_key_value_heads=8",
         "--vocab_size=1024", "--max_context_width=128"]  # fmt: skip
PARAMETER_BYTES, TOKEN_BYTES = 8 * GIB, GIB / 128
KEPT = {"none": 4.0, "selective:op": 2.0, "full": 0.3}
OPERATIONS = {"none": 6.0, "selective:op": 6.3, "full": 8.0}


def space_of(*flags: str, devices: int = 16, per_node: int = 8, gpu: bool = True, **known: Any) -> Space:
    resolved = parse([*LLAMA, *flags], {})
    return Space(planned_run(resolved.args, devices, per_node, gpu=gpu), fixed_flags(resolved), **known)


def test_all_settings_have_the_same_global_batch() -> None:
    space = space_of("--train_batch_size=4", "--gradient_accumulation_steps=2")
    with_less = space_of("--train_batch_size=4")
    assert (space.rows, with_less.rows) == (128, 64)
    settings, _ = with_less.settings()
    assert len(settings) == len(set(settings)) > 20
    for setting in settings:
        args = with_less.applied(setting).args
        degrees = plan(args, 16, 8, smp=False)
        assert (degrees.tensor, degrees.context, degrees.sharded) == (setting.tensor, setting.context, setting.shard)
        assert args.train_batch_size * args.gradient_accumulation_steps * degrees.data_parallel == 64
        again = parse([*LLAMA, "--train_batch_size=4", *command_line(with_less.flags(setting)).split()], {}).args
        assert dataclasses.replace(again, backend=args.backend, use_torch_compile=False) == args


@pytest.mark.parametrize(
    "flags",
    [["--tensor_parallel_degree=2"], ["--hybrid_shard_degree=4"], ["--sharding_strategy=no_shard"],
     ["--selective_checkpointing=2"], ["--sm_activation_offloading=0"], ["--gradient_accumulation_steps=2"]],
)  # fmt: skip
def test_given_flags_stay(flags: list[str]) -> None:
    space = space_of(*flags)
    settings, _ = space.settings()
    name, _, value = flags[0][2:].partition("=")
    assert settings
    assert {show(getattr(space.applied(one).args, name)) for one in settings} == {value}
    assert not any(name in space.flags(one) for one in settings)


def test_refused_settings_are_counted_with_the_programs_reason() -> None:
    heads = {"--num_heads=6", "--num_key_value_heads=6", "--hidden_width=384"}
    settings, out = space_of(*heads).settings()
    assert {one.tensor for one in settings} == {1, 2}
    (reason,) = [each for each in out if "attention heads" in each]
    assert reason.startswith("refused: --tensor_parallel_degree does not divide")
    both = space_of("--train_batch_size=1", "--gradient_accumulation_steps=1")
    settings, out = both.settings()
    assert {(one.tensor, one.context) for one in settings} == {(1, 1)}
    assert any("16 rows" in each for each in out)


def pretended(run: PlannedRun) -> Memory:
    """Return the memory and the work of an invented model, by formulas that the search only approximates."""
    args, per_node = run.args, run.per_node
    degrees = plan(args, run.devices, per_node, smp=False)
    mode, steps = args.activation_checkpointing, args.gradient_accumulation_steps
    tokens = args.train_batch_size * 128 / (degrees.tensor * degrees.context)
    state = PARAMETER_BYTES / degrees.sharing
    fixed = 2 * GIB / degrees.tensor
    peak: Counter[str] = Counter(
        {Use.PARAMETERS: int(state), Use.GRADIENTS: int(state), Use.OPTIMIZER: int(2 * state)}
    )
    stays = mode == "selective:op" or not args.sm_activation_offloading
    saved = KEPT[mode] * tokens * TOKEN_BYTES * (1.0 if stays else 0.1)
    away = KEPT[mode] * tokens * TOKEN_BYTES - saved
    back = Counter(
        {Use.ACTIVATIONS: int(saved), Use.HOST: int(away), Use.TEMPORARIES: int(0.5 * tokens * TOKEN_BYTES + fixed)}
    )
    phase, update = ("backward", -3), ("update", 0)
    work = Work()
    flops = OPERATIONS[mode] * tokens * steps * 2e12
    work.operations[phase, Operation.PRODUCTS] = Cost(flops, 1, 1e3 * steps)
    work.operations[phase, Operation.MEMORY_BOUND] = Cost(0, (tokens + 64) * steps * 1e9, 1e3 * steps)
    work.operations[update, Operation.MEMORY_BOUND] = Cost(0, 7 * state, 1)

    def sent(name: str, what: str, ranks: int, stride: int, size: float, calls: float) -> None:
        if ranks > 1:
            nodes = min(-(-ranks * stride // per_node), ranks)
            work.collectives[phase, Collective(what, name, ranks, nodes)] = Cost(0, size, calls)

    whole, gather = tokens * degrees.tensor, Transfer.GATHER
    gathered = 3 * PARAMETER_BYTES / degrees.tensor * steps
    sent("shard", gather, degrees.sharded, degrees.tensor, gathered, 24 * steps)
    sent("replicate", Transfer.SUM, degrees.replicate, degrees.sharing, state, 8)
    sent("tensor", gather, degrees.tensor, 1, whole * steps * 4e8, 64 * steps)
    sent("context", gather, degrees.context, degrees.tensor, whole * degrees.context * steps * 1e8, 16 * steps)
    return Memory({phase: peak + back, update: peak}, 10**9, work, gpu=run.gpu)


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search step the invented model."""
    monkeypatch.setattr(searching, "estimate", pretended)


P5 = machine_of(instances.find("p5.48xlarge"))
SEARCHES = [
    (16, 4, None, []), (64, 4, None, []), (16, 40, None, []), (16, 12, 5, []),
    (16, 6, None, ["--train_batch_size=8"]), (16, 6, None, ["--sm_activation_offloading=0"]),
]  # fmt: skip


@pytest.mark.usefixtures("invented")
@pytest.mark.parametrize(("devices", "gib", "host", "flags"), SEARCHES)
def test_a_search_finds_the_best_of_all_settings(devices: int, gib: int, host: int | None, flags: list[str]) -> None:
    flags = flags or ["--gradient_accumulation_steps=1"]
    space = space_of(*flags, devices=devices, host=None if host is None else host * GIB)
    found = Search(space, gib * GIB, P5)
    best = found.best()

    every = Search(space, gib * GIB, P5)
    settings, excluded = space.settings()
    plans = [every.plan(one, pretended(space.applied(one))) for one in settings]
    fitting = [
        each for each in plans
        if each.memory.needed <= gib * GIB and (host is None or each.memory.host_needed <= host * GIB)
    ]  # fmt: skip
    assert len(found.stepped) < max(0.5 * len(settings), 12)
    assert sum(found.rejected.values()) == len(settings) + sum(excluded.values()) - len(best)
    assert all(plan in fitting for plan in best)
    fastest: dict[Any, float] = {}
    for each in fitting:
        assert each.time is not None
        seconds = each.time.step_seconds
        fastest[kind(each.setting)] = min(seconds, fastest.get(kind(each.setting), seconds))
    assert len({kind(plan.setting) for plan in best}) == len(best) == min(len(fastest), searching.BEST)
    found_seconds = [plan.time.step_seconds for plan in best if plan.time is not None]
    assert found_seconds == pytest.approx(sorted(fastest.values())[: len(best)], rel=0.005)


@pytest.mark.usefixtures("invented")
def test_offloading_needs_host_memory() -> None:
    found = {host: search(space_of(host=host), 6 * GIB, P5) for host in (None, HOST_SLACK, GIB)}
    offloaded = {host: [plan["host"] for plan in result.report["best"]] for host, result in found.items()}
    assert any(offloaded[None])
    assert offloaded[HOST_SLACK]
    assert not any(offloaded[HOST_SLACK])
    assert found[HOST_SLACK].report["lost"][searching.NO_HOST] > 0
    assert "others more than the 1.00 GiB of host memory" in found[GIB].complaint
    too_small = search(space_of("--sm_activation_offloading=0"), GIB, P5)
    assert too_small.plans == []
    assert "nothing fits 16 devices of 1.00 GiB" in too_small.complaint
    assert "does not fit" in text(too_small.report)


@pytest.mark.usefixtures("invented")
def test_a_cautious_search_leaves_a_tenth_of_the_gpu_free() -> None:
    space = space_of()

    def found(there: int, cautious: bool) -> dict[str, Any]:
        return search(space, there, P5, cautious=cautious).report

    most = found(12 * GIB, False)["best"][0]["needed"]
    there = int(most / 0.95)
    bold, careful = found(there, False), found(there, True)
    assert bold["best"][0]["needed"] == most
    assert [plan["tight"] for plan in bold["best"]] == [plan["needed"] > 0.9 * there for plan in bold["best"]]
    assert " *" in text(bold)
    assert careful["best"]
    assert not any(plan["tight"] for plan in careful["best"])
    assert "*" not in text(careful)

    settings, _ = space.settings()
    least = min(pretended(space.applied(one)).needed for one in settings)
    assert {plan["needed"] for plan in found(least, True)["best"]} == {least}  # nothing fits nine tenths


@pytest.mark.usefixtures("invented")
def test_without_times_the_rule_decides() -> None:
    space = space_of(devices=4, per_node=4, gpu=False)
    first = search(space, 24 * GIB, None).report["best"][0]
    assert "step_seconds" not in first
    # 32 GiB of state on two devices, 2 GiB of other memory on each; a row's activations take 4.5 GiB.
    assert first["flags"] == {
        "hybrid_shard_degree": 2, "activation_checkpointing": "none", "train_batch_size": 1,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip
