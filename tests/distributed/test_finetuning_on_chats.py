"""Finetuning on chats and prompts: the loss and gradient of transformers' own model, on every mesh."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import harness
from tests.chats import (
    IGNORED,
    MARKED,
    by_transformers,
    chat,
    completion_by_transformers,
    turns,
    write_lines,
    write_tokenizer,
)
from tests.tiers import core
from tests.training import NO_MODEL, audits, flags, read_checkpoint, records, steps, train

ROWS, WIDTH = 24, 128
STILL = {"lr": 1e-20, "min_lr": 1e-20, "weight_decay": 0.0}
"""So that every step is of the weights that the run began with."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer as transformers saves them, chats, prompts, and both as `prepare` makes rows of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from smp_train.data.prepare.cli import main as prepare

    folder = tmp_path_factory.mktemp("chats")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=WIDTH, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_tokenizer(folder / "model", MARKED)
    write_lines(folder / "chats" / "a.jsonl", [{"messages": chat(number)} for number in range(ROWS)])
    write_lines(folder / "pairs" / "a.jsonl", [pair(number) for number in range(ROWS)])
    for kind in ("chats", "pairs"):
        words = f"--input {folder / kind} --output {folder}/{kind}_made --tokenizer {folder}/model"
        assert prepare([*words.split(), "--validation_fraction", "0"]) == 0
    return folder


def pair(number: int) -> dict[str, str]:
    return {"prompt": f"{number} plus {number} is", "completion": f" {2 * number}, é🙂"}


def row(model: Path, kind: str, number: int) -> tuple[list[int], list[int]]:
    """Return the ids and labels of a row, by transformers alone."""
    if kind == "chats":
        return by_transformers(model, chat(number))
    return completion_by_transformers(model, **pair(number))


def transformers_says(model: Path, kind: str, numbers: list[int]) -> tuple[float, float, int]:
    """Return loss, gradient norm and counted tokens of some rows, each by itself, by transformers alone."""
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for number in numbers:
        ids, labels = (torch.tensor([values]) for values in row(model, kind, number))
        assert ids.shape[1] <= WIDTH
        counted = int((labels[:, 1:] != IGNORED).sum())
        total = total + loaded(input_ids=ids, labels=labels).loss * counted
        tokens += counted
    loss = total / tokens
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in loaded.parameters() if p.grad is not None))
    return loss.item(), norm.item(), tokens


def used(folder: Path) -> list[list[int]]:
    """Return the numbers of the rows that each step consumed, on all ranks."""
    names = ["+".join(itertools.chain(*step.values())) for step in audits(folder).values()]
    return [sorted(int(number) - 1 for number in re.findall(r"[a-z]:(\d+)", each)) for each in names]


def options(here: Path, **changes: Any) -> dict[str, Any]:
    return {
        **NO_MODEL, "use_synthetic_data": None, "hf_pretrained_model_name_or_dir": here / "model", "shuffle": "none",
        "max_context_width": WIDTH, **changes,
    }  # fmt: skip


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {"train_batch_size": 4}), "2": (2, {"train_batch_size": 2}),
    "hybrid": (4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
    "accumulated": (1, {"train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "tensor": (2, {"train_batch_size": 4, "tensor_parallel_degree": 2}),
    "context": (2, {"train_batch_size": 4, "context_parallel_degree": 2}),
    "both": (4, {"train_batch_size": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}  # fmt: skip
CASES = [(kind, how, short, world) for kind in ("chats", "pairs") for how in ("prepared", "indexed", "streamed")
         for short in ("pad", "pack") for world in ("1", "2")]  # fmt: skip
CASES += [("pairs", "indexed", "pad", world) for world in WORLDS if not world.isdigit()]
CORE = {("chats", "prepared", "pack", "2"), ("pairs", "streamed", "pack", "2"), ("pairs", "indexed", "pad", "context")}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "short", "world"), core(CASES, CORE.__contains__))
def test_the_loss_is_that_of_transformers(
    here: Path, tmp_path: Path, kind: str, how: str, short: str, world: str
) -> None:
    """Of training, its gradient, and of validation."""
    sources = {
        "prepared": {"training_dir": here / f"{kind}_made" / "train"}, "indexed": {"dataset": here / kind},
        "streamed": {"dataset": here / kind, "streaming": 1},
    }  # fmt: skip
    validation = {"test_dir": here / kind, "validation_freq": 2, "validation_batches": ROWS, "fast_validation": 0}
    ranks, mesh = WORLDS[world]
    given = {**sources[how], **STILL, **validation, "short": short, "max_steps": 2, "data_audit": 1}
    harness.run(train, ranks, flags(tmp_path, **options(here, **given, **mesh)))
    found, numbers, seen = steps(tmp_path), used(tmp_path), 0
    assert len(found) == len(numbers) == 2
    assert (len(numbers[0]) > 4) == (short == "pack")
    for record, of_step in zip(found, numbers, strict=True):
        loss, norm, tokens = transformers_says(here / "model", kind, of_step)
        seen += tokens
        assert (record["loss"], record["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5)
        assert record["tokens"] == seen
    (validated,) = (record["loss"] for record in records(tmp_path) if record.get("event") == "evaluate")
    assert validated == pytest.approx(transformers_says(here / "model", kind, list(range(ROWS)))[0], rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_has_the_tokenizer_of_its_chats(here: Path, tmp_path: Path) -> None:
    """No flag of model or tokenizer, to go on with a run and to finetune its newest checkpoint."""
    given = options(here, dataset=here / "chats", short="pack", max_steps=4, checkpoint_freq=2, num_kept_checkpoints=0)
    bare = {**given, "hf_pretrained_model_name_or_dir": None}
    harness.run(train, 1, flags(tmp_path, **given))
    whole = read_checkpoint(tmp_path / "checkpoints/run/llama_v2-4steps")
    half = {"resume_from_checkpoint": tmp_path / "checkpoints/run/llama_v2-2steps", "max_context_width": None}
    harness.run(train, 1, flags(tmp_path / "resumed", **bare | half))
    resumed = read_checkpoint(tmp_path / "resumed/checkpoints/run/llama_v2-4steps")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    start = {"finetune": 1, "pretrained_checkpoint_file": tmp_path / "checkpoints", "max_steps": 2, **STILL}
    harness.run(train, 2, flags(tmp_path / "tuned", **bare | start))
    tuned = read_checkpoint(tmp_path / "tuned/checkpoints/run/llama_v2-2steps")
    weights = [name for name in whole if name.startswith("model.")]
    assert weights
    assert all(torch.allclose(tuned[name], whole[name]) for name in weights)
    assert (tmp_path / "tuned/checkpoints/run/llama_v2-2steps/tokenizer/chat_template.jinja").is_file()
    file = {"finetune": 1, "pretrained_checkpoint_file": here / "model" / "model.safetensors", "max_steps": 1}
    harness.run(train, 1, flags(tmp_path / "beside", **bare | file))  # the tokenizer lies there, too
    with pytest.raises(harness.RankFailed, match="--tokenizer"):
        harness.run(train, 2, flags(tmp_path / "x", **bare | {"resume_from_checkpoint": tmp_path / "x/checkpoints"}))


@pytest.mark.parametrize("streaming", [0, 1])
def test_a_chat_without_an_answer_stops_all_ranks(here: Path, tmp_path: Path, streaming: int) -> None:
    chats = [{"messages": chat(number)} for number in range(ROWS)]
    chats[5] = {"messages": turns("a question")}
    write_lines(tmp_path / "a.jsonl", chats)
    given = {"dataset": tmp_path / "a.jsonl", "max_steps": ROWS, "train_batch_size": 1, "streaming": streaming}
    with pytest.raises(harness.RankFailed, match=r"DataError: .*a\.jsonl:6: no .* --bad_rows skip"):
        harness.run(train, 2, flags(tmp_path, **options(here, **given)))
