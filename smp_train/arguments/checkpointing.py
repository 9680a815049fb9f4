"""The setting ``--activation_checkpointing``: the share of the layers that is recomputed, and how."""

from __future__ import annotations

from fractions import Fraction

from smp_train.errors import ConfigError

NONE, FULL, PER_OPERATION = "none", "full", "selective:op"
PREFIX = "selective:"


def read(setting: str) -> tuple[Fraction, bool]:
    """Return the share of the layers that is checkpointed, and whether these keep the results of costly operations.

    The share is 0 for ``none``, 1 for ``full`` and ``selective:op``, 1/N for ``selective:N``, and p for
    ``selective:p``, where p is a fraction such as 0.5 or 1/3. Raises `ConfigError` for anything else.
    """
    if setting in (NONE, FULL, PER_OPERATION):
        return Fraction(setting != NONE), setting == PER_OPERATION
    try:
        number = Fraction(setting.removeprefix(PREFIX)) if setting.startswith(PREFIX) else Fraction(0)
    except (ValueError, ZeroDivisionError):
        number = Fraction(0)
    if number <= 0 or (number > 1 and number.denominator > 1):
        raise ConfigError(
            f"--activation_checkpointing {setting}: is not none, full, selective:op, selective:N (every N-th layer) "
            "or selective:P (a share of the layers such as 1/3)"
        )
    return (1 / number if number > 1 else number), False


def of_layers(selective: float) -> str:
    """Return the setting for ``--selective_checkpointing``: 0, a share below 1, 1, or every N-th layer."""
    if selective in (0, 1):
        return FULL if selective else NONE
    return f"{PREFIX}{Fraction(selective).limit_denominator(1000)}"


def evenly_spaced(count: int, share: Fraction) -> list[int]:
    """Return the indices of a ``share``, from 0 to 1, of ``count`` layers, evenly spaced by the rule of fms-fsdp.

    Layer i (from 0) is selected if (i + 1) * share passes another k + 1/2; a share of 1/N selects the middle of every N
    layers.
    """
    half = Fraction(1, 2)
    return [i for i in range(count) if (share * (i + 1) + half) // 1 > (share * i + half) // 1]
