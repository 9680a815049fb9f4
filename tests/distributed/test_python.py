"""Training, evaluation and generation from Python: what a program gives, in one process and on several ranks."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import smp_train
from smp_train.data.source import Row, Source
from smp_train.errors import ConfigError, DataError, SmpTrainError
from tests import harness
from tests.shards import write_shard
from tests.tiers import slow
from tests.training import SAMPLE, TINY, alike, flags, numbers, read_checkpoint, records, same, train

ROWS: dict[str, Any] = {"use_synthetic_data": None, "lr_decay_style": "constant", "max_steps": 4}


class Numbers(Source):
    """Rows that their number makes, the same as those of `shards`."""

    fingerprint = "numbers"

    def __init__(self, bad: int = -1, then: Any = None) -> None:
        self.bad, self.then = bad, then

    def __len__(self) -> int:
        return 16

    def row(self, index: int) -> Row:
        if index == self.bad:
            return self.then() if callable(self.then) else Row(np.array(self.then))
        return Row(np.array(ids_of(index)))

    def name(self, index: int) -> str:
        return f"number {index}"


def ids_of(index: int) -> list[int]:
    return [(index * 31 + place * 7 + index * place) % 256 for place in range(9 + index % 8)]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the keywords of a tiny run whose output is all below ``folder``; a change to None drops one."""
    values = {**TINY, "run_dir": folder / "run", "checkpoint_dir": folder / "checkpoints", **changes}
    return {name: value for name, value in values.items() if value is not None}


def called(folder: Path, *several: dict[str, Any]) -> list[Any]:
    """Call `train` several times on this rank; return how each run ended."""
    return [smp_train.train(**settings(folder, **changes)) for changes in several]


def test_two_calls_in_one_process_are_one_run_of_the_command(tmp_path: Path) -> None:
    harness.run(train, 2, flags(tmp_path / "command", **{**ROWS, "use_synthetic_data": 1}))
    half = {**ROWS, "use_synthetic_data": True, "run_name": "halves"}
    whole = {**half, "resume_from_checkpoint": str(tmp_path / "calls" / "checkpoints")}
    ends = harness.run(called, 2, tmp_path / "calls", {**half, "max_steps": 2}, whole)
    assert [[end.step for end in of_rank] for of_rank in ends] == [[2, 4]] * 2
    assert not ends[0][1].stopped
    assert numbers(tmp_path / "calls") == numbers(tmp_path / "command")
    (here,) = (tmp_path / "calls" / "checkpoints" / "halves").glob("*-4steps")
    assert Path(ends[1][1].checkpoint) == here
    same(read_checkpoint(here), read_checkpoint(tmp_path / "command" / "checkpoints" / "run" / here.name))
    steps = [record["step"] for record in ends[0][1].history() if "event" not in record]
    assert steps == [1, 2, 3, 4]


def test_two_trainings_of_one_program_are_two_runs(tmp_path: Path) -> None:
    """What started the program is the same for both; the second is no restart of the first."""
    unnamed = {"run_name": None, "max_steps": 2}
    ends = harness.run(called, 2, tmp_path, unnamed, {**unnamed, "lr": 1e-4, "run_dir": tmp_path / "second"})
    assert [[end.step for end in of_rank] for of_rank in ends] == [[2, 2]] * 2
    names = [Path(end.checkpoint).parent.name for end in ends[0]]
    assert names == ["llama_v2-31.9k", "llama_v2-31.9k-2"]
    steps = [[record["step"] for record in end.history() if "event" not in record] for end in ends[0]]
    assert steps == [[1, 2]] * 2


def with_callbacks(folder: Path, **changes: Any) -> dict[str, list[Any]]:
    """Train, and return what each callback got on this rank."""
    got: dict[str, list[Any]] = {"on_step": [], "on_validation": [], "on_save": []}
    smp_train.train(**settings(folder, **changes), **{event: each.append for event, each in got.items()})
    return got


def test_callbacks_get_the_records_of_the_metrics(tmp_path: Path) -> None:
    got, other = harness.run(with_callbacks, 2, tmp_path, checkpoint_freq=2, validation_freq=2)
    assert other == {"on_step": [], "on_validation": [], "on_save": []}
    written = records(tmp_path)
    for event, name in (("on_step", None), ("on_validation", "evaluate"), ("on_save", "save")):
        assert json.loads(json.dumps(got[event])) == [each for each in written if each.get("event") == name]
    assert [len(each) for each in got.values()] == [3, 2, 2]


CONSTANT = {"lr_decay_style": "constant"}


class Boom(Exception):
    pass


def fails(folder: Path, event: str, at: int, kind: str, later: bool) -> tuple[str, str]:
    """Train with a callback that raises on rank 0 at a step; return the class and the message of the failure.

    ``later`` reads a step's numbers when the next step is queued, as on a GPU.
    """
    from smp_train.run import step as run_step

    def burst(record: dict[str, Any]) -> None:
        if record["step"] == at:
            raise SystemExit(3) if kind == "SystemExit" else Boom("no more")

    if later:
        run_step.ASYNCHRONOUS_DEVICES = {"cpu"}
    changes = {"max_steps": 8, "checkpoint_freq": 2, "validation_freq": 2, "checkpoint_type": "sharded", **CONSTANT}
    try:
        smp_train.train(**settings(folder, **changes), **{event: burst})
    except SmpTrainError as failure:
        return type(failure).__name__, str(failure)
    return "", ""


@pytest.mark.parametrize(
    ("event", "at", "kind", "last", "later"),
    slow(
        [("on_step", 3, "SystemExit", 3, False), ("on_step", 3, "Boom", 4, True), ("on_save", 2, "Boom", 2, False)],
        lambda case: case[-1],
    ),
)  # fmt: skip
def test_a_callback_that_raises_stops_all_by_name(
    event: str, at: int, kind: str, last: int, later: bool, tmp_path: Path
) -> None:
    ends = harness.run(fails, 2, tmp_path, event, at, kind, later)
    assert {name for name, _ in ends} == {"SmpTrainError"}
    whole = harness.same_message([text for _, text in ends])
    for part in (event, "fails.<locals>.burst", f"step {at}", kind):
        assert part in whole
    saved = sorted(path.parent.name for path in (tmp_path / "checkpoints" / "run").glob("*/COMMITTED"))
    assert saved[-1].endswith(f"-{last}steps")
    assert [record["step"] for record in records(tmp_path) if "event" not in record] == list(range(1, last + 1))


def own_rows(folder: Path, **changes: Any) -> Any:
    """Train on rows of one's own, and validate on them."""
    given = {"training_data": Numbers(), "validation_data": Numbers(), "validation_freq": 4}
    return smp_train.train(**settings(folder, **{**ROWS, **given, **changes}))


@pytest.mark.parametrize("short", slow(["pad", "pack"], {"pad"}.__contains__))
def test_own_rows_are_those_of_shards(short: str, tmp_path: Path) -> None:
    folder = write_shard(tmp_path / "data" / "rows.json", map(ids_of, range(16))).parent
    data = {"training_dir": folder, "test_dir": folder, "validation_freq": 4, "train_batch_size": 2}
    harness.run(train, 1, flags(tmp_path / "shards", **ROWS, **data, short=short))
    harness.run(own_rows, 1, tmp_path / "one", train_batch_size=2, short=short)
    harness.run(own_rows, 2, tmp_path / "two", short=short)
    assert numbers(tmp_path / "one") == numbers(tmp_path / "shards")
    alike(numbers(tmp_path / "two"), numbers(tmp_path / "one"))
    losses = [
        [record["loss"] for record in records(tmp_path / each) if record.get("event") == "evaluate"]
        for each in ("shards", "one", "two")
    ]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)


def refused(folder: Path, error: type[Exception], bad: int, then: Any) -> str:
    with pytest.raises(error) as failure:
        own_rows(folder, training_data=Numbers(bad, then), shuffle="none", validation_freq=None, validation_data=None)
    return str(failure.value)


def unreadable() -> Row:
    raise KeyError("the 5th")


@pytest.mark.parametrize(
    ("then", "named"),
    [([1, 256, 3], "256"), (unreadable, "KeyError")],
    ids=["vocabulary", "raises"],
)
def test_a_bad_own_row_stops_all_by_name(then: Any, named: str, tmp_path: Path) -> None:
    messages = harness.run(refused, 2, tmp_path, DataError, 5, then)  # of the third step, on rank 1
    whole = harness.same_message(messages)
    for part in ("training_data", "number 5", named):
        assert part in whole
    assert [path.parent.name for path in (tmp_path / "checkpoints" / "run").glob("*/COMMITTED")] == ["llama_v2-2steps"]


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    assert (type(logits), logits.dtype) == (Tensor, torch.float32)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.slow
def test_own_loss_is_the_same_on_every_mesh(tmp_path: Path) -> None:
    many = {"gradient_accumulation_steps": 2, "hybrid_shard_degree": 2, "tensor_parallel_degree": 2}
    context = {"gradient_accumulation_steps": 4, "context_parallel_degree": 2}
    for name, loss, world, changes in (
        ("default", None, 1, {"train_batch_size": 4}), ("plain", plain, 1, {"train_batch_size": 4}),
        ("one", smoothed, 1, {"train_batch_size": 4}), ("many", smoothed, 4, many), ("context", smoothed, 2, context),
    ):  # fmt: skip
        harness.run(own_rows, world, tmp_path / name, loss=loss, **changes)
    alike(numbers(tmp_path / "plain"), numbers(tmp_path / "default"))
    alike(numbers(tmp_path / "many"), numbers(tmp_path / "one"))
    alike(numbers(tmp_path / "context"), numbers(tmp_path / "one"))
    assert numbers(tmp_path / "one")[0][1] != pytest.approx(numbers(tmp_path / "plain")[0][1], rel=1e-2)
    assert json.loads((tmp_path / "one" / "run" / "run.json").read_text())["inputs"] == {
        "training_data": f"{__name__}.Numbers", "validation_data": f"{__name__}.Numbers", "loss": f"{__name__}.smoothed"
    }  # fmt: skip


def by_place(logits: Tensor, targets: Tensor) -> Tensor:
    each = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (each * torch.arange(targets.shape[1])).sum()


def test_a_loss_that_context_parallelism_would_change_is_refused(tmp_path: Path) -> None:
    harness.run(own_rows, 1, tmp_path / "one", loss=by_place, max_steps=1)
    with pytest.raises(harness.RankFailed, match=r"ConfigError.*by_place.*--context_parallel_degree 1"):
        harness.run(own_rows, 2, tmp_path / "two", loss=by_place, context_parallel_degree=2)


def on_rank_0_alone(folder: Path) -> str:
    mine = {"on_step": print} if smp_train.distributed.detect().is_main else {}
    with pytest.raises(ConfigError) as failure:
        smp_train.train(**settings(folder), **mine)
    return str(failure.value)


def test_ranks_with_other_callbacks_are_told(tmp_path: Path) -> None:
    messages = harness.run(on_rank_0_alone, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "rank 1 was given nothing and rank 0 builtins.print" in messages[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on the sample data, and its model for Hugging Face."""
    folder = tmp_path_factory.mktemp("trained")
    data = {
        "use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 1024, "max_context_width": 64,
        "max_steps": 2, "save_final_model": 1, "model_dir": folder / "model",
    }  # fmt: skip
    harness.run(train, 1, flags(folder, **data))
    return folder


def used(folder: Path) -> tuple[Any, ...]:
    place = str(folder / "checkpoints")
    evaluated = smp_train.evaluate(place, str(SAMPLE / "test"), batches=2)
    texts = smp_train.generate(place, ["To be", "Or not"], num_tokens=5)
    one = smp_train.generate(place, "To be", num_tokens=5)
    own = smp_train.evaluate(place, {"mine": Numbers()}).data["mine"]
    model, tokenizer = smp_train.load_model(place)
    ids = tokenizer("To be", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return evaluated, texts, one, own, model(ids).logits.numpy()


@pytest.mark.parametrize("world", slow([1, 2], {1}.__contains__))
def test_values_are_those_that_the_verbs_print(world: int, trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from smp_train.inference import evaluation, generation

    place, out = str(trained / "checkpoints"), io.StringIO()
    with contextlib.redirect_stdout(out):
        evaluation.main(["--checkpoint", place, "--data", str(SAMPLE / "test"), "--batches", str(2 * world), "--json"])
    printed = json.loads(out.getvalue())
    with contextlib.redirect_stdout(out := io.StringIO()):
        generation.main(["--checkpoint", place, "--prompt", "To be", "--num_tokens", "5"])
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    ids = AutoTokenizer.from_pretrained(trained / "model")("To be", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = model(ids).logits.numpy()
    for evaluated, texts, one, own, found in harness.run(used, world, trained):
        assert (evaluated.checkpoint, evaluated.step) == (printed["checkpoint"], printed["step"])
        assert evaluated.all._asdict() == pytest.approx(printed["all"], rel=1e-6)
        assert evaluated.data == {str(SAMPLE / "test"): evaluated.all}
        assert "To be" + one + "\n" == out.getvalue()
        assert texts[0] == one
        assert len(texts) == 2
        assert own.tokens == sum(len(ids_of(n)) - 1 for n in range(16))
        np.testing.assert_allclose(found, logits, rtol=1e-6, atol=1e-6)
