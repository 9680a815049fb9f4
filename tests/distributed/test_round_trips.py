"""Every family through every kind of mesh, one after another: what one saved, the next loads, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from smp_train import arguments, backends, runtime
from smp_train.checkpoints import CheckpointManager, Policy, find, gather_state, open_checkpoint
from smp_train.checkpoints.export import export
from smp_train.models.resolve import resolve
from tests.harness import run
from tests.training import TINY, flags

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
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "fsdp2": (2, {}),
    "fsdp4": (4, {}),
    "hsdp2x2": (4, {"hybrid_shard_degree": 2}),
    "tp2-fsdp2": (4, {"tensor_parallel_degree": 2}),
    "back": (1, {}),
}
COMMON = {"bf16": 0, "use_synthetic_data": 1}
NOT_SPLIT = ("gpt2", "falcon")
"""Families without tensor parallelism."""


def whole(state: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a hash of every whole tensor, by name; collective."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= whole(value, f"{prefix}{key}.")
        else:
            full = (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous()
            found[prefix + key] = hashlib.sha256(full.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def hand_on(folder: str, meshes: list[str], source: str | None) -> dict[str, dict[str, dict[str, str]]]:
    """Per mesh and family: fill a model of other weights with what the mesh before saved, and save that.

    Where there is none before, the optimizer's state is made up. Returns hashes of what was saved.
    """
    ranks = runtime.detect()
    device = runtime.start(ranks, timeout_seconds=60)
    told: dict[str, dict[str, dict[str, str]]] = {}
    for mesh in meshes:
        told[mesh] = {}
        for family, widths in FAMILIES.items():
            options = {} if family in NOT_SPLIT and mesh.startswith("tp") else MESHES[mesh][1]
            line = flags(Path("unused"), **{**dict.fromkeys(TINY), **COMMON, **SMALL, **widths, **options})
            args = arguments.parse(line).args
            backend, _ = backends.select(args, ranks, device)
            spec = resolve(args)
            model = backend.build(spec, seed=1 if source is None else 2, seq_len=16)
            optimizer = torch.optim.AdamW(model.parameters())
            state = gather_state(model, optimizer)
            if source is None:
                for number, values in enumerate(state["optim"]["state"].values()):
                    for value in values.values():
                        local = value.to_local() if isinstance(value, DTensor) else value
                        local.copy_(torch.rand(local.shape, generator=torch.Generator().manual_seed(number)))
            else:
                found = find(f"{folder}/{source}", strict=True, model_type=family)
                assert found is not None
                found.load(state)
            told[mesh][family] = whole(state)
            manager = CheckpointManager([Policy(f"{folder}/{mesh}", 1, 0)], model_type=family)
            manager.save(1, state, {"model_config": spec.config.to_dict()})
        source = mesh
    runtime.stop()
    return told


@pytest.mark.slow
def test_every_family_goes_through_every_mesh(tmp_path: Path) -> None:
    first = run(hand_on, 1, str(tmp_path), ["one process"], None)[0]["one process"]
    assert all(any(name.startswith("optim.") for name in found) for found in first.values())
    for world, meshes, source in (
        (2, ["fsdp2"], "one process"),
        (4, ["fsdp4", "hsdp2x2", "tp2-fsdp2"], "fsdp2"),
        (1, ["back"], "tp2-fsdp2"),
    ):
        for told in run(hand_on, world, str(tmp_path), meshes, source):
            for mesh, families in told.items():
                for family, found in families.items():
                    assert found == first[family], (mesh, family)
    ids = torch.arange(30).view(2, 15)
    for family in FAMILIES:
        logits = []
        for mesh in ("one process", "back"):
            export(open_checkpoint(tmp_path / mesh / f"{family}-1steps"), tmp_path / "hf" / mesh / family)
            with torch.no_grad():
                model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / mesh / family, dtype=torch.float32)
                logits.append(model.eval()(input_ids=ids).logits)
        assert torch.equal(*logits), family
