"""Warnings for a run that saves too rarely, or too slowly, before its time limit."""

from __future__ import annotations

import re
from contextlib import suppress
from statistics import median_high

from smp_train.arguments import Resolved
from smp_train.errors import ConfigError
from smp_train.launch.instances import Machines
from smp_train.models.resolve import preset_of
from smp_train.models.state_memory import CHECKPOINT_BYTES
from smp_train.telemetry.metrics import read_metrics

WRITE_RATE = 1e9
"""Expected rate of a shared file system, in bytes per second and node; a run that needs more is warned of."""
EARLY_SECONDS = 60
"""How much earlier than asked Slurm may send its signal."""


def slurm_seconds(text: str | None) -> int | None:
    """Return the seconds of ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``, Slurm's forms; else None."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", (text or "").strip())
    if not match:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:  # M or M:S
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third


def check_limit(limit: float | None, margin: float, setting: str) -> None:
    """Refuse a time limit that leaves no time for training; the run is asked to save ``margin`` seconds before it.

    Raises:
        ConfigError: naming ``setting``, and its remedy.
    """
    if limit is not None and limit <= margin + EARLY_SECONDS:
        raise ConfigError(
            f"{setting}: the limit is {_time(limit)}, and {_time(margin)} before it the run stops to save (Slurm may "
            f"signal {EARLY_SECONDS} s earlier still): nothing would be trained; raise the limit, or save later"
        )


def measured_step_seconds(run_dir: str) -> float | None:
    """Return the seconds of a step, as an earlier start of the run has measured them."""
    with suppress(ConfigError):
        logged = [record.get("step_sec") for record in read_metrics(run_dir) if "event" not in record]
        return median_high(filter(None, logged[-100:])) if any(logged[-100:]) else None
    return None


def save_warnings(
    resolved: Resolved, machines: Machines, limit: float | None, margin: float, setting: str = ""
) -> list[str]:
    """Return warnings about saving before the time limit.

    Args:
        resolved: The training flags.
        machines: The machines of the run.
        limit: Seconds until the run is ended; None without a limit.
        margin: Seconds for saving, between the request to stop and the end.
        setting: The setting of the margin, if there is a setting.
    """
    warnings = []
    preset = preset_of(resolved.args)
    size = CHECKPOINT_BYTES * preset.parameters if preset else 0
    if size > WRITE_RATE * machines.nodes * margin:
        warnings.append(
            f"a checkpoint of this model has {size / 1e9:.0f} GB, and there are {_time(margin)} to save one when time "
            f"is up: that takes {size / margin / 1e9:.1f} GB/s to {', '.join(resolved.args.checkpoint_dir)}; "
            f"{f'raise {setting}, or ' if setting else ''}lower --checkpoint_freq so that little is lost without it"
        )
    step = measured_step_seconds(resolved.args.run_dir)
    often, steps = min(resolved.args.checkpoint_freq), resolved.args.max_steps
    if limit is not None and step is not None and min(often, steps) * step > limit - margin:
        fitting = max(1, int((limit - margin) / step / 4))
        warnings.append(
            f"--checkpoint_freq {often}: that takes {_time(often * step)} ({step:.3g} s a step, as measured in this "
            f"run folder), and the time limit is {_time(limit)}: the only checkpoint would be the one when time is up, "
            f"and a lost node before that loses everything; --checkpoint_freq {fitting} would save some four times"
        )
    return warnings


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
