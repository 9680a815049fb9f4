"""The same run of the whole program, on one process and on several: same loss, same gradient norm, same validation.

What each mesh does to the numbers: test_same_numbers; here is what it does not vary: accumulation, strategies, text.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.training import SAMPLE, flags, records, steps, train

TOLERANCE = 1e-5  # relative, fp32: sums over ranks and micro-batches are taken in another order

CASES = {
    "accumulation": (1, {"train_batch_size": 2, "gradient_accumulation_steps": 2}),
    "fsdp2-accumulation": (2, {"train_batch_size": 1, "gradient_accumulation_steps": 2}),
    "fsdp4-grad-op": (4, {"train_batch_size": 1, "sharding_strategy": "shard_grad_op"}),
    "hsdp2x2": (4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
    "hsdp2x2-zero2": (4, {"train_batch_size": 1, "hybrid_shard_degree": 2, "sharding_strategy": "_hybrid_shard_zero2"}),
    "replicated": (2, {"train_batch_size": 2, "sharding_strategy": "no_shard"}),
    "tp2-fsdp2-accumulation": (4, {
        "train_batch_size": 1, "tensor_parallel_degree": 2, "gradient_accumulation_steps": 2
    }),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    harness.run(train, 1, flags(folder, **data(), train_batch_size=4))
    return folder


def evaluated(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record.get("event") == "evaluate"]


def data() -> dict:
    # Real text with rows of unequal length: what each rank counts differs, so a mean of means would show.
    return {
        "use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 4096, "max_context_width": 96,
        "test_dir": SAMPLE / "test", "validation_freq": 3,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_mesh_trains_like_one_process(case: str, reference: Path, tmp_path: Path) -> None:
    world, changes = CASES[case]
    harness.run(train, world, flags(tmp_path, **data(), **changes))
    result = steps(tmp_path)
    assert [r["step"] for r in result] == [1, 2, 3]
    for ours, theirs in zip(result, steps(reference), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        assert ours["tokens"] == theirs["tokens"]
    assert evaluated(tmp_path) == pytest.approx(evaluated(reference), rel=TOLERANCE)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    harness.run(train, 2, flags(tmp_path / "half", bf16=1))
    harness.run(train, 2, flags(tmp_path / "full", bf16=0))
    half, full = steps(tmp_path / "half"), steps(tmp_path / "full")
    assert [r["loss"] for r in half] == pytest.approx([r["loss"] for r in full], rel=5e-3)
    assert [r["loss"] for r in half] != [r["loss"] for r in full]
