"""Experts distributed over ranks: ranks without tokens, and what is refused.

Meshes with an expert dimension are in test_same_numbers, test_initialization and test_resume.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed.test_same_numbers import PLAIN, arguments_of, train_cell
from tests.releases import needs_transformers_5
from tests.training import alike, flags, group, train

MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 4}
TWO, FOUR = {"expert_parallel_degree": 2}, {"expert_parallel_degree": 4}


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
