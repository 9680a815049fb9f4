"""Hours and money for a budget of tokens: the steps, the saves, and what failures are expected to cost."""

from __future__ import annotations

import argparse
from typing import Any

from smp_train.arguments import Arguments
from smp_train.errors import ConfigError
from smp_train.planning.options import short
from smp_train.planning.step_time import LINKS, Machine, Prediction
from smp_train.planning.tracker import OPTIMIZER, PARAMETERS
from smp_train.planning.world import Memory


def described(
    own: argparse.Namespace, args: Arguments, found: Prediction, machine: Machine, memory: Memory, checkpoint: int
) -> dict[str, Any]:  # fmt: skip
    """Return what ``--json`` prints of saves, in seconds, and of a budget of tokens, in hours.

    A failure loses half of the steps between two checkpoints, and the time to restart. What it loses is subject to
    failures, too: the hours without any are divided by one less the part of an hour that is lost.

    Args:
        own: Flags of `options`.
        args: Of the run.
        found: Its speed.
        machine: Its devices.
        memory: Of a device.
        checkpoint: Bytes, of all devices.

    Raises:
        ConfigError: Failures lose more than there is time.
    """
    nodes, every = -(-found.devices // machine.per_node), min(args.checkpoint_freq)
    spent: dict[str, Any] = {}
    blocked = 0.0
    if own.write_gb_per_s is not None:
        written = checkpoint / nodes / (own.write_gb_per_s * 1e9)
        copied = (memory.state[PARAMETERS] + memory.state[OPTIMIZER]) / (LINKS * machine.host)
        behind = args.checkpoint_type in (None, "async_sharded")
        blocked = max(copied, written - every * found.step_seconds) if behind else written
        spent["save"] = {"written": written, "blocked": blocked}
    if own.tokens is None:
        return spent
    steps = own.tokens / found.tokens
    training, saving = steps * found.step_seconds / 3600, steps / every * blocked / 3600
    rate = found.devices / own.device_hours_per_failure + nodes * own.interruptions_per_hour
    each = (every * found.step_seconds + blocked) / 2 / 3600 + own.restart_minutes / 60
    if rate * each >= 1:
        raise ConfigError(
            f"plan: never done: {rate:.3g} failures per hour lose {each:.3g} hours each; save more often than "
            f"--checkpoint_freq {every}, or take fewer or steadier instances"
        )
    hours = (training + saving) / (1 - rate * each)
    price = None if own.price_per_hour is None else hours * nodes * own.price_per_hour
    spent["cost"] = {
        "tokens": own.tokens, "steps": steps, "training": training, "saving": saving, "failures": rate * hours,
        "lost": hours - training - saving, "hours": hours, "price": price,
    }  # fmt: skip
    return spent


def text(found: dict[str, Any]) -> list[str]:
    """Return the lines about time and cost, where they are predicted."""
    rows: list[tuple[str, str]] = []
    if time := found.get("time"):
        shown = [(part, seconds) for part, seconds in time["parts"].items() if seconds > 0.001 * time["step"]]
        rows += [(part, f"{seconds:,.3f} s") for part, seconds in sorted(shown, key=lambda row: -row[1])]
        rows += [
            (f"a step of {time['tokens_of_step']:,} tokens", f"{time['step']:,.3f} s"),
            ("tokens per second; of each device",
             f"{time['tokens_per_second']:,.0f}; {time['tokens_per_second_and_device']:,.0f}"),
            ("MFU", f"{time['mfu']:.1%}"), ("", ""),
        ]  # fmt: skip
    if save := found.get("save"):
        rows += [("writing a checkpoint", f"{save['written']:,.1f} s"),
                 ("training waits for it", f"{save['blocked']:,.1f} s"), ("", "")]  # fmt: skip
    if cost := found.get("cost"):
        rows += [
            (f"{cost['steps']:,.0f} steps", f"{cost['training']:,.1f} h"), ("saves", f"{cost['saving']:,.1f} h"),
            (f"{cost['failures']:,.1f} failures, expected", f"{cost['lost']:,.1f} h"),
            (f"all {short(cost['tokens'])} tokens", f"{cost['hours']:,.1f} h"),
        ]  # fmt: skip
        if cost["price"] is not None:
            hourly = cost["price"] / cost["hours"]
            rows.append((f"price, at {hourly:,.2f} an hour", f"{cost['price']:,.0f}"))
        rows.append(("", ""))
    return [f"  {name:<36}{value:>18}".rstrip() for name, value in rows]
