"""Which run a checkpoint is of, and which run a start goes on from. No collectives."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from smp_train.arguments.run_name import is_run_name
from smp_train.checkpoints.commit import ATTEMPT, UNKNOWN, CheckpointFolder, absent, open_folder, parent_of
from smp_train.checkpoints.manifest import COMMITTED, META, Committed, RunId, name_before, parse_folder_name
from smp_train.errors import CheckpointError
from smp_train.storage import normal


class Entry(NamedTuple):
    """A committed checkpoint of a folder; in order of steps, and of the time of the commit where steps are equal."""

    step: int
    time: float
    name: str
    model_type: str
    run: RunId


def committed_names(storage: CheckpointFolder) -> list[str]:
    """Return the names of the committed checkpoints, newest step first."""
    parsed = ((parse_folder_name(name), name) for name in storage.names())
    found = [(of[1], name) for of, name in parsed if of is not None and storage.has(name, COMMITTED)]
    return [name for _, name in sorted(found, reverse=True)]


def committed(storage: CheckpointFolder, run: RunId | None = None) -> list[Entry]:
    """Return the committed checkpoints (of ``run``, where given), newest step first."""
    return [entry for entry in _entries(storage, committed_names(storage)) if run in (None, entry.run)]


def damaged(storage: CheckpointFolder) -> list[Entry]:
    """Return the checkpoints that were set aside as damaged, newest step first."""
    return _entries(storage, storage.aside())


def _entries(storage: CheckpointFolder, names: Iterable[str]) -> list[Entry]:
    """Return what is known of checkpoints, set aside or not."""
    found = []
    for name in names:
        parsed = parse_folder_name(name_before(name))
        if parsed is None:
            continue
        try:
            owner, time = run_of(storage, name)
        except (OSError, CheckpointError):
            if storage.has(name, COMMITTED):
                raise
            continue  # its own run has deleted it since
        found.append(Entry(parsed[1], time, name, parsed[0], owner))
    return sorted(found, reverse=True)


def run_of(storage: CheckpointFolder, name: str) -> tuple[RunId, float]:
    """Return the run of a checkpoint, set aside or not, and when it was committed, as far as its files say.

    Versions before wrote the run's name into meta.json alone.
    """
    root, time = "", 0.0
    files = [COMMITTED] if storage.has(name, COMMITTED) else []
    files = files or [file for file in storage.sizes(name) if file.startswith(COMMITTED)]
    for file in files[-1:]:
        try:
            found = Committed.from_bytes(storage.read(name, file))
        except ValueError:
            break
        if found.run.id:
            return found.run, found.time
        root, time = found.root, found.time
    for file in sorted(storage.sizes(posixpath.join(name, root))):
        if posixpath.basename(file) == META:
            return _run_in_meta(storage.read(posixpath.join(name, root), file)), time
    return UNKNOWN, time


def _run_in_meta(data: bytes) -> RunId:
    meta: Any = {}
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        meta = json.loads(data)
        return RunId.parse(meta["run"])
    with suppress(KeyError, TypeError):
        name = str(meta["arguments"]["run_name"])
        return RunId(name if is_run_name(name) else "")
    return UNKNOWN


@dataclass(frozen=True)
class Origin:
    """What a start goes on from: the checkpoints of ``run`` at ``place``, a folder or one checkpoint."""

    place: str
    run: RunId


def origin(
    places: Sequence[str],
    *,
    name: str,
    own: Sequence[str],
    near: Sequence[CheckpointFolder],
    model_type: Callable[[], str],
) -> Origin | None:
    """Return which run's checkpoints, at which of ``places``, a start continues from; None where there are none.

    ``name`` is the run's, or empty; ``own`` are the folders that it saves to, and ``near`` those on this rank's disk,
    which are looked at with them. A named run continues from checkpoints of its name: those in its own folders too
    where ``places`` are others, because it has already used what it began from. Where it has none, and ``places`` are
    its own, it continues from those of no known run; else from the run that committed last (of ``model_type``, where
    there are several model types). Damaged checkpoints count for their run: to start afresh would hide the loss.
    """
    first = normal(places[0])
    folder, last = parent_of(first)
    if absent(first) is None and last and open_folder(folder).has(last, COMMITTED):
        return Origin(first, run_of(open_folder(folder), last)[0])
    mine = set(map(normal, own))
    there = list(map(normal, places))

    def listed(
        of: Callable[[CheckpointFolder], list[Entry]], near: Sequence[CheckpointFolder]
    ) -> list[tuple[str, Entry]]:
        found: list[tuple[str, Entry]] = []
        for place in dict.fromkeys([*there, *([] if first in mine or not name else mine)]):
            storages = [open_folder(place)] if absent(place) is None else []
            for storage in [*storages, *(near if place in mine else [])]:
                found += [(place, entry) for entry in of(storage)]
        named = [(place, entry) for place, entry in found if name and entry.run.name == name]
        if named:
            return named
        found = [(place, entry) for place, entry in found if place in there]
        return [(place, entry) for place, entry in found if not (name and place in mine and entry.run.name)]

    chosen = listed(committed, near) or listed(damaged, ())
    if len({entry.model_type for _, entry in chosen if not name or entry.run.name != name}) > 1:
        wanted = model_type()
        chosen = [(place, entry) for place, entry in chosen if entry.model_type == wanted] or chosen
    if not chosen:
        return None
    run = last_run([entry for _, entry in chosen])
    return Origin(max((entry, place) for place, entry in chosen if entry.run == run)[1], run)


def last_run(entries: Sequence[Entry]) -> RunId:
    """Return the run that committed last."""
    return max(entries, key=lambda entry: (entry.time, entry.step)).run


def runs_in(location: str) -> list[str]:
    """Return the names, quoted, of the runs with committed checkpoints in a folder."""
    return sorted({entry.run.quoted for entry in committed(open_folder(location))})


def summary(location: str, run: RunId) -> str:
    """Return in a few words whose checkpoints of which steps a folder holds; ``run`` is the one that asks."""
    storage = open_folder(location, run)
    steps: dict[RunId, list[int]] = {}
    for entry in reversed(committed(storage)):
        steps.setdefault(entry.run, []).append(entry.step)
    found = [f"{owner.quoted} {_shortened(of)}{' (this run)' * (owner == run)}" for owner, of in steps.items()]
    others = {name: storage.storage.level(name) for name in storage.names() if parse_folder_name(name)}
    uncommitted = [name for name, (files, _) in others.items() if not any(file.startswith(COMMITTED) for file in files)]
    for name in uncommitted[:3]:
        unfinished = any(map(ATTEMPT.fullmatch, others[name][1]))
        found.append(f"{name} ({'unfinished' if unfinished else 'not committed by this program'})")
    return "; ".join(found) or "nothing yet"


def _shortened(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return f"step{'s' * (len(shown) > 1)} {', '.join(shown if len(shown) < 6 else [*shown[:2], '...', *shown[-2:]])}"
