"""Initial and pretrained weights on real meshes: the same bits as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import run
from tests.tiers import slow
from tests.training import NO_MODEL, built, flags, group, same

# Sizes that neither 2 nor 3 nor 4 ranks divide evenly: 250 rows, 66 and 154 columns.
SMALL = {"num_heads": 3, "hidden_width": 66, "vocab_size": 250}
LLAMA = SMALL | {"num_key_value_heads": 1, "intermediate_size": 154}
# A width that tensor parallelism over 2 divides.
EVEN = {"hidden_width": 64, "vocab_size": 250, "intermediate_size": 160}
TIED = LLAMA | {"model_type": "llama_v3", "tie_word_embeddings": 1}
GPT2 = SMALL | {"model_type": "gpt2", "num_key_value_heads": None, "intermediate_size": None}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}
FEW = MIXTRAL | {"num_local_experts": 2}
TENSOR, TWO, FOUR = {"tensor_parallel_degree": 2}, {"expert_parallel_degree": 2}, {"expert_parallel_degree": 4}


class Case(NamedTuple):
    """Flags, and the shape of each rank's part of the experts of a layer."""

    changes: dict[str, Any]
    experts: tuple[int, ...] | None = None


CASES: dict[int, list[Case]] = {
    2: [Case(LLAMA), Case(GPT2), Case(TIED), Case(MIXTRAL | EVEN)],
    3: [Case(LLAMA)],
    4: [
        Case(LLAMA), Case(LLAMA | {"hybrid_shard_degree": 2}), Case(EVEN | TENSOR),
        Case(MIXTRAL | FOUR, (1, 96, 32)), Case(MIXTRAL | TWO, (1, 96, 32)),
        Case(MIXTRAL | TWO | TENSOR, (1, 96, 32)),
        # Two experts, so one on each expert rank: by columns.
        Case(FEW | TWO, (1, 96, 16)), Case(FEW, (2, 96, 8)), Case(FEW | TENSOR, (1, 96, 16)),
    ],
}  # fmt: skip


def weights(cases: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Any]]:
    """Return, per case, the whole weights (on the last rank) and the shape of this rank's experts."""
    from smp_train.distributed.dtensor import local_tensor

    found = []
    with group() as (ranks, device):
        for changes in cases:
            _, backend, spec = built(ranks, device, **changes)
            model = backend.build(backend.check(spec, seq_len=16), seed=3)
            named = dict(model.named_parameters())
            whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in named.items()}
            experts = named.get("model.layers.0.mlp.experts.gate_up_proj")
            shape = None if experts is None else tuple(local_tensor(experts).shape)
            last = ranks.rank == ranks.world_size - 1
            found.append(({name: value.clone() for name, value in whole.items()} if last else {}, shape))
    return found


def pretrained(folder: Path) -> None:
    """Write a Mixtral of random weights as a folder of the hub's."""
    import torch

    from smp_train.arguments import parse
    from smp_train.models.hugging_face import model_of
    from smp_train.models.resolve import resolve

    torch.manual_seed(1)
    model_of(resolve(parse(flags(folder, **MIXTRAL)).args).config).save_pretrained(folder)


@pytest.mark.parametrize("world", slow(CASES, {4}.__contains__))
def test_every_mesh_has_the_bits_of_one_process(world: int, tmp_path: Path) -> None:
    cases = list(CASES[world])
    if world == 4:
        run(pretrained, 1, tmp_path)
        hub = {**NO_MODEL, "hf_pretrained_model_name_or_dir": tmp_path}
        # Of tensor ranks the rows of a shard are not consecutive.
        cases += [Case(hub | degrees) for degrees in (TWO, FOUR, TENSOR)]
    alone = [{name: value for name, value in case.changes.items() if not name.endswith("degree")} for case in cases]
    (one,) = run(weights, 1, alone)
    split = run(weights, world, [case.changes for case in cases])
    for case, (expected, _), *parts in zip(cases, one, *split, strict=True):
        same(parts[-1][0], expected)
        if case.experts is not None:
            assert [shape for _, shape in parts] == [case.experts] * world
