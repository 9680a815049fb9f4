"""Initial weights on real meshes: the same bits as on one process, each rank drawing its own part."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from smp_train.arguments import Arguments
from smp_train.models.build import build_meta, decoder_layers, materialise
from smp_train.models.initialization import initialise
from smp_train.models.resolve import resolve
from tests.harness import run

SEED = 7
# Sizes that neither 2 nor 3 nor 4 ranks divide evenly: 250 rows, 66 and 154 columns.
SMALL = {"num_layers": 2, "num_heads": 3, "hidden_width": 66, "vocab_size": 250, "max_context_width": 32}
LLAMA = SMALL | {"model_type": "llama_v2", "num_key_value_heads": 1, "intermediate_size": 154}
# A width that tensor parallelism over 2 divides.
EVEN = LLAMA | {"num_heads": 4, "num_key_value_heads": 2, "hidden_width": 64, "intermediate_size": 160}
TIED = SMALL | {"model_type": "llama_v3", "tie_word_embeddings": 1}
GPT2 = SMALL | {"model_type": "gpt2"}
MIXTRAL = EVEN | {"model_type": "mixtral", "num_local_experts": 4}


def build(flags: dict[str, Any]) -> torch.nn.Module:
    return build_meta(resolve(Arguments(**flags)))


def draw(model: torch.nn.Module) -> int:
    """Draw the model's weights, over NaN; return how many numbers this rank drew."""
    materialise(model, "cpu")
    with torch.no_grad():
        for param in model.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).fill_(float("nan"))
    return initialise(model, SEED)


def finish(model: torch.nn.Module, flags: dict[str, Any]) -> int:
    """Draw the model's weights, and compare them with those of one process."""
    drawn, whole = draw(model), build(flags)
    draw(whole)
    for (name, param), (expected, value) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == expected
        assert torch.equal(param.full_tensor() if isinstance(param, DTensor) else param, value), name
    return drawn


def sharded(flags: dict[str, Any], *shape: int) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[2 - len(shape) :])
    model = build(flags)
    for _, layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel_and_sharded(flags: dict[str, Any]) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = build(flags)
    plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
    plan |= {"self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel()}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for _, layer in decoder_layers(model):
        parallelize_module(layer, mesh["tensor"], plan)
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    placements = {tuple(type(p).__name__ for p in param.placements) for param in model.parameters()}
    assert ("_StridedShard", "Shard") in placements
    return model


# One matrix placed on a 2 x 2 mesh, and how many times over it is drawn.
PLACEMENTS = [
    ([Shard(1), Replicate()], 2),
    ([Replicate(), Replicate()], 4),
    ([Shard(0), Shard(1)], 1),
    ([Shard(1), Shard(1)], 1),
]


def place_one_matrix() -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2))
    counts = []
    for placements, _ in PLACEMENTS:
        model = build(LLAMA)
        head: Any = model.get_submodule("lm_head")
        meta = distribute_tensor(torch.empty(head.weight.shape, device="meta"), mesh, placements)
        head.weight = torch.nn.Parameter(meta)
        named = model.named_parameters()
        others = sum(p.numel() for n, p in named if n != "lm_head.weight" and "norm" not in n)
        counts.append(finish(model, LLAMA) - others)
    return counts


def check_tied(model: Any) -> None:
    """The head is the embedding, also after a step."""
    model.reshard()
    ids = torch.arange(24).view(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    model.reshard()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.get_input_embeddings().weight.grad is not None


def body(world: int) -> dict[str, Any]:
    """Run every case of one number of processes; return how many numbers this rank drew in each."""
    dist.init_process_group("gloo")
    drawn: dict[str, Any] = {"sharded": finish(sharded(LLAMA, world), LLAMA)}
    if world == 2:
        for flags in (GPT2, TIED, MIXTRAL):
            model: Any = sharded(flags, world)
            finish(model, flags)
            if model.config.tie_word_embeddings:
                check_tied(model)
    if world == 4:
        drawn["hybrid"] = finish(sharded(LLAMA, 2, 2), LLAMA)
        finish(tensor_parallel_and_sharded(EVEN), EVEN)
        drawn["placed"] = place_one_matrix()
    dist.destroy_process_group()
    return drawn


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_mesh_has_the_bits_of_one_process_and_each_rank_draws_its_part(world: int) -> None:
    results = run(body, world, world)
    norms, row = 5 * 66, 250
    for case, replicas in (("sharded", 1), ("hybrid", 2)):
        if case in results[0]:
            counts = [result[case] for result in results]
            total = sum(p.numel() for p in build(LLAMA).parameters()) - norms
            assert sum(counts) == replicas * total
            # Rows are dealt in whole ones, 17 matrices of them.
            assert max(counts) <= replicas * total / world + 17 * row
    if world == 4:
        counts = [sum(result["placed"][case] for result in results) for case in range(len(PLACEMENTS))]
        assert counts == [times * row * 66 for _, times in PLACEMENTS]
