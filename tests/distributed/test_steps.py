"""What a step asks of the host: nothing is waited for, logged steps are read a step later, no garbage holds tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from smp_train.distributed.host import older
from tests import harness
from tests.shards import write_shard
from tests.smp import smp, train_on_smp
from tests.training import flags, records, steps, train
from tests.waits import Waits

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {}, "none": {"activation_checkpointing": "none", "gradient_accumulation_steps": 2},
    "selective:op": {"activation_checkpointing": "selective:op"},
    "offloading": {"sm_activation_offloading": 1, "activation_loading_horizon": 1},
    "saves": {"checkpoint_freq": 3, "checkpoint_type": "sharded", "validation_freq": 2, "validation_batches": 1},
    "falcon": {"model_type": "falcon", "num_key_value_heads": None},
    "clipped and decayed": {"grad_clip": 0.01, "weight_decay": 0.3, "tie_word_embeddings": 1},
}  # fmt: skip


def watched(
    command_lines: dict[str, list[str]], run: Callable[[list[str]], Any] = train
) -> dict[str, list[tuple[list[str], int]]]:
    """Train, with logged steps read later as on a GPU; return per step the waits, and the tensors in cyclic garbage."""
    import gc

    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    from smp_train import train_lib
    from smp_train.data.batch import Batch
    from smp_train.run import step as run_step

    counted_tokens = Batch.counted_tokens

    def on_the_host(batch: Batch) -> int:
        with _disable_current_modes():  # the batch is not on the device yet
            return counted_tokens(batch)

    Batch.counted_tokens = on_the_host  # type: ignore[method-assign]

    found: dict[str, list[tuple[list[str], int]]] = {}
    step, run_step.ASYNCHRONOUS_DEVICES = train_lib.step, {"cpu"}

    def noting(*args: Any) -> Any:
        gc.collect()
        with Waits() as waits:
            result = step(*args)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found[name].append((waits.seen, sum(isinstance(item, torch.Tensor) for item in gc.garbage)))
        gc.set_debug(0)
        gc.garbage.clear()
        return result

    train_lib.step = noting
    for name, words in command_lines.items():
        found[name] = []
        run(words)
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_waits_for_nothing_and_leaves_no_tensor_behind(world: int, tmp_path: Path) -> None:
    lines = {
        name: flags(tmp_path / name, num_layers=3, max_steps=4, logging_freq=1, **changes)
        for name, changes in VARIANTS.items()
    }
    for of_rank in harness.run(watched, world, lines):
        for name, found in of_rank.items():
            assert found == [([], 0)] * 4, name
    for name in VARIANTS:
        assert [record["step"] for record in steps(tmp_path / name)] == [1, 2, 3, 4]
    events = [record.get("event") or record["step"] for record in records(tmp_path / "saves")]
    assert events == ["start", 1, 2, "evaluate", 3, "save", 4, "evaluate", "save", "finish"]


def test_the_numbers_of_a_step_are_copied_together_though_its_gradients_are_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --cpu_offload 1 the norm is computed on the host, and the loss on the device."""
    import torch

    from smp_train import train_utils

    device = torch.device("meta")
    weight = torch.nn.Parameter(torch.ones((), device=device))
    backend: Any = SimpleNamespace(
        topology=SimpleNamespace(device=device, tp_rank=0), begin_micro_batch=lambda model, last: None,
        loss=lambda model, batch: (weight * 2, None), clip_grad_norm=lambda *_: torch.ones(()),
    )  # fmt: skip
    monkeypatch.setattr(train_utils.dist, "all_reduce", lambda values: values)
    batch: Any = SimpleNamespace(to=lambda device: batch)
    optimizer: Any = SimpleNamespace(
        param_groups=[{"params": [weight]}], zero_grad=lambda set_to_none: None, step=lambda: None
    )
    result = train_utils.train_step(
        backend, torch.nn.Module(), optimizer, [batch], tokens=torch.ones((), device=device), lr=0.1, max_grad_norm=1.0
    )
    assert result.to_host().values().shape == (4,)


@pytest.mark.slow
def test_a_step_on_smp_leaves_no_tensor_behind(tmp_path: Path) -> None:
    lines = {mode: smp(tmp_path / mode, num_layers=3, max_steps=4, activation_checkpointing=mode)
             for mode in ("none", "full")}  # fmt: skip
    for of_rank in harness.run(watched, 2, lines, train_on_smp):
        for name, found in of_rank.items():
            assert [tensors for _, tensors in found] == [0] * 4, name


def counted_compilations(command_line: list[str]) -> list[int]:
    """Train, and return how many graphs were compiled by the end of each step, its validation included."""
    from torch._dynamo.utils import counters

    from smp_train import train_lib

    step, counts = train_lib.step, []

    def counting(*args: Any) -> Any:
        counts.append(counters["stats"]["unique_graphs"])
        return step(*args)

    train_lib.step = counting
    assert train(command_line) == 0
    assert not counters["graph_break"]
    return [*counts[1:], counters["stats"]["unique_graphs"]]


@pytest.mark.slow
def test_a_run_compiles_in_its_first_step_and_its_first_validation(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name, count in (("train", 41), ("test", 11)):
        documents = [random.integers(3, 250, size).tolist() for size in random.integers(3, 40, count)]
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in documents]
        write_shard(tmp_path / name / "1.json", rows)
    words = flags(
        tmp_path, use_synthetic_data=None, training_dir=tmp_path / "train", test_dir=tmp_path / "test", short="pack",
        long="split", max_context_width=32, train_batch_size=3, val_batch_size=2, max_steps=None, epochs=1,
        validation_freq=2, validation_batches=5, use_torch_compile=1, torch_compile_backend="aot_eager",
    )  # fmt: skip
    (counts,) = harness.run(counted_compilations, 1, words, timeout=300)
    layers, loss, validation = 1, 2, 1
    assert len(counts) > 6
    assert counts == [layers + loss] + [layers + loss + validation] * (len(counts) - 1)


def compile_with_inductor(command_line: list[str]) -> dict[str, int]:
    """Train and return what the compiler found among what was kept, and what it did not."""
    from torch._dynamo.utils import counters

    assert train(command_line) == 0
    return dict(counters["inductor"])


@pytest.mark.slow
def test_a_restart_finds_what_was_compiled_in_the_run_folder(tmp_path: Path) -> None:
    resume = {"resume_from_checkpoint": tmp_path / "checkpoints"}
    words = flags(tmp_path, use_torch_compile=1, max_steps=1, num_layers=1, save_final_model=0, **resume)
    for attempt in range(2):
        (found,) = harness.run(compile_with_inductor, 1, [*words, f"--max_steps={attempt + 1}"], timeout=600)
        hits, misses = (found.get(f"fxgraph_cache_{kind}", 0) for kind in ("hit", "miss"))
        assert (misses > 0) == (attempt == 0), found
        assert hits > 0 or attempt == 0, found  # the first may meet a graph of its own again
    (folder,) = (tmp_path / "run").glob("compiled-*")
    assert folder.stat().st_mode & 0o077 == 0


def test_garbage_is_collected_after_every_fiftieth_step_and_at_no_other_time() -> None:
    import gc

    from smp_train import train_utils

    step, collected = 0, []

    def note(phase: str, _: Any) -> None:
        if phase == "start":
            collected.append(step)

    with train_utils.garbage_collected_together():
        gc.callbacks.append(note)
        try:
            for step in range(1, 121):
                kept = [[] for _ in range(10_000)]  # more than Python would go by
                kept.append(kept)
                train_utils.collect_garbage(step)
        finally:
            gc.callbacks.remove(note)
    assert collected == [50, 100]
    assert gc.isenabled()


def test_metrics_have_the_slowest_rank_and_the_shares_of_time(tmp_path: Path) -> None:
    """The rule by which a rank is named: unit/test_step_times.py."""
    harness.run(train, 2, flags(tmp_path / "all", max_steps=4, logging_freq=2))
    assert [record["step"] for record in steps(tmp_path / "all")] == [2, 4]
    for record in steps(tmp_path / "all"):
        assert {"slowest_rank", "slowest_host", "slowest_phase", "slowest_sec"} <= record.keys()
        assert 0.99 < sum(record["time_shares"].values()) < 1.01
        if not older(torch.__version__, "2.9"):
            assert 0 < record["communication_share"] < 1
    harness.run(train, 1, flags(tmp_path / "minimal", max_steps=1, telemetry="minimal"))
    assert "time_shares" not in steps(tmp_path / "minimal")[0]
