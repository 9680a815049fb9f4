"""Training on labels: the loss and gradient of transformers' own models, on every mesh; rows with nothing to learn."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smp_train.data.audit import audit
from tests import harness
from tests.shards import write_shard
from tests.smp import numbers, train_on_smp
from tests.tiers import core
from tests.training import TINY, flags, records, steps, train

ROWS, BATCH, STEPS = 24, 8, 3
STILL = {"lr": 1e-20, "min_lr": 1e-20, "weight_decay": 0.0}
"""So that every step is of the weights that the run began with."""


def conversation(number: int) -> dict[str, list[int]]:
    """Return a row of turns, of which the answers alone are learnt, and one target is not the token itself."""
    rng = np.random.default_rng(number)
    ids = rng.integers(1, 256, int(rng.integers(5, 17)))
    labels = np.where(rng.random(ids.size) < 0.6, -100, ids)
    labels[0], labels[2], labels[-1] = -100, 7, ids[-1]
    return {"input_ids": ids.tolist(), "attention_mask": [1] * ids.size, "labels": labels.tolist()}


def put(folder: Path, rows: list[dict[str, list[int]]]) -> Path:
    for shard in range(2):
        write_shard(folder / f"{shard}.jsonl", rows[shard * len(rows) // 2 : (shard + 1) * len(rows) // 2])
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as transformers saves it, and data sets of the same rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("labels")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [conversation(number) for number in range(ROWS)]
    put(folder / "shards", rows)
    padded = [{key: [0] * (16 - len(row["input_ids"])) + values for key, values in row.items()} for row in rows]
    put(folder / "left", padded)
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "arrow"))
    return folder


@cache
def transformers_says(model: Path, first: int, count: int) -> tuple[float, float, int]:
    """Return loss, gradient norm and counted tokens of some rows, by transformers' own loss of each with its labels."""
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for number in range(first, first + count):
        row = {key: torch.tensor([values]) for key, values in conversation(number).items()}
        counted = int((row["labels"][:, 1:] != -100).sum())
        total = total + loaded(**row).loss * counted
        tokens += counted
    loss = total / tokens
    loss.backward()
    norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in loaded.parameters() if p.grad is not None))
    return loss.item(), norm.item(), tokens


def options(here: Path, kind: str, **changes: Any) -> dict[str, Any]:
    widths = {name: None for name in TINY if name.startswith(("model_type", "hidden", "num_", "intermediate", "vocab"))}
    return {
        **widths, **STILL, "use_synthetic_data": None, "hf_pretrained_model_name_or_dir": here / "model",
        "training_dir": here / kind, "test_dir": here / kind, "shuffle": "none", "max_steps": STEPS,
        "validation_freq": STEPS, "validation_batches": ROWS, "fast_validation": 0, **changes,
    }  # fmt: skip


MESHES = {
    "one": (1, {"train_batch_size": BATCH}),
    "accumulated": (1, {"train_batch_size": 2, "gradient_accumulation_steps": 4}),
    "sharded": (2, {"train_batch_size": 4}),
    "hybrid": (4, {"train_batch_size": 2, "hybrid_shard_degree": 2}),
    "tensor": (2, {"train_batch_size": BATCH, "tensor_parallel_degree": 2}),
    "context": (2, {"train_batch_size": BATCH, "context_parallel_degree": 2}),
    "context and tensor": (4, {"train_batch_size": BATCH, "context_parallel_degree": 2, "tensor_parallel_degree": 2}),
}


def compare(folder: Path, here: Path) -> None:
    found = steps(folder)
    assert len(found) == STEPS
    seen = 0
    for number, record in enumerate(found):
        loss, norm, tokens = transformers_says(here / "model", number * BATCH, BATCH)
        seen += tokens
        assert record["loss"] == pytest.approx(loss, rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert record["tokens"] == seen
    (validation,) = (record for record in records(folder) if record.get("event") == "evaluate")
    assert validation["loss"] == pytest.approx(transformers_says(here / "model", 0, ROWS)[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", core(MESHES, {"context"}.__contains__))
def test_labels_train_as_in_transformers(here: Path, tmp_path: Path, mesh: str) -> None:
    world, changes = MESHES[mesh]
    harness.run(train, world, flags(tmp_path, **options(here, "shards", **changes)))
    compare(tmp_path, here)


@pytest.mark.parametrize("kind", ["arrow", "left"])
def test_labels_of_other_sets_train_alike(here: Path, tmp_path: Path, kind: str) -> None:
    harness.run(train, 2, flags(tmp_path, **options(here, kind, train_batch_size=4)))
    compare(tmp_path, here)


@pytest.mark.slow
def test_labels_train_alike_on_smp(here: Path, tmp_path: Path) -> None:
    common = {"training_dir": here / "shards", "shuffle": "none", "use_synthetic_data": None}
    harness.run(train, 1, flags(tmp_path / "native", **common, train_batch_size=8))
    harness.run(train_on_smp, 2, flags(tmp_path / "smp", **common, train_batch_size=4, backend="smp"))
    assert numbers(tmp_path / "smp") == [pytest.approx(one, rel=1e-5) for one in numbers(tmp_path / "native")]


@pytest.mark.slow
def test_packed_labels_stay_in_their_document(here: Path, tmp_path: Path) -> None:
    """All rows in one step, packed: the loss is that of each row alone."""
    packed = {"short": "pack", "long": "split", "max_context_width": 32, "max_steps": 1, "validation_freq": None}
    audited = {"data_audit": 1, "epochs": 1, "train_batch_size": 12, "test_dir": None}
    harness.run(train, 2, flags(tmp_path, **options(here, "shards", **packed, **audited)))
    (record,) = steps(tmp_path)
    loss, norm, tokens = transformers_says(here / "model", 0, ROWS)
    assert (record["loss"], record["grad_norm"]) == pytest.approx((loss, norm), rel=1e-5)
    assert record["tokens"] == tokens


def prompts(folder: Path) -> Path:
    """Write rows of 24 tokens, of which every fifth has its first target behind 16."""
    rows = [
        {"input_ids": list(range(1, 25)), "labels": [-100] * first + [9] * (24 - first)}
        for first in (18 if number % 5 == 3 else number % 15 for number in range(40))
    ]
    return put(folder, rows)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_cut_to_nothing_stop_the_run_at_the_start(tmp_path: Path, world: int) -> None:
    place = prompts(tmp_path / "data")
    words = flags(tmp_path, use_synthetic_data=None, training_dir=place, shuffle="none")
    with pytest.raises(harness.RankFailed, match=r"DataError: .*\b0\.jsonl:4: "):
        harness.run(train, world, words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not steps(tmp_path)
    # In the validation data alike.
    good = put(tmp_path / "good", [{"input_ids": list(range(1, 25))} for _ in range(4)])
    words = flags(tmp_path, use_synthetic_data=None, training_dir=good, test_dir=place, validation_freq=1)
    with pytest.raises(harness.RankFailed, match=r"DataError: .*\b0\.jsonl:4: "):
        harness.run(train, world, words)


@pytest.mark.slow
def test_rows_cut_to_nothing_keep_their_positions_and_train_on_nothing(tmp_path: Path) -> None:
    place = prompts(tmp_path / "data")
    common = {
        "use_synthetic_data": None, "training_dir": place, "data_audit": 1, "bad_rows": "skip", "max_bad": 0.25,
        "epochs": 2, "lr_decay_iters": 20,
    }  # fmt: skip
    one, moved = tmp_path / "one", tmp_path / "moved"
    harness.run(train, 1, flags(one, **common, train_batch_size=4, max_steps=None))
    resume = {"resume_from_checkpoint": moved / "checkpoints"}
    harness.run(train, 2, flags(moved, **common, gradient_accumulation_steps=2, max_steps=5, checkpoint_freq=5))
    harness.run(train, 4, flags(moved, **common, **resume, max_steps=None))
    used: dict[Path, dict[int, set[str]]] = {one: {}, moved: {}}
    for folder, by_step in used.items():
        assert audit(folder / "run") == 0
        for path in (folder / "run").glob("data_audit-rank*.jsonl"):
            for record in map(json.loads, path.read_text().splitlines()):
                by_step.setdefault(record["step"], set()).update(record["samples"])
    assert used[moved] == used[one]
    assert len(used[one]) == 20
    rows = {f"{shard}.jsonl:{line}[0:16]" for shard in range(2) for line in range(1, 21)}
    assert set().union(*used[one].values()) == rows
    learnt = sum(16 - max(first, 1) for first in (number % 15 for number in range(40) if number % 5 != 3))
    assert steps(one)[-1]["tokens"] == 2 * learnt
    assert [record["loss"] for record in steps(moved)] == pytest.approx(
        [record["loss"] for record in steps(one)], rel=1e-4
    )
    with pytest.raises(harness.RankFailed, match=r"DataError: .*--max_bad"):
        harness.run(train, 1, flags(tmp_path / "few", **{**common, "max_bad": 0.1}))
    with pytest.raises(harness.RankFailed, match=r"DataError: .*training data changed"):
        harness.run(train, 1, flags(moved, **common, **resume, max_context_width=20, train_batch_size=4))
