"""The same numbers on every mesh: each family, on each mesh, with each way of saving memory, against one process.

A cell is one run of three updates; the cells of a family on a mesh share one group of processes. What cannot be done
together is listed in `UNSUPPORTED` and docs/parallelism.md, and every such cell is seen to be refused.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.releases import need
from tests.tiers import core
from tests.training import alike, built, flags, group

STEPS = 3
ROWS = 4
WIDTH = 32

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama_v3", "tie_word_embeddings": 1},
    "mistral": {"model_type": "mistral", "sliding_window": 12},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": None, "resid_pdrop": 0},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": None, "resid_pdrop": 0, "embd_pdrop": 0},
    "phi": {"model_type": "phi", "rotary_pct": 0.5, "resid_pdrop": 0, "embd_pdrop": 0},
    "falcon": {"model_type": "falcon", "num_key_value_heads": 1, "resid_pdrop": 0},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "fsdp2": (2, {}), "fsdp4": (4, {}), "hsdp2x2": (4, {"hybrid_shard_degree": 2}),
    "tp2": (2, {"tensor_parallel_degree": 2}), "tp2-fsdp2": (4, {"tensor_parallel_degree": 2}),
    "tp2-hsdp2x2": (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "cp2": (2, {"context_parallel_degree": 2}),
    "ep2": (2, {"expert_parallel_degree": 2}), "ep2-fsdp2": (4, {"expert_parallel_degree": 2}),
    "ep4": (4, {"expert_parallel_degree": 4}),
    "ep2-hsdp2": (4, {"expert_parallel_degree": 2, "hybrid_shard_degree": 1}),
    "ep2-tp2": (4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "ep2-tp2-fsdp2": (8, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "ep2-cp2-hsdp2x2": (
        8, {"expert_parallel_degree": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 2}
    ),
}  # fmt: skip
CHECKPOINTING = ("none", "full", "selective:op", "selective:2")
MODES = list(itertools.product(CHECKPOINTING, (0, 1), (1, 0)))
"""(activation checkpointing, activation offloading, chunked loss)"""
PLAIN = ("none", 0, 0)
SOME = [("none", 1, 1), ("full", 0, 1), ("selective:op", 0, 0), ("selective:2", 1, 0)]
"""Every value of each, trained where SMP_TRAIN_WHOLE_TABLE is not 1."""
CELLS = [
    (family, mesh) for family in FAMILIES for mesh in MESHES if family == "mixtral" or not mesh.startswith("ep")
]  # fmt: skip
CORE = {
    ("llama", "fsdp2"), ("mixtral", "tp2"), ("mixtral", "ep2"), ("mistral", "cp2"), ("gpt2", "one"), ("falcon", "tp2"),
}  # fmt: skip

UNSUPPORTED: list[tuple[str, str, str, str]] = [
    # family, mesh, checkpointing (regular expressions), what the refusal says
    ("gpt2|falcon", "tp2.*", ".*", "tensor_parallel_degree"),
    ("falcon", "cp2", ".*", "context_parallel_degree"),
    ("falcon", ".*", "selective:op", "selective:op"),
]


def refusal(family: str, mesh: str, checkpointing: str) -> str | None:
    """Return what the refusal of a cell says, or None for a cell that trains."""
    for *patterns, says in UNSUPPORTED:
        if all(re.fullmatch(p, v) for p, v in zip(patterns, (family, mesh, checkpointing), strict=True)):
            return says
    return None


def arguments_of(family: str, mesh: str, mode: tuple[str, int, int], world: int, **changes: Any) -> list[str]:
    checkpointing, offloading, chunked = mode
    degrees = MESHES[mesh][1]
    ranks_of_data = world // degrees.get("tensor_parallel_degree", 1) // degrees.get("context_parallel_degree", 1)
    return flags(
        Path("unused"), vocab_size=64, max_context_width=WIDTH, attn_pdrop=0, **FAMILIES[family],
        **degrees, train_batch_size=ROWS // ranks_of_data, activation_checkpointing=checkpointing,
        sm_activation_offloading=offloading, activation_loading_horizon=1, chunked_loss=chunked, **changes,
    )  # fmt: skip


def train_here(
    family: str, mesh: str, modes: list[tuple[str, int, int]], ranks: Any, device: Any, **changes: Any
) -> dict[Any, Any]:
    """Return, per mode, (global loss, gradient norm) of each step, or the message of a refusal."""
    from smp_train.errors import ConfigError
    from smp_train.parallel import mesh as meshes

    # A mesh has no state, and its groups take longer to make than a cell to train.
    if not hasattr(meshes.Mesh, "cache_info"):
        meshes.Mesh = cache(meshes.Mesh)  # type: ignore[misc]
    found: dict[Any, Any] = {}
    for mode in modes:
        try:
            found[mode] = train_cell(arguments_of(family, mesh, mode, ranks.world_size, **changes), ranks, device)
        except ConfigError as error:
            found[mode] = str(error)
    return found


def train_modes(family: str, mesh: str, modes: list[tuple[str, int, int]]) -> dict[Any, Any]:
    """Return `train_here` in a group of processes of its own."""
    with group() as (ranks, device):
        return train_here(family, mesh, modes, ranks, device)


def train_cell(
    command_line: list[str], ranks: Any, device: Any, change: Callable[[Any], None] = lambda model: None,
    each: Callable[[], None] = lambda: None, rows: Callable[[int, int, int], tuple[Any, int]] | None = None,
) -> list[tuple[float, float]]:  # fmt: skip
    """Return (global loss, gradient norm) of each step of a model that ``change`` changes; ``each`` is called after.

    ``rows`` replaces `rows_of`.
    """
    import torch

    from smp_train import train_utils

    args, backend, spec = built(ranks, device, command_line)
    model = backend.build(backend.check(spec, seq_len=WIDTH), seed=args.seed)
    change(model)
    optimizer = train_utils.build_optimizer(args, backend, model)
    results = []
    for step in range(STEPS):
        batch, tokens = (rows or rows_of)(step, backend.topology.dp_rank, args.train_batch_size)
        train_utils.seed_step(args.seed, step, backend.topology.dp_rank)
        result = train_utils.train_step(
            backend, model, optimizer, [batch], tokens=torch.tensor(tokens), lr=1e-2, max_grad_norm=1.0
        )
        results.append((backend.sum_over_data(result.loss.clone()).item(), result.grad_norm.item()))
        each()
    return results


def rows_of(step: int, dp_rank: int, count: int) -> tuple[Any, int]:
    """Return this rank's rows of the step's global batch and the tokens counted in all.

    Every second step has padding.
    """
    import torch

    from smp_train.data.batch import Batch
    from smp_train.data.source import IGNORED

    tokens = torch.randint(64, (ROWS, WIDTH), generator=torch.Generator().manual_seed(step))
    lengths = torch.tensor([[WIDTH], [WIDTH // 3], [WIDTH - 1], [WIDTH // 2]])
    mask = (torch.arange(WIDTH) < (WIDTH if step % 2 else lengths)).long()
    labels = tokens.masked_fill(mask == 0, IGNORED)
    mine = slice(dp_rank * count, (dp_rank + 1) * count)
    return Batch((tokens * mask)[mine], labels[mine]), int((labels[:, 1:] != IGNORED).sum())


@cache
def reference(family: str) -> list[tuple[float, float]]:
    (found,) = harness.run(train_modes, 1, family, "one", [PLAIN])
    return found[PLAIN]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), core(CELLS, CORE.__contains__))
def test_every_cell_equals_one_process(family: str, mesh: str) -> None:
    need(family, mesh)
    expected = reference(family)
    modes = MODES if os.environ.get("SMP_TRAIN_WHOLE_TABLE") == "1" else SOME
    by_rank = harness.run(train_modes, MESHES[mesh][0], family, mesh, modes)
    for rank, mode in itertools.product(range(len(by_rank)), modes):
        found, says = by_rank[rank][mode], refusal(family, mesh, mode[0])
        cell = f"{family} {mesh} {mode} rank {rank}: {found}"
        if says is not None:
            assert isinstance(found, str), cell
            assert says in found, cell
            continue
        assert isinstance(found, list), cell
        alike(found, expected, cell)


COMPILED: dict[str, list[tuple[str, tuple[str, int, int]]]] = {
    "tp2": [("gpt_neox", ("full", 1, 1)), ("mixtral", ("selective:op", 0, 1))],
    "cp2": [("llama", ("full", 1, 1))],
}


def train_compiled(mesh: str) -> dict[str, tuple[list[Any], int, dict[str, int]]]:
    """Return, by family, (global loss, gradient norm) of each step, how many graphs were compiled, what broke one."""
    import torch
    from torch._dynamo.utils import counters

    compiled = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}
    results = {}
    with group() as (ranks, device):
        for family, mode in COMPILED[mesh]:
            counters.clear()
            torch.compiler.reset()
            found = train_here(family, mesh, [mode], ranks, device, **compiled)[mode]
            results[family] = found, counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return results


def traces_experts() -> bool:
    import torch
    import transformers.integrations.moe  # noqa: F401

    return hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", COMPILED)
def test_compiled_layers_of_split_models_equal_one_process(mesh: str) -> None:
    for of_rank in harness.run(train_compiled, MESHES[mesh][0], mesh):
        for family, (found, graphs, breaks) in of_rank.items():
            # Older transformers cannot trace the product of experts in float32: layers are compiled in pieces.
            if family != "mixtral" or traces_experts():
                assert not breaks, family
                assert graphs == 1 + 2, family  # the layers, whether rows are padded or not; the loss
            alike(found, reference(family), family)
