"""Low-rank adapters: only they are trained, saved and resumed; peft opens what is exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.errors import CheckpointError
from tests import harness
from tests.tiers import slow
from tests.training import NO_MODEL, SAMPLE, TINY, flags, same, saved, steps, train
from tests.versions import FAMILIES, SMALL

DATA = {"use_synthetic_data": None, "training_dir": SAMPLE / "train", "max_context_width": 64}
LORA = {"lora_rank": 4, "lora_alpha": 16, "lr": 1e-2, "max_steps": 4, "checkpoint_freq": 2, "num_kept_checkpoints": 0}
PROMPT = "To be, or not"


def base_model(folder: Path, family: str = "llama_v2") -> Path:
    """Write a small random model with the sample's tokenizer."""
    from transformers import AutoTokenizer

    from smp_train.arguments import parse
    from smp_train.models.hugging_face import model_of
    from smp_train.models.resolve import resolve

    widths = {**{name: TINY[name] for name in NO_MODEL}, "vocab_size": 1024, "max_context_width": 128}
    if family != "llama_v2":
        widths = {**SMALL, **FAMILIES[family], "model_type": family, "vocab_size": 1024, "max_context_width": 128}
    spec = resolve(parse([f"--{name}={value}" for name, value in widths.items() if value is not None]).args)
    torch.manual_seed(1)
    model_of(spec.config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(SAMPLE).save_pretrained(folder)
    return folder


def options(folder: Path, base: Path, **changes: Any) -> list[str]:
    model = {**NO_MODEL, "hf_pretrained_model_name_or_dir": base}
    return flags(folder, **{**model, **DATA, **LORA, **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    harness.run(train, 1, options(folder, base))
    return folder


def reference(base: Path, rows: list[Any], lora: Any, adapters: dict[str, Any]) -> list[float]:
    """Train with peft and transformers alone from the given adapters, and return the losses."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora.config())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = name.removeprefix("base_model.model.").replace(".default", "")
            parameter.data.copy_(adapters[key])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for row in rows:
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def initial_adapters(command_line: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Return the adapters and the rows with which a run begins."""
    from unittest import mock

    from smp_train import train_lib
    from smp_train.models.hub_state import gather_state

    seen: dict[str, Any] = {}
    rows: list[Any] = []
    original = train_lib.train_utils.train_step

    def spy(backend: Any, model: Any, optimizer: Any, batches: Any, **more: Any) -> Any:
        if not seen:
            seen.update({name: value.full_tensor().clone() for name, value in gather_state(model)["model"].items()})
        rows.extend(batch.input_ids.clone() for batch in batches)
        return original(backend, model, optimizer, batches, **more)

    with mock.patch.object(train_lib.train_utils, "train_step", spy):
        assert train(command_line) == 0
    return seen, rows


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head")], ids=" ".join)
def test_losses_are_those_of_peft(targets: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    from smp_train.models.lora import Lora

    constant = {"lr_decay_style": "constant", "weight_decay": 0, "adam_epsilon": 1e-8, "beta2": 0.95}
    command = [*options(tmp_path, base, **constant), "--lora_target_modules", *targets]
    (adapters, rows), *_ = harness.run(initial_adapters, 1, command)
    expected = reference(base, rows, Lora(4, 16.0, targets), adapters)
    assert all(not value.any() for name, value in adapters.items() if ".lora_B." in name)
    assert all(value.any() for name, value in adapters.items() if ".lora_A." in name)
    assert [record["loss"] for record in steps(tmp_path)] == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


MESHES = [
    (2, {}), (4, {"hybrid_shard_degree": 2}), (2, {"context_parallel_degree": 2}), (1, {"sm_activation_offloading": 1}),
    (2, {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "changes"), slow(MESHES, lambda mesh: {"use_torch_compile", "hybrid_shard_degree"} & {*mesh[1]}), ids=str
)
def test_every_mesh_trains_the_same_adapters(
    world: int, changes: dict[str, Any], base: Path, trained: Path, tmp_path: Path
) -> None:
    ranks = 1 if "context_parallel_degree" in changes else world
    single = tmp_path / "single"
    harness.run(train, 1, options(single, base, gradient_accumulation_steps=ranks))
    harness.run(train, world, options(tmp_path, base, **changes))
    for name in ("loss", "grad_norm"):
        expected = [record[name] for record in steps(single)]
        assert [record[name] for record in steps(tmp_path)] == pytest.approx(expected, rel=1e-4)


def test_a_checkpoint_is_small_and_resumes_bit_for_bit(base: Path, trained: Path, tmp_path: Path) -> None:
    whole = saved(trained, 4)
    assert all(".lora_" in name for name in whole)
    assert sum(value.numel() for value in whole.values()) < 3.1 * 4 * (2 * 32 * 20 + 2 * 48 * 6)
    found = {"resume_from_checkpoint": trained / "checkpoints/run/llama_v2-2steps"}
    no_model = {**NO_MODEL, **DATA, **LORA, **found, "lora_rank": None, "lora_alpha": None}
    harness.run(train, 1, options(tmp_path / "0", base, **found))
    harness.run(train, 2, flags(tmp_path / "1", **no_model))
    same(saved(tmp_path / "0", 4), whole)
    assert saved(tmp_path / "1", 4).keys() == whole.keys()
    rank = {"lora_rank": 2}
    for command in (options(tmp_path / "2", base, **found, **rank), flags(tmp_path / "3", **no_model | rank)):
        with pytest.raises(harness.RankFailed, match=r"rank 4.*rank 2.*lora_rank"):
            harness.run(train, 1, command)


@pytest.fixture(scope="module")
def adapter(trained: Path) -> Path:
    """The run's adapters, exported."""
    from smp_train.checkpoints.cli import main

    assert main(["export", str(trained / "checkpoints"), str(trained / "adapter")]) == 0
    return trained / "adapter"


def adapted(base: Path, adapter: Path) -> tuple[Any, Any]:
    """Return the adapted model as peft opens it, and its tokenizer."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return model, AutoTokenizer.from_pretrained(base)


def test_exports_open_in_peft_and_in_transformers(
    base: Path, trained: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    from smp_train import load_model
    from smp_train.checkpoints.cli import main

    whole = (str(trained / "checkpoints"), str(tmp_path / "merged"))
    assert main(["export", *whole]) == 0
    # Over an adapter: transformers would open that in place of the model.
    assert main(["export", *whole, "--merge", "--overwrite", "1", "--dtype", "bfloat16"]) == 0
    assert main(["export", *whole, "--merge", "1", "--overwrite", "1", "--model", str(base)]) == 0
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert "rank 4" in (tmp_path / "merged/README.md").read_text()
    model, tokenizer = adapted(base, adapter)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    loaded, _ = load_model(str(trained / "checkpoints"))
    with torch.no_grad():
        expected = model(ids).logits
        for same in (merged, loaded):
            torch.testing.assert_close(same(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(ids).logits, expected, atol=1e-3)
    assert loaded.state_dict().keys() == merged.state_dict().keys()
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == (str(base), 4)
    with caplog.at_level("WARNING"):
        assert main(["export", whole[0], str(tmp_path / "moved"), "--model", "org/base"]) == 0
        assert "which peft cannot read" not in caplog.text
        assert main(["export", *whole, "--overwrite", "1", "--model", whole[0]]) == 0
    assert json.loads((tmp_path / "moved/adapter_config.json").read_text())["base_model_name_or_path"] == "org/base"
    assert "is a checkpoint, which peft cannot read" in caplog.text


def test_generate_and_evaluate_with_adapters(base: Path, trained: Path, adapter: Path) -> None:
    from tests.distributed.test_from_a_checkpoint import verb

    model, tokenizer = adapted(base, adapter)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0]
    where = ["--checkpoint", trained / "checkpoints"]
    text = harness.run(verb, 2, "generate", *where, "--prompt", PROMPT, "--num_tokens=16")[0]
    assert text == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    found = json.loads(harness.run(verb, 2, "evaluate", *where, "--data", SAMPLE / "test", "--json")[0])
    plain = ["--checkpoint", base, "--max_context_width=64"]
    without = json.loads(verb("evaluate", *plain, "--data", SAMPLE / "test", "--json"))
    assert found["all"]["loss"] < without["all"]["loss"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora_target_modules": "q_porj"}, "q_porj"),
        ({"hf_pretrained_model_name_or_dir": None, "model_type": "llama_v2", "model_size": "7b"}, "lora_rank"),
        ({"fp8": 1, "bf16": 1}, "fp8|FP8"),
        ({"lora_target_modules": "embed_tokens"}, "embed_tokens.*linear"),
        ({"pretrained_checkpoint_file": "checkpoints"}, "adapters belong to one.*-4steps"),
        ({"pretrained_checkpoint_file": "checkpoints/run/llama_v2-4steps"}, "adapters alone.*--merge 1"),
    ],
    ids=str,
)
def test_refused_by_name(changes: dict[str, Any], named: str, base: Path, trained: Path, tmp_path: Path) -> None:
    if file := changes.get("pretrained_checkpoint_file"):
        changes = {"finetune": 1, "pretrained_checkpoint_file": trained / file}
    with pytest.raises(harness.RankFailed, match=named) as failed:
        harness.run(train, 1, options(tmp_path, base, **changes))
    assert "ConfigError" in str(failed.value) or "CheckpointError" in str(failed.value)


def test_adapters_follow_weights_that_have_moved(base: Path, tmp_path: Path) -> None:
    from tests.distributed.test_from_a_checkpoint import verb

    first, then = tmp_path / "first", tmp_path / "then"
    shutil.copytree(base, first)
    harness.run(train, 1, options(tmp_path, first, max_steps=2))
    first.rename(then)
    words = ["--checkpoint", tmp_path / "checkpoints", "--prompt", PROMPT]
    with pytest.raises(CheckpointError, match=r"first.*--model"):
        verb("generate", *words)
    assert verb("generate", *words, "--model", then).startswith(PROMPT)
    again = options(tmp_path, then, max_steps=3, resume_from_checkpoint=tmp_path / "checkpoints")
    with pytest.raises(harness.RankFailed, match=r"CheckpointError.*first.*then.*--allow_model_change 1"):
        harness.run(train, 1, again)
    harness.run(train, 1, [*again, "--allow_model_change=1"])


@pytest.mark.parametrize("family", slow(sorted(set(FAMILIES) - {"llama_v2"}), lambda family: family != "mixtral"))
def test_every_family_has_adapters(family: str, tmp_path: Path) -> None:
    """A checkpoint holds all of them, also of stacked experts: peft and a merged model compute the same from it."""
    from transformers import AutoModelForCausalLM

    from smp_train.checkpoints.cli import main

    base = base_model(tmp_path / "base", family)
    harness.run(train, 2, options(tmp_path, base, max_steps=2))
    assert all(record["loss"] == record["loss"] for record in steps(tmp_path))
    for words in (["adapter"], ["merged", "--merge", "1"]):
        assert main(["export", str(tmp_path / "checkpoints"), str(tmp_path / words[0]), *words[1:]]) == 0
    model, tokenizer = adapted(base, tmp_path / "adapter")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(ids).logits, expected, atol=1e-3)
    names = {name.removeprefix("base_model.").replace(".default", "") for name, _ in model.named_parameters()}
    assert {name for name in names if ".lora_" in name} <= saved(tmp_path, 2).keys()
