"""Hours and money for a budget of tokens: the steps, the saves, and the expected cost of failures."""

from __future__ import annotations

import argparse
from typing import Any

from smp_train.arguments import Arguments
from smp_train.distributed.degrees import plan
from smp_train.errors import ConfigError
from smp_train.planning.memory import Memory
from smp_train.planning.options import short_number
from smp_train.planning.step_memory import Use
from smp_train.planning.step_time import LINKS, Machine, Prediction

RECOVERY_SECONDS = 30.0
"""Seconds from a failure to the next step with --recovery in_place, an assumption."""


def described(
    options: argparse.Namespace, args: Arguments, speed: Prediction, machine: Machine, memory: Memory
) -> dict[str, Any]:  # fmt: skip
    """Return what ``--json`` prints about saves, in seconds, and about a budget of tokens, in hours.

    A failure loses half of the steps between two checkpoints, and the time to restart; with --recovery in_place and a
    replica, one step and `RECOVERY_SECONDS`, if spare nodes take the place of lost ones. Work that is repeated can fail
    again, so the hours without failures are divided by the share of time that is not lost.

    Raises:
        ConfigError: Failures lose more time than passes between them.
    """
    nodes, interval = -(-speed.devices // machine.per_node), min(args.checkpoint_freq)
    costs: dict[str, Any] = {}
    blocked = 0.0
    if options.write_gb_per_s is not None:
        written = memory.checkpoint / nodes / (options.write_gb_per_s * 1e9)
        copied = (memory.state[Use.PARAMETERS] + memory.state[Use.OPTIMIZER]) / (LINKS * machine.host)
        in_background = args.checkpoint_type in (None, "async_sharded")
        blocked = max(copied, written - interval * speed.step_seconds) if in_background else written
        costs["save"] = {"written": written, "blocked": blocked}
    if options.tokens is None:
        return costs
    steps = options.tokens / speed.tokens
    training, saving = steps * speed.step_seconds / 3600, steps / interval * blocked / 3600
    rate = speed.devices / options.device_hours_per_failure + nodes * options.interruptions_per_hour
    lost_per_failure = (interval * speed.step_seconds + blocked) / 2 / 3600 + options.restart_minutes / 60
    if args.recovery == "in_place" and plan(args, speed.devices, machine.per_node, smp=False).replicate > 1:
        lost_per_failure = (speed.step_seconds + RECOVERY_SECONDS) / 3600
    if rate * lost_per_failure >= 1:
        raise ConfigError(
            f"plan: never done: {rate:.3g} failures per hour lose {lost_per_failure:.3g} hours each; save more often "
            f"than --checkpoint_freq {interval}, or take fewer or steadier instances"
        )
    hours = (training + saving) / (1 - rate * lost_per_failure)
    price = None if options.price_per_hour is None else hours * nodes * options.price_per_hour
    costs["cost"] = {
        "tokens": options.tokens, "steps": steps, "training": training, "saving": saving, "failures": rate * hours,
        "lost": hours - training - saving, "hours": hours, "price": price,
    }  # fmt: skip
    return costs


def text(report: dict[str, Any]) -> list[str]:
    """Return the lines about time and cost, if they are predicted."""
    rows: list[tuple[str, str]] = []
    if time := report.get("time"):
        shown = [(part, seconds) for part, seconds in time["parts"].items() if seconds > 0.001 * time["step"]]
        rows += [(part, f"{seconds:,.3f} s") for part, seconds in sorted(shown, key=lambda row: -row[1])]
        rows += [
            (f"a step of {time['tokens_of_step']:,} tokens", f"{time['step']:,.3f} s"),
            ("tokens per second; of each device",
             f"{time['tokens_per_second']:,.0f}; {time['tokens_per_second_and_device']:,.0f}"),
            ("MFU", f"{time['mfu']:.1%}"), ("", ""),
        ]  # fmt: skip
    if save := report.get("save"):
        rows += [("writing a checkpoint", f"{save['written']:,.1f} s"),
                 ("training waits for it", f"{save['blocked']:,.1f} s"), ("", "")]  # fmt: skip
    if cost := report.get("cost"):
        rows += [
            (f"{cost['steps']:,.0f} steps", f"{cost['training']:,.1f} h"), ("saves", f"{cost['saving']:,.1f} h"),
            (f"{cost['failures']:,.1f} failures, expected", f"{cost['lost']:,.1f} h"),
            (f"all {short_number(cost['tokens'])} tokens", f"{cost['hours']:,.1f} h"),
        ]  # fmt: skip
        if cost["price"] is not None:
            hourly = cost["price"] / cost["hours"]
            rows.append((f"price, at {hourly:,.2f} an hour", f"{cost['price']:,.0f}"))
        rows.append(("", ""))
    return [f"  {name:<36}{value:>18}".rstrip() for name, value in rows]
