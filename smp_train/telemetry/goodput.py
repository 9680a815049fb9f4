"""Goodput: the share of a run's time that was spent on updates that are in the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOST = {
    "recovery_sec": "recoveries", "repeated_sec": "repeated steps", "restart_sec": "restarts",
    "blocked_sec": "saves and validations",
}  # fmt: skip
"""Fields of lost time, and their names for people."""
LOST_BEFORE = {"start": "restart_sec", "resume": "restart_sec", "recovery": "repeated_sec"}
"""The field of `LOST` that counts the time before each of these events."""
BOUNDS = (None, "start", "resume", "recovery", "stop", "finish")
"""Kinds of records that end an interval: a step (None), and these events."""


def goodput(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return ``goodput`` and the seconds of `LOST` over all attempts of a run; {} if no time passes between records.

    Between two records, each update takes ``step_sec``, and the remaining time is lost. Updates after the last
    record of a killed attempt count as part of the restart.
    """
    lost = dict.fromkeys(LOST, 0.0)
    updates: list[float] = []  # seconds of each update that is in the weights
    before = pace = usual = float("inf")
    logged = 0  # updates of the last record of a step
    for record in records:
        event, step, now = record.get("event"), record.get("step"), record.get("time")
        if event not in BOUNDS or not isinstance(step, int) or not isinstance(now, float | int):
            continue
        recovery = min(max(0.0, now - before), record["seconds"]) if event == "recovery" else 0.0
        if logged and event == "recovery" and before > now - record["seconds"]:  # a step was logged in the recovery
            lost["recovery_sec"] += max(0.0, sum(updates[-logged:]) - logged * usual)
            updates[-logged:] = [min(seconds, usual) for seconds in updates[-logged:]]
            pace = min(pace, usual)
        seconds, before, new = max(0.0, now - before), now, max(0, step - len(updates))
        logged = new if event is None else 0
        if event is None:
            usual, pace = pace, record.get("step_sec") or pace
        worked = 0.0 if not new or event in ("start", "resume") else min(seconds - recovery, new * pace)
        if event == "recovery":  # a hang is part of it: a rank's death interrupts one step
            recovery = max(recovery, seconds - worked - pace)
        lost["recovery_sec"] += recovery
        lost[LOST_BEFORE.get(event or "", "blocked_sec")] += seconds - recovery - worked
        lost["repeated_sec"] += sum(updates[step:])  # it went back to a checkpoint
        updates[step:] = [worked / new] * new if new else []
    useful = sum(updates)
    whole = useful + sum(lost.values())
    return {"goodput": useful / whole, **lost} if whole > 0 else {}


def in_words(measured: Mapping[str, float]) -> str:
    """Return the result of `goodput` for people: the share, and the lost seconds above 0.1."""
    lost = ", ".join(f"{measured[field]:,.1f} s {name}" for field, name in LOST.items() if measured[field] >= 0.05)
    return f"{measured['goodput']:.1%}{f' (lost: {lost})' if lost else ''}"
