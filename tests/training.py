"""Tiny training runs for tests: the real program, in this process, as one rank of a harness run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 1e-5  # relative, fp32: sums are taken in another order
SAMPLE = Path(__file__).parent.parent / "data" / "sample"

TINY: dict[str, Any] = {
    "run_name": "run", "model_type": "llama_v2", "vocab_size": 256, "hidden_width": 32, "num_layers": 2, "num_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_context_width": 16, "bf16": 0, "use_synthetic_data": 1,
    "train_batch_size": 1, "max_steps": 3, "lr": 1e-3, "warmup": 0,
}  # fmt: skip
NO_MODEL: dict[str, Any] = dict.fromkeys(
    ("model_type", "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size")
)
"""Changes of a run whose model something else describes: its folder, or its checkpoint."""


def flags(folder: Path, **changes: Any) -> list[str]:
    """Return the command line of a tiny run whose output is all below ``folder``; a change to None drops a flag."""
    values = {**TINY, "run_dir": folder / "run", "checkpoint_dir": folder / "checkpoints", **changes}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def train(command_line: list[str]) -> int:
    """Run the training program on this rank and return its exit code; failures are raised, not printed."""
    from smp_train import arguments, distributed, train_lib

    ranks = distributed.detect()
    resolved = arguments.parse(command_line)
    arguments.validate(resolved.args, ranks.world_size)
    return train_lib.main(resolved, ranks)


@contextlib.contextmanager
def group() -> Iterator[tuple[Any, Any]]:
    """Form the process group of the harness' ranks; yield this rank's place in it and its device."""
    from smp_train import distributed

    ranks = distributed.detect()
    device = distributed.start(ranks, distributed_backend="auto", timeout_seconds=300)
    try:
        yield ranks, device
    finally:
        distributed.stop()


def built(ranks: Any, device: Any, command_line: Sequence[str] = (), **changes: Any) -> tuple[Any, Any, Any]:
    """Return the arguments of a tiny run, or of a command line, its backend and its model."""
    from smp_train import arguments, backends
    from smp_train.models.resolve import resolve

    args = arguments.parse(list(command_line) or flags(Path("unused"), **changes), {}).args
    arguments.validate(args, ranks.world_size)
    backend, _ = backends.select(args, ranks, device)
    return args, backend, resolve(args)


def steps(folder: Path) -> list[dict[str, Any]]:
    """Return the step records that a run below ``folder`` wrote."""
    return [record for record in records(folder) if "event" not in record]


def audits(folder: Path) -> dict[int, dict[int, list[str]]]:
    """Return the samples that a run below ``folder`` read: by step, then by data-parallel rank."""
    found: dict[int, dict[int, list[str]]] = {}
    for path in sorted((folder / "run").glob("data_audit-rank*.jsonl")):
        for record in map(json.loads, path.read_text().splitlines()):
            found.setdefault(record["step"], {})[record["dp_rank"]] = record["samples"]
    return dict(sorted(found.items()))


def numbers(folder: Path) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step of a run below ``folder``."""
    return [(record["loss"], record["grad_norm"]) for record in steps(folder)]


def exact(folder: Path) -> list[list[Any]]:
    """Return what a run below ``folder`` that goes on exactly has in common with one that never stopped."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "consumed")
    return [[record[name] for name in names] for record in steps(folder)]


def saved(folder: Path, step: int) -> dict[str, Any]:
    """Return every entry of the checkpoint of a step that the one run below ``folder`` saved."""
    (path,) = folder.glob(f"checkpoints/*/*-{step}steps")
    return read_checkpoint(path)


def alike(ours: list[tuple[float, float]], theirs: list[tuple[float, float]], what: Any = "") -> None:
    """Assert that two runs have the same numbers, but for the order of sums."""
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE), what


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Assert that two checkpoints hold the same entries, bit for bit."""
    import torch

    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name], name


def records(folder: Path) -> list[dict[str, Any]]:
    """Return all records that a run below ``folder`` wrote."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return every entry of a checkpoint's DCP tree, whole, by its flat name."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return flatten(state)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries and lists under dotted names."""
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in items:
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
