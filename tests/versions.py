"""One run handed from one pair of torch and transformers versions to another, as a program for either environment.

``python -m tests.versions JSON``: a list of hand-overs, which `hand_over` carries out one after another.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch

from tests import harness
from tests.smp import NATIVE, install
from tests.training import TINY, built, group

SMALL = {"num_layers": 1, "num_heads": 4, "hidden_width": 40, "vocab_size": 96, "max_context_width": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama_v2": {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": 1},
    "mistral": {"num_key_value_heads": 2, "intermediate_size": 50},
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 36, "num_local_experts": 4},
    "gpt_neox": {"rotary_pct": 0.4},
}
NATIVE_FAMILIES: dict[str, dict[str, Any]] = {**FAMILIES, "gpt2": {}, "falcon": {}, "phi": {}}


def hand_over(families: list[str], options: dict[str, Any], source: str | None, target: str) -> None:
    """Per family, on this rank: load what is in ``source``, or draw weights and moments, and save it to ``target``."""
    from smp_train.checkpoints.find import open_verified
    from smp_train.checkpoints.save import CheckpointManager, Policy

    if not NATIVE:
        install()
    with group() as (ranks, device):
        for family in families:
            values = {**dict.fromkeys(TINY), **SMALL, **NATIVE_FAMILIES[family], **options, "model_type": family}
            values |= {"bf16": 0, "use_synthetic_data": 1, "backend": "native" if NATIVE else "smp"}
            _, backend, spec = built(ranks, device, **values)
            model = backend.build(backend.check(spec, seq_len=16), seed=1 if source is None else 2)
            optimizer = torch.optim.AdamW(model.parameters())
            read: Any = partial(draw_moments, rank=ranks.rank)
            if source is not None:
                read = partial(open_verified(f"{source}/{family}/{family}-1steps").load, saver=backend.saver)
            backend.load_state(model, optimizer, read)
            manager = CheckpointManager([Policy(target, 1, 0)], run_name=family, model_type=family)
            manager.save(1, backend.state_dict(model, optimizer), {}, saver=backend.saver)


def draw_moments(state: dict[str, Any], *, rank: int) -> None:
    """Give this rank's part of the moments values of its own."""
    generator = torch.Generator().manual_seed(rank)
    for values in state["optim"]["state"].values():
        for value in values.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            if not local.is_meta:
                local.copy_(torch.rand(local.shape, generator=generator) if local.dim() else torch.tensor(7.0))


if __name__ == "__main__":
    for world, *given in json.loads(sys.argv[1]):
        harness.run(hand_over, world, list(FAMILIES), *given)
