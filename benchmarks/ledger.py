"""The table of `LEDGER.md` of what runs on CUDA alone, and what a run of `right` says of each of its lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.cells import FAILED, OK, WRONG

LEDGER = Path(__file__).with_name("LEDGER.md")
TITLE = "| line | where |"
HELD, BROKEN, NOT_TRIED, NO_CHECK = "held", "did not hold", "not tried", "no check yet"


@dataclass(frozen=True)
class Line:
    """A part of the package, and the cells of `right` that must hold for it."""

    name: str
    where: str
    cells: tuple[str, ...]


def lines() -> list[Line]:
    """Return the table's lines."""
    table = LEDGER.read_text().split(TITLE)[1].split("\n\n")[0].splitlines()[2:]
    found = []
    for row in table:
        name, where, *_, cells = (cell.strip() for cell in row.strip("|").split(" | "))
        found.append(Line(name, where, () if cells == "-" else tuple(cells.split("; "))))
    return found


def version(package: str) -> str | None:
    """Return a package's version, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def first_needed(cells: Sequence[Any]) -> list[Any]:
    """Return the cells with those first that a line of the table needs."""
    needed = {name for line in lines() for name in line.cells}
    return sorted(cells, key=lambda cell: cell.name not in needed)


def verdicts(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Line, str, list[Mapping[str, Any]]]]:
    """Yield each line with its verdict and the records of the cells that are not ok."""
    by_cell = {record["cell"]: record for record in records}
    for line in lines():
        of_line = [by_cell.get(name, {"cell": name, "state": "not run"}) for name in line.cells]
        others = [record for record in of_line if record["state"] != OK]
        broken = any(record["state"] in (WRONG, FAILED) for record in others)
        yield line, NO_CHECK if not of_line else BROKEN if broken else NOT_TRIED if others else HELD, others


def report(facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return what to attach to a bug report: versions, the verdict of every line, and how the cells failed."""
    text = ["# smp-train bench gpu --part right", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    text += ["| line | verdict | where | why |", "|---|---|---|---|"]
    for line, verdict, others in verdicts(records):
        why = "; ".join(f"{each['cell']}: {each['state']}" for each in others)
        text.append(f"| {line.name} | {verdict} | {line.where} | {why} |")
    for record in records:
        if record["state"] in (WRONG, FAILED):
            text += ["", f"## {record['cell']}: {record['state']}", "", record["why"]]
            if "traceback" in record:
                text += ["", "```", *record["traceback"], "```"]
    return "\n".join(text) + "\n"
