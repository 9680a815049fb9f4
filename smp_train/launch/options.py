"""Options of `smp-train launch <where>`, which share a command line with the training flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smp_train.arguments.aliases import NAMES
from smp_train.arguments.parse import canonical
from smp_train.arguments.values import is_bool, nearest, read_bool
from smp_train.errors import ConfigError


@dataclass(frozen=True)
class Option:
    """One launch option. ``kind`` is str, int or bool; ``many`` takes several words and may be repeated."""

    name: str
    help: str
    kind: type = str
    default: Any = None
    many: bool = False
    metavar: str = ""
    dashes: bool = False
    """Its first word may begin with dashes: it is an option of another program."""


COMMON = (
    Option("dry_run", "print exactly what would be done, and do nothing", bool, False),
    Option("check", "check everything that can be checked beforehand, and start nothing", bool, False),
)


def split(words: Sequence[str], options: Sequence[Option]) -> tuple[dict[str, Any], list[str]]:
    """Return (value by option name, training flags in their order).

    Raises:
        ConfigError: for an option without its value or with one of another kind, and for a flag that is neither
            a launch option nor a training flag, with the nearest one of both.
    """
    table = {option.name: option for option in options}
    values: dict[str, Any] = {option.name: [] if option.many else option.default for option in options}
    training: list[str] = []
    rest = [str(word) for word in words]
    while rest:
        word = rest.pop(0)
        name, equals, attached = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        option = table.get(canonical(name))
        if option is None:
            _check_known(word, canonical(name), table)
            training.append(word)
            continue
        given = [attached] if equals else []
        while not equals and rest and (option.many or not given):
            is_flag = rest[0].startswith("--") and not (option.dashes and not given)
            if is_flag or (option.kind is bool and not is_bool(rest[0])):
                break
            given.append(rest.pop(0))
        values[option.name] = _read(option, word.partition("=")[0], given, values[option.name])
    if values.get("dry_run") and values.get("check"):
        raise ConfigError(
            "--dry_run and --check: give one of them; --dry_run prints what would be submitted and asks nobody, "
            "--check asks whether it would be accepted and prints no text"
        )
    return values, training


def _check_known(word: str, name: str, table: dict[str, Option]) -> None:
    if not name or name in NAMES or name.removeprefix("no_") in NAMES:
        return
    hint = nearest(name, [*table, *NAMES]).replace("mean ", "mean --")
    raise ConfigError(f"unknown flag {word.partition('=')[0]}{hint or '; see --help'}")


def _read(option: Option, spelling: str, given: list[str], before: Any) -> Any:
    if option.kind is bool:
        return read_bool(given[0]) if given else True
    if not given or (not option.many and given[0] == ""):
        raise ConfigError(f"{spelling} expects a value")
    if option.kind is int:
        if not given[0].isdigit() or int(given[0]) < 1:
            raise ConfigError(f"{spelling} {given[0]!r}: expects a number, at least 1")
        return int(given[0])
    return [*before, *given] if option.many else given[0]


def print_help(words: Sequence[str], usage: str, about: str | None, options: Sequence[Option]) -> bool:
    """Print the help of one place to launch at if ``words`` ask for it, and return whether they do."""
    if not {"-h", "--help"} & set(words):
        return False
    print(f"usage: {usage}\n\n{about}\n")
    for option in options:
        metavar = option.metavar or {int: "N", bool: ""}.get(option.kind, "X")
        left = f"--{option.name} {metavar}{' ...' if option.many else ''}".rstrip()
        default = "" if option.default in (None, False) else f" (default {option.default})"
        print(f"  {left:<28} {option.help}{default}")
    print("\nEvery other flag is a training flag.\n")
    return True
