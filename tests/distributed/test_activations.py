"""Checkpointing, offloading and compiling change no number, on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.training import alike, built, group

STEPS = 3
DEEP = {"num_layers": 4, "max_context_width": 24, "train_batch_size": 2}
DROPOUT = {"model_type": "gpt2", "num_key_value_heads": None, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "bf16": 1}
"""In the type in which older versions of transformers can trace it."""
FALCON = {"model_type": "falcon", "num_key_value_heads": None}
"""Changes a kept result in place, so it is checkpointed by operation only where it is compiled."""
COMPILED = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}
OFFLOADED = {"sm_activation_offloading": 1, "activation_loading_horizon": 1}
MODES = ("none", "full", "selective:op", "selective:2")


def named(mode: str, **changes: Any) -> dict[str, Any]:
    return {"activation_checkpointing": mode, **changes}


def run_variants(variants: dict[str, dict[str, Any]], watch: Any = None) -> dict[str, list[tuple[float, float]]]:
    """Return, on every rank, (this rank's loss, gradient norm) of each step of each variant."""
    with group() as (ranks, device):
        return {name: train(ranks, device, changes, name, watch) for name, changes in variants.items()}


def train(
    ranks: Any, device: Any, changes: dict[str, Any], name: str = "", watch: Any = None, first: int = 0
) -> list[tuple[float, float]]:
    """Train one variant from step ``first`` on; ``watch(name, step, model, backend, optimizer)`` is called before the
    first step, as step 0, and after each.
    """
    import torch

    from smp_train import train_utils
    from smp_train.data.batch import Batch

    args, backend, spec = built(ranks, device, **{**DEEP, **changes})
    model = backend.build(backend.check(spec, seq_len=args.max_context_width), seed=args.seed)
    optimizer = train_utils.build_optimizer(args, backend, model)
    generator = torch.Generator().manual_seed(7 + ranks.rank)
    watch = watch or (lambda *_: None)
    watch(name, 0, model, backend, optimizer)
    results = []
    for step in range(STEPS):
        micro_batches = []
        for _ in range(args.gradient_accumulation_steps):
            tokens = torch.randint(0, 256, (args.train_batch_size, args.max_context_width), generator=generator)
            micro_batches.append(Batch(input_ids=tokens, labels=tokens))
        if step < first:
            continue
        train_utils.seed_step(args.seed, step, ranks.rank)
        result = train_utils.train_step(
            backend, model, optimizer, micro_batches, tokens=torch.tensor(100), lr=args.lr, max_grad_norm=1.0
        )
        results.append((result.loss.item(), result.grad_norm.item()))
        watch(name, step + 1, model, backend, optimizer)
    return results


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


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_one_compilation_serves_all_layers_and_steps(world: int) -> None:
    """All models in one group of processes: the compiler takes longer to import than to compile for one."""
    chosen = [("llama", {}, MODES), ("dropout", DROPOUT, ("selective:op",)), ("mixture", MIXTURE, ("full",)),
              ("falcon", FALCON, ("selective:op",))]  # fmt: skip
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
    from smp_train.backends.native import NativeBackend
    from smp_train.checkpoints.find import open_verified
    from smp_train.checkpoints.save import CheckpointManager, Policy

    init = NativeBackend.__init__

    def offloading(self: Any, *args: Any) -> None:
        init(self, *args)
        assert not self.cpu_offload  # asked for on a CPU, it changes nothing
        self.cpu_offload = True

    changes = {"gradient_accumulation_steps": 2, "cpu_offload": 1, "forward_prefetch": 0}
    manager = CheckpointManager([Policy(folder, 1, 9)], run_name="run", model_type="tiny")

    def save(name: str, step: int, model: Any, backend: Any, optimizer: Any) -> None:
        if step == 1:
            manager.save(step, backend.state_dict(model, optimizer), {}, force=True)

    def load(name: str, step: int, model: Any, backend: Any, optimizer: Any) -> None:
        if step == 0:
            backend.load_state(model, optimizer, open_verified(folder).load)

    with group() as (ranks, device):
        plain = train(ranks, device, {**changes, "forward_prefetch": 1})
        NativeBackend.__init__ = offloading  # type: ignore[method-assign]
        offloaded = train(ranks, device, changes, watch=save)
        resumed = [train(ranks, device, changes, watch=load, first=1)]
        NativeBackend.__init__ = init  # type: ignore[method-assign]
        resumed.append(train(ranks, device, changes, watch=load, first=1))
    return plain, offloaded, resumed
