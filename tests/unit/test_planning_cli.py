"""`smp-train plan`: its complaint about a run that does not fit, host memory, and mistakes without a wait."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smp_train.planning.cli import main, why_not
from smp_train.planning.memory import Memory
from smp_train.planning.step_memory import Part, Use

GIB = 2**30
A, B = "--chunked_loss 1", "--cpu_offload 1"


@pytest.mark.parametrize(
    ("lower", "included", "excluded"),
    [
        ({A: 30 * GIB, B: 19 * GIB, "more devices": None}, "; give --cpu_offload 1 (19.00 GiB)", A),
        ({A: 30 * GIB, B: 26 * GIB}, "--chunked_loss 1 (30.00 GiB); --cpu_offload 1 (26.00 GiB)", "give"),
        ({"more devices": None}, "; take more or larger devices", "alone"),
    ],
)
def test_a_complaint_names_the_change_that_is_enough(
    lower: dict[str, int | None], included: str, excluded: str
) -> None:
    found: dict[str, Any] = {"devices": 8, "needed": 31 * GIB, "memory": 20 * GIB, "lower": lower}
    line = why_not(found)
    assert line.startswith("each of 8 devices needs 31.00 GiB and has 20.00 GiB; ")
    assert included in line
    assert excluded not in line
    found |= {"devices": 1, "needed": 7 * GIB, "host_needed": 9 * GIB, "host_memory": 8 * GIB}
    assert why_not(found).startswith("the device needs 9.00 GiB of its host's memory, which has 8.00 GiB")


def test_adapters_are_planned_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 512, "num_key_value_heads": 4, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--hf_model", str(tmp_path), "--devices=8", "--memory_gib=80", "--json"]
    planned = []
    for adapters in ([], ["--lora_rank=4"]):
        assert main([*words, *adapters]) == 0
        planned.append(json.loads(capsys.readouterr().out))
    assert planned[1]["fits"]
    assert 0 < planned[1]["state"][Use.OPTIMIZER] < planned[0]["state"][Use.OPTIMIZER] / 2


@pytest.mark.parametrize(
    ("cpu_offload", "gpu", "on_host", "while_saving"),
    [(False, True, 0, 24), (True, True, 16 + 10, 15), (False, False, 0, 15), (True, False, 0, 15)],
)
def test_page_locked_memory_is_counted_by_blocks(
    cpu_offload: bool, gpu: bool, on_host: int, while_saving: int
) -> None:
    state = Counter({Use.PARAMETERS: 5, Use.GRADIENTS: 5, Use.OPTIMIZER: 10})
    memory = Memory({(Part.UPDATE, 0): state}, 1, pinned=16, saved=24, gpu=gpu, state_on_host=cpu_offload and gpu)
    assert (memory.host, memory.host_while_saving) == (on_host, while_saving)


def test_help_and_mistakes_need_neither_torch_nor_numpy() -> None:
    """In a subprocess, because this process has imported both."""
    commands = [
        ["plan", "--help"], ["prepare", "--help"], ["plan", "--modl=x"], ["plan", "--model_size=8b", "--devices=1"],
        ["plan", "--model_size=7b", "--instance_type=p5.48xlarge", "--tokens=-5"],
    ]  # fmt: skip
    program = (
        "import sys; from smp_train.cli import main; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"for words in {commands}:\n"
        "  try: sys.stderr.write(f'{main(words)}\\n')\n"
        "  except SystemExit as left: sys.stderr.write(f'{left.code}\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "usage: smp-train plan" in done.stdout
    assert "usage: smp-train prepare" in done.stdout
    helped, helped_too, flag, code, size, another, tokens, last = done.stderr.splitlines()
    assert (helped, helped_too, code, another, last) == ("0", "0", "2", "2", "2")
    assert "--modl; did you mean --model" in flag
    assert "--model_size 8b" in size
    assert "--tokens: -5:" in tokens
