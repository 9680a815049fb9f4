"""Attention within a training step: nothing waits for the device, and bounds of documents serve every mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests import harness
from tests.distributed.test_same_numbers import FAMILIES, ROWS, WIDTH, arguments_of, train_cell
from tests.tiers import core
from tests.training import alike, built, group

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


def batch_of(kind: str, step: int, rank: int = 0, count: int = ROWS) -> Any:
    """Return this rank's rows of a batch: whole, short or packed."""
    import numpy as np

    from smp_train.data.batch import collate
    from smp_train.data.samples import Sample
    from smp_train.data.source import Row

    random = np.random.default_rng(step)
    ids = random.integers(64, size=(ROWS, WIDTH))
    rows = [Row(row) for row in ids]
    if kind == "short":
        rows = [Row(row[: WIDTH - 3 * number]) for number, row in enumerate(ids)]
    elif kind == "packed":
        rows = [Row(row, None, random.multinomial(WIDTH - 3, [1 / 3] * 3) + 1) for row in ids]
    return collate([Sample(row, "") for row in rows[rank * count : (rank + 1) * count]], WIDTH)


def waits(families: list[str]) -> dict[tuple[str, str], Any]:
    """Return, per family and kind of rows, what waited in one training step."""
    import torch

    from smp_train import train_utils
    from tests.waits import Waits

    found: dict[tuple[str, str], Any] = {}
    with group() as (ranks, device):
        for family in families:
            args, backend, spec = built(ranks, device, arguments_of(family, "one", ("full", 0, 1), 1))
            model = backend.build(backend.check(spec, seq_len=WIDTH), seed=args.seed)
            optimizer = train_utils.build_optimizer(args, backend, model)
            for kind in ("whole", "short", "packed"):
                batch, tokens = batch_of(kind, 0), torch.tensor(100)
                with Waits() as seen:
                    train_utils.train_step(
                        backend, model, optimizer, [batch], tokens=tokens, lr=1e-2, max_grad_norm=1.0
                    )
                found[family, kind] = Counter(seen.seen)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("families", core([["llama"], [*FAMILIES][1:]], lambda chosen: chosen == ["llama"]))
def test_nothing_in_a_step_waits_for_the_device(families: list[str]) -> None:
    (found,) = harness.run(waits, 1, families)
    assert found == {(family, kind): Counter() for family in families for kind in ("whole", "short", "packed")}


def packed_rows(step: int, dp_rank: int, count: int) -> tuple[Any, int]:
    return batch_of("whole" if step == 1 else "packed", step, dp_rank, count), 100


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
