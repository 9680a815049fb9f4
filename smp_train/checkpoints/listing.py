"""Describe a run's checkpoints for people and programs: all of them in a table, or one in detail."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from smp_train.checkpoints.aws.sharded import checkpoint_paths
from smp_train.checkpoints.checkpoint import Checkpoint, Damaged, opened, verified
from smp_train.checkpoints.dcp.storage import TreeReader
from smp_train.checkpoints.dcp.trees import plain_values, saved_entries
from smp_train.checkpoints.find import best_of
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.format import BEGUN, DAMAGED, SWEPT, parse_folder_name
from smp_train.errors import CheckpointError
from smp_train.progress import MOVED, Progress
from smp_train.storage import parent_of


def damage_of(folder: RunFolder, name: str, *, read_all: bool = False) -> str:
    """Return what contradicts a checkpoint's COMMITTED, or "". ``read_all`` checks all files, not only sizes."""
    try:
        if read_all:
            with Progress(f"verify {name}", unit="B", moved=MOVED):
                verified(folder, name).entries()
        else:
            opened(folder, name)
    except Damaged as error:
        return str(error).rpartition(" is damaged: ")[2]
    return f"it has a file {DAMAGED}" if folder.is_marked_damaged(name) else ""


def rows_of_run(folder: RunFolder) -> list[dict[str, Any]]:
    """Return a row per checkpoint: the run's, oldest first; then those of SMP's sample; then unfinished attempts."""
    best, rows = None, []
    with suppress(CheckpointError):
        best = best_of(folder)
    for generation, step, name, marker in reversed(folder.committed()):
        row = _row(folder, name, "damaged" if damage_of(folder, name) else "committed")
        saved = marker and _time(marker.time)
        rows.append(row | {"step": step, "generation": generation, "saved": saved, "best": name == best})
    rows += rows_of_sample(folder.location)
    names = [row["name"] for row in rows]
    swept = {BEGUN, SWEPT}
    attempts = [name for name in folder.names() if name not in names and folder.sizes(name).keys() - swept]
    return rows + [_row(folder, name, "incomplete") for name in attempts]


def rows_of_sample(location: str) -> list[dict[str, Any]]:
    """Return a row for each checkpoint of SMP's sample at a location."""
    paths = map(parent_of, reversed(checkpoint_paths(location)))
    return [_row(open_folder(parent), name, "SMP sample") for parent, name in paths]


def _row(folder: RunFolder, name: str, state: str) -> dict[str, Any]:
    sizes = folder.sizes(name)
    return {
        "name": name, "path": os.path.join(folder.location, name), "run": os.path.basename(folder.location),
        "state": state, "best": False, "step": (parse_folder_name(name) or (name, None))[1], "generation": None,
        "bytes": sum(sizes.values()), "files": len(sizes), "saved": None,
    }  # fmt: skip


def table(rows: Iterable[dict[str, Any]], folder: str) -> Iterator[str]:
    """Yield the lines of a table, with a header. Names are relative to ``folder``."""
    lines = [["name", "state", "size", "step"]]
    for row in rows:
        name = row["path"].removeprefix(folder).lstrip("/") or row["name"]
        step = "-" if row["step"] is None else str(row["step"])
        lines.append([name, row["state"] + ", best" * row["best"], f"{row['bytes'] / 1e6:,.1f} MB", step])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _time(seconds: float) -> str | None:
    """Return a time in UTC as ISO 8601; None if it is unknown."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if 0 < seconds < 1e11 else None


def facts_of_tree(folder: RunFolder) -> dict[str, Any]:
    """Return the facts of a DCP tree that another program wrote."""
    reader = TreeReader(folder.storage, "", folder.sizes(""))
    facts = {"path": folder.location, "format": "DCP tree of another program"} | plain_values(reader)
    return facts | _tensors([saved_entries(reader)])


def facts_of_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the facts of a checkpoint: its metadata, and the number of its tensors."""
    marker, meta = checkpoint.marker, checkpoint.meta
    arguments = meta.get("arguments") or {}
    model = ("model_size", "hf_pretrained_model_name_or_dir", "pretrained_model_name")
    hidden = ("model_config", "generation_config", "arguments", "step", "model_type", "run")
    facts = {
        "path": checkpoint.path, "run": os.path.basename(checkpoint.folder.location), "step": marker.step,
        "model": " ".join([marker.model_type, *(str(arguments[name]) for name in model if arguments.get(name))]),
        "saved": _time(marker.time), "generation": marker.generation,
        "bytes": sum(record.size for record in marker.files.values()),
    }  # fmt: skip
    return facts | {key: value for key, value in meta.items() if key not in hidden} | _tensors(checkpoint.entries())


def _tensors(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kinds: dict[str, list[int]] = {}
    for key, entry in (pair for tree in trees for pair in tree.items()):
        if hasattr(entry, "size"):
            kinds.setdefault(key.split(".")[0], []).append(entry.size.numel())
    parts = f" in {len(trees)} parts" if len(trees) > 1 else ""
    return {f"{kind}.*": f"{len(sizes)} tensors, {sum(sizes):,} numbers{parts}" for kind, sizes in kinds.items()}


def in_words(value: Any, nested: bool = False) -> str:
    """Return a value of meta.json as text for people; a long list becomes its length."""
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} entries"
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else (("", item) for item in value)
        text = ", ".join(f"{key} {in_words(item, nested=True)}".lstrip() for key, item in items) or "none"
        return f"({text})" if nested else text
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)
