"""What a checkpoint is enough for: to resume, to evaluate, to generate and to export, without a flag of its model."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.cli import VERBS
from smp_train.errors import CheckpointError, ConfigError, DataError
from tests import harness
from tests.training import NO_MODEL, SAMPLE, flags, records, same, saved, train

DATA = {
    "use_synthetic_data": None, "training_dir": SAMPLE / "train", "test_dir": SAMPLE / "test", "vocab_size": 1024,
    "max_context_width": 64, "max_steps": 4, "checkpoint_freq": 2, "num_kept_checkpoints": 0, "validation_freq": 4,
    "fast_validation": 0, "validation_batches": 1000, "lr": 1e-2,
}  # fmt: skip
BARE = {**NO_MODEL, "max_context_width": None}
UNVALIDATED = {"validation_freq": None, "test_dir": None}
PROMPT = "To be, or not"


def verb(name: str, *words: Any) -> str:
    """Run a verb on this rank and return what it printed."""
    import importlib

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert importlib.import_module(VERBS[name].module).main(list(map(str, words))) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of four steps on the sample data, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("trained")
    harness.run(train, 2, flags(folder, **DATA))
    return folder


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    """The model of the last checkpoint for Hugging Face, with its tokenizer."""
    from smp_train.checkpoints.cli import main

    assert main(["export", str(trained / "checkpoints"), str(trained / "model")]) == 0
    return trained / "model"


def reference(exported: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)


def test_export_is_complete(trained: Path, exported: Path) -> None:
    model, tokenizer = reference(exported)
    assert tokenizer.decode(tokenizer(PROMPT)["input_ids"]) == PROMPT
    from transformers import pipeline

    (said,) = pipeline("text-generation", model=str(exported))(PROMPT, max_new_tokens=8, do_sample=False)
    ids = model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert said["generated_text"] == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0  # a Llama's own is 2
    card = (exported / "README.md").read_text()
    (validation,) = (r["loss"] for r in records(trained) if r.get("event") == "evaluate")
    (last,) = (r["loss"] for r in records(trained) if r["step"] == 4 and "event" not in r)
    for fact in (f"| data | {SAMPLE / 'train'} |", "| steps | 4 |", f"| training loss | {last:.4f} |"):
        assert fact in card
    assert f"| validation loss | {validation:.4f} |" in card


def test_resume_needs_no_flag_of_the_model(trained: Path, tmp_path: Path) -> None:
    found = {"resume_from_checkpoint": trained / "checkpoints/run/llama_v2-2steps"}
    harness.run(train, 2, flags(tmp_path, **DATA | BARE | UNVALIDATED | found))
    same(saved(tmp_path, 4), saved(trained, 4))
    assert (tmp_path / "checkpoints/run/llama_v2-4steps/tokenizer/tokenizer.json").is_file()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["checkpoint", "model"])
def test_greedy_text_is_that_of_transformers(kind: str, world: int, trained: Path, exported: Path) -> None:
    model, tokenizer = reference(exported)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()
    where = exported if kind == "model" else trained / "checkpoints"
    texts = harness.run(verb, world, "generate", "--checkpoint", where, "--prompt", PROMPT, "--num_tokens", "20")
    assert texts[0] == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert texts[1:] == [""] * (world - 1)


@pytest.mark.parametrize("one", [True, False])
def test_a_checkpoint_of_the_sample_needs_its_model(one: bool, exported: Path, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from smp_train.checkpoints.cli import main

    model, tokenizer = reference(exported)
    whole = tmp_path / "theirs/llama_v2-4steps"
    dcp.save({"model": model.state_dict(), "total_steps": torch.tensor(4)}, checkpoint_id=whole)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
    where = str(whole if one else whole.parent)
    shared = ["--checkpoint", where, "--tokenizer", exported]
    told = ["--model", exported]
    prompt, data = ["--prompt", PROMPT, "--num_tokens", "8"], ["--data", SAMPLE / "test", "--max_context_width", "64"]
    assert verb("generate", *shared, *prompt, *told) == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert f"{where}\n" in verb("evaluate", *shared, *data, *told)
    for name, words in (("generate", prompt), ("evaluate", data)):
        with pytest.raises(ConfigError, match="add --model FOLDER"):
            verb(name, *shared, *words)
    with pytest.raises(CheckpointError, match=f"checkpoint import {whole} FOLDER --model"):
        main(["export", where, str(tmp_path / "out")])


def test_draws_follow_the_seed(trained: Path) -> None:
    def text(world: int, seed: int, **more: Any) -> str:
        drawn = {"prompt": PROMPT, "temperature": 1, "seed": seed, "top_k": 50}
        more = {"checkpoint": trained / "checkpoints", **drawn, **more}
        return str(harness.run(verb, world, "generate", *(f"--{name}={value}" for name, value in more.items()))[0])

    assert text(1, 1) == text(2, 1) != text(1, 2)
    assert text(1, 1, top_k=1) == text(1, 2, temperature=0)


TEST = str(SAMPLE / "test")


@pytest.mark.parametrize(
    ("name", "words", "named"),
    [
        ("generate", ["--prompt", PROMPT * 20], "64 positions"),
        ("generate", ["--checkpoint", "/nowhere"], "/nowhere"),
        ("generate", ["--model", "/nowhere"], "leave --model out"),
        ("generate", ["--checkpoint", str(SAMPLE)], "config.json"),
        ("evaluate", ["--data", TEST, "--training_dir", "x"], "--training_dir"),
        ("evaluate", ["--data", TEST, "--lr", "1e-3"], "--lr has no effect"),
        ("evaluate", ["--data", str(SAMPLE / "tokenizer.json")], "tokenizer.json"),
        ("evaluate", ["--data", TEST, "--checkpoint", TEST], "config.json"),
    ],
    ids=lambda value: str(value)[-20:],
)
def test_refused_by_name(name: str, words: list[str], named: str, trained: Path) -> None:
    prompt = ["--prompt", PROMPT] if name == "generate" else []
    with pytest.raises(DataError if "tokenizer.json" in named else ConfigError, match=named):
        verb(name, "--checkpoint", trained / "checkpoints", *prompt, *words)


def test_a_prompt_of_a_chat_needs_a_template(exported: Path, tmp_path: Path) -> None:
    model = shutil.copytree(exported, tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="--chat"):
        verb("generate", "--checkpoint", model, "--prompt", PROMPT, "--chat")


def test_prompt_when_a_run_ends_and_by_itself(trained: Path, tmp_path: Path) -> None:
    prompt = {"prompt": PROMPT, "num_tokens": 12}
    found = {"resume_from_checkpoint": trained / "checkpoints/run/llama_v2-4steps"}
    alone = verb("generate", "--checkpoint", found["resume_from_checkpoint"], "--prompt", PROMPT, "--num_tokens", "12")
    changes = DATA | BARE | prompt | found | UNVALIDATED | {"run_dir": tmp_path / "run"}
    for world in (1, 2):
        printed = harness.run(train_and_print, world, flags(tmp_path / str(world), **changes))
        assert printed[0].count(alone.strip()) == 1
    minimal = {"max_epochs": -1, "training_dir": None, "epochs": None}
    assert train_and_print(flags(tmp_path, **changes | minimal)) == alone


def train_and_print(command_line: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert train(command_line) == 0
    return out.getvalue()


def test_a_prompt_that_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(harness.RankFailed, match=r"ConfigError.*64 positions"):
        harness.run(train, 1, flags(tmp_path, **DATA, prompt=PROMPT * 20))
    assert not [record for record in records(tmp_path) if "event" not in record]


def test_how_the_base_generates_goes_with_its_checkpoints(exported: Path, tmp_path: Path) -> None:
    model, tokenizer = reference(exported)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()[ids.shape[1] :]
    end = next(token for token in new[2:] if token not in new[:2])
    base = shutil.copytree(exported, tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end], "temperature": 0.25}))
    still = {"lr": 1e-20, "min_lr": 0, "weight_decay": 0, "max_steps": 2}
    first = DATA | BARE | UNVALIDATED | still
    harness.run(train, 1, flags(tmp_path, **first, hf_pretrained_model_name_or_dir=base))
    again = first | {"resume_from_checkpoint": tmp_path / "checkpoints", "max_steps": 3}
    harness.run(train, 1, flags(tmp_path, **again, save_final_model=1, model_dir=tmp_path / "model"))
    words = ["--prompt", PROMPT, "--num_tokens", "20"]
    expected = tokenizer.decode([*ids[0].tolist(), *new[: new.index(end) + 1]], skip_special_tokens=True) + "\n"
    for place in (tmp_path / "checkpoints", tmp_path / "model"):
        assert verb("generate", "--checkpoint", place, *words) == expected
    assert json.loads((tmp_path / "model/generation_config.json").read_text())["temperature"] == 0.25
    (base / "generation_config.json").write_text("[broken")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        verb("generate", "--checkpoint", base, *words)


def test_evaluate_is_the_validation_of_the_run(trained: Path, tmp_path: Path) -> None:
    """On any number of ranks, also on more ranks than a data set has rows."""
    (event,) = (r for r in records(trained) if r.get("event") == "evaluate")
    (tmp_path / "one").mkdir()
    with gzip.open(SAMPLE / "test/test-00000.json.gz", "rt") as rows:
        (tmp_path / "one/a.json").write_text(rows.readline())
    places = [SAMPLE / "test", tmp_path / "one"]
    (tmp_path / "run.yaml").write_text("lr: 1\ntraining_dir: [/nowhere]\n")  # flags of a training, without effect here
    words = ["--checkpoint", trained / "checkpoints", "--data", *places, "--json", "--val_batch_size=3"]
    words += ["--config", tmp_path / "run.yaml"]
    found, *others = (json.loads(harness.run(verb, world, "evaluate", *words)[0]) for world in (1, 2, 4))
    test, whole = found["data"][str(places[0])], found["all"]
    assert test["loss"] == pytest.approx(event["loss"], rel=1e-6)
    assert test["perplexity"] == pytest.approx(math.exp(test["loss"]))
    assert event["perplexity"] == pytest.approx(test["perplexity"], rel=1e-5)
    assert whole["tokens"] == sum(row["tokens"] for row in found["data"].values())
    sums = [row["loss"] * row["tokens"] for row in found["data"].values()]
    assert whole["loss"] * whole["tokens"] == pytest.approx(sum(sums))
    for other in others:
        assert all(other["data"][name] == pytest.approx(row, rel=1e-6) for name, row in found["data"].items())


def test_evaluate_text_as_transformers_does(trained: Path, exported: Path, tmp_path: Path) -> None:
    model, tokenizer = reference(exported)
    text = "All the world's a stage, and all the men and women merely players. " * 20
    (tmp_path / "text.txt").write_text(text)
    layout = ["--max_context_width=64", "--bf16=0"]
    found = json.loads(verb("evaluate", "--checkpoint", exported, "--data", tmp_path, "--json", *layout))
    ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    losses = []
    for row in ids.split(64):
        losses += [] if len(row) < 2 else [model(row[None], labels=row[None]).loss.item()] * (len(row) - 1)
    assert found["all"]["tokens"] == len(losses)
    assert found["all"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
