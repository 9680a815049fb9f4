"""Measurements on a borrowed GPU: cells that fail, die and no longer fit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells import Cell, Skip, Wrong, run_cells

FLAGS: dict[str, Any] = {}


def fine(value: float) -> dict[str, Any]:
    FLAGS["seen"] = FLAGS.get("seen", 0) + 1
    return {"value": value, "cells of this process": FLAGS["seen"]}


def bad(kind: str) -> dict[str, Any]:
    if kind == "skip":
        raise Skip("no such package")
    if kind == "wrong":
        raise Wrong("another number", value=2.0)
    if kind == "die":
        os._exit(7)
    if kind == "hang":
        time.sleep(600)
    raise ValueError("broken")


def test_a_cell_that_fails_or_dies_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    cells = [
        Cell("one", fine, {"value": 1.5}), Cell("skip", bad, {"kind": "skip"}), Cell("wrong", bad, {"kind": "wrong"}),
        Cell("two", fine, {"value": 2}), Cell("die", bad, {"kind": "die"}), Cell("three", fine, {"value": 3}),
        Cell("broken", bad, {"kind": "broken"}), Cell("long", fine, {"value": 4}, seconds=1e6),
        Cell("four", fine, {"value": 5}),
    ]  # fmt: skip
    seen: list[dict[str, Any]] = []
    records = run_cells("part", cells, seconds=1000, log=tmp_path / "log", see=seen.append)
    assert records == seen
    states = {record["cell"]: record["state"] for record in records}
    assert states == {
        "one": "ok", "skip": "skipped", "wrong": "wrong", "two": "ok", "die": "failed", "three": "ok",
        "broken": "failed", "long": "left out", "four": "ok",
    }  # fmt: skip
    found = {record["cell"]: record for record in records}
    # One process serves until it dies or a cell fails in it.
    assert [found[name]["cells of this process"] for name in ("one", "two", "three", "four")] == [1, 2, 1, 1]
    assert "7" in found["die"]["why"]
    assert "ValueError: broken" in found["broken"]["why"]
    assert (found["wrong"]["value"], found["skip"]["why"]) == (2.0, "no such package")
    assert "ValueError: broken" in (tmp_path / "log").read_text()


def test_a_cell_that_hangs_ends_with_the_time_of_its_part(tmp_path: Path) -> None:
    cells = [Cell("hang", bad, {"kind": "hang"}, seconds=0), Cell("after", fine, {"value": 1}, seconds=1)]
    records = run_cells("part", cells, seconds=0.5, log=tmp_path / "log", see=lambda record: None)
    assert [record["state"] for record in records] == ["failed", "left out"]


@pytest.mark.parametrize(("part", "code"), [("right", 1), ("memory", 0)])
def test_a_wrong_number_fails_the_command_and_is_reported(
    part: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import gpu

    module = __import__(f"benchmarks.parts.{part}", fromlist=["cells"])
    monkeypatch.setattr(module, "cells", lambda setting: [Cell("wrong", bad, {"kind": "wrong"})])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda cuda: {"date": "2026-01-01", "device": "a GPU"})
    assert gpu.main(["--part", part, "--out", str(tmp_path)]) == code
    assert json.loads((tmp_path / f"{part}.json").read_text())["cells"][0]["value"] == 2.0
    assert "| wrong | wrong |" in (tmp_path / f"{part}.md").read_text()
