"""`smp-train bench gpu --rehearse`: every part's whole path, on a CPU at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ledger
from benchmarks.gpu import PARTS
from tests.harness import ROOT

NEEDS = ("is not installed", "needs a GPU")
"""Reasons for which a rehearsed cell may be skipped."""


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("part", "processes"), [*((part, 1) for part in PARTS), ("peers", 2)])
def test_every_cell_of_a_part_runs(part: str, processes: int, tmp_path: Path) -> None:
    options = ["--rehearse", "--processes", str(processes), "--out", str(tmp_path)]
    line = [sys.executable, "-m", "smp_train", "bench", "gpu", "--part", part, *options]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    cells = json.loads((tmp_path / f"{part}.json").read_text())["cells"]
    odd = [cell for cell in cells if cell["state"] != "ok" and not any(need in cell.get("why", "") for need in NEEDS)]
    assert odd == []
    assert any(cell["state"] == "ok" for cell in cells)
    if part == "right":
        report = (tmp_path / "report.md").read_text()
        assert all(f"| {line.name} | " in report for line in ledger.lines())
        assert ledger.BROKEN not in report
        assert report.count(f"| {ledger.HELD} |") > len(ledger.lines()) / 2
    text = (tmp_path / f"{part}.md").read_text()
    assert all(f"| {cell['cell']} |" in text for cell in cells)
