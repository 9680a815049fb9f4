"""From flags to a configuration."""

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.arguments import Arguments
from smp_train.errors import ConfigError
from smp_train.models.build import build_meta, materialise
from smp_train.models.configuration import with_flags
from smp_train.models.families import FAMILIES
from smp_train.models.flops import count_parameters
from smp_train.models.hugging_face import ModelSpec
from smp_train.models.initialization import initialise
from smp_train.models.resolve import presets, resolve, settled_flags
from tests.chats import PLAIN, write_tokenizer
from tests.releases import need_model


def spec(**flags: Any) -> ModelSpec:
    return resolve(Arguments(**flags))


def rope(config: Any) -> dict[str, Any]:
    """Return base, share and scaling, where either version of transformers has them."""
    new = getattr(config, "rope_parameters", None)
    if new is not None:
        return dict(new)
    share = {"partial_rotary_factor": config.rotary_pct} if config.model_type == "gpt_neox" else {}
    return share | {"rope_theta": config.rope_theta} | (config.rope_scaling or {"rope_type": "default"})


SEVEN = {"model_type": "llama_v2", "model_size": "7b"}
SMALL = {"hidden_width": 64, "num_layers": 1, "vocab_size": 64}
OF_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "max_position_embeddings": 4096}
FIELDS: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    # flags, the model's name, fields of its configuration
    (SEVEN, "llama_v2-7b", OF_7B),
    ({**SEVEN, "model_size": "7B"}, "llama_v2-7b", OF_7B),
    ({**SEVEN, "model_size": "llama_v2-7b"}, "llama_v2-7b", OF_7B),
    ({"model_size": "350M"}, "scratch-350m", {}),  # a rung of the ladder
    ({"model_type": "scratch", "model_size": "13B"}, "scratch-13b", {"hidden_size": 5120}),
    ({**SEVEN, "num_layers": 2, "vocab_size": 50432}, "llama_v2-7b", {"num_hidden_layers": 2, "vocab_size": 50432}),
    # a longer context raises the positions, a shorter one does not
    ({**SEVEN, "max_context_width": 2048}, "llama_v2-7b", {"max_position_embeddings": 4096}),
    ({**SEVEN, "max_context_width": 8192}, "llama_v2-7b", {"max_position_embeddings": 8192}),
    # key-value heads follow --num_heads if the preset has equal numbers
    ({**SEVEN, **SMALL, "num_heads": 4}, "llama_v2-7b", {"num_key_value_heads": 4}),
    ({**SEVEN, **SMALL, "num_heads": 4, "num_key_value_heads": 2}, "llama_v2-7b", {"num_key_value_heads": 2}),
    ({"model_type": "llama_v3", "model_size": "8b", **SMALL, "num_heads": 16}, "llama_v3-8b",
     {"num_key_value_heads": 8}),
    # Llama's own feed-forward width, up to 13B
    ({"model_type": "llama_v2", "hidden_width": 5120, "num_heads": 40}, "llama_v2", {"intermediate_size": 13824}),
    # the original systems' defaults
    ({}, "gpt_neox", {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50432,
                      "max_position_embeddings": 2048, "intermediate_size": 3072}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "name", "fields"), FIELDS)
def test_flags_describe_a_model(flags: dict[str, Any], name: str, fields: dict[str, Any]) -> None:
    found = spec(**flags)
    assert (found.name, found.pretrained) == (name, None)
    assert {field: getattr(found.config, field) for field in fields} == fields


def test_the_source_of_each_value_is_known_before_a_model_is_built() -> None:
    assert settled_flags(Arguments(**SEVEN, num_heads=4))["num_key_value_heads"] == (4, "follows from --num_heads")
    assert settled_flags(Arguments(**SEVEN))["num_key_value_heads"] == (32, "preset llama_v2-7b")


def test_rope_parameters_reach_the_configuration() -> None:
    llama = {"model_type": "llama_v3", "model_size": "8b"}
    preset = rope(spec(**llama).config)
    published = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    assert preset.items() >= published.items()
    longer = rope(spec(**llama, rope_scaling_factor=32.0, rotary_emb_base=1000000).config)
    assert longer == preset | {"factor": 32.0, "rope_theta": 1000000}
    assert rope(spec(**llama, rope_scaling_type="default").config)["rope_type"] == "default"
    neox = spec(model_type="gpt_neox", rotary_pct=0.5, rotary_emb_base=5000).config
    assert rope(neox) == {"rope_theta": 5000, "partial_rotary_factor": 0.5, "rope_type": "default"}


def test_flags_over_a_configuration_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = {"num_layers": 2, "num_heads": 4, "hidden_width": 64, "num_key_value_heads": 2, "vocab_size": 99}
    config = spec(model_type="llama_v3", model_size="8b", **tiny).config
    config.save_pretrained(tmp_path)
    over = {"hf_pretrained_model_name_or_dir": str(tmp_path / "config.json")}
    assert spec(**over).pretrained is None
    changed = spec(**over, num_layers=3, hidden_width=128, rope_scaling_factor=16.0).config
    assert (changed.num_hidden_layers, changed.head_dim) == (3, 32)
    assert rope(changed) == rope(config) | {"factor": 16.0}
    spec(model_type="mistral", **tiny).config.save_pretrained(tmp_path / "mistral")
    without_window = json.loads((tmp_path / "mistral/config.json").read_text()) | {"sliding_window": 0}  # as Qwen2's
    (tmp_path / "mistral/config.json").write_text(json.dumps(without_window))
    mistral = spec(hf_pretrained_model_name_or_dir=str(tmp_path / "mistral"), max_context_width=64).config
    assert mistral.sliding_window == 0
    positions = config.max_position_embeddings
    for width, warned in ((positions // 2, False), (positions, False), (2 * positions, True)):
        with caplog.at_level(logging.WARNING, "smp_train"):
            with_flags(config, {"max_context_width": width}, "weights", str(tmp_path))
        # a longer context than the weights were trained on has to be learned
        assert any(str(width) in line and str(positions) in line for line in caplog.messages) == warned


TINY = {"hidden_width": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "max_context_width": 32}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_builds_from_widths(family: str) -> None:
    more = {"rotary_pct": 0.5} if family in ("gpt_neox", "phi") else {}
    for base in (TINY, TINY | {"model_size": next(s for f, s in presets() if f == family), "intermediate_size": 96}):
        if "model_size" in base and family in ("falcon", "llama_v2", "llama_v3", "codellama", "scratch"):
            more["num_key_value_heads"] = 1
        elif "model_size" in base and FAMILIES[family].fields.get("num_key_value_heads"):
            more["num_key_value_heads"] = 4
        found = spec(model_type=family, **base, **more)
        model = build_meta(found)
        materialise(model, "cpu")
        initialise(model, 1)
        logits = model.eval()(input_ids=torch.arange(24).view(1, 24)).logits
        assert logits.shape == (1, 24, 64)
        assert bool(torch.isfinite(logits).all())
    config = spec(model_type=family, **{**TINY, "vocab_size": 2}, **more).config
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        assert token is None or token < 2


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt_bigcode", "olmo"])
def test_model_types_of_transformers_outside_the_families(name: str) -> None:
    need_model(name)
    found = spec(model_type=name, **TINY)
    assert found.config.model_type == name
    assert found.config.num_hidden_layers == 2
    assert count_parameters(found.config) < 1_000_000


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama_v2"}, "did you mean llama_v2"),
    ({"model_type": "llama_v2", "model_size": "8b"}, "70b, 7b"),
    ({"model_type": "qwen2", "model_size": "7b"}, "no presets"),
    ({"model_type": "llama_v2", "sliding_window": 4}, "--sliding_window 4"),
    ({"model_type": "llama_v2", "num_local_experts": 4}, "--num_local_experts"),
    ({"model_type": "gpt2", "num_key_value_heads": 3}, "--num_key_value_heads"),
    ({"hidden_width": 65}, "--hidden_width 65 is not a multiple of --num_heads 12"),
    ({"model_type": "llama_v2", "num_heads": 12, "num_key_value_heads": 5}, "--num_key_value_heads 5"),
    ({"model_type": "llama_v2", "hidden_width": 36, "num_heads": 4}, "leaves 9"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "--num_local_experts 8"),
    ({"model_type": "llama_v3", "rope_scaling_type": "odd"}, "--rope_scaling_type odd"),
    ({"hf_pretrained_model_name_or_dir": "/does/not/exist"}, "does not exist"),
    ({"hf_pretrained_model_name_or_dir": "nobody/nothing"}, "give the folder"),
]


@pytest.mark.parametrize(("flags", "words"), BAD, ids=[words for _, words in BAD])
def test_contradicting_flags_are_refused_in_one_line(flags: dict[str, Any], words: str) -> None:
    """And, unless a Hugging Face model is read, before a model is built."""
    of_hub = "hf_pretrained_model_name_or_dir" in flags
    for ask in [resolve] if of_hub else [resolve, settled_flags]:
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            ask(Arguments(**flags))
        assert "\n" not in str(caught.value)


def test_a_folder_without_a_usable_configuration_is_refused(tmp_path: Path) -> None:
    for content, named in ((None, r"config\.json"), ("{broken", str(tmp_path)), ('{"model_type": "lama"}', "lama")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=named):
            spec(hf_pretrained_model_name_or_dir=str(tmp_path))


def test_flags_that_scripts_always_pass_are_logged_if_they_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "smp_train"):
        spec(model_type="mixtral", **TINY, rotary_pct=0.25, resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.1)
    assert caplog.messages == [
        "--rotary_pct 0.25 has no effect: mixtral has no such setting",
        "--resid_pdrop 0.1 has no effect: mixtral has no such setting",
    ]


def test_a_hub_model_has_its_chat_template_and_generation_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from smp_train.checkpoints.hf.card import hub_name
    from smp_train.models.tokenizer import open_tokenizer, tokenizer_folder

    hub, cache = tmp_path / "hub", tmp_path / "models--org--tiny/snapshots/abc"
    write_tokenizer(hub, PLAIN)
    (hub / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    (hub / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (hub / "model.safetensors").touch()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        unwanted = [path.name for path in hub.iterdir() if not any(map(path.match, allow_patterns))]
        return str(shutil.copytree(hub, cache, ignore=shutil.ignore_patterns(*unwanted)))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    spec = resolve(Arguments(hf_pretrained_model_name_or_dir="org/tiny"))
    assert (spec.pretrained, hub_name(spec.pretrained or "")) == (str(cache), "org/tiny")
    assert spec.generation == {"eos_token_id": [1, 2]}
    with open_tokenizer(tokenizer_folder(spec.pretrained) or "") as tokenizer:
        assert tokenizer.chat_template == PLAIN


def test_every_family_has_presets_and_the_documentation_lists_them() -> None:
    assert {family for family, _ in presets()} == FAMILIES.keys()
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    text = text.split("## Presets")[1].split("## From widths")[0]
    for preset in presets().values():
        assert f"| `{preset.model_type}` | `{preset.model_size}` | {preset.parameters:,} |" in text
    assert text.count("\n| `") == len(presets())
