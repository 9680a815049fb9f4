"""Hours and money for a budget of tokens: the steps, the saves, and what failures are expected to cost."""

from __future__ import annotations

import argparse
import math
from typing import Any

from smp_train.arguments import Arguments
from smp_train.errors import ConfigError
from smp_train.planning.step_time import LINKS, Machine, Prediction
from smp_train.planning.tracker import OPTIMIZER, PARAMETERS
from smp_train.planning.world import Memory

HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
"""Of one device: Llama 3 was interrupted 419 times unexpectedly in 54 days on 16,384 H100 (The Llama 3 Herd of Models,
2024, table 5)."""
RESTART_MINUTES = 10.0
"""From a failure to the next step. An assumption."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `described` reads."""
    add = parser.add_argument
    add("--tokens", type=number, help="train on so many, such as 15e12 or 1T: hours, and with a price the cost")
    add("--price_per_hour", type=float, help="of one instance, in any currency")
    add("--device_hours_per_failure", type=float, default=HOURS_PER_FAILURE,
        help=f"of one device (default: {HOURS_PER_FAILURE:,.0f}, Llama 3's)")  # fmt: skip
    add("--interruptions_per_hour", type=float, default=0.0, help="of one spot instance (default: 0)")
    add("--restart_minutes", type=float, default=RESTART_MINUTES,
        help=f"from a failure to the next step (default: {RESTART_MINUTES:.0f}, an assumption)")  # fmt: skip
    add(
        "--write_gb_per_s",
        type=float,
        help="what a node writes of a checkpoint, 10^9 bytes/s; without it saves are free",
    )


def number(text: str) -> float:
    """Read a number such as 15e12, 300B or 1T; ValueError otherwise."""
    unit = UNITS.get(text[-1:].upper())
    return float(text[:-1]) * unit if unit else float(text)


def short(tokens: float) -> str:
    """Return a number as `number` reads it: 1.5T; in full where it has no unit."""
    unit = max((name for name, size in UNITS.items() if size <= tokens), key=UNITS.__getitem__, default="")
    return f"{tokens / UNITS.get(unit, 1):.4g}{unit}"


def check(own: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags of `add_flags` that cannot be."""
    above = ("tokens", "price_per_hour", "device_hours_per_failure", "write_gb_per_s")
    wrong = [name for name in above if (value := getattr(own, name)) is not None and not 0 < value < math.inf]
    wrong += [name for name in ("interruptions_per_hour", "restart_minutes") if not 0 <= getattr(own, name) < math.inf]
    if wrong:
        raise ConfigError(f"plan: --{wrong[0]} {getattr(own, wrong[0])}: give a positive number")
    if own.tokens is None and own.price_per_hour is not None:
        raise ConfigError("plan: --price_per_hour is for a budget; give --tokens")
    if own.tokens is not None and own.instance_type is None:
        raise ConfigError("plan: --tokens needs --instance_type: the speed of other devices is not known")


def described(
    own: argparse.Namespace, args: Arguments, found: Prediction, machine: Machine, memory: Memory, checkpoint: int
) -> dict[str, Any]:  # fmt: skip
    """Return what ``--json`` prints of saves, in seconds, and of a budget of tokens, in hours.

    A failure loses half of the steps between two checkpoints, and the time to restart. What it loses is subject to
    failures, too: the hours without any are divided by one less the part of an hour that is lost.

    Args:
        own: Flags of `add_flags`.
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
