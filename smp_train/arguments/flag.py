"""What a flag is: one row, which a field of a dataclass declares, with everything that is known of the flag."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Systems whose names for our flags are accepted.
SMP = "SMP v2 samples (17.SM-modelparallelv2)"
FSDP = "AWS FSDP sample (10.FSDP)"
PROFILING = "AWS FSDP profiling sample (19.FSDP-llama2-profiling)"
MINIMAL = "minimal_fsdp"
FSDP2 = "FSDP2 LLM Training"
TRAINER = "Hugging Face Trainer"
SYSTEMS = (SMP, FSDP, PROFILING, MINIMAL, FSDP2, TRAINER)


class Rule(NamedTuple):
    """What each value of a flag must be."""

    says: str
    holds: Callable[[Any], bool]


AT_LEAST_0 = Rule("must be at least 0", lambda number: number >= 0)
AT_LEAST_1 = Rule("must be at least 1", lambda number: number >= 1)
AT_LEAST_2 = Rule("must be at least 2, to have a next token", lambda number: number >= 2)
ABOVE_0 = Rule("must be above 0", lambda number: number > 0)
ABOVE_0_TO_1 = Rule("must be above 0 and at most 1", lambda number: 0 < number <= 1)
BELOW_1 = Rule("must be from 0 up to, not including, 1", lambda number: 0 <= number < 1)
SHARE = Rule("must be a fraction, at least 0 and at most 1, as 0.1%", lambda number: 0 <= number <= 1)
A_FOLDER = Rule(
    "this is written little by little, which S3 cannot do; give a folder", lambda place: not place.startswith("s3://")
)


class Only(NamedTuple):
    """The values that are accepted where others are not available, and why, or what to do."""

    values: tuple[Any, ...]
    why: str


def share_or(counted: str) -> Rule:
    """Return the rule for a share below 1 that is a whole number from 1 on."""
    return Rule(
        f"must be at least 0; a share is below 1, and from 1 on it counts {counted}",
        lambda number: 0 <= number < 1 or (number >= 1 and number == int(number)),
    )


@dataclass(frozen=True)
class Flag:
    """One flag. `flag` declares a row; `flags_of` adds the fields after ``aka``, which the dataclass knows."""

    help: str
    """One line that says what the flag does."""
    default: Any
    choices: tuple[Any, ...] = ()
    """The only values it takes; empty for any."""
    unit: str = ""
    """What a value counts; empty where that goes without saying."""
    shown: str = ""
    """Stands for the default in help where that is found out at start."""
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Other systems' spellings of a value, and ours."""
    switch: bool = False
    """It may stand alone, for 1, and after ``--no-``, for 0. Text that may has those under 1 and 0 in ``values``."""
    must: Rule | None = None
    needs: str = ""
    """The flag without which it is refused."""
    idle_without: str = ""
    """The flag without which it has no effect."""
    only: Only | None = None
    """The values that this version accepts."""
    only_natively: Only | None = None
    """The values that the native backend accepts; SMP takes all."""
    no_effect: str = ""
    """Why any value is accepted and none changes anything."""
    no_effect_natively: str = ""
    """The same on the native backend; SMP reads it."""
    smp_key: bool = False
    """SMP's configuration has a key of this name."""
    variable: str = ""
    """SageMaker's variable that holds the default."""
    aka: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """System to its names for this flag, separated by spaces. `aliases` has those whose values are translated."""
    name: str = ""
    group: type = object
    kind: type = str
    many: bool = False
    optional: bool = False

    @property
    def shown_default(self) -> str:
        """The default as a reader of help wants it."""
        return self.shown or self.variable or show(self.default)

    @property
    def idle(self) -> str:
        """Why it has no effect on the native backend; empty where it has one."""
        return self.no_effect or self.no_effect_natively


def flag(default: Any, help: str, **known: Any) -> Any:
    """Declare one flag; ``known`` are fields of `Flag`."""
    metadata = {"flag": Flag(help, default, **known)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(group: type) -> Iterator[Flag]:
    """Yield the flags that a dataclass declares, in its order."""
    hints = typing.get_type_hints(group)
    for item in dataclasses.fields(group):
        row: Flag = item.metadata["flag"]
        kind, many, optional = _read_type(hints[item.name])
        yield dataclasses.replace(
            row, name=item.name, group=group, kind=kind, many=many, optional=optional, switch=row.switch or kind is bool
        )


def _read_type(hint: Any) -> tuple[type, bool, bool]:
    """Take ``list[int] | None`` apart into (int, many, optional)."""
    optional = False
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        optional = True
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True, optional
    return hint, False, optional


def show(value: Any) -> str:
    """Return a value as it would be typed on a command line; ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list):
        return " ".join(show(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)
