"""A run's checkpoints as people and programs read them: a table of all, or the contents of one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from smp_train.checkpoints.aws.sharded import checkpoint_paths
from smp_train.checkpoints.checkpoint import Checkpoint, Damaged, opened
from smp_train.checkpoints.dcp.storage import TreeReader
from smp_train.checkpoints.dcp.trees import plain_values, saved_entries
from smp_train.checkpoints.find import best_of, parent_of
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.format import BEGUN, DAMAGED, SWEPT, parse_folder_name
from smp_train.errors import CheckpointError, first_few

Facts = dict[str, Any]


def rows_of_run(folder: RunFolder) -> Iterator[Facts]:
    """Yield a row for each checkpoint of a run, oldest first, then for SMP's sample checkpoints, then for the rest."""
    best = None
    with suppress(CheckpointError):
        best = best_of(folder)
    committed = folder.committed()
    for checkpoint in reversed(committed):
        state = "damaged" if visible_damage(folder, checkpoint.name) else "committed"
        row = _row(folder.location, checkpoint.name, state)
        if checkpoint.marker is not None:
            row |= {"step": checkpoint.step, "saved": _time(checkpoint.marker.time)}
        yield row | {"generation": checkpoint.generation, "best": checkpoint.name == best}
    samples = list(rows_of_sample(folder.location))
    yield from samples
    names = {checkpoint.name for checkpoint in committed} | {row["name"] for row in samples}
    for name in folder.names():
        if name not in names and folder.sizes(name).keys() - {BEGUN, SWEPT}:  # a swept attempt has no other file
            yield _row(folder.location, name, "incomplete")


def rows_of_sample(location: str) -> Iterator[Facts]:
    """Yield a row for each checkpoint of SMP's sample at a location."""
    for path in reversed(checkpoint_paths(location)):
        yield _row(*parent_of(path), "SMP sample") | {"run": None}


def _row(parent: str, name: str, state: str) -> Facts:
    model_type, step = parse_folder_name(name) or (None, None)
    sizes = open_folder(parent).sizes(name)
    return {
        "name": name, "path": os.path.join(parent, name), "run": os.path.basename(parent), "model_type": model_type,
        "state": state, "best": False, "step": step, "generation": None, "bytes": sum(sizes.values()),
        "files": len(sizes), "saved": None,
    }  # fmt: skip


def visible_damage(folder: RunFolder, name: str) -> str:
    """Return what shows that a checkpoint is damaged without reading its tensors; empty if nothing does."""
    if folder.is_marked_damaged(name):
        return f"it has a file {DAMAGED}"
    try:
        opened(folder, name)
    except Damaged as error:
        return str(error).partition(" is damaged: ")[2]
    return ""


def table(rows: Iterable[Facts], folder: str) -> Iterator[str]:
    """Yield the lines of a table, with a header. Names are relative to ``folder``."""
    lines = [["name", "state", "size", "step", "generation", "saved"]]
    for row in rows:
        name = row["path"].removeprefix(folder).lstrip("/") or row["name"]
        numbers = ["-" if row[key] is None else str(row[key]) for key in lines[0][3:]]
        lines.append([name, row["state"] + ", best" * row["best"], in_bytes(row["bytes"]), *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _time(seconds: float) -> str | None:
    """Return a time in UTC as ISO 8601; None if it is unknown."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)) if 0 < seconds < 1e11 else None


def in_bytes(number: float) -> str:
    """Return a size with its unit: 13.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def facts_of_tree(folder: RunFolder) -> Facts:
    """Return the facts of a DCP tree that another program wrote."""
    reader = TreeReader(folder.storage, "", folder.sizes(""))
    facts = {"path": folder.location, "format": "DCP tree of another program"} | plain_values(reader)
    return facts | _tensors([saved_entries(reader)])


def facts_of_checkpoint(checkpoint: Checkpoint) -> Facts:
    """Return the facts of a checkpoint: its metadata, and the number of its tensors."""
    marker, hidden = checkpoint.marker, ("model_config", "generation_config", "arguments", "step", "model_type", "run")
    facts = {
        "path": checkpoint.path, "model": _model(marker.model_type, checkpoint.meta), "saved": _time(marker.time),
        "run": os.path.basename(checkpoint.folder.location), "step": marker.step, "generation": marker.generation,
        "bytes": sum(record.size for record in marker.files.values()),
    }  # fmt: skip
    facts |= {key: value for key, value in checkpoint.meta.items() if key not in hidden}
    return facts | _tensors(checkpoint.entries())


def _tensors(trees: list[Any]) -> Facts:
    kinds: dict[str, list[int]] = {}
    for key, entry in (pair for tree in trees for pair in tree.items()):
        if hasattr(entry, "size"):
            kinds.setdefault(key.split(".")[0], []).append(entry.size.numel())
    parts = f" in {len(trees)} parts" if len(trees) > 1 else ""
    return {f"{kind}.*": f"{len(sizes)} tensors, {sum(sizes):,} numbers{parts}" for kind, sizes in kinds.items()}


def lines_of(facts: Facts) -> Iterator[str]:
    """Yield the facts line by line, for people."""
    for key, value in facts.items():
        yield f"{key + ':':<12} {_SHOWN_AS.get(key, _in_words)(value)}"


def _model(model_type: str, meta: dict[str, Any]) -> str:
    """Return the model in a few words: its type and size, its origin, transformers' type."""
    config, arguments = (meta[key] if isinstance(meta.get(key), dict) else {} for key in ("model_config", "arguments"))
    size = arguments.get("model_size")
    pretrained = arguments.get("hf_pretrained_model_name_or_dir") or arguments.get("pretrained_model_name")
    name = f"{model_type}{f'-{size}' if size else ''}{f' of {pretrained}' if pretrained else ''}"
    return f"{name} ({config.get('model_type', 'unknown')} of transformers)"


def _in_words(value: Any) -> str:
    """Return a value of meta.json for people; of a long list only its length."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {f'({_in_words(item)})' if isinstance(item, dict) else _in_words(item)}"
                         for key, item in value.items())  # fmt: skip
    if isinstance(value, list):
        return f"{len(value)} entries" if len(value) > 8 else " ".join(map(_in_words, value)) or "none"
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def _best(best: Any) -> str:
    if not isinstance(best, dict) or best.get("step") is None:
        return "no validation yet"
    return f"step {best['step']} with validation loss {best.get('loss')}, {best.get('since')} validations since"


def _spikes(spikes: Any) -> str:
    spans = spikes.get("skipped") if isinstance(spikes, dict) else None
    stretches = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans or ()]
    return f"updates skipped: {f'steps {first_few(stretches)}' if stretches else 'none'}"


_SHOWN_AS: dict[str, Callable[[Any], str]] = {"best": _best, "spikes": _spikes}
