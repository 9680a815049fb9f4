"""`smp-train bench step` measures on any number of processes and leaves nothing behind."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests import harness

SMALL = ("--hidden_width", "32", "--num_layers", "2", "--num_heads", "4", "--intermediate_size", "48")


def measure(scratch: str) -> str:
    import io
    from contextlib import redirect_stdout

    from benchmarks import step

    tempfile.tempdir = scratch
    with redirect_stdout(io.StringIO()) as out:
        assert step.main(["--rounds", "2", *SMALL, "--max_context_width", "16"]) == 0
    return out.getvalue()


@pytest.mark.parametrize("world", [1, 2])
def test_prints_the_ratio(world: int, tmp_path: Path) -> None:
    printed = harness.run(measure, world, str(tmp_path))[0]
    assert re.search(rf"bench step: {world} ranks, .* ratio of the same round: median \d+\.\d+ ", printed)
    assert list(tmp_path.iterdir()) == []
