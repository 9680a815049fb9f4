"""One flag: a row with everything that is known of it, which a field of a dataclass declares."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SYSTEMS = {
    "smp": "SMP v2 samples (17.SM-modelparallelv2)", "fsdp": "AWS FSDP sample (10.FSDP)",
    "profiling": "AWS FSDP profiling sample (19.FSDP-llama2-profiling)", "minimal": "minimal_fsdp",
    "fsdp2": "FSDP2 LLM Training", "trainer": "Hugging Face Trainer",
}  # fmt: skip
"""Systems whose names for our flags are accepted, by the keyword under which `flag` takes these names."""


class Rule(NamedTuple):
    """What each value of a flag must be."""

    says: str
    holds: Callable[[Any], bool]


RULES = {
    ">=0": Rule("must be at least 0", lambda number: number >= 0),
    ">=1": Rule("must be at least 1", lambda number: number >= 1),
    ">=2": Rule("must be at least 2, to have a next token", lambda number: number >= 2),
    ">0": Rule("must be above 0", lambda number: number > 0),
    ">0 <=1": Rule("must be above 0 and at most 1", lambda number: 0 < number <= 1),
    ">=0 <1": Rule("must be from 0 up to, not including, 1", lambda number: 0 <= number < 1),
    ">=0 <=1": Rule("must be a fraction, at least 0 and at most 1, as 0.1%", lambda number: 0 <= number <= 1),
    "share or count": Rule(
        "must be a share of at least 0 and below 1, or a whole number from 1 on",
        lambda number: 0 <= number < 1 or (number >= 1 and number == int(number)),
    ),
    "folder": Rule("is appended to, which S3 cannot do; give a folder", lambda place: not place.startswith("s3://")),
}


class Only(NamedTuple):
    """The values that are accepted where others are not available, and why, or what to do."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Flag:
    """One flag. `flag` declares a row; `flags_of` adds the fields after ``aka``, which the dataclass knows."""

    help: str
    default: Any
    choices: tuple[Any, ...] = ()  # the only values it takes; empty for any
    shown: str = ""  # stands for the default in help where that is found out at start
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other systems' spellings of a value, and ours
    switch: bool = False
    """It may stand alone, for 1, and after ``--no-``, for 0. Text that may has those under 1 and 0 in ``values``."""
    must: str = ""  # the key of its rule in `RULES`
    needs: str = ""  # the flag without which it is refused
    idle_without: str = ""  # the flag without which it has no effect
    only: Only | None = None  # the values that this version accepts
    only_natively: Only | None = None  # the values that the native backend accepts; SMP takes all
    no_effect: str = ""  # why any value is accepted and none changes anything
    no_effect_natively: str = ""  # the same on the native backend; SMP reads it
    smp_key: bool = False  # SMP's configuration has a key of this name
    variable: str = ""  # SageMaker's variable that holds the default
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
    """Declare one flag; ``known`` are fields of `Flag`, and other systems' names for it by the key of `SYSTEMS`."""
    aka = {system: known.pop(system) for system in SYSTEMS if system in known}
    metadata = {"flag": Flag(help, default, aka=aka, **known)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(group: type) -> Iterator[Flag]:
    """Yield the flags that a dataclass declares, in its order."""
    hints = typing.get_type_hints(group)
    for item in dataclasses.fields(group):
        row: Flag = item.metadata["flag"]
        hint, many = hints[item.name], False
        optional = isinstance(hint, types.UnionType)
        if optional:
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        if typing.get_origin(hint) is list:
            (hint,), many = typing.get_args(hint), True
        yield dataclasses.replace(
            row, name=item.name, group=group, kind=hint, many=many, optional=optional, switch=row.switch or hint is bool
        )


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
