"""Runs go from the versions of SMP v2's container (torch 2.5.1, transformers 4.44.2) to today's, and back, bit for bit.

Skipped where ``.venv-smp`` is not there; ``make test-smp-container-versions`` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.smp import NATIVE
from tests.training import read_checkpoint
from tests.versions import FAMILIES

ROOT = Path(__file__).parents[2]
TODAYS = sys.executable
CONTAINERS = ROOT / ".venv-smp" / "bin" / "python"
"""The interpreters of both environments."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".venv-smp" / ".installed").is_file(), reason="make test-smp-container-versions"),
    pytest.mark.skipif(not NATIVE, reason="it is today's versions that call the others"),
    pytest.mark.timeout(1800),
]


def hand_on(interpreter: Path | str, *steps: tuple[int, dict[str, Any], Path | None, Path]) -> None:
    """Carry out hand-overs (ranks, flags, source, target) with the versions of an interpreter."""
    given = json.dumps(steps, default=str)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(interpreter), "-m", "tests.versions", given], cwd=ROOT, env=environ, capture_output=True, text=True,
        check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def content(folder: Path, family: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / family / f"{family}-1steps")


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_goes_to_the_containers_versions_and_back(tmp_path: Path) -> None:
    first, theirs, back, own = (tmp_path / name for name in ("first", "theirs", "back", "own"))
    hand_on(TODAYS, (4, {"hybrid_shard_degree": 2}, None, first))
    hand_on(CONTAINERS, (2, {}, first, theirs), (4, {"hybrid_shard_degree": 2}, None, own))
    hand_on(TODAYS, (4, {"tensor_parallel_degree": 2}, theirs, back), (2, {}, own, tmp_path / "taken over"))
    for family in FAMILIES:
        saved = content(first, family)
        same(saved, content(theirs, family))
        same(saved, content(back, family))
        drawn = content(own, family)
        same(drawn, content(tmp_path / "taken over", family))
        # From scratch the weights are the same too.
        same(*({name: value for name, value in each.items() if name.startswith("model.")} for each in (saved, drawn)))
