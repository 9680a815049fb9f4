"""Proof from a run's ``data_audit`` files that it used each sample once per epoch and left out no step."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from smp_train.arguments.sources import read_weights
from smp_train.data.blend import BLOCK, apportion, sources_of_block
from smp_train.errors import ConfigError, DataError, first_few

SHOWN = 100
SHOWN_NAMES = 10
PART = re.compile(r"(.+?:\d+)(?:\[(\d+):(\d+)\])?(?:\+|$)")
"""A record in the name of a sample: whole, or tokens of it."""


class StepRecord(NamedTuple):
    """Samples that one rank consumed in one step."""

    rank: int
    attempt: int
    dp_rank: int
    dp_size: int | None
    samples: list[str]
    truncated: int
    truncated_targets: int


@dataclass
class Recorded:
    """The audit files of a run: of each step, the records of the newest attempt at it."""

    steps: dict[int, list[StepRecord]]
    """By step in order; records by rank."""
    skipped: list[int]
    """Steps whose updates --on_spike left out of the weights."""
    problems: list[str] = field(default_factory=list)

    def samples(self) -> dict[int, list[str]]:
        """Return the samples of each step; of ranks that share a model, the samples of the first."""
        last = max(self.steps)
        samples: dict[int, list[str]] = {}
        self.problems += [f"step {step} is missing" for step in range(min(self.steps), last) if step not in self.steps]
        for step, records in self.steps.items():
            by_dp_rank = {record.dp_rank: record.samples for record in reversed(records)}
            samples[step] = [sample for dp_rank in sorted(by_dp_rank) for sample in by_dp_rank[dp_rank]]
            # A kill may come between the writes of two ranks.
            if is_incomplete(records) and step < last:
                self.problems.append(f"step {step}: the records of some ranks are missing")
            different = [f"rank {record.rank}" for record in records if record.samples != by_dp_rank[record.dp_rank]]
            if different:
                self.problems.append(
                    f"step {step}: {', '.join(different)} read other samples than the ranks they share a model with"
                )
        return samples

    def truncated(self) -> tuple[int, int]:
        """Return the rows cut off at their end, and the tokens with loss that they lost, of all steps."""
        records = [record for step in self.steps.values() for record in {one.dp_rank: one for one in step}.values()]
        return sum(record.truncated for record in records), sum(record.truncated_targets for record in records)


def audit(run: Path, rows: int | None = None) -> int:
    """Check that a run used each sample once per epoch and left out no step; print the result, return the exit code.

    Every sample must have been used E times in a run that came to the end of its --epochs E. ``rows`` is the number of
    samples in the data set, by default the number in run.json.
    """
    facts = _run_facts(run)
    config: dict[str, Any] = facts.get("config") or {}
    recorded = _read_records(run)
    if not recorded.steps:
        print(f"{run}: no step was recorded yet")
        return 0
    steps = recorded.samples()
    first, last = min(steps), max(steps)
    if facts.get("streams"):
        verdict = _audit_streams(recorded, steps, config)
    else:
        verdict = _audit_indexed(run, recorded, steps, facts, rows)
    for problem in recorded.problems[:SHOWN]:
        print(problem)
    if recorded.skipped:
        names = ", ".join(map(str, recorded.skipped[:SHOWN])) + (", ..." if len(recorded.skipped) > SHOWN else "")
        print(f"{run}: {len(recorded.skipped)} steps are not in the weights (--on_spike): {names}")
    truncated, targets = recorded.truncated()
    if truncated:
        print(f"{run}: {truncated} rows lost their end, and with it {targets} tokens that carry loss (--long truncate)")
    names_used = [_without_window(name, config) for samples in steps.values() for name in samples]
    verdict = f"{len(recorded.problems)} problems" if recorded.problems else f"{verdict}, no step left out"
    print(f"{run}: steps {first} to {last}, {len(names_used)} samples, {len(set(names_used))} different: {verdict}")
    return DataError.exit_code if recorded.problems else 0


def _without_window(name: str, config: dict[str, Any]) -> str:
    """Return the name of a sample; all windows of --long crop in a row count as the same sample."""
    return name.rpartition("[")[0] or name if config.get("long") == "crop" else name


def _run_facts(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "run.json").read_text()))
    except (OSError, ValueError):
        return {}


def _read_records(run: Path) -> Recorded:
    paths = sorted(run.glob("data_audit-rank*.jsonl"))
    if not paths:
        raise ConfigError(f"{run}: no data_audit-rank*.jsonl in it; train with --data_audit 1")
    first_steps: dict[int, int] = {}
    """First step of each attempt."""
    records: list[tuple[int, StepRecord]] = []
    skips: set[tuple[int, int]] = set()
    for path in paths:
        rank = int(path.stem.rpartition("rank")[2])
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
                if "skipped" in entry:
                    begin, end = entry["skipped"]
                    skips.update((step, int(entry["attempt"])) for step in range(begin, end + 1))
                    continue
                step, attempt = int(entry["step"]), int(entry.get("attempt", 0))
                lost = int(entry.get("truncated", 0)), int(entry.get("truncated_targets", 0))
                dp_rank = int(entry.get("dp_rank", rank))
                record = StepRecord(rank, attempt, dp_rank, entry.get("dp_size"), list(entry["samples"]), *lost)
            except (ValueError, KeyError, TypeError):
                continue  # the last line of a run that was killed
            first_steps[attempt] = min(step, first_steps.get(attempt, step))
            records.append((step, record))

    def is_superseded(step: int, attempt: int) -> bool:
        # An attempt supersedes all earlier attempts from its first step on.
        return any(later > attempt and step >= first for later, first in first_steps.items())

    steps: dict[int, dict[int, StepRecord]] = {}
    for step, record in records:
        if not is_superseded(step, record.attempt):
            steps.setdefault(step, {})[record.rank] = record
    skipped = sorted({step for step, attempt in skips if step in steps and not is_superseded(step, attempt)})
    return Recorded(
        {step: [by_rank[rank] for rank in sorted(by_rank)] for step, by_rank in sorted(steps.items())}, skipped
    )


def is_incomplete(records: list[StepRecord]) -> bool:
    """Return whether the record of a data-parallel rank is missing."""
    return records[0].dp_size is not None and len({record.dp_rank for record in records}) < records[0].dp_size


# --- Indexed


def _audit_indexed(
    run: Path, recorded: Recorded, steps: dict[int, list[str]], facts: dict[str, Any], rows: int | None
) -> str:
    """Append the problems of an indexed run; return the verdict where it has none."""
    config: dict[str, Any] = facts.get("config") or {}
    sizes: dict[str, int] = facts.get("samples") or {}
    locations, weights = read_weights([*(config.get("training_dir") or ()), *(config.get("dataset") or ())])
    used: dict[str, list[tuple[int, str]]] = {}
    """(step, sample) by source of a blend; by an empty name without weights."""
    for step, samples in steps.items():
        for name in samples:
            sources = [one for one in locations if name.startswith(one + "/")] if weights else []
            used.setdefault(max(sources, key=len, default=""), []).append((step, _without_window(name, config)))
    for source, samples_used in used.items():
        recorded.problems += _repeats(source, samples_used, (rows if not source else None) or sizes.get(source))
    first, last = min(steps), max(steps)
    if weights:
        # A last step that only some ranks recorded is no beginning of the order.
        whole = last - is_incomplete(recorded.steps[last])
        counts = {source: sum(step <= whole for step, _ in used.get(source, ())) for source in locations}
        recorded.problems += _shares(counts, weights, config.get("seed") if first == 1 else None)
        print(f"{run}: drawn from " + ", ".join(f"{source}: {count}" for source, count in counts.items()))
    elif (size := rows or sizes.get("")) and first == 1 and "" in used:
        unused, verdict = _unused(Counter(name for _, name in used[""]), size, config.get("epochs"))
        if _used_all_epochs(facts, config, last):
            recorded.problems += unused
        else:  # another flag has ended the run before, or it has not ended
            print("".join(f"{line}\n" for line in unused), end="")
        return verdict
    return "each once per epoch"


def _used_all_epochs(facts: dict[str, Any], config: dict[str, Any], last_step: int) -> bool:
    """Return whether a run came to the end of its --epochs, and no other flag has ended it."""
    total, epochs = facts.get("total_steps"), config.get("epochs")
    max_steps_set = (facts.get("sources") or {}).get("max_steps", "default") != "default"
    ended_by = [config["max_steps"]] if max_steps_set else []
    if epochs and config.get("steps_per_epoch"):
        ended_by.append(epochs * config["steps_per_epoch"])
    return bool(epochs and total and last_step >= total and total not in ended_by)


def _unused(times: Counter[str], size: int, epochs: int | None) -> tuple[list[str], str]:
    """Return which samples were used less often than others, and a verdict on how often all were used.

    Args:
        times: how often each sample was used.
        size: samples of an epoch.
        epochs: epochs that the run was to have; None: any number.
    """
    begun = -(-times.total() // size)
    missing = begun * size - times.total()
    problems = []
    if missing:
        # Names of samples that were never used are not known.
        names = sorted(name for name, number in times.items() if number < begun) if len(times) == size else []
        which = f": {first_few(names, most=SHOWN_NAMES)}" if names else ""
        problems.append(f"epoch {begun} is not whole: {missing} of {size} samples were not used in it{which}")
    if epochs and epochs > begun:
        problems.append(f"{epochs - begun} of {epochs} epochs were not begun")
    return problems, "each once per epoch" if missing else f"each {begun} times" if begun > 1 else "each once"


def _repeats(source: str, used: list[tuple[int, str]], rows: int | None) -> list[str]:
    """Return what contradicts one use per epoch, where an epoch is ``rows`` samples (default: the different ones)."""
    size = rows or len({name for _, name in used})
    steps = np.array([step for step, _ in used])
    # Within a step the ranks' order is not recorded: only the first and last position of the step are known.
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


def _shares(counts: dict[str, int], weights: list[float], seed: int | None) -> list[str]:
    """Return which sources of a blend were drawn from less or more often than its order requires.

    Every block of positions has the same number of each source. With the ``seed`` of a run that is audited from its
    beginning, the order in the last block is known too; without it, not even where in a block the audit begins.
    """
    blocks, rest_of_block = divmod(sum(counts.values()), BLOCK)
    slots = apportion(weights, BLOCK)
    least, most = [max(0, blocks - 1) * n for n in slots], [(blocks + 2) * n for n in slots]
    if seed is not None:
        within = np.bincount(sources_of_block(blocks, slots, seed)[:rest_of_block], minlength=len(slots))
        least = most = [blocks * n + int(more) for n, more in zip(slots, within, strict=True)]
    return [
        f"{source}: was drawn from {number} times, its weight gives it "
        + (f"{low}" if low == high else f"{low} to {high}")
        for (source, number), low, high in zip(counts.items(), least, most, strict=True)
        if not low <= number <= high
    ]


# --- Streamed


class Span(NamedTuple):
    """Tokens of a record that are in a sample."""

    record: str
    begin: int
    end: float
    """Infinite where the name does not tell because the sample has the whole record."""


def _spans(sample: str) -> list[Span]:
    """Return the tokens of records that the name of a sample lists."""
    return [Span(record, int(begin or 0), float(end or "inf")) for record, begin, end in PART.findall(sample)]


def _audit_streams(recorded: Recorded, steps: dict[int, list[str]], config: dict[str, Any]) -> str:
    """Append the problems of a streamed run; return the verdict where it has none."""
    spans = {step: [_spans(sample) for sample in samples] for step, samples in steps.items()}
    cropped = config.get("long") == "crop"
    if not cropped:
        recorded.problems += gaps(spans)
    begun = Counter(
        span.record for samples in spans.values() for sample in samples for span in sample if cropped or not span.begin
    )
    epochs = config.get("epochs")
    if not epochs:
        return "no token of a record twice or left out"
    repeated = [f"{record} ({times} times)" for record, times in sorted(begun.items()) if times > epochs]
    if repeated:
        recorded.problems.append(f"used more than {epochs} times: {first_few(repeated, most=SHOWN_NAMES)}")
    every = sum(times == epochs for times in begun.values())
    return f"{every} of {len(begun)} records {epochs} times, no token twice or left out"


def gaps(steps: dict[int, list[list[Span]]]) -> list[str]:
    """Return where a record does not continue at the token at which the sample before ended.

    A record may begin again after its end, which is known when another record follows it in a sample.
    """
    ends: dict[str, float] = {}
    by_step: dict[int, dict[str, list[Span]]] = {}
    for step, samples in steps.items():
        for sample in samples:
            ends.update((span.record, span.end) for span in sample[:-1])
            for span in sample:
                by_step.setdefault(step, {}).setdefault(span.record, []).append(span)
    problems = []
    next_tokens: dict[str, float] = {}
    known_from_start = min(steps) == 1
    for step in sorted(by_step):
        for record, spans in by_step[step].items():
            # The order of ranks in a step is not recorded; the order of a record's spans is, unless it ends and begins
            # again.
            remaining = sorted(spans)
            while remaining:
                token = next_tokens.get(record, 0)
                ended = token in (ends.get(record, token), float("inf"))
                candidates = [span for span in remaining if span.begin == token]
                candidates = candidates or [span for span in remaining if ended and not span.begin] or remaining
                span = candidates[0]
                remaining.remove(span)
                is_known = record in next_tokens or known_from_start
                if span.begin != token and is_known and not (ended and not span.begin):
                    problems.append(f"step {step}: {record} goes on at token {span.begin}, but was left at {token:.0f}")
                next_tokens[record] = span.end
    return problems
