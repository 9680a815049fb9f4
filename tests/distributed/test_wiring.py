"""Each flag of the native backend is seen in what it changes: a flag that is read and forgotten changes no number."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.training import built, flags, group, train

LAYERS, TOKENS, VOCAB = 4, 2 * 96, 512
FREE = {"activation_checkpointing": "none"}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": FREE, "full": {"activation_checkpointing": "full"},
    "selective:op": {"activation_checkpointing": "selective:op"},
    "selective:2": {"activation_checkpointing": "selective:2"},
    "selective:9": {"activation_checkpointing": "selective:9"},
    "all logits": {**FREE, "chunked_loss": 0}, "no prefetch": {**FREE, "forward_prefetch": 0},
    "bf16": {**FREE, "bf16": 1}, "bf16 not given": {**FREE, "bf16": None},
    "zero2": {**FREE, "sharding_strategy": "shard_grad_op"},
    "offloading": {**FREE, "sm_activation_offloading": 1, "activation_loading_horizon": 3},
    "parameters on the host": FREE,
    "replicas": {**FREE, "sharding_strategy": "no_shard", "gradient_accumulation_steps": 2},
}  # fmt: skip


def look_at_all() -> dict[str, dict[str, Any]]:
    """Return, per variant, what is to be seen of it on this rank."""
    import logging

    from smp_train import losses

    logging.getLogger("smp_train.native").setLevel(logging.INFO)
    losses.CHUNK_ELEMENTS = 1  # so few tokens at a time as there may be
    with group() as (ranks, device):
        return {name: look_at(name, ranks, device) for name in VARIANTS}


def look_at(name: str, ranks: Any, device: Any) -> dict[str, Any]:
    import logging

    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from smp_train.backends import native
    from smp_train.data.batch import Batch

    class Watch(TorchDispatchMode):
        """Counts operations, and notes the most elements that one of them gives."""

        def __init__(self) -> None:
            super().__init__()
            self.counts: dict[str, int] = {}
            self.largest = 0

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operation(*args, **(kwargs or {}))
            label = operation._schema.name
            self.counts[label] = self.counts.get(label, 0) + 1
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
            return result

    sizes = {"num_layers": LAYERS, "vocab_size": VOCAB, "max_context_width": TOKENS // 2, "train_batch_size": 2}
    args, backend, spec = built(ranks, device, **{**sizes, **VARIANTS[name]})
    backend.cpu_offload = name == "parameters on the host"  # which a flag alone does not do on a CPU
    said: list[str] = []
    native.logger.handlers = [handler := logging.Handler()]
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    model: Any = backend.build(backend.check(spec, seq_len=args.max_context_width), seed=1)
    ids = torch.randint(VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(ranks.rank))
    reduced = []
    all_reduce = dist.all_reduce
    micro_batches = args.gradient_accumulation_steps
    for index in range(micro_batches):
        count = []

        def counting(*args: Any, count: list[int] = count, **kwargs: Any) -> Any:
            count.append(1)
            return all_reduce(*args, **kwargs)

        dist.all_reduce = counting
        backend.begin_micro_batch(model, last=index == micro_batches - 1)
        with Watch() as forward:
            loss, _ = backend.loss(model, Batch(ids, ids))
            gathered = [not isinstance(layer.mlp.up_proj.weight, DTensor) for layer in model.model.layers]
            with Watch() as backward:
                loss.backward()
        dist.all_reduce = all_reduce
        reduced.append(len(count))
    native.logger.handlers = []
    state = model.model.layers[1]._get_fsdp_state()
    return {
        "products": backward.counts["aten::mm"], "activations": backward.counts.get("aten::silu", 0),
        "largest": max(forward.largest, backward.largest), "gathered": gathered,
        "reduce": str(state._mp_policy.reduce_dtype), "compute": str(state._mp_policy.param_dtype),
        "prefetched": len(state._states_to_forward_prefetch),
        "parameters": type(state._fsdp_param_group.offload_policy).__name__,
        "horizon": backend.offload.horizon if backend.offload else None, "reduced": reduced, "said": said,
    }  # fmt: skip


@cache
def seen() -> dict[str, dict[str, Any]]:
    first, second = harness.run(look_at_all, 2)
    assert first == second
    return first


@pytest.mark.parametrize(
    ("name", "layers", "products"),
    [("none", 0, 0), ("full", LAYERS, LAYERS), ("selective:op", LAYERS, 0), ("selective:2", LAYERS // 2, LAYERS // 2)],
)
def test_checkpointing_computes_its_layers_again(name: str, layers: int, products: int) -> None:
    assert seen()[name]["activations"] == layers
    assert seen()[name]["products"] - seen()["none"]["products"] == 6 * products  # the last of a layer is not needed


def test_a_chunked_loss_never_holds_all_logits() -> None:
    assert seen()["none"]["largest"] < TOKENS * VOCAB
    assert seen()["all logits"]["largest"] >= TOKENS * VOCAB


def test_settings_without_effect_are_logged() -> None:
    assert seen()["none"]["said"] == []
    (line,) = seen()["selective:9"]["said"]
    assert f"selective:9 chooses none of {LAYERS} layers" in line


def test_each_flag_reaches_what_it_is_for() -> None:
    assert (seen()["none"]["prefetched"], seen()["no prefetch"]["prefetched"]) == (1, 0)
    assert (seen()["bf16"]["compute"], seen()["bf16"]["reduce"]) == ("torch.bfloat16", "torch.float32")
    assert seen()["bf16 not given"]["compute"] == seen()["none"]["compute"], "a CPU computes in float32"
    # Layers are freed after their forward pass.
    assert seen()["none"]["gathered"] == [False] * (LAYERS - 1) + [True]
    assert seen()["zero2"]["gathered"] == [True] * LAYERS
    assert (seen()["none"]["horizon"], seen()["offloading"]["horizon"]) == (None, 3)
    parameters = seen()["none"]["parameters"], seen()["parameters on the host"]["parameters"]
    assert parameters == ("OffloadPolicy", "CPUOffloadPolicy")
    # Replicas are summed after the last micro-batch.
    first, last = seen()["replicas"]["reduced"]
    assert first == 0 < last


def with_and_without_fp8() -> tuple[int, bool, bool, bool]:
    """Return how many layers compute in FP8, whether names and weights are what they are without, and if it trains."""
    import torch

    from smp_train.data.batch import Batch
    from smp_train.parallel import float8

    float8.check = lambda device: None  # which asks for a GPU; torch has the product for CPUs too
    models: list[Any] = []
    with group() as (ranks, device):
        for fp8 in (0, 1):
            _, backend, spec = built(ranks, device, bf16=1, fp8=fp8, activation_checkpointing="full")
            models.append(backend.build(backend.check(spec, seq_len=16), seed=1))
        plain, converted = (dict(model.named_parameters()) for model in models)
        same = all(torch.equal(converted[name].to_local(), plain[name].to_local()) for name in plain)
        count = sum(type(module).__name__ == "Float8Linear" for module in models[1].modules())
        ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(ranks.rank))
        loss, _ = backend.loss(models[1], Batch(ids, ids))
        loss.backward()
        finite = all(bool(p.grad.to_local().isfinite().all()) for p in models[1].parameters())
        return count, list(converted) == list(plain), same, bool(loss.isfinite()) and finite


def test_fp8_changes_the_products_and_not_the_weights() -> None:
    pytest.importorskip("torchao", reason="an optional package")
    for found in harness.run(with_and_without_fp8, 2):
        assert found == (2 * 7, True, True, True)


def train_with_little_memory(command_line: list[str], node: int) -> int:
    """Train on a host with a thousand bytes, as far as rank ``node`` is told."""
    import os

    from smp_train import build_run

    if int(os.environ["RANK"]) == node:
        build_run.free_host_bytes = lambda: 1000
    return train(command_line)


def test_a_model_larger_than_one_ranks_memory_is_refused_by_all_unless_asked_to_try(tmp_path: Path) -> None:
    words = flags(tmp_path, max_steps=1)
    with pytest.raises(harness.RankFailed, match="--memory_check 0"):
        harness.run(train_with_little_memory, 2, words, 1)
    assert not list((tmp_path / "checkpoints").glob("*"))
    assert harness.run(train_with_little_memory, 2, [*words, "--memory_check=0"], 1) == [0, 0]
