"""Configurations that a newer transformers wrote, read by the one that is installed: in SMP's container, 4.44.2."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp_train.arguments import Arguments
from smp_train.checkpoints.hf.export import export
from smp_train.models.build import build_meta, materialise
from smp_train.models.hugging_face import ModelSpec, config_of
from smp_train.models.initialization import initialise
from smp_train.models.resolve import resolve

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 96, "bos_token_id": 1,
         "eos_token_id": 2, "max_position_embeddings": 32, "dtype": "float32"}  # fmt: skip
# As transformers 5 writes them, and by how much the fastest rotation differs from the slowest.
WRITTEN: dict[str, tuple[dict[str, Any], float]] = {
    "llama": ({"intermediate_size": 128, "num_key_value_heads": 2,
               "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000.0 ** (14 / 16)),
    "gpt_neox": ({"intermediate_size": 256,
                  "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 50000.0, "rope_type": "default"}},
                 50000.0 ** (6 / 8)),
}  # fmt: skip


@pytest.mark.parametrize("family", WRITTEN)
def test_a_configuration_of_transformers_5_is_read_and_written(family: str, tmp_path: Path) -> None:
    fields, ratio = WRITTEN[family]
    fields = {**SMALL, **fields, "model_type": family}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(fields))
    spec = resolve(Arguments(hf_pretrained_model_name_or_dir=str(tmp_path / "theirs")))
    model = build_meta(spec)
    (rotations, *_) = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert float(rotations.max() / rotations.min()) == pytest.approx(ratio, rel=1e-4)
    materialise(model, "cpu")
    initialise(model, 1)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    config, marker = spec.config, SimpleNamespace(model_type=family)
    saved: Any = SimpleNamespace(
        path="ours", step=1, meta={}, tokenizer=dict, marker=marker, model_config=lambda: config
    )
    export(saved, tmp_path / "ours", weights=weights)
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written.get("dtype", written.get("torch_dtype")) == "float32"
    # What a checkpoint says of its model, too.
    again = build_meta(ModelSpec(family, family, config_of(fields)))
    assert torch.equal(next(b for n, b in again.named_buffers() if n.endswith("inv_freq")), rotations)
