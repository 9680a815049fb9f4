"""The contract of `Backend`: the native one, and SMP's on a stand-in, each against one process.

What each mesh does to the numbers of each family: test_same_numbers. What SMP is called with: test_smp_calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import harness
from tests.smp import NATIVE, NEEDS_NATIVE, install, train_alone, train_on_smp
from tests.tiers import core
from tests.training import (
    SAMPLE,
    TOLERANCE,
    alike,
    built,
    flags,
    group,
    numbers,
    read_checkpoint,
    records,
    steps,
    train,
)

BOTH = ("native", "smp")
CLIPPED = {
    "grad_clip": 0.05, "lr_decay_style": "constant",
    "adam_epsilon": 1e-3,  # large: AdamW's first steps then feel the size of the gradient
}  # fmt: skip

NATIVE_ONLY = ("native",)
# Rows, world size, flags, backends; four rows a step. What each mesh does to each family natively: test_same_numbers.
CASES: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...]]] = {
    "sharded": ("text", 2, {"train_batch_size": 1, "gradient_accumulation_steps": 2}, BOTH),
    "zero 2": ("text", 4, {"train_batch_size": 1, "sharding_strategy": "shard_grad_op"}, BOTH),
    "hybrid": ("text", 4, {"train_batch_size": 1, "hybrid_shard_degree": 2}, ("smp",)),
    "hybrid, zero 2": (
        "text", 4, {"train_batch_size": 1, "hybrid_shard_degree": 2, "sharding_strategy": "_hybrid_shard_zero2"}, BOTH,
    ),
    "no_shard": ("text", 2, {"train_batch_size": 2, "sharding_strategy": "no_shard"}, BOTH),
    "replicated": (
        "text", 2, {"train_batch_size": 1, "gradient_accumulation_steps": 2, "hybrid_shard_degree": 1}, BOTH,
    ),
    "offloaded, every second layer": (
        "text", 2, {"train_batch_size": 2, "sm_activation_offloading": 1, "activation_loading_horizon": 1,
                    "activation_checkpointing": "selective:2"}, ("smp",),
    ),
    "all logits, not delayed": ("text", 2, {"train_batch_size": 2, "chunked_loss": 0, "delayed_param": 0}, ("smp",)),
    "tied": ("tied", 2, {"train_batch_size": 2}, ("smp",)),
    "tp2, accumulation": (
        "text", 4, {"train_batch_size": 1, "tensor_parallel_degree": 2, "gradient_accumulation_steps": 2}, NATIVE_ONLY,
    ),
    "padded": ("padded", 2, {"train_batch_size": 2}, BOTH),
    "cp2 tp2, padded": (
        "padded", 4, {"train_batch_size": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2}, NATIVE_ONLY,
    ),
    "packed": ("packed", 2, {"train_batch_size": 2}, BOTH),
    "tp2, packed": ("packed", 2, {"train_batch_size": 4, "tensor_parallel_degree": 2}, NATIVE_ONLY),
    "ep2, packed": ("experts", 4, {"train_batch_size": 1, "expert_parallel_degree": 2}, NATIVE_ONLY),
}  # fmt: skip
CELLS = [(name, backend) for name, (*_, backends) in CASES.items() for backend in backends]
CORE = {("sharded", "native"), ("sharded", "smp"), ("cp2 tp2, padded", "native")}


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
    common = {"use_synthetic_data": None, **CLIPPED}
    if rows in ("packed", "experts"):
        common |= {"model_type": "mixtral", "num_local_experts": 4} if rows == "experts" else {}
        return {**common, "training_dir": packed(scratch / rows), "short": "pack", "long": "split"}
    common |= {"test_dir": SAMPLE / "test", "vocab_size": 4096, "validation_freq": 3, "validation_batches": 2}
    if rows == "padded":
        return {**common, "training_dir": padded(scratch / rows), "max_context_width": 64}
    # Of unequal length: what each rank counts differs, so a mean of means would show.
    return {**common, "training_dir": SAMPLE / "train", "max_context_width": 96,
            "tie_word_embeddings": int(rows == "tied")}  # fmt: skip


@cache
def expected(rows: str, scratch: Path) -> Path:
    """Return the folder of the same run on one process."""
    train_alone(flags(scratch / f"one-{rows}", **options(rows, scratch), train_batch_size=4, val_batch_size=4))
    return scratch / f"one-{rows}"


def evaluated(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record.get("event") == "evaluate"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one process")


def run_case(folder: Path, scratch: Path, rows: str, world: int, backend: str, **changes: Any) -> None:
    shares = changes.get("tensor_parallel_degree", 1) * changes.get("context_parallel_degree", 1)
    line = {**options(rows, scratch), "val_batch_size": 4 * shares // world, "backend": backend, **changes}
    harness.run(train_on_smp if backend == "smp" else train, world, flags(folder, **line))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "backend"), core(CELLS, CORE.__contains__))
def test_trains_like_one_process(case: str, backend: str, scratch: Path, tmp_path: Path) -> None:
    """The loss, the norm before clipping, the tokens, the validation, and weights that were clipped by that norm."""
    if backend == "native" and not NATIVE:
        pytest.skip(NEEDS_NATIVE)
    rows, world, changes, _ = CASES[case]
    run_case(tmp_path, scratch, rows, world, backend, **changes)
    one = expected(rows, scratch)
    assert [record["step"] for record in steps(tmp_path)] == [1, 2, 3]
    assert steps(one)[0]["grad_norm"] > 2 * CLIPPED["grad_clip"]
    for ours, theirs in zip(steps(tmp_path), steps(one), strict=True):
        assert ours["tokens"] == theirs["tokens"]
    alike(numbers(tmp_path), numbers(one))
    assert len(evaluated(one)) == (rows not in ("packed", "experts"))
    assert evaluated(tmp_path) == pytest.approx(evaluated(one), rel=TOLERANCE)
    ours, theirs = (read_checkpoint(*(each / "checkpoints" / "run").glob("*-3steps")) for each in (tmp_path, one))
    assert ours.keys() == theirs.keys()
    assert any("lm_head" in name for name in ours) == (rows != "tied")
    for name in (name for name in theirs if name.startswith("model")):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", core(BOTH, {"native"}.__contains__))
def test_bfloat16_follows_float32(backend: str, scratch: Path, tmp_path: Path) -> None:
    """bfloat16 has 8 bits: 1e-2 is two of its steps."""
    if backend == "native" and not NATIVE:
        pytest.skip(NEEDS_NATIVE)
    run_case(tmp_path, scratch, "text", 2, backend, train_batch_size=2, bf16=1)
    one = expected("text", scratch)
    half, full = ([record["loss"] for record in steps(folder)] for folder in (tmp_path, one))
    assert half == pytest.approx(full, rel=1e-2)
    assert half != full
    assert evaluated(tmp_path) == pytest.approx(evaluated(one), rel=1e-2)


def used(backend_name: str) -> Iterator[tuple[str, Any]]:
    """Use a backend on this rank through its interface; yield what it gave, by name."""
    from smp_train import train_utils
    from smp_train.data.batch import Batch
    from smp_train.distributed.dtensor import local_tensor

    if backend_name == "smp":
        install()
    with group() as (ranks, device):
        args, backend, spec = built(ranks, device, backend=backend_name, lr=1e-2)
        topology = backend.topology
        yield "data ranks", (topology.dp_rank, topology.dp_size)
        yield "mesh", int(torch.tensor(list(topology.mesh.values())).prod())

        def make(initial: bool) -> tuple[Any, Any]:
            model = backend.build(backend.check(spec, seq_len=16), seed=3, initial=initial)
            return model, train_utils.build_optimizer(args, backend, model)

        def backward(model: Any, optimizer: Any, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            backend.begin_micro_batch(model, last=True)
            loss, _ = backend.loss(model, Batch(ids, labels))
            loss.backward()
            return backend.sum_over_data(loss.detach().clone())

        ids = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(ranks.rank))
        model, optimizer = make(True)
        nothing = backward(model, optimizer, torch.full_like(ids, -100))
        yield "nothing counted", (float(nothing), float(backend.clip_grad_norm(model, 1.0, optimizer)))
        loss = backward(model, optimizer, ids)
        norms = [float(backend.clip_grad_norm(model, limit, optimizer)) for limit in (0.0, 1.0)]
        yield "loss", float(loss)
        yield "norms", norms
        yield "sum over data", float(backend.sum_over_data(torch.ones(())))
        optimizer.step()
        moments = [local_tensor(state["exp_avg"]) for state in optimizer.state.values()]
        squares = torch.stack([moment.double().square().sum() for moment in moments]).sum()
        yield "applied norm", float(backend.sum_over_data(squares).sqrt()) / (1 - args.beta1)
        decayed = {name for name, p in model.named_parameters() if backend.decays(name, p)}
        yield "decays", sorted(name for name, _ in model.named_parameters() if name not in decayed)

        def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
            if hasattr(tree, "local_shards"):  # what SMP's own saver takes
                return {prefix: tree.local_shards()[0].tensor}
            if not isinstance(tree, dict):
                return {prefix: local_tensor(tree)}
            found: dict[str, Any] = {}
            for key, value in tree.items():
                found |= leaves(value, f"{prefix}/{key}")
            return found

        saved = {name: leaf.clone() for name, leaf in leaves(backend.state_dict(model, optimizer)).items()}
        yield "state", sorted(saved)

        def read(state: dict[str, Any]) -> None:
            for name, leaf in leaves(state).items():
                leaf.copy_(saved[name])

        again, other = make(False)
        backend.load_state(again, other, read)
        loaded = leaves(backend.state_dict(again, other))
        yield "loaded", all(torch.equal(loaded[name], value) for name, value in saved.items())
        yield "same loss", float(backward(again, other, ids)) == float(backward(model, optimizer, ids))
        yield "full weights", backend.full_weights(again)


def interface(backend_name: str) -> dict[str, Any]:
    return dict(used(backend_name))


def test_one_interface() -> None:
    found = {name: harness.run(interface, 2, name) for name in (BOTH if NATIVE else BOTH[1:])}
    for by_rank in found.values():
        for rank, facts in enumerate(by_rank):
            assert (facts["data ranks"], facts["mesh"], facts["sum over data"]) == ((rank, 2), 2, 2.0)
            assert facts["nothing counted"] == (0.0, 0.0)
            before, same = facts["norms"]
            assert before == same > 1  # a limit of 0 clips nothing
            assert facts["applied norm"] == pytest.approx(1.0, rel=1e-5)
            assert facts["decays"]
            assert all("norm" in name for name in facts["decays"])
            assert facts["loaded"]
            assert facts["same loss"]
            assert facts["full weights"] is None  # checkpoints have the names of the hub
    native, smp = (found.get(name, found["smp"]) for name in BOTH)
    for name in ("loss", "norms"):
        assert smp[0][name] == pytest.approx(native[0][name], rel=TOLERANCE)
    assert smp[0]["state"] == native[0]["state"]
