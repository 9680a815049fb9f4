"""`smp-train plan` against the memory of real ranks' tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.system.command import warm
from tests.tiers import core
from tests.training import built, group

DEEP = {"num_layers": 8, "hidden_width": 64, "vocab_size": 512, "intermediate_size": 160, "max_context_width": 64,
        "train_batch_size": 2}  # fmt: skip
OF = {
    "llama": {},
    "mistral": {"model_type": "mistral"},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": None, "intermediate_size": None},
    "neox": {"model_type": "gpt_neox", "num_key_value_heads": None, "intermediate_size": None},
    "phi": {"model_type": "phi", "num_key_value_heads": None},
    "falcon": {"model_type": "falcon", "num_key_value_heads": None, "intermediate_size": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
HALF, WHOLE = {"bf16": 1}, {"chunked_loss": 0}
OFFLOADED = {"sm_activation_offloading": 1, "activation_loading_horizon": 1}
HSDP, TP, CP = {"hybrid_shard_degree": 2}, {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}
EP = {"expert_parallel_degree": 2}


def mode(value: str) -> dict[str, Any]:
    return {"activation_checkpointing": value}


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"{name} alone": (1, of) for name, of in OF.items()},
    **{f"{name} fsdp 2": (2, of) for name, of in OF.items()},
    **{f"llama fsdp 2 {value}": (2, mode(value)) for value in ("none", "selective:op", "selective:2", "selective:1/3")},
    "llama fsdp 2 bf16": (2, HALF),
    "gpt2 fsdp 2 bf16 none": (2, {**OF["gpt2"], **HALF, **mode("none")}),
    "llama fsdp 2 offloaded": (2, OFFLOADED),
    "llama fsdp 2 offloaded none": (2, {**OFFLOADED, **mode("none")}),
    "llama fsdp 2 all logits": (2, {**WHOLE, **HALF}),
    "llama fsdp 2 no prefetch": (2, {"forward_prefetch": 0}),
    "llama fsdp 2 gradients sharded": (2, {"sharding_strategy": "shard_grad_op"}),
    "llama fsdp 2 accumulated": (2, {"gradient_accumulation_steps": 2}),
    "llama tp 2 all logits": (2, {**TP, **WHOLE}),
    "neox tp 2 none": (2, {**OF["neox"], **TP, **mode("none")}),
    "phi tp 2 bf16 none": (2, {**OF["phi"], **TP, **HALF, **mode("none")}),
    "llama cp 2": (2, CP),
    "mixtral fsdp 2 bf16 none": (2, {**OF["mixtral"], **HALF, **mode("none")}),
    "mixtral ep 2 bf16 none": (2, {**OF["mixtral"], **EP, **HALF, **mode("none")}),
    "mixtral ep 2 offloaded": (2, {**OF["mixtral"], **EP, **OFFLOADED}),
    "llama fsdp 4 bf16 none": (4, {**HALF, **mode("none")}),
    "mistral hsdp 2x2": (4, {**OF["mistral"], **HSDP}),
    "phi hsdp 2x2 selective:op": (4, {**OF["phi"], **HSDP, **mode("selective:op")}),
    "mixtral ep 4": (4, {**OF["mixtral"], "expert_parallel_degree": 4}),
    "mixtral ep 2 tp 2 bf16": (4, {**OF["mixtral"], **EP, **TP, **HALF}),
    "llama tp 2 fsdp 2 bf16": (4, {**TP, **HALF}),
    "llama tp 2 fsdp 2 selective:op": (4, {**TP, **mode("selective:op")}),
}
"""By name: ranks and flags."""

CORE = ["llama fsdp 2 selective:1/3", "llama fsdp 2 offloaded none"]
BY_WORLD = [[name for name, (ranks, _) in SETTINGS.items() if ranks == world] for world in (1, 2, 4)]
TENS = [names[first : first + 10] for names in BY_WORLD for first in range(0, len(names), 10)]


@pytest.mark.slow
@pytest.mark.parametrize("names", core([CORE, *TENS], lambda names: names is CORE))
def test_planned_memory_is_that_of_real_ranks(names: Sequence[str]) -> None:
    """Ten settings of one world in one group of ranks: starting one takes as long as several settings."""
    (ranks,) = {SETTINGS[name][0] for name in names}
    changes = [SETTINGS[name][1] for name in names]
    real = harness.run(measured, ranks, changes)[0]
    planned = harness.run(estimated, 1, ranks, changes)[0]
    assert dict(zip(names, planned, strict=True)) == {
        name: pytest.approx(each, rel=0.02) for name, each in zip(names, real, strict=True)
    }


def dealt(
    exchange: Any, compute: Any, share: int, mesh: Any, profile: Any, hidden: Any, index: Any, weights: Any
) -> Any:
    """Exchange tokens as if the router used all experts equally."""
    index = (index.new_ones(index.numel()).cumsum(0) % (share * mesh.size())).view_as(index)
    return exchange(compute, share, mesh, profile, hidden, index, weights)


def measured(settings: list[dict[str, Any]]) -> list[Any]:
    """Return the bytes of rank 0's tensors for each setting: on the device, on the host, and saved from a GPU."""
    from smp_train import train_utils
    from smp_train.distributed.host_copy import local_bytes
    from smp_train.models.hub_state import gather_state, present
    from smp_train.parallel import expert_parallel
    from smp_train.planning import step_memory
    from smp_train.planning.memory import Memory

    expert_parallel._exchange = partial(dealt, expert_parallel._exchange)
    found: list[Any] = []
    with group() as (ranks, device):
        for changes in settings:
            args, backend, spec = built(ranks, device, **{**DEEP, **changes})
            model = backend.build(backend.check(spec, seq_len=args.max_context_width), seed=args.seed)
            memory = Memory(step_memory.peaks(args, backend, model, seq_len=args.max_context_width), 0)
            state = gather_state(model, train_utils.build_optimizer(args, backend, model))
            found.append((memory.peak, memory.offloaded, local_bytes(present(state), pinned=True)))
    return found


def estimated(world: int, settings: list[dict[str, Any]]) -> list[Any]:
    """Return the planned bytes of each setting: on the device, on the host, and saved from a GPU."""
    return [(memory.peak, memory.offloaded, memory.saved) for _, memory in planned(world, settings)]


def planned(world: int, settings: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield each setting's run and its memory."""
    from smp_train import arguments
    from smp_train.planning.best import planned_run
    from smp_train.planning.estimate import estimate
    from tests.training import flags

    for changes in settings:
        args = arguments.parse(flags(Path("unused"), **{**DEEP, **changes}), {}).args
        run = planned_run(args, world, world, gpu=False)
        yield run, estimate(run)


LARGEST = {
    "head": {"vocab_size": 8192, "chunked_loss": 0},
    "activations": mode("none"),
    "rows": {"train_batch_size": 16},
    "gathered": {"hidden_width": 256, "intermediate_size": 1024, "max_context_width": 16, "train_batch_size": 1},
    "state": {"sharding_strategy": "no_shard"},
    "experts": {**OF["mixtral"], "num_local_experts": 8, "max_context_width": 16, "intermediate_size": 640},
}
"""Settings in which one use of memory is the largest, by use."""


@pytest.mark.slow
def test_every_suggestion_lowers_the_memory_of_real_ranks() -> None:
    suggested = harness.run(suggestions, 1, 2, list(LARGEST.values()))[0]
    settings = {(use, None): changes for use, changes in LARGEST.items()}
    for use, flags in zip(LARGEST, suggested, strict=True):
        settings |= {(use, words): {**LARGEST[use], **read(words)} for words in flags if words.startswith("--")}
    real = harness.run(measured, 2, list(settings.values()))[0]
    peaks = {setting: peak for setting, (peak, *_) in zip(settings, real, strict=True)}
    assert {use for (use, words) in settings if words} == set(LARGEST)
    assert [key for key, peak in peaks.items() if key[1] and peak >= peaks[key[0], None]] == []
    assert {flag for _, words in settings if words for flag in read(words)} >= {
        "chunked_loss", "activation_checkpointing", "train_batch_size", "context_parallel_degree",
        "tensor_parallel_degree", "expert_parallel_degree", "hybrid_shard_degree",
    }  # fmt: skip


def read(words: str) -> dict[str, Any]:
    """Return the flags of a suggestion."""
    found = words.split()
    return {flag.removeprefix("--"): value for flag, value in zip(found[::2], found[1::2], strict=True)}


def suggestions(world: int, settings: list[dict[str, Any]]) -> list[list[str]]:
    """Return the suggestions for each setting."""
    from smp_train.planning.cli import lower
    from smp_train.planning.options import Devices

    devices = Devices(world, world, memory=None, host=None)
    return [list(lower(run, memory, devices)) for run, memory in planned(world, settings)]


PAGE = Path(__file__).parents[2] / "docs" / "memory.md"
CELLS = [("scratch 7b", 8), ("mixtral 8x7b", 64), ("falcon 40b", 16), ("scratch 70b", 32)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "devices"), CELLS)
def test_docs_memory_is_current(model: str, devices: int) -> None:
    from benchmarks import memory_table as table

    head, *rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert head[2:] == [*map(str, table.DEVICES[:-1]), f"{table.DEVICES[-1]} GPUs"]
    assert [row[0] for row in rows] == [" ".join(each) for each in table.MODELS]
    (documented,) = (row[2 + table.DEVICES.index(devices)] for row in rows if row[0] == model)
    assert harness.run(table.needed, 1, *model.split(), devices) == [int(documented)], "run benchmarks.memory_table"


MIB = 2**20
LLAMA = ["--model_type", "llama_v2", "--model_size", "7b", "--max_context_width", "4096", "--train_batch_size", "1"]


@pytest.mark.slow
@pytest.mark.core
def test_the_verb(tmp_path: Path) -> None:
    """A model of 7 B parameters: 16 bytes each are 50 GiB on each of two devices, 13 GiB on each of eight."""
    with warm(tmp_path, "plan", *LLAMA, "--instance_type", "ml.p5.48xlarge", "--tokens", "1T", "--price_per_hour", "2",
              "--json", "--trust_remote_code", "1") as command:  # fmt: skip
        assert command.code() == 0
        assert "--trust_remote_code" in command.err
        found = json.loads(command.out)
    assert found["fits"] is True
    assert found["needed"] == found["peak"] + found["slack"] < found["memory"] == 80 * 10**9
    assert sum(found["state"].values()) == pytest.approx(16 * 6_738_415_616 / 8, rel=1e-3)
    assert found["checkpoint"] == 12 * 6_738_415_616
    # An eighth in float32: attention's matrices take 8 MiB, the feed-forward layer's 21.5, the embedding's 62.5.
    blocks = 32 * (4 * 8 + 3 * 32) * MIB + 2 * 64 * MIB + (2 * 32 + 1) * 4 * 4096 // 8
    assert found["host_while_saving"] == 3 * blocks
    assert sum(found["at_peak"].values()) == found["peak"] == max(found["phases"].values())
    time, cost = found["time"], found["cost"]
    assert sum(time["parts"].values()) == pytest.approx(time["step"])
    assert time["tokens_per_second"] == pytest.approx(8 * 4096 / time["step"])
    assert 0.3 < time["mfu"] < 0.6
    assert cost["training"] == pytest.approx(1e12 / time["tokens_per_second"] / 3600)
    assert cost["training"] < cost["hours"] == cost["price"] / 2
    with warm(tmp_path, "plan", *LLAMA, "--devices", "2", "--memory_gib", "40") as command:
        assert command.code() == 2
        (line,) = command.err.splitlines()
        header = " ".join(command.out.splitlines()[:2])
        assert all(part in header for part in ("rows of 4,096 tokens", "1 a micro-batch", "checkpointing full", "bf16"))
        assert "does not fit into 40.00 GiB" in command.out
        assert "more devices" in command.out
    assert all(part in line for part in ("does not fit", "40.00 GiB", "give --cpu_offload 1 with "))

    with warm(tmp_path, "plan", "--devices", "2") as command:
        assert command.code() == 2
        assert "no model; give --model_type" in command.err


@pytest.mark.slow
def test_a_run_that_needs_more_host_memory_does_not_fit(tmp_path: Path) -> None:
    """A g5.xlarge has 16 GiB, and the state of 7 B parameters takes 100."""
    with warm(tmp_path, "plan", *LLAMA, "--instance_type", "g5.xlarge", "--cpu_offload", "1", "--json") as command:
        assert command.code() == 2
        (line,) = command.err.splitlines()
        found = json.loads(command.out)
    assert found["needed"] < found["memory"]
    assert found["host_needed"] > found["host"] > 16 * 6_738_415_616 > found["host_memory"] == 16 * 2**30
    assert "of its host's memory, which has 16.00 GiB" in line
    with warm(tmp_path, "plan", *LLAMA, "--instance_type", "g5.xlarge") as command:
        assert command.code() == 2
        assert "--cpu_offload 1" not in command.err  # which would not fit the host
