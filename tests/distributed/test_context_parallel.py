"""Context parallelism: each sequence on several ranks, padded rows among them, the numbers of one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tests import harness
from tests.training import SAMPLE, flags, records, steps, train

TOLERANCE = 1e-5  # relative, fp32: attention and gradients are summed in another order

MESHES = {
    "cp2": (2, {"context_parallel_degree": 2, "train_batch_size": 4}),
    "cp2-fsdp2": (4, {"context_parallel_degree": 2, "train_batch_size": 2}),
    "cp2-tp2": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2, "train_batch_size": 4}),
    "cp2-hsdp2x2": (8, {"context_parallel_degree": 2, "hybrid_shard_degree": 4, "train_batch_size": 1}),
}


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows shorter than the context, padded on either side."""
    folder = tmp_path_factory.mktemp("padded")
    rows = []
    for index in range(16):
        length = 20 + 2 * index
        ids = [(7 * index + 5 * place) % 250 for place in range(64)]
        mask = [1] * length + [0] * (64 - length)
        rows.append({"input_ids": ids, "attention_mask": mask if index % 2 else mask[::-1]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options(folder: Path) -> dict:
    return {
        "use_synthetic_data": None, "training_dir": folder, "vocab_size": 4096, "max_context_width": 64,
        "test_dir": SAMPLE / "test", "validation_freq": 3,
    }  # fmt: skip


@cache
def reference(data: Path, folder: Path) -> Path:
    harness.run(train, 1, flags(folder, **options(data), train_batch_size=4))
    return folder


def validations(folder: Path) -> list[dict]:
    return [record for record in records(folder) if record.get("event") == "evaluate"]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rows"), [("cp2-fsdp2", "whole"), *((mesh, "padded") for mesh in MESHES)])
def test_split_sequences_train_like_whole_ones(
    mesh: str, rows: str, padded: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = padded if rows == "padded" else SAMPLE / "train"
    expected = reference(data, tmp_path_factory.getbasetemp() / f"context-parallel-{rows}")
    world, changes = MESHES[mesh]
    harness.run(train, world, flags(tmp_path, **options(data), **changes))
    for ours, theirs in zip(steps(tmp_path), steps(expected), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        assert ours["tokens"] == theirs["tokens"]
    (ours,), (theirs,) = validations(tmp_path), validations(expected)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
