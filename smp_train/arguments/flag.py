"""What a flag is: how a field of a dataclass declares one, and what is known of it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),
    unit: str = "",
    shown: str = "",
    values: dict[str, Any] | None = None,
    switch: bool = False,
) -> Any:
    """Declare one flag.

    ``unit`` is what a value counts; ``shown`` replaces the default in help texts where the default is found
    out at start; ``values`` maps other systems' spellings of a value to ours; ``switch`` lets text be given
    as a boolean too, which ``values`` then has under 1 and 0.
    """
    metadata = {
        "help": help, "choices": choices, "unit": unit, "shown": shown, "values": values or {}, "switch": switch,
    }  # fmt: skip
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """What is known of one flag: how its text is read, and what help says of it."""

    name: str
    group: type
    kind: type
    many: bool
    optional: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def help(self) -> str:
        """One line that says what the flag does."""
        return str(self.metadata["help"])

    @property
    def switch(self) -> bool:
        """Whether it may stand alone, for 1, and after ``--no-``, for 0."""
        return self.kind is bool or bool(self.metadata["switch"])

    @property
    def choices(self) -> tuple[Any, ...]:
        """The only values it takes; empty for any."""
        return tuple(self.metadata["choices"])

    @property
    def unit(self) -> str:
        """What a value counts; empty where that goes without saying."""
        return str(self.metadata["unit"])

    @property
    def shown_default(self) -> str:
        """The default as a reader of help wants it."""
        if self.metadata["shown"]:
            return str(self.metadata["shown"])
        return show(self.default)


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


def _read_type(hint: Any) -> tuple[type, bool, bool]:
    """Take ``list[int] | None`` apart into (int, many, optional)."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        optional = True
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True, optional
    return hint, False, optional


def flags_of(group: type) -> Iterator[Flag]:
    """Yield the flags that a dataclass declares, in its order."""
    hints = typing.get_type_hints(group)
    for item in dataclasses.fields(group):
        kind, many, optional = _read_type(hints[item.name])
        default = item.default_factory() if callable(item.default_factory) else item.default
        yield Flag(item.name, group, kind, many, optional, default, item.metadata)
