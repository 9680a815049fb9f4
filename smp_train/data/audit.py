"""Proof by a run's ``data_audit`` files that it used each sample once per epoch and left no step out."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smp_train.data.blend import BLOCK, apportion, read_weights, sources_of
from smp_train.errors import ConfigError, DataError

SHOWN = 100
SHOWN_NAMES = 10
SPAN = re.compile(r"(.+?)\[(\d+):(\d+)\](?:\+|$)")


def audit(run: Path, rows: int | None = None) -> int:
    """Check that a run used each sample once per epoch and left no step out; print it, and return the exit code.

    Of a run with --epochs that came to its end, each sample must have been used so many times. ``rows`` is the number
    of samples in the data set, by default that of run.json.
    """
    facts = _facts(run)
    config: dict[str, Any] = facts.get("config") or {}
    sizes: dict[str, int] = facts.get("samples") or {}
    records, skipped = _records(run)
    if not records:
        print(f"{run}: no step was recorded yet")
        return 0
    first, last = min(records), max(records)
    problems = [f"step {step} is missing" for step in range(first, last) if step not in records]
    steps: dict[int, list[str]] = {}
    for step, ranks in records.items():
        # Ranks that share a model read the same rows: those of the first count.
        of_peers = {one.dp_rank: one.samples for one in reversed(ranks)}
        steps[step] = [sample for dp_rank in sorted(of_peers) for sample in of_peers[dp_rank]]
        # Of a run that was killed, a rank's last step may be missing.
        if _absent(ranks) and step < last:
            problems.append(f"step {step}: the records of some ranks are missing")
        if strays := ", ".join(f"rank {one.rank}" for one in ranks if one.samples != of_peers[one.dp_rank]):
            problems.append(f"step {step}: {strays} read other samples than the ranks they share a model with")
    places, weights = read_weights(config.get("training_dir") or [""])
    by_place: dict[str, list[tuple[int, str]]] = {}
    for step, samples in steps.items():
        for name in samples:
            if config.get("long") == "crop":  # the windows of a row are of one sample
                name = name.rpartition("[")[0] or name
            place = max((p for p in places if name.startswith(p + "/")), key=len, default="") if weights else ""
            by_place.setdefault(place, []).append((step, name))
    used = "each once per epoch"
    if config.get("dataset"):
        problems += torn(steps)
        used = "no token of a document twice or left out"
    else:
        for place, seen in by_place.items():
            problems += _repeats(place, seen, (rows if not place else None) or sizes.get(place))
        if weights:
            # A last step that only some ranks recorded is no beginning of the order.
            whole = last - _absent(records[last])
            drawn = {place: sum(step <= whole for step, _ in by_place.get(place, ())) for place in places}
            problems += _shares(drawn, weights, config.get("seed") if first == 1 else None)
            print(f"{run}: drawn from " + ", ".join(f"{place}: {number}" for place, number in drawn.items()))
        elif (size := rows or sizes.get("")) and first == 1 and "" in by_place:
            left_over, used = _left_over(Counter(name for _, name in by_place[""]), size, config.get("epochs"))
            if _used_all_epochs(facts, config, last):
                problems += left_over
            else:  # no fault where a flag has ended the run before, or where it is not at its end
                print("".join(f"{line}\n" for line in left_over), end="")
    for problem in problems[:SHOWN]:
        print(problem)
    if skipped:
        shown = f"{', '.join(map(str, skipped[:SHOWN]))}{', ...' if len(skipped) > SHOWN else ''}"
        print(f"{run}: {len(skipped)} steps are not in the weights (--on_spike): {shown}")
    verdict = f"{len(problems)} problems" if problems else f"{used}, no step left out"
    names = [name for seen in by_place.values() for _, name in seen]
    print(f"{run}: steps {first} to {last}, {len(names)} samples, {len(set(names))} different: {verdict}")
    return DataError.exit_code if problems else 0


def _facts(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "run.json").read_text()))
    except (OSError, ValueError):
        return {}


class _Record(NamedTuple):
    """What one rank consumed in one step."""

    rank: int
    attempt: int
    dp_rank: int
    dp_size: int | None
    samples: list[str]


def _records(run: Path) -> tuple[dict[int, list[_Record]], list[int]]:
    """Return, by step in order, what each rank consumed in it, by rank, of the newest attempt that took the step.

    And the steps whose updates --on_spike left out of the weights.
    """
    files = sorted(run.glob("data_audit-rank*.jsonl"))
    if not files:
        raise ConfigError(f"{run}: no data_audit-rank*.jsonl in it; train with --data_audit 1")
    begins: dict[int, int] = {}
    found: list[tuple[int, _Record]] = []
    skips: set[tuple[int, int]] = set()
    for path in files:
        rank = int(path.stem.rpartition("rank")[2])
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                if "skipped" in record:
                    first, last = record["skipped"]
                    skips.update((step, int(record["attempt"])) for step in range(first, last + 1))
                    continue
                step, samples = int(record["step"]), list(record["samples"])
                attempt, dp_rank = int(record.get("attempt", 0)), int(record.get("dp_rank", rank))
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a run that was killed
            begins[attempt] = min(step, begins.get(attempt, step))
            found.append((step, _Record(rank, attempt, dp_rank, record.get("dp_size"), samples)))

    def superseded(step: int, by: int) -> bool:
        # An attempt supersedes all earlier ones from its first step on.
        return any(attempt > by and step >= first for attempt, first in begins.items())

    steps: dict[int, dict[int, _Record]] = {}
    for step, one in found:
        if not superseded(step, one.attempt):
            steps.setdefault(step, {})[one.rank] = one
    skipped = sorted({step for step, attempt in skips if step in steps and not superseded(step, attempt)})
    return {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in sorted(steps.items())}, skipped


def _absent(ranks: list[_Record]) -> bool:
    """Return whether nothing is known of what some data-parallel rank read."""
    return ranks[0].dp_size is not None and len({one.dp_rank for one in ranks}) < ranks[0].dp_size


def _used_all_epochs(facts: dict[str, Any], config: dict[str, Any], last_step: int) -> bool:
    """Return whether a run was at the end of its --epochs, and no other flag has ended it."""
    total, epochs = facts.get("total_steps"), config.get("epochs")
    given = (facts.get("sources") or {}).get("max_steps", "default") != "default"
    ended_by = [config["max_steps"]] if given else []
    if epochs and config.get("steps_per_epoch"):
        ended_by.append(epochs * config["steps_per_epoch"])
    return bool(epochs and total and last_step >= total and total not in ended_by)


def _left_over(times: Counter[str], size: int, epochs: int | None) -> tuple[list[str], str]:
    """Return which samples were not used as often as others, and how often all were, in words.

    Args:
        times: how often each sample was used.
        size: samples of an epoch.
        epochs: how many there were to be; None for whatever there are.
    """
    begun = -(-times.total() // size)
    short = begun * size - times.total()
    found = []
    if short:
        # Of samples that were never used, the names are not known.
        names = sorted(name for name, number in times.items() if number < begun) if len(times) == size else []
        which = f": {', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''}" if names else ""
        found.append(f"epoch {begun} is not whole: {short} of {size} samples were not used in it{which}")
    if epochs and epochs > begun:
        found.append(f"{epochs - begun} of {epochs} epochs were not begun")
    return found, "each once per epoch" if short else f"each {begun} times" if begun > 1 else "each once"


def _repeats(place: str, seen: list[tuple[int, str]], rows: int | None) -> list[str]:
    """Return what contradicts one use per epoch, where an epoch is ``rows`` samples (default: the different ones)."""
    size = rows or len({name for _, name in seen})
    steps = np.array([step for step, _ in seen])
    # Within a step the ranks' order is not recorded: only its first and last position are known.
    firsts, lasts = np.searchsorted(steps, steps, side="left"), np.searchsorted(steps, steps, side="right") - 1
    times: Counter[str] = Counter()
    problems = []
    for (step, name), first, last in zip(seen, firsts.tolist(), lasts.tolist(), strict=True):
        epoch = times[name]
        times[name] += 1
        if last < epoch * size:
            problems.append(f"step {step}: {name} comes again before the epoch of {size} samples is over")
        elif first >= (epoch + 1) * size:
            problems.append(f"step {step}: {name} comes late: it was left out of an epoch of {size} samples")
    if rows is not None and len(seen) >= rows and len(times) < rows:
        problems.append(f"{place or 'the data'}: {rows - len(times)} of {rows} samples were never used")
    return problems


def _shares(drawn: dict[str, int], weights: list[float], seed: int | None) -> list[str]:
    """Return which sources of a blend were drawn from less or more often than its order requires.

    Every block of positions has equally many of each place. With the ``seed`` of a run that is audited from its
    beginning, the rest is known too; without, not even where in a block the audit begins.
    """
    blocks, rest = divmod(sum(drawn.values()), BLOCK)
    slots = apportion(weights, BLOCK)
    least, most = [max(0, blocks - 1) * n for n in slots], [(blocks + 2) * n for n in slots]
    if seed is not None:
        within = np.bincount(sources_of(blocks, slots, seed)[:rest], minlength=len(slots))
        least = most = [blocks * n + int(more) for n, more in zip(slots, within, strict=True)]
    return [
        f"{place}: was drawn from {number} times, its weight gives it "
        + (f"{low}" if low == high else f"{low} to {high}")
        for (place, number), low, high in zip(drawn.items(), least, most, strict=True)
        if not low <= number <= high
    ]


def torn(steps: dict[int, list[str]]) -> list[str]:
    """Return where documents of streamed text do not continue at the token where the sample before ended.

    Samples are ``document[begin:end]``, joined by ``+``. A document may begin again when it was read to its end, which
    is known when another has followed it in a sample.
    """
    pieces: dict[int, dict[str, list[tuple[int, int]]]] = {}
    ends: dict[str, int] = {}
    for step, samples in steps.items():
        for sample in samples:
            spans = [(name, int(begin), int(end)) for name, begin, end in SPAN.findall(sample)]
            ends.update((name, end) for name, _, end in spans[:-1])
            for name, begin, end in spans:
                pieces.setdefault(step, {}).setdefault(name, []).append((begin, end))
    problems = []
    at: dict[str, int] = {}
    known_from_start = min(steps) == 1
    for step in sorted(pieces):
        for name, places in pieces[step].items():
            # Within a step the order of ranks is not recorded; of one document it is that of its places, but that a
            # short one may end and begin again.
            waiting = sorted(places)
            while waiting:
                left = at.get(name, 0)
                again = left == ends.get(name, left)
                fits = [p for p in waiting if p[0] == left] or [p for p in waiting if again and p[0] == 0] or waiting
                begin, end = fits[0]
                waiting.remove((begin, end))
                if begin != left and not (again and begin == 0) and (name in at or known_from_start):
                    problems.append(f"step {step}: {name} goes on at token {begin}, but was left at {left}")
                at[name] = end
    return problems
