"""`smp-train bench step` measures on any number of processes and leaves nothing behind; `bench finetune` on one."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests import harness

SMALL = ("--hidden_width", "32", "--num_layers", "2", "--num_heads", "4", "--intermediate_size", "48")


def measure(scratch: str, name: str, *words: str) -> str:
    import importlib
    import io
    from contextlib import redirect_stdout

    tempfile.tempdir = scratch
    with redirect_stdout(io.StringIO()) as out:
        assert importlib.import_module(f"benchmarks.{name}").main(words) == 0
    return out.getvalue()


@pytest.mark.parametrize(("world", "head"), [(1, "chunked"), (2, "plain")])
def test_prints_the_ratio(world: int, head: str, tmp_path: Path) -> None:
    words = ["--rounds", "2", "--head", head, *SMALL, "--max_context_width", "16"]
    printed = harness.run(measure, world, str(tmp_path), "step", *words)[0]
    assert re.search(rf"bench step: {world} ranks, .* ratio of the same round: median \d+\.\d+ ", printed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_adapters_take_less_memory(tmp_path: Path) -> None:
    words = ["--width", "64", "--layers", "1", "--rank", "2"]
    printed = harness.run(measure, 1, str(tmp_path), "finetune", *words)[0]
    assert "full  state" in printed
    assert "(16.00)" in printed  # weights, gradients and two moments, of 4 bytes
    state, peak = map(float, re.findall(r"(?:state|peak) (0\.\d+)", printed.splitlines()[-1]))
    assert state < 0.3
    assert state < peak < 0.9
