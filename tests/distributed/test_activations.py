"""Checkpointing, offloading and compiling change no number, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.activations import STEPS, run_variants, train
from tests.training import alike

DROPOUT = {"model_type": "gpt2", "num_key_value_heads": None, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "bf16": 1}
"""In the type in which older versions of transformers can trace it."""
COMPILED = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}
OFFLOADED = {"sm_activation_offloading": 1, "activation_loading_horizon": 1}
MODES = ("none", "full", "selective:op", "selective:2")


def named(mode: str, **changes: Any) -> dict[str, Any]:
    return {"activation_checkpointing": mode, **changes}


@pytest.mark.parametrize(
    ("model", "world"), [("llama", 2), ("dropout", 1), pytest.param("dropout", 2, marks=pytest.mark.slow)]
)
def test_checkpointing_and_offloading_change_no_bit(model: str, world: int) -> None:
    base = {"gradient_accumulation_steps": 2, **(DROPOUT if model == "dropout" else {})}
    variants = {
        f"{mode} {'offloaded' if more else ''}": {**base, **named(mode, **more)}
        for mode in MODES
        for more in ({}, OFFLOADED)
    }
    for of_rank in harness.run(run_variants, world, variants):
        reference = of_rank["none "]
        assert len(reference) == STEPS
        assert of_rank == dict.fromkeys(variants, reference)


FALCON = {"model_type": "falcon", "num_key_value_heads": None}


@pytest.mark.slow
def test_falcon_changes_a_kept_result_in_place() -> None:
    variants = {"falcon": {**FALCON, **named("selective:op")}}
    by_name = "ConfigError: --activation_checkpointing selective:op: a falcon changes the result of a matrix product"
    with pytest.raises(harness.RankFailed, match=by_name):
        harness.run(run_variants, 1, variants)
    found_out = "ConfigError: --activation_checkpointing selective:op: this model changes the result of aten.mm"
    with pytest.raises(harness.RankFailed, match=found_out):
        harness.run(run_as_if_unknown, 1, variants)
    compiled = {"plain": FALCON, "compiled": {**FALCON, **named("selective:op", **COMPILED)}}
    (found,) = harness.run(run_variants, 1, compiled)
    assert found["compiled"] == found["plain"]


def run_as_if_unknown(variants: dict[str, Any]) -> Any:
    from smp_train.parallel import activation_checkpointing as activations

    activations.CHANGE_IN_PLACE = frozenset()
    return run_variants(variants)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_one_compilation_serves_all_layers_and_steps(world: int) -> None:
    """All models in one group of processes: the compiler takes longer to import than to compile for one."""
    chosen = [("llama", {}, MODES), ("dropout", DROPOUT, ("selective:op",)), ("mixture", MIXTURE, ("full",))]
    variants: dict[str, dict[str, Any]] = {}
    for model, base, modes in chosen if world == 1 else [("llama", {}, ("full",))]:
        variants[f"{model} plain"] = {**base, **named("none")}
        for mode in modes:
            more = OFFLOADED if world == 1 else {}
            variants[f"{model} {mode}"] = {**base, **named(mode, **COMPILED, **more)}
    for found, counts in harness.run(counting_compilations, world, variants):
        for name, result in found.items():
            model, mode = name.split()
            assert result == found[f"{model} plain"], name
            kinds = {"plain": 0, "selective:2": 2 + 2}.get(mode, 1 + 2)  # layers of one kind share one; the loss: 2
            assert counts[name] == [0, kinds, kinds, kinds], name


def counting_compilations(variants: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Run the variants and count the graphs that were compiled by the end of each step."""
    import torch
    from torch._dynamo.utils import counters

    counts: dict[str, list[int]] = {}

    def watch(name: str, step: int, model: Any, backend: Any, optimizer: Any) -> None:
        if step == 0:
            counters.clear()
            torch.compiler.reset()  # another variant's code must not be at hand
        assert not counters["graph_break"]
        counts.setdefault(name, []).append(counters["stats"]["unique_graphs"])

    return run_variants(variants, watch), counts


@pytest.mark.slow
def test_the_default_compiler_trains_alike() -> None:
    variants = {"plain": named("full"), "compiled": named("full", use_torch_compile=1, **OFFLOADED)}
    (found,) = harness.run(run_variants, 1, variants, timeout=600)
    alike(found["compiled"], found["plain"])  # fused kernels sum in another order


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_in_host_memory(world: int, tmp_path: Path) -> None:
    for plain, offloaded, resumed in harness.run(host_parameters, world, str(tmp_path)):
        assert offloaded == plain
        assert resumed == [plain[1:]] * 2


def host_parameters(folder: str) -> tuple[list, list, list]:
    """Train without and with CPUOffloadPolicy (on a CPU a detour, with clipping), saving and loading in the latter."""
    from smp_train import distributed
    from smp_train.backends.native import NativeBackend
    from smp_train.checkpoints.find import open_verified
    from smp_train.checkpoints.save import CheckpointManager, Policy

    ranks = distributed.detect()
    device = distributed.start(ranks, distributed_backend="auto", timeout_seconds=300)
    init = NativeBackend.__init__

    def offloading(self: Any, *args: Any) -> None:
        init(self, *args)
        assert not self.cpu_offload  # asked for on a CPU, it changes nothing
        self.cpu_offload = True

    changes = {"gradient_accumulation_steps": 2, "cpu_offload": 1, "forward_prefetch": 0}
    plain = train(ranks, device, {**changes, "forward_prefetch": 1})
    NativeBackend.__init__ = offloading  # type: ignore[method-assign]
    manager = CheckpointManager([Policy(folder, 1, 9)], run_name="run", model_type="tiny")

    def save(name: str, step: int, model: Any, backend: Any, optimizer: Any) -> None:
        if step == 1:
            manager.save(step, backend.state_dict(model, optimizer), {}, force=True)

    def load(name: str, step: int, model: Any, backend: Any, optimizer: Any) -> None:
        if step == 0:
            backend.load_state(model, optimizer, open_verified(folder).load)

    offloaded = train(ranks, device, changes, watch=save)
    resumed = [train(ranks, device, changes, watch=load, first=1)]
    NativeBackend.__init__ = init  # type: ignore[method-assign]
    resumed.append(train(ranks, device, changes, watch=load, first=1))
    distributed.stop()
    return plain, offloaded, resumed
