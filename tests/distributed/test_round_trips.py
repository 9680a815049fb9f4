"""Every family through every kind of mesh, one after another: what one saved, the next loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train import arguments, backends, distributed
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.models.build import build_meta, materialise
from smp_train.models.hub_state import gather_state
from smp_train.models.initialization import initialise
from smp_train.models.resolve import resolve
from tests.harness import run
from tests.training import TINY, flags, flatten, read_checkpoint

SMALL = {"num_layers": 1, "num_heads": 4, "hidden_width": 40, "vocab_size": 96, "max_context_width": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama_v3", "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": 1},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "intermediate_size": 50},
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "intermediate_size": 36, "num_local_experts": 2},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.4},
    "gpt2": {"model_type": "gpt2"},
    "falcon": {"model_type": "falcon"},
    "phi": {"model_type": "phi"},
}
MESHES: dict[str, dict[str, Any]] = {
    "fsdp4": {},
    "hsdp2x2": {"hybrid_shard_degree": 2},
    "tp2-fsdp2": {"tensor_parallel_degree": 2},
    "ep2-fsdp2": {"expert_parallel_degree": 2},
}
COMMON = {"bf16": 0, "use_synthetic_data": 1}
NOT_SPLIT = ("gpt2", "falcon")
"""Families without tensor parallelism."""


def command(family: str, **options: Any) -> Any:
    """Return the arguments of a run of this family."""
    values = {**dict.fromkeys(TINY), **COMMON, **SMALL, **FAMILIES[family], **options}
    return arguments.parse(flags(Path("unused"), **values)).args


def hand_on(folder: str, source: str) -> None:
    """Per mesh and family: fill a model of other weights with what the mesh before saved, and save that."""
    ranks = distributed.detect()
    device = distributed.start(ranks, timeout_seconds=300)
    for mesh, options in MESHES.items():
        for family in FAMILIES:
            split = family not in NOT_SPLIT if mesh.startswith("tp") else family == "mixtral" or mesh[:2] != "ep"
            args = command(family, **(options if split else {}))
            backend, _ = backends.select(args, ranks, device)
            spec = resolve(args)
            model = backend.build(backend.check(spec, seq_len=16), seed=2)
            state = gather_state(model, torch.optim.AdamW(model.parameters()))
            open_verified(f"{folder}/{source}/{family}/{family}-1steps").load(state)
            manager = CheckpointManager([Policy(f"{folder}/{mesh}", 1, 0)], run_name=family, model_type=family)
            manager.save(1, state, {"model_config": spec.config.to_dict()})
        source = mesh
    distributed.stop()


@pytest.mark.slow
def test_every_family_goes_through_every_mesh_and_back(tmp_path: Path) -> None:
    first: dict[str, dict[str, torch.Tensor]] = {}
    for family in FAMILIES:
        model = build_meta(resolve(command(family)))
        materialise(model, "cpu")
        initialise(model, seed=1)
        state = gather_state(model, torch.optim.AdamW(model.parameters()))
        for number, values in enumerate(state["optim"]["state"].values()):
            for value in values.values():
                value.copy_(torch.rand(value.shape, generator=torch.Generator().manual_seed(number)))
        manager = CheckpointManager([Policy(str(tmp_path / "first"), 1, 0)], run_name=family, model_type=family)
        config: Any = model.config
        manager.save(1, state, {"model_config": config.to_dict()})
        first[family] = flatten(state)
    run(hand_on, 4, str(tmp_path), "first", timeout=600)
    for family, expected in first.items():
        for mesh in MESHES:  # bytes that went through one mesh and every one before it
            found = read_checkpoint(tmp_path / mesh / family / f"{family}-1steps")
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), (mesh, family)
