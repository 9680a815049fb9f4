"""Measurements on a borrowed GPU: cells that fail, die and no longer fit; sums of traces; what a report looks like."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells import Cell, Skip, Wrong, run_cells, table

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


def test_the_cells_of_right_check_every_line_of_the_ledger() -> None:
    from benchmarks import gpu, ledger
    from benchmarks.parts import Setting, right

    cells = right.cells(Setting("cuda", rehearse=True, out="", scratch=""))
    lines = ledger.lines()
    assert len({line.name for line in lines}) == len(lines) > 20
    needed = {name for line in lines for name in line.cells}
    assert needed <= {cell.name for cell in cells}
    assert {cell.name for cell in cells[: len(needed)]} == needed
    # Those that look for another GPU or a package first are skipped at once on a machine without.
    absent = ("two GPUs", "fp8, compiled", "flash attention 2", "flash attention 3")
    assert sum(cell.seconds for cell in cells if cell.name in needed.difference(absent)) <= gpu.SECONDS


def test_every_module_that_asks_for_a_gpu_is_in_the_ledger() -> None:
    from benchmarks import ledger
    from benchmarks.program import ROOT

    where = " ".join(line.where for line in ledger.lines())
    asks = re.compile(r"torch\.cuda\.|is_cuda|pin_memory|non_blocking|device\.type [!=]= \"(cuda|cpu)\"|cuda:nccl")
    package = ROOT / "smp_train"
    asking = [path for path in package.rglob("*.py") if asks.search(path.read_text())]
    names = [path.relative_to(package).as_posix() for path in asking]
    assert len(names) > 20
    # Those name a flag, or only read what a machine has.
    others = ("arguments/", "launch/doctor/")
    assert [name for name in names if name not in where and not name.startswith(others)] == []


def test_a_line_holds_if_all_its_cells_do() -> None:
    from benchmarks import ledger

    line = next(line for line in ledger.lines() if len(line.cells) > 1)
    first, *others = line.cells
    bad = {"state": "failed", "why": "ValueError: broken", "traceback": ["here", "and there"]}
    for state, verdict in (("ok", ledger.HELD), ("left out", ledger.NOT_TRIED), ("wrong", ledger.BROKEN)):
        records = [{"cell": first, "state": state, "why": ""}, *({"cell": name, "state": "ok"} for name in others)]
        assert f"| {line.name} | {verdict} |" in ledger.report({"torch": "2.8"}, records)
    report = ledger.report({"torch": "2.8"}, [{"cell": first, **bad}])
    assert all(text in report for text in ("torch: 2.8", "ValueError: broken", "and there"))


def test_without_a_gpu_only_a_rehearsal_runs(tmp_path: Path) -> None:
    from benchmarks import gpu
    from smp_train.errors import ConfigError

    with pytest.raises(ConfigError, match="--rehearse"):
        gpu.main(["--part", "ladder", "--out", str(tmp_path)])


def test_a_table_has_a_column_for_every_figure_and_leaves_lists_out() -> None:
    lines = table([{"cell": "a", "state": "ok", "x": 0.12345, "list": [1]}, {"cell": "b|c", "why": "no", "y": 12345.6}])
    assert lines.splitlines() == [
        "| cell | state | seconds | x | y | why |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a | ok |  | 0.123 |  |  |",
        "| b\\|c |  |  |  | 12,346 | no |",
    ]


def test_a_trace_is_summed_by_kind_and_stream() -> None:
    from benchmarks.parts.profile import sums

    def kernel(name: str, begin: int, duration: int, stream: int, category: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, "args": {"stream": stream}}

    found = sums(
        [
            kernel("sm90_xmma_gemm", 0, 400, 7), kernel("cudnn_sdpa_fprop", 400, 200, 7),
            kernel("ncclAllGather", 300, 300, 9), kernel("Memcpy DtoH", 900, 100, 11, "gpu_memcpy"),
            kernel("cudaStreamSynchronize", 0, 50, 0, "cuda_runtime"), kernel("aten::item", 0, 1, 0, "cpu_op"),
            {"ph": "i", "name": "a mark", "ts": 5},
        ],
        steps=2,
    )  # fmt: skip
    assert found["step ms"] == pytest.approx(0.5)
    assert found["device idle %"] == pytest.approx(30)  # from 600 to 900 of 1000
    assert (found["matrix products %"], found["attention %"], found["communication %"]) == (40, 20, 30)
    assert (found["host waits per step"], found["host waits ms"]) == (0.5, pytest.approx(0.025))
    assert found["ms by stream"] == {"7": pytest.approx(0.3), "9": pytest.approx(0.15), "11": pytest.approx(0.05)}
    assert found["attention kernel"] == "cudnn_sdpa_fprop"


def test_on_a_cpu_a_trace_counts_the_own_time_of_operators() -> None:
    from benchmarks.parts.profile import sums

    linear = [("aten::linear", 0, 10, 1), ("aten::addmm", 2, 6, 1)]
    rows = [*linear, ("aten::mul", 10, 5, 1), ("aten::copy_", 0, 15, 2)]
    found = sums([{"ph": "X", "cat": "cpu_op", "name": n, "ts": ts, "dur": d, "tid": t} for n, ts, d, t in rows], 1)
    assert {name: 1000 * value for name, value in found["ms by name"].items()} == pytest.approx(
        {"aten::copy_": 15, "aten::addmm": 6, "aten::mul": 5, "aten::linear": 4}
    )


def test_memory_at_its_peak_has_owners() -> None:
    from benchmarks.parts.memory import owners

    gib = 2**30

    def frames(*files: str) -> list[dict[str, Any]]:
        return [{"filename": file, "line": 3, "name": "f"} for file in files]

    loss = frames("/x/torch/nn/functional.py", "/x/smp_train/losses.py", "/x/smp_train/train_lib.py")
    trace = [
        {"action": "alloc", "addr": 1, "size": gib, "frames": loss},
        {"action": "alloc", "addr": 2, "size": 2 * gib, "frames": []},
        {"action": "free_completed", "addr": 1, "size": gib},
        {"action": "alloc", "addr": 1, "size": gib // 2, "frames": frames("/x/torch/optim/adamw.py")},
        {"action": "free_completed", "addr": 9, "size": gib},
    ]
    assert owners(trace) == {"backward pass": 2.0, "smp_train/losses.py:3": 1.0}
