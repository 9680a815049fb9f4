"""`Flag`, the row that describes one flag. A field of a dataclass declares it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    ">=0": ("must be at least 0", lambda value: value >= 0),
    ">=1": ("must be at least 1", lambda value: value >= 1),
    ">=2": ("must be at least 2, to have a next token", lambda value: value >= 2),
    ">0": ("must be above 0", lambda value: value > 0),
    ">0 <=1": ("must be above 0 and at most 1", lambda value: 0 < value <= 1),
    ">=0 <1": ("must be at least 0 and below 1", lambda value: 0 <= value < 1),
    ">=0 <=1": ("must be a fraction, at least 0 and at most 1, as 0.1%", lambda value: 0 <= value <= 1),
    "share or count": (
        "must be a share of at least 0 and below 1, or a whole number of at least 1",
        lambda value: 0 <= value < 1 or (value >= 1 and value == int(value)),
    ),
    "folder": ("is appended to, which S3 cannot do; give a folder", lambda path: not path.startswith("s3://")),
}
"""Rules for the values of flags: the complaint, and whether a value obeys the rule."""


@dataclass(frozen=True)
class Flag:
    """The description of one flag. `flag` sets the fields up to ``aliases``, and `flags_of` the fields after it."""

    help: str
    default: Any
    choices: tuple[Any, ...] = ()  # the accepted values; empty: any
    shown: str = ""  # text in place of the default in the help, for a default that depends on something else
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other systems' values, and ours for each
    switch: bool = False  # --flag alone means 1 and --no-flag 0; a text flag maps 1 and 0 in `values`
    must: str = ""  # the key of its rule in `RULES`
    path: str = ""  # "read" or "written" if it may name a file or folder, which containers must mount
    needs: str = ""  # the flag without which it is refused
    idle_without: str = ""  # the flag without which it has no effect
    only_natively: tuple[tuple[Any, ...], str] | None = None
    """The values that the native backend accepts, and the reason or the remedy; SMP accepts all."""
    smp_only: str = ""  # why it has no effect on the native backend
    smp_key: bool = False  # SMP's configuration has a key of this name
    variable: str = ""  # SageMaker's environment variable with the default
    aliases: str = ""  # other systems' names, separated by spaces; `TRANSLATED` has those with translated values
    name: str = ""
    group: type = object
    kind: type = str
    many: bool = False
    optional: bool = False

    @property
    def shown_default(self) -> str:
        """The default as the help shows it."""
        return self.shown or self.variable or show(self.default)


def flag(default: Any, help: str, **fields: Any) -> Any:
    """Declare one flag; ``fields`` are fields of `Flag`."""
    metadata = {"flag": Flag(help, default, **fields)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(group: type) -> Iterator[Flag]:
    """Yield the flags that a dataclass declares, in its order."""
    hints = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        hint, many = hints[field.name], False
        optional = isinstance(hint, types.UnionType)
        if optional:
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        if typing.get_origin(hint) is list:
            (hint,), many = typing.get_args(hint), True
        row: Flag = field.metadata["flag"]
        switch = row.switch or hint is bool
        yield dataclasses.replace(
            row, name=field.name, group=group, kind=hint, many=many, optional=optional, switch=switch
        )


def show(value: Any) -> str:
    """Return a value as it is typed on a command line; ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, list):
        return " ".join(map(show, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)


def command_line(values: Mapping[str, Any]) -> str:
    """Return flags with their values as a command line."""
    return " ".join(f"--{name} {show(value)}" for name, value in values.items())
