"""The keywords of the Python functions: those of the command, under the same rules; and what a loss must be."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import smp_train
from smp_train import arguments, losses
from smp_train.arguments.groups import flags
from smp_train.arguments.parse import from_keywords
from smp_train.arguments.program_inputs import ProgramInputs
from smp_train.errors import ConfigError
from tests.shards import Documents


def test_import_is_light_and_names_what_there_is() -> None:
    code = "import sys, smp_train; print(*dir(smp_train)); print('torch' in sys.modules); smp_train.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == [*smp_train.__all__, "False"]
    assert "AttributeError" in done.stderr


def test_every_flag_is_a_keyword() -> None:
    keywords = inspect.signature(smp_train.train).parameters
    assert set(flags()) <= set(keywords)
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in keywords.values())
    assert {"training_data", "validation_data", "loss", "on_step", "on_validation", "on_save"} <= set(keywords)


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 3e-4, "bf16": False, "checkpoint_freq": [5], "max_steps": 7},
        {"training_dir": "a b", "checkpoint_dir": "c", "checkpoint_freq": 5, "learning_rate": 1e-3},
        {"training_dir": ["a:0.5", "b:0.5"], "validation_freq": None, "hybrid_shard_degree": 0},
        {"checkpoint_dir": [Path("x")], "test_dir": Path("y"), "warmup": "10%"},
    ],
)
def test_keywords_mean_what_flags_mean(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    words: list[str] = []
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(str(int(each) if isinstance(each, bool) else each) for each in values)]
    monkeypatch.setenv("SM_HP_SEED", "9")  # a command's only
    assert from_keywords(given).args == arguments.parse(words, {}).args
    assert from_keywords(given).given(next(iter(given))) or "learning_rate" in given


@pytest.mark.parametrize(
    "given",
    [
        {"max_stepz": 3}, {"lr": "fast"}, {"lr": -1.0}, {"lr_decay_style": "round"}, {"bf16": "perhaps"},
        {"model_size": "7b", "hf_pretrained_model_name_or_dir": "x"}, {"hybrid_shard_degree": 2}, {},
        {"training_dir": "/x", "validation_freq": 5}, {"keep_best": True, "use_synthetic_data": True},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_command_refuses_is_refused_in_its_words(given: dict[str, Any]) -> None:
    words = [f"--{name}={value}" for name, value in given.items()]
    with pytest.raises(ConfigError) as theirs:
        arguments.validate(arguments.parse(words, {}).args, 1)
    with pytest.raises(ConfigError) as ours:
        smp_train.train(**given)
    assert str(ours.value) == str(theirs.value)


ROWS = Documents([3] * 4)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"training_data": ROWS, "training_dir": "x"}, "--training_dir and training_data"),
        ({"training_data": ROWS, "use_synthetic_data": True}, "--use_synthetic_data"),
        ({"use_synthetic_data": True, "validation_data": ROWS, "test_dir": "x"}, "--test_dir and validation_data"),
        ({"training_data": ROWS, "on_step": "print"}, "on_step"),
        ({"training_data": ROWS, "print_config": True}, "--print_config"),
        ({"training_data": ROWS, "evaluate_only": True}, "--test_dir"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        smp_train.train(**given)


def test_a_channel_gives_way_to_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_CHANNEL_TRAIN", "/channel")
    assert from_keywords({}).args.training_dir == ["/channel"]
    resolved = from_keywords({}, ProgramInputs(training_data=ROWS))
    assert resolved.args.training_dir is None
    arguments.validate(resolved.args, 1, inputs=resolved.inputs)


def reduced(reduction: str) -> Any:
    return lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (reduced("mean"), "sum"),
        (reduced("none"), "sum"),
        (lambda logits, targets: logits.square().sum(), "-100"),
        (lambda logits, targets: 3.0, "scalar tensor"),
        (lambda logits, targets: logits.detach().sum(), "scalar tensor"),
        (lambda logits: logits.sum(), "TypeError"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_by_name(loss: Any, named: str) -> None:
    losses.check_sum(reduced("sum"), 50, torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"loss: .*{named}"):
        losses.check_sum(loss, 50, torch.device("cpu"))
