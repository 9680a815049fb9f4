"""The roofline and the cost of `smp-train plan`, against sums by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from smp_train.arguments import parse
from smp_train.errors import ConfigError
from smp_train.launch import instances
from smp_train.models.flops import flops_per_token
from smp_train.models.resolve import resolve
from smp_train.planning import cost, options
from smp_train.planning import step_time as st
from smp_train.planning.memory import Memory, PlannedRun
from smp_train.planning.step_memory import Part, Use
from smp_train.planning.work import Collective, Cost, Operation, Transfer, Work

MACHINE = st.Machine(
    peak=1e15, products=0.5, attention=0.25, memory=1e12, link=100e9, host=50e9, network=80e9, per_node=8
)
FIRST, MIDDLE, LAST, END = (Part.FORWARD, 0), (Part.FORWARD, -3), (Part.BACKWARD, 0), (Part.UPDATE, 0)


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "hops", "moved", "rate"),
    [
        (Transfer.GATHER, 8, 1, 7 * st.HOP_WITHIN, 7 / 8, 100e9),
        (Transfer.REDUCE, 16, 2, 14 * st.HOP_WITHIN + st.HOP_ACROSS, 15 / 16, 80e9),
        (Transfer.SUM, 4, 4, 6 * st.HOP_ACROSS, 2 * 3 / 4, 80e9 / 8),  # one rank of each node
        (Transfer.EXCHANGE, 4, 1, st.HOP_WITHIN, 3 / 4, 100e9),
    ],
)
def test_a_collective_is_a_ring(kind: str, ranks: int, nodes: int, hops: float, moved: float, rate: float) -> None:
    found = st.collective_seconds(Collective(kind, "shard", ranks, nodes), Cost(0, 3e9, 2), MACHINE)
    assert found == pytest.approx(2 * (st.LAUNCH + hops) + 3e9 * moved / (st.LINKS * rate))


FLAGS = [
    "--model_type=llama_v2", "--num_layers=2", "--hidden_width=64", "--num_heads=4", "--vocab_size=128",
    "--train_batch_size=2",
]  # fmt: skip


def predicted(work: Work, *flags: str, compiled: bool = False, host: int = 0) -> st.Prediction:
    args = parse([*FLAGS, *flags], {}).args
    memory = Memory({END: Counter({Use.PARAMETERS: 10**9, Use.HOST: host})}, 10, work)
    return st.predict(PlannedRun(args, resolve(args), 8, 8, 64, compiled=compiled), memory, MACHINE)


def test_what_a_layer_sends_hides_behind_what_it_computes() -> None:
    second = Cost(0.5e15, 0, 1)
    one_ring = Collective(Transfer.GATHER, "shard", 8, 1)
    sent = Cost(0, 0.5 * st.LINKS * 100e9 * 8 / 7, 0.001)  # half a second, and next to no latency
    work = Work(
        {**{(phase, Operation.PRODUCTS): second for phase in (FIRST, MIDDLE, LAST)},
         (END, Operation.MEMORY_BOUND): Cost(0, 0.8e12, 1)},
        {(phase, one_ring): sent for phase in (FIRST, MIDDLE, LAST)},
    )  # fmt: skip
    found = predicted(work)
    assert found.parts == pytest.approx({Operation.PRODUCTS: 3, "update": 1, "waiting for shard": 1}, rel=1e-4)
    assert found.communication == {"shard": pytest.approx(1.5, rel=1e-4)}
    assert found.step_seconds == pytest.approx(5, rel=1e-4)
    assert found.tokens_per_device == pytest.approx(2 * 64 / 5, rel=1e-4)
    flops = flops_per_token(resolve(parse(FLAGS, {}).args).config, 64)
    assert found.mfu == pytest.approx(flops * 2 * 64 / (5 * 1e15), rel=1e-4)
    slower = Work(dict(work.operations), {(MIDDLE, one_ring): sent.plus(sent, 3)})  # two seconds beside one
    assert predicted(slower).parts["waiting for shard"] == pytest.approx(1, rel=1e-3)
    tensor = Work(dict(work.operations), {(MIDDLE, Collective(Transfer.GATHER, "tensor", 8, 1)): sent})
    assert predicted(tensor).parts["waiting for tensor"] == pytest.approx(0.5, rel=1e-3)


def test_compilation_offloading_and_the_host() -> None:
    moved = {(MIDDLE, Operation.MEMORY_BOUND): Cost(0, st.BANDWIDTH * 1e12, 1)}
    assert predicted(Work(moved)).parts == pytest.approx({Operation.MEMORY_BOUND: 1})
    assert predicted(Work(moved), compiled=True).parts == pytest.approx({Operation.MEMORY_BOUND: st.FUSED})
    many = Work({(MIDDLE, Operation.MEMORY_BOUND): Cost(0, 0, 1000)})
    assert predicted(many).parts == pytest.approx({"waiting for the host": 1000 * st.HOST_SECONDS})
    away = predicted(Work(moved), "--gradient_accumulation_steps=2", host=int(st.LINKS * 50e9))
    assert away.parts["copies to the host and back"] == pytest.approx(4 - 1)
    work = Work({**moved, (END, Operation.MEMORY_BOUND): Cost(0, st.HOST_MEMORY, 1)})
    offloaded = predicted(work, "--cpu_offload=1")
    assert offloaded.parts["update"] == pytest.approx(1)


def test_every_gpu_with_a_known_peak_has_rates() -> None:
    unknown = {each.gpu for each in instances.instances().values() if st.machine_of(each) is None}
    assert unknown == {"RTX PRO 6000"}
    found = st.machine_of(instances.find("p5.48xlarge"))
    assert found is not None
    assert (found.peak, found.network, found.per_node) == (989.4e12, 400e9, 8)


def spent(**changes: Any) -> dict[str, Any]:
    own = {
        "tokens": 36e6, "price_per_hour": 3.0, "device_hours_per_failure": 1e30, "interruptions_per_hour": 0.0,
        "restart_minutes": 6.0, "write_gb_per_s": None, "checkpoint_type": None, **changes,
    }  # fmt: skip
    mode, degree = own.pop("recovery", "off"), own.pop("hybrid_shard_degree", 8)
    args: Any = replace(
        parse([f"--recovery={mode}", f"--hybrid_shard_degree={degree}"], {}).args, checkpoint_freq=[720, 5000],
        checkpoint_type=own.pop("checkpoint_type"),
    )  # fmt: skip
    speed = st.Prediction(5.0, 1000, 16, 0.5, {}, {})
    memory: Any = SimpleNamespace(state={Use.PARAMETERS: 35 * 10**9, Use.OPTIMIZER: 70 * 10**9}, checkpoint=10**12)
    return cost.described(SimpleNamespace(**own), args, speed, MACHINE, memory)  # type: ignore[arg-type]


def test_a_budget() -> None:
    found = spent()["cost"]  # 36,000 steps of 5 s on two instances
    assert (found["training"], found["hours"], found["price"]) == pytest.approx((50, 50, 300))
    # Every hour half of a failure, each of which loses half of 720 steps, half an hour, and 0.1 to restart.
    failing = spent(device_hours_per_failure=64.0, interruptions_per_hour=0.125)["cost"]
    assert failing["hours"] == pytest.approx(50 / (1 - 0.5 * 0.6))
    assert failing["failures"] == failing["hours"] / 2
    assert failing["lost"] == pytest.approx(failing["hours"] - 50)
    # In place: one step of 5 s, and 30 s.
    recovering = {"device_hours_per_failure": 64.0, "interruptions_per_hour": 0.125, "recovery": "in_place"}
    assert spent(**recovering)["cost"]["hours"] == pytest.approx(50 / (1 - 0.5 * 35 / 3600))
    assert spent(**recovering, hybrid_shard_degree=16)["cost"] == failing, "without a replica"
    assert spent(tokens=None, price_per_hour=None) == {}
    with pytest.raises(ConfigError, match="never done"):
        spent(interruptions_per_hour=1.0)


def test_saves() -> None:
    # 500 GB of each node; 105 GB from each device to the host at 35 GB/s.
    assert spent(write_gb_per_s=2.0)["save"] == pytest.approx({"written": 250, "blocked": 3})
    waiting = spent(write_gb_per_s=2.0, checkpoint_type="sharded")
    assert waiting["save"]["blocked"] == 250
    assert waiting["cost"]["saving"] == pytest.approx(50 * 250 / 3600)
    # One save takes longer than the 3,600 s to the next.
    assert spent(write_gb_per_s=0.1)["save"]["blocked"] == pytest.approx(5000 - 3600)


P5 = "--instance_type=p5.48xlarge"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([P5, "--price_per_hour=1"], "give --tokens"), ([P5, "--tokens=inf"], "--tokens: inf: must be above 0"),
        (["--devices=8", "--tokens=1e9"], "--instance_type"), (["--devices=8", "--nodes=2"], "--nodes"),
        (["--devices=0"], "--devices: 0: must be at least 1"), ([P5, "--memory_gib=80"], "--memory_gib"),
        ([P5, "--restart_minutes=nan"], "--restart_minutes: nan"),
        ([P5, "--interruptions_per_hour=-1"], "--interruptions_per_hour: -1"),
    ],
)  # fmt: skip
def test_impossible_machines_and_budgets_are_refused(words: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        options.read(["--model_type=llama_v2", "--model_size=7b", *words])
    options.read(["--model_type=llama_v2", "--model_size=7b", P5, "--tokens=1T", "--interruptions_per_hour=0"])


def test_numbers_of_tokens() -> None:
    assert [*map(options.number, ("1T", "15e12", "300b"))] == [1e12, 15e12, 300e9]
    assert [*map(options.short_number, (1e12, 1.5e13, 3e11, 500))] == ["1T", "15T", "300B", "500"]
