"""Experts distributed over ranks: the same weights, numbers and checkpoints as of one process.

The cells of `test_same_numbers` with an expert dimension compare losses and gradient norms on every mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed.test_same_numbers import PLAIN, arguments_of, train_cell
from tests.releases import needs_transformers_5
from tests.training import alike, built, flags, group, same, train

MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4}
TWO, FOUR = {"expert_parallel_degree": 2}, {"expert_parallel_degree": 4}
HELD: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    # degrees on four ranks, and the shape of a rank's part of a stack of [experts, 96, 32]
    "ep4": (FOUR, (1, 96, 32)),
    "ep2-fsdp2": (TWO, (1, 96, 32)),
    "ep2-tp2": ({**TWO, "tensor_parallel_degree": 2}, (1, 96, 32)),
    # Two experts, so one on each expert rank: by columns.
    "ep2-fsdp2, few": ({**TWO, "num_local_experts": 2}, (1, 96, 16)),
    "fsdp4, few": ({"num_local_experts": 2}, (2, 96, 8)),
    "tp2-fsdp2, few": ({"num_local_experts": 2, "tensor_parallel_degree": 2}, (1, 96, 16)),
}


def weights(cases: list[tuple[dict[str, Any], str | None]]) -> list[dict[str, Any]]:
    """Return, per case of degrees and pretrained weights, the weights put together, and the shape of a part of them."""
    from smp_train.distributed.dtensor import local_tensor
    from smp_train.models.resolve import resolve

    found = []
    with group() as (ranks, device):
        for changes, folder in cases:
            given = {**MIXTRAL, **changes}
            if folder is not None:
                given["hf_pretrained_model_name_or_dir"] = folder
            args, backend, _ = built(ranks, device, **given)
            model = backend.build(backend.check(resolve(args), seq_len=16), seed=3)
            whole: dict[str, Any] = {}
            for name, parameter in model.named_parameters():
                whole[name] = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
                if name.endswith("0.mlp.experts.gate_up_proj"):
                    whole["part"] = tuple(local_tensor(parameter).shape)
            found.append(whole if ranks.rank == 3 or ranks.world_size == 1 else {"part": whole["part"]})
    return found


def pretrained(folder: Path) -> None:
    """Write a Mixtral of random weights as a folder of the hub's."""
    import torch

    from smp_train.arguments import parse
    from smp_train.models.hugging_face import model_of
    from smp_train.models.resolve import resolve

    torch.manual_seed(1)
    model_of(resolve(parse(flags(folder, **MIXTRAL)).args).config).save_pretrained(folder)


@pytest.mark.slow
def test_weights_are_those_of_one_process_on_every_mesh(tmp_path: Path) -> None:
    harness.run(pretrained, 1, tmp_path)
    cases: list[tuple[dict[str, Any], str | None]] = [(changes, None) for changes, _ in HELD.values()]
    widths = dict.fromkeys(
        ("model_type", "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads",
         "intermediate_size", "num_local_experts")
    )  # fmt: skip
    strided = {"tensor_parallel_degree": 2}  # each rank's rows are not consecutive
    cases += [({**widths, **degrees}, str(tmp_path)) for degrees in (TWO, FOUR, strided)]
    own = [({key: value for key, value in changes.items() if not key.endswith("_degree")}, at) for changes, at in cases]
    (one,) = harness.run(weights, 1, own)
    split = harness.run(weights, 4, cases)
    for (name, (_, shape)), *parts in zip(HELD.items(), *split, strict=False):
        assert [part["part"] for part in parts] == [shape] * 4, name
    for expected, found in zip(one, split[3], strict=True):
        del expected["part"], found["part"]
        same(expected, found)


def without_tokens(degrees: dict[str, Any]) -> list[tuple[float, float]]:
    """Train with routers of zeros, by which all tokens go to the first two experts, and those alone have gradients."""
    import torch

    from smp_train.distributed.dtensor import local_tensor

    def zeros(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.requires_grad_(False)
                with torch.no_grad():
                    local_tensor(parameter).zero_()

    with group() as (ranks, device):
        line = arguments_of("mixtral", "one", PLAIN, ranks.world_size, **degrees)
        return train_cell(line, ranks, device, change=zeros)


@needs_transformers_5
def test_ranks_without_tokens_take_part_with_gradients_of_zero() -> None:
    ((expected),) = harness.run(without_tokens, 1, {})
    for found in harness.run(without_tokens, 4, FOUR):
        alike(found, expected)


COMPILED = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager", "activation_checkpointing": "selective:op"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "three experts": ({"num_local_experts": 3, **TWO}, "--expert_parallel_degree 2 does not divide the 3 experts"),
    "compiled": ({**COMPILED, **TWO}, "--use_torch_compile 0"),
    "adapters": ({"lora_rank": 4, **TWO}, "--lora_rank needs"),
    "router loss, dense": ({"model_type": "llama_v2", "num_local_experts": None, "moe": 1}, "a llama has no experts"),
    "router loss, compiled": ({**COMPILED, "moe": 1, "moe_load_balancing": "aux_loss"}, "--use_torch_compile 0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    with pytest.raises(harness.RankFailed, match=says):
        harness.run(train, 2, flags(tmp_path, **{**MIXTRAL, "moe_load_balancing": "none", **changes}))
