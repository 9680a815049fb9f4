"""Hours and money for a budget of tokens."""

from __future__ import annotations

import argparse
from typing import Any

from smp_train.planning.step_time import Machine, Prediction


def described(options: argparse.Namespace, speed: Prediction, machine: Machine) -> dict[str, Any]:
    """Return what ``--json`` prints about a budget of tokens, in hours; empty without a budget."""
    if options.tokens is None:
        return {}
    steps, nodes = options.tokens / speed.tokens, -(-speed.devices // machine.per_node)
    hours = steps * speed.step_seconds / 3600
    price = None if options.price_per_hour is None else hours * nodes * options.price_per_hour
    return {"cost": {"tokens": options.tokens, "steps": steps, "hours": hours, "price": price}}


def text(plan: dict[str, Any]) -> list[str]:
    """Return the lines about time and cost, if they are predicted."""
    rows: list[tuple[str, str]] = []
    if time := plan.get("time"):
        shown = [(part, seconds) for part, seconds in time["parts"].items() if seconds > 0.001 * time["step"]]
        rows += [(part, f"{seconds:,.3f} s") for part, seconds in sorted(shown, key=lambda row: -row[1])]
        rows += [
            (f"a step of {time['tokens_of_step']:,} tokens", f"{time['step']:,.3f} s"),
            ("tokens per second; of each device",
             f"{time['tokens_per_second']:,.0f}; {time['tokens_per_second_and_device']:,.0f}"),
            ("MFU", f"{time['mfu']:.1%}"), ("", ""),
        ]  # fmt: skip
    if cost := plan.get("cost"):
        rows.append((f"all {cost['steps']:,.0f} steps", f"{cost['hours']:,.1f} h"))
        if cost["price"] is not None:
            rows.append(("price", f"{cost['price']:,.0f}"))
        rows.append(("", ""))
    return [f"  {name:<36}{value:>18}".rstrip() for name, value in rows]
