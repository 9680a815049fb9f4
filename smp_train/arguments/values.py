"""Text to values: the forms that command lines, SageMaker hyperparameters and configuration files write."""

from __future__ import annotations

import ast
import difflib
import json
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from smp_train.arguments.flag import Flag
from smp_train.errors import ConfigError

TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
FALSE = frozenset({"0", "false", "no", "off", "n", "f"})
NOT_GIVEN = object()
"""The value of a flag that was named without one: ``--lr ''`` from SageMaker."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for the closest of ``names``, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def is_bool(text: str) -> bool:
    """Return whether ``text`` is one of the spellings of a boolean."""
    return text.strip().lower() in TRUE | FALSE


def read_bool(text: str) -> bool:
    """Read 0/1, true/false, yes/no, on/off in any case; ValueError otherwise."""
    if not is_bool(text):
        raise ValueError("expects 0 or 1 (or true, false)")
    return text.strip().lower() in TRUE


def read_int(text: str) -> int:
    """Read an integer; ``1e5`` and ``32.0`` count as the integers they are."""
    try:
        return int(text)
    except ValueError:
        number = read_float(text, "expects an integer")
        if number != int(number):
            raise ValueError("expects an integer") from None
        return int(number)


def read_float(text: str, complaint: str = "expects a number") -> float:
    """Read a finite number, a fraction such as ``1/3``, or a percentage such as ``0.1%``."""
    if text.strip().endswith("%"):
        return read_float(text.strip()[:-1], complaint) / 100
    try:
        number = float(Fraction(text.replace(" ", ""))) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(complaint) from None
    if not math.isfinite(number):
        raise ValueError(complaint)
    return number


def unquote(text: str) -> str:
    """Take the quotes off a string that SageMaker has JSON-encoded."""
    if len(text) >= 2 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


READERS: dict[type, Callable[[str], Any]] = {bool: read_bool, int: read_int, float: read_float, str: unquote}


def _is_none(flag: Flag, value: Any) -> bool:
    if flag.many and value in ([], [""], ["None"]):
        return True
    if not isinstance(value, str) or value in flag.choices:
        return value is None
    word = unquote(value).strip()
    # "none" in lower case may be meant as text where text is expected.
    return word in {"", "None", "null"} or (flag.kind is not str and word.lower() == "none")


def _items(flag: Flag, value: Any) -> list[Any]:
    """Take a list apart: several words, ``[1, 2]`` as JSON or Python writes it, or ``1,2`` for numbers."""
    if isinstance(value, list | tuple):
        words = list(value)
        return _items(flag, words[0]) if len(words) == 1 and isinstance(words[0], str) else words
    if isinstance(value, str) and value.strip().startswith("["):
        for read in (json.loads, ast.literal_eval):
            try:
                parsed = read(value.strip())
            except (ValueError, SyntaxError):
                continue
            if isinstance(parsed, list):
                return parsed
        raise ValueError("is not a list such as [1, 2]")
    if isinstance(value, str) and flag.kind is not str and "," in value:
        return value.split(",")
    return [value]


def _scalar(flag: Flag, value: Any) -> Any:
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError("expects one value")
        value = value[0]
    if isinstance(value, dict) or (isinstance(value, bool) and not flag.switch):
        raise ValueError(f"expects {'text' if flag.kind is str else 'a number'}")
    text = str(value)
    if flag.switch and flag.kind is str and is_bool(text):
        text = str(int(read_bool(text)))
    result: Any = READERS[flag.kind](text)
    if isinstance(result, str) and (flag.values or flag.choices):
        plain = result.strip().lower().replace("-", "_")
        result = plain if plain in flag.choices else flag.values.get(plain, result)
    if flag.choices and result not in flag.choices:
        raise ValueError(f"is not one of {', '.join(map(str, flag.choices))}")
    return result


def convert(flag: Flag, value: Any, spelling: str) -> Any:
    """Return ``value`` (text, or what a configuration file holds) as the type of ``flag``.

    ``NOT_GIVEN`` stands for an empty value of a flag that cannot be empty. ``spelling`` is how the user wrote
    the flag; a `ConfigError` begins with it.
    """
    empty = None if flag.optional else NOT_GIVEN
    if _is_none(flag, value):
        return empty
    try:
        return [_scalar(flag, item) for item in _items(flag, value)] or empty if flag.many else _scalar(flag, value)
    except ValueError as problem:
        written = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        raise ConfigError(f"{spelling} {written!r}: {problem}") from None
