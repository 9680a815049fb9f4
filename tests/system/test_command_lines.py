"""The command lines of the five systems, run: scaled down by what is appended, or refused by the flag's name."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.command_lines import LINES
from tests.system.command import warm
from tests.tiers import core
from tests.training import SAMPLE

pytestmark = [pytest.mark.system, pytest.mark.slow]

SMALL = (
    "--vocab_size 1024 --hidden_width 32 --num_layers 2 --num_heads 4 --num_key_value_heads 2 --intermediate_size 48 "
    f"--max_context_width 32 --bf16 0 --max_steps 2 --logging_freq 1 --training_dir {SAMPLE}/train "
    f"--test_dir {SAMPLE}/test --checkpoint_dir ck --resume_from_checkpoint ck"
)


@pytest.fixture(autouse=True)
def model_folder(tmp_path: Path) -> None:
    """A folder with a configuration, where the documented lines name a model of the hub."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))


def small(name: str) -> str:
    """Return what scales a documented line down."""
    if name.startswith("002"):  # GPT-2's heads have keys of their own
        return SMALL.replace("--num_key_value_heads 2", "--num_key_value_heads 4")
    return f"{SMALL} --shard_degree 1" if name.startswith("003") else SMALL


CORE = {"000, Mixtral", "001", "002", "003, resumed", "004, its other flags"}
"""One of each system."""


@pytest.mark.parametrize("name", core(LINES, CORE.__contains__))
def test_trains(name: str, tmp_path: Path) -> None:
    line = LINES[name]
    words = shlex.split(f"{line.text} {small(name)} {line.off} --run_dir run")
    with warm(tmp_path, "train", *words) as command:
        assert command.code() == 0, command.err
        assert command.err == ""
        assert "Batch 2 Loss: " in command.out
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 2
    assert list(tmp_path.glob("ck/*/*-2steps/COMMITTED"))


@pytest.mark.parametrize("name", core([name for name, line in LINES.items() if line.refused], CORE.__contains__))
def test_is_refused(name: str, tmp_path: Path) -> None:
    line = LINES[name]
    with warm(tmp_path, "train", *shlex.split(f"{line.text} {small(name)} --run_dir run")) as command:
        assert command.code() == 2
        (said,) = command.err.splitlines()
        assert line.refused in said
    assert not list(tmp_path.glob("ck/*"))
