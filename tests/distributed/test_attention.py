"""Attention within a training step: bounds of documents serve every mesh."""

from __future__ import annotations

from typing import Any

import pytest

from tests import harness
from tests.distributed.test_same_numbers import ROWS, WIDTH, arguments_of, train_cell
from tests.training import alike, group

MODES = {
    "fsdp2 compiled": ("fsdp2", ("full", 0, 1), {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}),
    "fsdp2 offloaded": ("fsdp2", ("none", 1, 1), {}),
    "fsdp2 selective": ("fsdp2", ("selective:op", 0, 1), {}),
    "fsdp2 selective compiled": (
        "fsdp2", ("selective:op", 1, 1), {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"},
    ),
    "tp2": ("tp2", ("full", 1, 0), {}),
    "tp2 compiled": ("tp2", ("full", 0, 1), {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}),
}  # fmt: skip


def packed_rows(step: int, dp_rank: int, count: int) -> tuple[Any, int]:
    """Return this rank's rows of a step's batch, packed but in step 1, and a number of tokens."""
    import numpy as np

    from smp_train.data.batch import collate
    from smp_train.data.samples import Sample
    from smp_train.data.source import Row

    random = np.random.default_rng(step)
    ids = random.integers(64, size=(ROWS, WIDTH))
    sizes = [None if step == 1 else random.multinomial(WIDTH - 3, [1 / 3] * 3) + 1 for _ in ids]
    rows = [Row(row, None, of_documents) for row, of_documents in zip(ids, sizes, strict=True)]
    return collate([Sample(row, "") for row in rows[dp_rank * count : (dp_rank + 1) * count]], WIDTH), 100


def train_packed(modes: dict[str, Any], by_bounds: bool) -> dict[str, Any]:
    """Return, per mode, (loss, gradient norm) of steps of packed and whole rows."""
    import torch

    from smp_train.models import attention
    from tests.unit.test_attention import Varlen

    if by_bounds:
        attention.varlen = Varlen()
        attention._against_bounds = lambda *args, **options: None
    found: dict[str, Any] = {}
    with group() as (ranks, device):
        for name, (mesh, mode, changes) in modes.items():
            torch.compiler.reset()
            command_line = arguments_of("mistral", mesh, mode, ranks.world_size, short="pack", **changes)
            found[name] = train_cell(command_line, ranks, device, rows=packed_rows)
    assert not by_bounds or attention.varlen.calls
    return found


@pytest.mark.slow
def test_bounds_of_documents_give_the_numbers_of_a_mask_on_every_mesh() -> None:
    (expected,) = harness.run(train_packed, 1, {"one": ("one", ("none", 0, 0), {})}, False)
    for found in harness.run(train_packed, 2, MODES, True, timeout=600):
        for name, numbers in found.items():
            alike(numbers, expected["one"], name)
