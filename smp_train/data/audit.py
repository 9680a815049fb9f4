"""Checks, from a run's ``data_audit`` files, that the run used each sample once per epoch and left out no step."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.arguments.sources import read_weights
from smp_train.data.blend import BLOCK, apportion, sources_of_block
from smp_train.errors import ConfigError, DataError, first_few
from smp_train.storage.json_lines import read_lines

SHOWN = 100
PART = re.compile(r"(.+?:\d+)(?:@(\d+))?(?:\[(\d+):(\d+)\])?(?:\+|$)")
"""Matches one record in the name of a sample. Groups: the record's name; in a stream, the epoch from the second epoch
on; the begin and the end of the record's tokens, unless the sample has the whole record."""
WINDOW = re.compile(r"\[\d+:\d+\](?=\+|$)")
END = float("inf")  # end of a record that one sample holds whole: the record's length is not known


Records = dict[int, dict[int, dict[str, Any]]]
"""The records that `DataAudit` wrote, by step and then by rank."""


def audit(folder: Path, rows: int | None = None) -> int:
    """Check that a run used each sample once per epoch and left out no step; print the result and return the exit code.

    A run that came to the end of its --epochs E must have used every sample E times. ``rows`` is the number of samples
    in the data set, by default the number in run.json.
    """
    records, skipped = _read_records(folder)
    if not records:
        print(f"{folder}: no step was recorded yet")
        return 0
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        facts = dict(json.loads((folder / "run.json").read_text()))
    problems = _missing_records(records)
    recorded = {step: list(_peers(ranks).values()) for step, ranks in records.items()}
    steps = {step: [name for record in peers for name in record["samples"]] for step, peers in recorded.items()}
    if (facts.get("config") or {}).get("long") == "crop":  # all windows of one row count as the same sample
        steps = {step: [WINDOW.sub("", name) for name in names] for step, names in steps.items()}
    streamed = facts.get("streams")
    verdict = _audit_streams(steps, facts, problems) if streamed else _audit_indexed(steps, facts, problems, rows)
    print("".join(f"{problem}\n" for problem in problems[:SHOWN]), end="")
    if skipped:
        numbers = first_few([str(step) for step in skipped], most=SHOWN)
        print(f"{folder}: {len(skipped)} steps are not in the weights (--on_spike): {numbers}")
    lost = [record for peers in recorded.values() for record in peers if "truncated" in record]
    if lost:
        cut, targets = (sum(record.get(key, 0) for record in lost) for key in ("truncated", "truncated_targets"))
        print(f"{folder}: {cut} rows lost their end, and with it {targets} tokens that carry loss (--long truncate)")
    names = [name for samples in steps.values() for name in samples]
    verdict = f"{len(problems)} problems" if problems else f"{verdict}, no step left out"
    first, last = min(steps), max(steps)
    print(f"{folder}: steps {first} to {last}, {len(names)} samples, {len(set(names))} different: {verdict}")
    return DataError.exit_code if problems else 0


def _read_records(folder: Path) -> tuple[Records, list[int]]:
    """Return the records that the newest attempt at each step wrote, and the steps that were skipped."""
    paths = sorted(folder.glob("data_audit-rank*.jsonl"))
    if not paths:
        raise ConfigError(f"{folder}: no data_audit-rank*.jsonl in it; train with --data_audit 1")
    attempts: dict[int, Records] = {}
    skips: dict[int, set[int]] = {}
    for path in paths:
        rank = int(path.stem.rpartition("rank")[2])
        for entry in read_lines(path):
            if "skipped" in entry:
                skips.setdefault(entry["attempt"], set()).update(range(entry["skipped"][0], entry["skipped"][1] + 1))
            else:
                attempts.setdefault(entry["attempt"], {}).setdefault(entry["step"], {})[rank] = entry
    steps: Records = {}
    skipped: set[int] = set()
    for attempt, records in sorted(attempts.items()):
        # From its first step on, an attempt replaces the records of all earlier attempts.
        first = min(records)
        steps = {step: ranks for step, ranks in steps.items() if step < first} | dict(sorted(records.items()))
        skipped = {step for step in skipped if step < first} | skips.get(attempt, set())
    return steps, sorted(skipped & steps.keys())


def _peers(ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return one record per data-parallel rank, by rank; ranks that share a model read the same samples."""
    peers = {record["dp_rank"]: record for _, record in sorted(ranks.items(), reverse=True)}
    return dict(sorted(peers.items()))


def _missing_records(records: Records) -> list[str]:
    """Return a problem for each missing or contradictory record; delete an incomplete last step from ``records``."""
    last = max(records)
    problems = [f"step {step} is missing" for step in range(min(records), last) if step not in records]
    for step, ranks in list(records.items()):
        peers = _peers(ranks)
        if len(peers) < peers[min(peers)]["dp_size"]:
            if step < last:
                problems.append(f"step {step}: the records of some ranks are missing")
            elif len(records) > 1:  # the run was killed when only some ranks had written
                del records[last]
                break
        problems += [
            f"step {step}: rank {rank} read other samples than the ranks they share a model with"
            for rank, record in sorted(ranks.items())
            if record["samples"] != peers[record["dp_rank"]]["samples"]
        ]
    return problems


def _audit_indexed(steps: dict[int, list[str]], facts: dict[str, Any], problems: list[str], rows: int | None) -> str:
    """Append the problems of an indexed run to ``problems``; return the verdict to print if nothing was appended."""
    config: dict[str, Any] = facts.get("config") or {}
    sizes: dict[str, int] = facts.get("samples") or {}
    locations, weights = read_weights([*(config.get("training_dir") or ()), *(config.get("dataset") or ())])
    used: dict[str, list[tuple[int, str]]] = {}  # (step, sample name) by source; "" without weights
    for step, samples in steps.items():
        for name in samples:
            sources = [source for source in locations if weights and name.startswith(source + "/")]
            used.setdefault(max(sources, key=len, default=""), []).append((step, name))
    for source, names in used.items():
        problems += _repeats(source, names, (rows if not source else None) or sizes.get(source))
    first, last = min(steps), max(steps)
    if weights:
        counts = [len(used.get(source, ())) for source in locations]
        print("drawn from " + ", ".join(f"{name}: {count}" for name, count in zip(locations, counts, strict=True)))
        if first == 1 and (seed := config.get("seed")) is not None:
            blocks, rest_of_block = divmod(sum(counts), BLOCK)
            slots = apportion(weights, BLOCK)
            last_block = sources_of_block(blocks, slots, seed)[:rest_of_block].tolist()
            for number, (source, count) in enumerate(zip(locations, counts, strict=True)):
                share = blocks * slots[number] + last_block.count(number)
                if count != share:
                    problems.append(f"{source}: was drawn from {count} times, its weight gives it {share}")
    elif (size := rows or sizes.get("")) and first == 1 and "" in used:
        times, epochs = Counter(name for _, name in used[""]), config.get("epochs") or 0
        begun = -(-times.total() // size)
        unused = []
        if missing := begun * size - times.total():
            short = sorted(name for name, number in times.items() if number < begun)
            which = f"; not: {first_few(short, most=10)}" if len(times) == size else ""
            unused.append(f"epoch {begun} is not whole: {missing} of {size} samples were not used in it{which}")
        if epochs > begun:
            unused.append(f"{epochs - begun} of {epochs} epochs were not begun")
        max_steps_set = (facts.get("sources") or {}).get("max_steps", "default") != "default"
        by_epochs = epochs and not max_steps_set and not config.get("steps_per_epoch")
        if by_epochs and last >= (facts.get("total_steps") or END):
            problems += unused
        else:  # a flag other than --epochs ended the run, or the run has not ended
            print("".join(f"{line}\n" for line in unused), end="")
        if not missing:
            return f"each {begun} times" if begun > 1 else "each once"
    return "each once per epoch"


def _repeats(source: str, used: list[tuple[int, str]], rows: int | None) -> list[str]:
    """Return samples repeated or left out in an epoch of ``rows`` samples (default: number of distinct samples)."""
    size = rows or len({name for _, name in used})
    steps = np.array([step for step, _ in used])
    # The order of the ranks within a step is not recorded, so only the step's first and last position are known.
    firsts, lasts = np.searchsorted(steps, steps, side="left"), np.searchsorted(steps, steps, side="right") - 1
    times: Counter[str] = Counter()
    problems = []
    for (step, name), first, last in zip(used, firsts.tolist(), lasts.tolist(), strict=True):
        epoch = times[name]
        times[name] += 1
        if last < epoch * size:
            problems.append(f"step {step}: {name} comes again before the epoch of {size} samples is over")
        elif first >= (epoch + 1) * size:
            problems.append(f"step {step}: {name} comes late: it was left out of an epoch of {size} samples")
    if rows is not None and len(used) >= rows and len(times) < rows:
        problems.append(f"{source or 'the data'}: {rows - len(times)} of {rows} samples were never used")
    return problems


def _audit_streams(steps: dict[int, list[str]], facts: dict[str, Any], problems: list[str]) -> str:
    """Append the problems of a streamed run to ``problems``; return the verdict to print if nothing was appended.

    In each epoch a record must begin once, and each later part must begin at the token where the part before it ended.
    """
    next_tokens: dict[tuple[str, int], float] = {}
    for step, samples in steps.items():
        spans = [
            (record, int(epoch or 0), int(begin or 0), float(end or END))
            for sample in samples
            for record, epoch, begin, end in PART.findall(sample)
        ]
        # The order of ranks in a step is not recorded, so spans are sorted: the spans of one record become neighbours.
        for record, epoch, begin, end in sorted(spans):
            # If the run's first steps are not recorded, a record may have begun in them: accept any first token.
            token = next_tokens.get((record, epoch), 0 if min(steps) == 1 else begin)
            if begin != token:
                left = "its end" if token == END else f"token {token:.0f}"
                problems.append(f"step {step}: {record} goes on at token {begin}, but epoch {epoch} left it at {left}")
            next_tokens[record, epoch] = end
    times = Counter(record for record, _ in next_tokens)
    epochs = (facts.get("config") or {}).get("epochs")
    late = sorted(record for record, epoch in next_tokens if epochs and epoch >= epochs)
    if late:
        problems.append(f"used after epoch {epochs}: {first_few(late, most=10)}")
    whole = sum(count == epochs for count in times.values())
    parts = f"{whole} of {len(times)} records {epochs} times, " if epochs else ""
    return f"{parts}no token twice, no record left in its middle"
