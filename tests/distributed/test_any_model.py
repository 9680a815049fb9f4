"""Causal language models that the package does not know by name, from a folder with nothing but a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.training import alike, flags, numbers, train

SHARED = {"vocab_size": 256, "tie_word_embeddings": True, "initializer_range": 0.02}
CONFIGS: dict[str, dict[str, Any]] = {
    # No max_position_embeddings: its positions are biases of attention.
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.0},
    "qwen2": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 64},
    "gemma": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64},
}  # fmt: skip
OF_THE_MODEL = ("vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size")


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_trains_from_its_configuration(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": family, **SHARED, **CONFIGS[family]}))
    changes = {
        "model_type": None, "hf_pretrained_model_name_or_dir": model, "seed": 3, **dict.fromkeys(OF_THE_MODEL),
    }  # fmt: skip
    for world in (1, 2):
        harness.run(train, world, flags(tmp_path / str(world), **changes, train_batch_size=2 // world))
    assert len(numbers(tmp_path / "1")) == 3
    alike(numbers(tmp_path / "2"), numbers(tmp_path / "1"))
