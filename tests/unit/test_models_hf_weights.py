"""Weights that transformers saved, read by us: the same logits as transformers' own loading gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from smp_train.arguments import Arguments
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.build import build_meta, decoder_layers, materialise
from smp_train.models.hf_weights import load_pretrained
from smp_train.models.resolve import resolve
from tests.harness import run
from tests.releases import IN_FLOAT32, TRANSFORMERS_5

TINY = {"num_layers": 2, "num_heads": 4, "hidden_width": 40, "vocab_size": 99, "max_context_width": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": TINY | {"model_type": "gpt_neox", "rotary_pct": 0.4},
    "llama_v2": TINY | {"model_type": "llama_v2", "num_key_value_heads": 2, "intermediate_size": 50},
    "llama_v3": TINY | {"model_type": "llama_v3", "tie_word_embeddings": 1, "rope_scaling_type": "llama3"},
    "mistral": TINY | {"model_type": "mistral", "sliding_window": 8},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 3, "intermediate_size": 36},
    "gpt2": TINY | {"model_type": "gpt2"},
    "falcon": TINY | {"model_type": "falcon"},
    "falcon 40b": TINY | {"model_type": "falcon", "num_key_value_heads": 2},
    "phi": TINY | {"model_type": "phi"},
}
IDS = torch.arange(48).view(2, 24)


def save(flags: dict[str, Any], folder: Path, **kwargs: Any) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(resolve(Arguments(**flags)).config)
    with torch.no_grad():
        for param in model.parameters():  # Biases and norms too: a parameter left out must show.
            param.add_(torch.randn_like(param) * 0.3)
    model.save_pretrained(folder, **kwargs)


def expected_logits(folder: Path | str) -> torch.Tensor:
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, **IN_FLOAT32)
        return model.eval()(input_ids=IDS).logits


def same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether logits are equal; to rounding with transformers 4, which computes on the unaligned mapped file."""
    return torch.equal(ours, theirs) or (not TRANSFORMERS_5 and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5))


def built(folder: Path | str) -> Any:
    spec = resolve(Arguments(hf_pretrained_model_name_or_dir=str(folder)))
    assert spec.pretrained == str(folder)
    return build_meta(spec)


def loaded(folder: Path | str, weights: Path | None = None) -> Any:
    model = built(folder)
    materialise(model, "cpu")
    load_pretrained(model, weights or folder)
    return model.eval()


def test_cast_to_the_parameters_own_dtype(tmp_path: Path) -> None:
    save(FAMILIES["llama_v2"], tmp_path)
    model = build_meta(resolve(Arguments(hf_pretrained_model_name_or_dir=str(tmp_path))), dtype=torch.bfloat16)
    materialise(model, "cpu")
    load_pretrained(model, tmp_path)
    for param, exact in zip(model.parameters(), loaded(tmp_path).parameters(), strict=True):
        assert param.dtype == torch.bfloat16
        assert torch.equal(param, exact.bfloat16())


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save(FAMILIES["llama_v2"], tmp_path)
    file = tmp_path / "model.safetensors"
    stored, head, up = load_file(file), "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
    model = built(tmp_path)
    materialise(model, "cpu")

    def refused(*words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            load_pretrained(model, tmp_path)
        assert all(word in str(caught.value) for word in words)

    for changed, words in (
        ({name: value for name, value in stored.items() if name != up}, [up]),
        (stored | {"model.layers.2.extra": torch.zeros(3)}, ["model.layers.2.extra"]),
        (stored | {head: stored[head][:-1].contiguous()}, [head, "[98, 40]", "[99, 40]"]),
    ):
        save_file(changed, file, {"format": "pt"})
        refused(*words)
    file.unlink()
    save(FAMILIES["llama_v2"], tmp_path, max_shard_size="30KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    first.write_bytes(first.read_bytes()[:100])
    refused(first.name)
    second.unlink()
    refused(second.name)


def pickled(folder: Path, name: str = "pytorch_model.bin", **around: Any) -> Path:
    """Turn a folder's safetensors into one file of torch.save; return it."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for key in reversed(around):
        stored = {key: stored, **around[key]}
    torch.save(stored, folder / name)
    return folder / name


def in_one_file(family: str) -> Callable[[Path], None]:
    return lambda folder: save(FAMILIES[family], folder)


def in_several_files(folder: Path) -> None:
    save(FAMILIES["llama_v2"], folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def in_several_pickled_files(folder: Path) -> None:
    in_several_files(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    index["weight_map"] = {k: v.replace(".safetensors", ".bin") for k, v in index["weight_map"].items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def under_names_of_the_base_model(folder: Path) -> None:
    """The hub's GPT-2 has names without "transformer." and mask buffers among the weights."""
    save(FAMILIES["gpt2"], folder)
    file = folder / "model.safetensors"
    stored = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    assert "wte.weight" in stored
    stored["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(stored, file, {"format": "pt"})


FORMS: dict[str, Callable[[Path], Any]] = {family: in_one_file(family) for family in FAMILIES} | {
    "several files": in_several_files,
    "several pickled files": in_several_pickled_files,
    "names of the base model": under_names_of_the_base_model,
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_those_of_from_pretrained(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path)
    expected = expected_logits(tmp_path)
    with torch.no_grad():
        assert same_logits(loaded(tmp_path)(input_ids=IDS).logits, expected)
    if form in ("llama_v3", "gpt_neox", "mixtral"):
        file = pickled(tmp_path)
        torch.save({"step": 3}, tmp_path / "optimizer.bin")  # The trainer's own, beside the model's.
        for weights in (None, file):
            with torch.no_grad():
                assert torch.equal(loaded(tmp_path, weights)(input_ids=IDS).logits, expected)
    if form == "llama_v2":
        file = pickled(tmp_path, "full.pt", state_dict={"epoch": 3, "lr": 0.1}, model={})
        with torch.no_grad():
            assert torch.equal(loaded(tmp_path, file)(input_ids=IDS).logits, expected)


def peak(folder: str, weights: str) -> tuple[int, int, int]:
    """Return (memory taken while loading, this rank's part, the largest tensor), in bytes."""
    dist.init_process_group("gloo")
    model = built(folder)
    for layer in [*(layer for _, layer in decoder_layers(model)), model]:
        fully_shard(layer)
    largest = max(p.numel() for p in model.parameters()) * 4
    seen = [anonymous_memory()]
    materialise(model, "cpu")
    load_pretrained(model, weights, lambda done, total: seen.append(anonymous_memory()))
    held = sum(p.to_local().numel() * 4 for p in model.parameters())
    dist.destroy_process_group()
    return max(seen) - seen[0], held, largest


def anonymous_memory() -> int:
    """Return this process's memory but for mapped files, whose pages the system takes back when it needs them."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_rank_holds_its_part_and_one_tensor_at_most(kind: str, tmp_path: Path) -> None:
    save(TINY | {"model_type": "llama_v2", "hidden_width": 384, "vocab_size": 4000, "num_layers": 8}, tmp_path)
    weights = str(pickled(tmp_path) if kind == "bin" else tmp_path)
    for taken, held, largest in run(peak, 4, str(tmp_path), weights):  # 63 MB, the largest tensor 3 MB
        assert held > 2 * largest
        assert taken < held + largest + (4 << 20)


def test_flags_over_weights_may_not_change_shapes(tmp_path: Path) -> None:
    save(FAMILIES["llama_v2"], tmp_path)
    over = {"hf_pretrained_model_name_or_dir": str(tmp_path)}
    assert resolve(Arguments(**over, hidden_width=40, attn_pdrop=0.5)).config.attention_dropout == 0.5
    with pytest.raises(ConfigError, match="--hidden_width 80"):
        resolve(Arguments(**over, hidden_width=80))
    (tmp_path / "model.safetensors").unlink()
    for location in (tmp_path, tmp_path / "config.json"):
        spec = resolve(Arguments(hf_pretrained_model_name_or_dir=str(location)))
        assert (spec.pretrained, spec.model_type, spec.config.hidden_size) == (None, "llama_v2", 40)
