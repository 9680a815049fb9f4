"""What a search may choose, and whether it finds the best of that without stepping all of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from smp_train.arguments import parse
from smp_train.arguments.chosen import given, words
from smp_train.arguments.flag import show
from smp_train.distributed.degrees import plan
from smp_train.launch import instances
from smp_train.models.resolve import resolve
from smp_train.models.state_memory import GIB
from smp_train.planning import search as searching
from smp_train.planning.best import search, text
from smp_train.planning.fitting import HOST_SLACK
from smp_train.planning.search import Plan, Search, kind
from smp_train.planning.space import Setting, Space
from smp_train.planning.step_time import machine_of
from smp_train.planning.tracker import ACTIVATIONS, BACKWARD, GRADIENTS, HOST, OPTIMIZER, PARAMETERS
from smp_train.planning.work import ELEMENTWISE, GATHER, PRODUCTS, SUM, Collective, Cost, Work
from smp_train.planning.world import Memory

LLAMA = ["--model_type=llama_v2", "--hidden_width=512", "--num_layers=8", "--num_heads=8", "--num_key_value_heads=8",
         "--vocab_size=1024", "--max_context_width=128"]  # fmt: skip
PARAMETER_BYTES, TOKEN_BYTES = 8 * GIB, GIB / 128
KEPT = {"none": 4.0, "selective:op": 2.0, "full": 0.3}
OPERATIONS = {"none": 6.0, "selective:op": 6.3, "full": 8.0}


def space_of(*flags: str, devices: int = 16, per_node: int = 8, **known: Any) -> Space:
    resolved = parse([*LLAMA, *flags], {})
    resolved.args.backend = "native"
    return Space(resolved.args, given(resolved), resolve(resolved.args), devices, per_node, 128, **known)


def test_every_choice_is_a_run_of_the_same_global_batch() -> None:
    space = space_of("--train_batch_size=4", "--gradient_accumulation_steps=2")
    with_less = space_of("--train_batch_size=4")
    assert (space.rows, with_less.rows) == (128, 64)
    settings, _ = with_less.settings()
    assert len(settings) == len(set(settings)) > 20
    for one in settings:
        args = with_less.applied(one)
        degrees = plan(args, 16, 8, smp=False)
        assert (degrees.tensor, degrees.context, degrees.sharded) == (one.tensor, one.context, one.shard)
        assert args.train_batch_size * args.gradient_accumulation_steps * degrees.data_parallel == 64
        again = parse([*LLAMA, "--train_batch_size=4", *words(with_less.flags(one)).split()], {}).args
        args.backend = again.backend
        assert again == args


@pytest.mark.parametrize(
    "flags",
    [["--tensor_parallel_degree=2"], ["--hybrid_shard_degree=4"], ["--sharding_strategy=no_shard"],
     ["--activation_checkpointing=none"], ["--selective_checkpointing=2"], ["--sm_activation_offloading=0"],
     ["--train_batch_size=1"], ["--gradient_accumulation_steps=2"], ["--context_parallel_degree=2"]],
)  # fmt: skip
def test_what_is_given_stays(flags: list[str]) -> None:
    space = space_of(*flags)
    settings, _ = space.settings()
    name, _, value = flags[0][2:].partition("=")
    assert settings
    assert {show(getattr(space.applied(one), name)) for one in settings} == {value}
    assert not any(name in space.flags(one) for one in settings)


def test_refusals_are_those_of_the_program_and_counted() -> None:
    heads = {"--num_heads=6", "--num_key_value_heads=6", "--hidden_width=384"}
    settings, out = space_of(*heads).settings()
    assert {one.tensor for one in settings} == {1, 2}
    (reason,) = [each for each in out if "attention heads" in each]
    assert reason.startswith("refused: --tensor_parallel_degree does not divide")
    both = space_of("--train_batch_size=1", "--gradient_accumulation_steps=1")
    settings, out = both.settings()
    assert {(one.tensor, one.context) for one in settings} == {(1, 1)}
    assert any("16 rows" in each for each in out)


def pretended(args: Any, spec: Any, *, devices: int, per_node: int, **_: Any) -> Memory:
    """A model of which everything is known: nothing of the proportions that a search uses, but how they come about."""
    degrees = plan(args, devices, per_node, smp=False)
    mode, steps = args.activation_checkpointing, args.gradient_accumulation_steps
    tokens = args.train_batch_size * 128 / (degrees.tensor * degrees.context)
    state = PARAMETER_BYTES / degrees.sharing
    fixed = 2 * GIB / degrees.tensor
    peak: Counter[str] = Counter({PARAMETERS: int(state), GRADIENTS: int(state), OPTIMIZER: int(2 * state)})
    stays = mode == "selective:op" or not args.sm_activation_offloading
    saved = KEPT[mode] * tokens * TOKEN_BYTES * (1.0 if stays else 0.1)
    away = KEPT[mode] * tokens * TOKEN_BYTES - saved
    back = Counter({ACTIVATIONS: int(saved), HOST: int(away), BACKWARD: int(0.5 * tokens * TOKEN_BYTES + fixed)})
    phase, update = ("backward", -3), ("update", 0)
    work = Work()
    flops = OPERATIONS[mode] * tokens * steps * 2e12
    work.operations[phase, PRODUCTS] = Cost(flops, 1, 1e3 * steps)
    work.operations[phase, ELEMENTWISE] = Cost(0, (tokens + 64) * steps * 1e9, 1e3 * steps)
    work.operations[update, ELEMENTWISE] = Cost(0, 7 * state, 1)

    def sent(name: str, what: str, ranks: int, stride: int, size: float, calls: float) -> None:
        if ranks > 1:
            nodes = min(-(-ranks * stride // per_node), ranks)
            work.collectives[phase, Collective(what, name, ranks, nodes)] = Cost(0, size, calls)

    whole = tokens * degrees.tensor
    sent("shard", GATHER, degrees.sharded, degrees.tensor, 3 * PARAMETER_BYTES / degrees.tensor * steps, 24 * steps)
    sent("replicate", SUM, degrees.replicate, degrees.sharing, state, 8)
    sent("tensor", GATHER, degrees.tensor, 1, whole * steps * 4e8, 64 * steps)
    sent("context", GATHER, degrees.context, degrees.tensor, whole * degrees.context * steps * 1e8, 16 * steps)
    return Memory({phase: peak + back, update: peak}, 10**9, work)


@pytest.mark.parametrize(("gib", "host"), [(4, None), (6, None), (12, None), (40, None), (12, 5)])
@pytest.mark.parametrize("flags", [[], ["--train_batch_size=8"], ["--sm_activation_offloading=0"]])
def test_a_search_finds_what_trying_all_finds(
    gib: int, host: int | None, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    known = {"host": None if host is None else host * GIB}
    space = space_of("--gradient_accumulation_steps=1", **known) if not flags else space_of(*flags, **known)
    machine = machine_of(instances.find("p5.48xlarge"))
    found = Search(space, gib * GIB, machine)
    best = found.run()

    every = Search(space, gib * GIB, machine)
    settings, _ = space.settings()
    plans = [every._plan(one, pretended(space.applied(one), None, devices=16, per_node=8)) for one in settings]
    fitting = [each for each in plans if each.needed <= gib * GIB and (host is None or each.host <= host * GIB)]
    assert bool(best) == bool(fitting)
    assert len(found.stepped) < max(0.5 * len(settings), 12)
    assert sum(found.lost.values()) == len(settings) + sum(space.settings()[1].values()) - len(best)
    if not best:
        return

    def seconds(plan: Plan) -> float:
        assert plan.time is not None
        return plan.time.step_seconds

    assert all(plan in fitting for plan in best)
    assert len({kind(plan.setting) for plan in best}) == len(best)
    assert [seconds(plan) for plan in best] == sorted(map(seconds, best))
    assert seconds(best[0]) <= min(map(seconds, fitting)) / searching.ALIKE


def test_what_the_host_has_no_memory_for_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    machine = machine_of(instances.find("p5.48xlarge"))
    found = {
        host: search(space_of(host=host), 6 * GIB, machine, compiled=True)[:2] for host in (None, HOST_SLACK, GIB)
    }
    offloaded = {
        host: [plan["flags"].get("sm_activation_offloading", False) for plan in plans["best"]]
        for host, (plans, _) in found.items()
    }
    assert any(offloaded[None])
    assert offloaded[HOST_SLACK]
    assert not any(offloaded[HOST_SLACK])
    assert found[HOST_SLACK][0]["lost"][searching.NO_HOST] > 0
    assert "others more than the 1.00 GiB of host memory" in found[GIB][1]


def test_nothing_fits_is_said_with_what_would_be_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    space = space_of("--sm_activation_offloading=0")
    found, complaint, *_ = search(space, GIB, machine_of(instances.find("p5.48xlarge")), compiled=True)
    assert found["best"] == []
    assert "nothing fits 16 devices of 1.00 GiB" in complaint
    assert "does not fit" in text(found)


def test_what_takes_nearly_all_of_a_gpu_is_marked_and_a_cautious_search_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    machine, space = machine_of(instances.find("p5.48xlarge")), space_of()

    def found(there: int, cautious: bool) -> dict[str, Any]:
        return search(space, there, machine, compiled=True, cautious=cautious)[0]

    most = found(12 * GIB, False)["best"][0]["needed"]
    there = int(most / 0.95)
    bold, careful = found(there, False), found(there, True)
    assert bold["best"][0]["needed"] == most
    assert [plan["tight"] for plan in bold["best"]] == [plan["needed"] > 0.9 * there for plan in bold["best"]]
    assert " *" in text(bold)
    assert careful["best"]
    assert not any(plan["tight"] for plan in careful["best"])
    assert "*" not in text(careful)

    every = Search(space, there, machine)
    settings, _ = space.settings()
    least = min(
        every._plan(one, pretended(space.applied(one), None, devices=16, per_node=8)).needed for one in settings
    )
    assert {plan["needed"] for plan in found(least, True)["best"]} == {least}  # nothing fits nine tenths


def test_without_times_the_rule_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "estimate", pretended)
    space = space_of(devices=4, per_node=4, gpu=False)
    found, *_ = search(space, 24 * GIB, None, compiled=False)
    first = found["best"][0]
    assert "step_seconds" not in first
    # 32 GiB of state over two and 2 GiB beside it; the activations of a row take 4.5 GiB.
    assert first["flags"] == {
        "hybrid_shard_degree": 2, "activation_checkpointing": "none", "train_batch_size": 1,
        "gradient_accumulation_steps": 2,
    }  # fmt: skip


def test_a_setting_is_a_choice_of_seven() -> None:
    one = Setting(2, 1, 4, "none", False, 2, 3)
    assert (one.sharing, one.share) == (8, 1.0)
