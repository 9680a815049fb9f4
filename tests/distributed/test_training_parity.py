"""The same run of the whole program, on one process and on several: same loss, same gradient norm, same validation.

What each mesh does to the numbers of each family: test_same_numbers; here is what it does not vary: accumulation,
strategies, real text, rows padded on either side, packed rows.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.tiers import core
from tests.training import SAMPLE, flags, records, steps, train

TOLERANCE = 1e-5  # relative, fp32: sums over ranks and micro-batches are taken in another order

# Rows, world size, flags; four rows a step.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "accumulation": ("text", 1, {"train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "fsdp2-accumulation": ("text", 2, {"train_batch_size": 1, "gradient_accumulation_steps": 2}),
    "fsdp4-grad-op": ("text", 4, {"train_batch_size": 1, "sharding_strategy": "shard_grad_op"}),
    "hsdp2x2": ("text", 4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
    "hsdp2x2-zero2": (
        "text", 4, {"train_batch_size": 1, "hybrid_shard_degree": 2, "sharding_strategy": "_hybrid_shard_zero2"},
    ),
    "replicated": ("text", 2, {"train_batch_size": 2, "sharding_strategy": "no_shard"}),
    "tp2-fsdp2-accumulation": (
        "text", 4, {"train_batch_size": 1, "tensor_parallel_degree": 2, "gradient_accumulation_steps": 2},
    ),
    "cp2-fsdp2": ("text", 4, {"train_batch_size": 2, "context_parallel_degree": 2}),
    "cp2, padded": ("padded", 2, {"train_batch_size": 4, "context_parallel_degree": 2}),
    "cp2-fsdp2, padded": ("padded", 4, {"train_batch_size": 2, "context_parallel_degree": 2}),
    "cp2-tp2, padded": (
        "padded", 4, {"train_batch_size": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2},
    ),
    "cp2-hsdp2x2, padded": (
        "padded", 8, {"train_batch_size": 1, "context_parallel_degree": 2, "hybrid_shard_degree": 4},
    ),
    "accumulation, packed": ("packed", 1, {"train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "fsdp2, packed": ("packed", 2, {"train_batch_size": 2}),
    "tp2, packed": ("packed", 2, {"train_batch_size": 4, "tensor_parallel_degree": 2}),
}  # fmt: skip


def write(folder: Path, rows: list[dict[str, list[int]]]) -> Path:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def padded(folder: Path) -> Path:
    """Write rows shorter than the context, padded on either side."""
    rows = []
    for index in range(16):
        mask = [1] * (20 + 2 * index) + [0] * (44 - 2 * index)
        ids = [(7 * index + 5 * place) % 250 for place in range(64)]
        rows.append({"input_ids": ids, "attention_mask": mask if index % 2 else mask[::-1]})
    return write(folder, rows)


def packed(folder: Path) -> Path:
    lengths = [3, 9, 30, 5, 12, 4, 7, 21, 6, 11, 40, 3, 8, 10, 5, 17]
    ids = [[(3 * n * n + k * (n + 3)) % 256 for k in range(size)] for n, size in enumerate(lengths)]
    return write(folder, [{"input_ids": row} for row in ids])


@cache
def options(rows: str, scratch: Path) -> dict[str, Any]:
    """Return the flags of a run on rows of a kind."""
    if rows == "packed":
        return {"use_synthetic_data": None, "training_dir": packed(scratch / rows), "short": "pack", "long": "split"}
    common = {"use_synthetic_data": None, "test_dir": SAMPLE / "test", "vocab_size": 4096, "validation_freq": 3}
    if rows == "padded":
        return {**common, "training_dir": padded(scratch / rows), "max_context_width": 64}
    # Of unequal length: what each rank counts differs, so a mean of means would show.
    return {**common, "training_dir": SAMPLE / "train", "max_context_width": 96}


@cache
def expected(rows: str, scratch: Path) -> Path:
    """Return the folder of the same run on one process."""
    harness.run(train, 1, flags(scratch / f"one-{rows}", **options(rows, scratch), train_batch_size=4))
    return scratch / f"one-{rows}"


def evaluated(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record.get("event") == "evaluate"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.mark.slow
@pytest.mark.parametrize("case", core(CASES, {"fsdp2-accumulation", "cp2, padded"}.__contains__))
def test_every_mesh_trains_like_one_process(case: str, scratch: Path, tmp_path: Path) -> None:
    rows, world, changes = CASES[case]
    harness.run(train, world, flags(tmp_path, **options(rows, scratch), **changes))
    result, one = steps(tmp_path), expected(rows, scratch)
    assert [record["step"] for record in result] == [1, 2, 3]
    for ours, theirs in zip(result, steps(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        assert ours["tokens"] == theirs["tokens"]
    assert len(evaluated(one)) == (rows != "packed")
    assert evaluated(tmp_path) == pytest.approx(evaluated(one), rel=TOLERANCE)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    harness.run(train, 2, flags(tmp_path / "half", bf16=1))
    harness.run(train, 2, flags(tmp_path / "full", bf16=0))
    half, full = steps(tmp_path / "half"), steps(tmp_path / "full")
    assert [r["loss"] for r in half] == pytest.approx([r["loss"] for r in full], rel=5e-3)
    assert [r["loss"] for r in half] != [r["loss"] for r in full]
