"""A step that diverges is left out of the weights on all ranks, bit for bit as if held; samples and layer are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smp_train.data.audit import audit
from tests import harness
from tests.smp import install
from tests.system.command import write_shard
from tests.training import flags, read_checkpoint, records, same, train

BAD = 255
"""The token of bad rows; no other row has it."""
LAST = 8


def data(folder: Path, *bad: int, **changes: Any) -> dict[str, Any]:
    """Return flags of 40 rows in stored order, two a step; of those in ``bad``, the first token is `BAD`."""
    shard = folder / "data" / "part-0.jsonl"
    if not shard.exists():
        write_shard(shard, 40, vocab=BAD)
        lines = [json.loads(line) for line in shard.read_text().splitlines()]
        for row in bad:
            lines[row]["input_ids"][0] = BAD
        shard.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "use_synthetic_data": None, "training_dir": folder / "data", "shuffle": "none", "max_steps": LAST,
        "lr_decay_iters": LAST, "checkpoint_freq": 100, "attn_pdrop": 0.1, "data_audit": 1, **changes,
    }  # fmt: skip


def train_oddly(command_line: list[str], *, held: tuple[int, ...] = (), later: bool = False, weights: int = 0) -> int:
    """Train natively or on SMP's stand-in; bad rows make a layer's output nan.

    Args:
        command_line: flags.
        held: bad rows are as good as others, and the updates of these steps are held back from outside.
        later: numbers are read a step later, as on a GPU.
        weights: the step before which rank 1's part of a layer's weights gets a nan.
    """
    from smp_train import train_lib, train_utils
    from smp_train.run import step as run_step

    if "--backend=smp" in command_line:
        install()
    train_step, open_run = train_utils.train_step, train_lib.build_run
    runs: list[Any] = []
    odd = [False]

    def build(*given: Any) -> Any:
        run = open_run(*given)
        runs.append(run)
        mlp = run.model.base_model.layers[1].mlp
        forward = mlp.down_proj.forward

        def planted(hidden: Any) -> Any:
            return forward(hidden) * (float("nan") if odd[0] and not held else 1.0)

        mlp.down_proj.forward = planted
        loss = run.backend.loss

        def watched(model: Any, batch: Any) -> Any:
            odd[0] = bool((batch.input_ids == BAD).any())
            return loss(model, batch)

        run.backend.loss = watched
        return run

    def step(*given: Any, **named: Any) -> Any:
        run = runs[0]
        at = run.progress.step + 1
        if at in held:
            named["skip_update"] = named["skip_update"] + 1
        if at == weights and run.runtime.rank == 1:
            run.model.base_model.layers[1].mlp.up_proj.weight.to_local().data.view(-1)[0] = float("nan")
        return train_step(*given, **named)

    train_lib.build_run = build
    train_utils.train_step = step  # type: ignore[assignment]
    if later:
        run_step.ASYNCHRONOUS_DEVICES = {"cpu"}
    return train(command_line)


def spikes(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if record.get("event") == "spike"]


def fails(*given: Any, **named: Any) -> str:
    with pytest.raises(harness.RankFailed) as failed:
        harness.run(*given, **named)
    return str(failed.value)


def checkpoint(folder: Path, step: int = LAST) -> Path:
    return folder / "checkpoints" / "run" / f"llama_v2-{step}steps"


@pytest.mark.slow
@pytest.mark.parametrize("later", [False, True])
def test_nan_ends_a_run_that_only_warns(tmp_path: Path, later: bool) -> None:
    common = data(tmp_path, 7, checkpoint_freq=2)
    message = fails(train_oddly, 2, flags(tmp_path, **common), later=later)
    assert "step 4: the loss is nan" in message
    assert "samples 6 to 7 of the order" in message
    assert "not finite for rank 1's part-0.jsonl:8," in message
    assert "first in the output of model.layers.1.mlp.down_proj of rank 1" in message
    assert checkpoint(tmp_path, 2).exists()
    assert not checkpoint(tmp_path, 4).exists()
    (event,) = spikes(tmp_path)
    assert (event["step"], event["action"], event["nonfinite"]["loss"]) == (4, "stop", "nan")
    assert event["samples"] == {"0": ["part-0.jsonl:7"], "1": ["part-0.jsonl:8"]}


@pytest.mark.slow
@pytest.mark.core
def test_a_skipped_step_is_as_if_held_and_resumed_exactly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    later, cut, told = (tmp_path / name for name in ("later", "cut", "told"))
    common = data(tmp_path, 7, on_spike="skip")
    harness.run(train_oddly, 2, flags(told, **common), held=(4,))
    harness.run(train_oddly, 2, flags(later, **common), later=True)
    same(read_checkpoint(checkpoint(later)), read_checkpoint(checkpoint(told)))
    harness.run(train_oddly, 2, flags(cut, **common | {"max_steps": 5}))
    harness.run(train_oddly, 2, flags(cut, **common, resume_from_checkpoint=cut / "checkpoints"))
    same(read_checkpoint(checkpoint(cut)), read_checkpoint(checkpoint(told)))
    assert [(event["step"], event["action"]) for event in (*spikes(later), *spikes(cut))] == [(4, "skip")] * 2
    metas = [json.loads((checkpoint(folder) / "meta.json").read_text()) for folder in (later, cut)]
    assert metas[0]["spikes"] == metas[1]["spikes"]
    assert metas[0]["spikes"]["skipped"] == [[4, 4]]
    capfd.readouterr()
    for folder in (later, cut):
        assert audit(folder / "run") == 0
        assert "1 steps are not in the weights (--on_spike): 4" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "later"), [("native", False), ("native", True), ("smp", False)])
def test_a_rollback_passes_over_the_steps_since_the_checkpoint(tmp_path: Path, backend: str, later: bool) -> None:
    back, told = tmp_path / "back", tmp_path / "told"
    common = data(tmp_path, 9, on_spike="rollback", checkpoint_freq=3, num_kept_checkpoints=0, backend=backend)
    harness.run(train_oddly, 2, flags(told, **common), held=(4, 5))
    harness.run(train_oddly, 2, flags(back, **common), later=later)
    same(read_checkpoint(checkpoint(back)), read_checkpoint(checkpoint(told)))
    assert [(event["step"], event["action"]) for event in spikes(back)] == [(5, "rollback")]


@pytest.mark.slow
def test_a_rollback_after_a_stop_goes_to_the_checkpoint_of_an_undisturbed_run(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    common = data(tmp_path, 11, on_spike="rollback", checkpoint_freq=3, num_kept_checkpoints=1)
    harness.run(train_oddly, 2, flags(whole, **common))
    harness.run(train_oddly, 2, flags(stopped, **common | {"max_steps": 4}))  # saves as a stop does
    assert [path.name for path in sorted(checkpoint(stopped).parent.glob("*steps"))] == [
        checkpoint(stopped, step).name for step in (3, 4)
    ]
    harness.run(train_oddly, 2, flags(stopped, **common, resume_from_checkpoint=stopped / "checkpoints"))
    assert [(event["step"], event["action"]) for event in spikes(stopped)] == [(6, "rollback")]
    same(read_checkpoint(checkpoint(stopped)), read_checkpoint(checkpoint(whole)))
    metas = [json.loads((checkpoint(folder) / "meta.json").read_text())["spikes"] for folder in (stopped, whole)]
    assert metas[0] == metas[1]
    assert metas[0]["rollbacks"] == [3, 1]


@pytest.mark.slow
def test_no_rollback_without_end(tmp_path: Path) -> None:
    common = data(tmp_path, 1, 9, 11, 13, 15, on_spike="rollback", checkpoint_freq=4, max_steps=20)
    message = fails(train_oddly, 2, flags(tmp_path, **common))
    assert "step 8: another spike after 3 rollbacks to the checkpoint of step 4" in message
    # Before the first checkpoint there is nothing to go back to.
    assert [event["action"] for event in spikes(tmp_path)] == ["skip", *["rollback"] * 4]
    assert [path.name for path in (tmp_path / "checkpoints" / "run").glob("*steps")] == [checkpoint(tmp_path, 4).name]


@pytest.mark.slow
def test_damaged_weights_end_a_run_that_skips_before_they_are_saved(tmp_path: Path) -> None:
    common = data(tmp_path, on_spike="skip", checkpoint_freq=1)
    message = fails(train_oddly, 2, flags(tmp_path, **common), weights=3)
    assert "step 3: the loss is nan" in message
    assert "--on_spike rollback" in message
    (event,) = spikes(tmp_path)
    assert (event["action"], event["layer"]) == (
        "stop", "model.layers.1.mlp.up_proj (its weights are not finite) of rank 0"
    )  # fmt: skip
    assert checkpoint(tmp_path, 2).exists()
    assert not checkpoint(tmp_path, 3).exists()


@pytest.mark.slow
def test_a_learning_rate_far_too_high_is_named_within_ten_steps(tmp_path: Path) -> None:
    larger = {"hidden_width": 64, "intermediate_size": 96, "max_context_width": 64, "train_batch_size": 8}
    harness.run(train, 1, flags(tmp_path, lr=3, warmup=8, max_steps=10, lr_decay_iters=300, **larger))
    (event,) = [record for record in records(tmp_path) if record.get("event") == "diverged"]
    assert (event["step"] <= 10, event["lr"]) == (True, 3.0)
    log = (tmp_path / "run/logs/rank-0.log").read_text()
    (line,) = [line for line in log.splitlines() if "diverges" in line]
    assert "--lr" in line


HARD = 30
"""The row in which nothing is as before: step 16, rank 0."""


def learnable(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return flags of rows of one token, which a model soon predicts, but for one row."""
    rows = [[7] * 16 for _ in range(40)]
    rows[HARD] = [(31 * place) % 251 for place in range(16)]
    (folder / "data").mkdir(exist_ok=True)
    lines = [json.dumps({"input_ids": row, "attention_mask": [1] * 16}) + "\n" for row in rows]
    (folder / "data/part-0.jsonl").write_text("".join(lines))
    return {
        "use_synthetic_data": None, "training_dir": folder / "data", "shuffle": "none", "max_steps": 19, "lr": 1e-2,
        "lr_decay_style": "constant", "checkpoint_freq": 100, "spike_window": 4, **changes,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mesh"), [(2, {}), (4, {"tensor_parallel_degree": 2})])
def test_a_hard_row_is_a_spike(tmp_path: Path, world: int, mesh: dict[str, Any]) -> None:
    skipped, warned = tmp_path / "skipped", tmp_path / "warned"
    harness.run(train, world, flags(skipped, **learnable(tmp_path, on_spike="skip", **mesh)))
    (event,) = spikes(skipped)
    assert (event["step"], event["action"], event["first"], event["last"]) == (16, "skip", 30, 31)
    assert event["samples"]["0"] == ["part-0.jsonl:31"]
    log = (skipped / "run/logs/rank-0.log").read_text()
    assert "the highest loss is rank 0's part-0.jsonl:31" in log
    harness.run(train, world, flags(warned, **learnable(tmp_path, **mesh)))
    assert spikes(warned)[0]["action"] == "warn"
    losses = [[record["loss"] for record in records(folder) if "event" not in record] for folder in (skipped, warned)]
    assert losses[0][:16] == losses[1][:16]
    assert losses[0][16] != losses[1][16]
