"""Text to values: the spellings of command lines, SageMaker hyperparameters and configuration files."""

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


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for the closest of ``names``; empty if no name is close."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def is_bool(text: str) -> bool:
    """Return whether ``text`` spells a boolean."""
    return text.strip().lower() in TRUE | FALSE


def read_bool(text: str) -> bool:
    """Read 0/1, true/false, yes/no, on/off in any case; ValueError otherwise."""
    if not is_bool(text):
        raise ValueError("expects 0 or 1 (or true, false)")
    return text.strip().lower() in TRUE


def read_int(text: str) -> int:
    """Read an integer, also when written as ``1e5`` or ``32.0``; ValueError otherwise."""
    try:
        return int(text)
    except ValueError:
        number = read_float(text, "expects an integer")
        if number != int(number):
            raise ValueError("expects an integer") from None
        return int(number)


def read_float(text: str, complaint: str = "expects a number") -> float:
    """Read a finite number, a fraction such as ``1/3``, or a percentage such as ``0.1%``; ValueError otherwise."""
    digits = text.strip().removesuffix("%")
    try:
        number = float(Fraction(digits.replace(" ", ""))) if "/" in digits else float(digits)
    except (ValueError, ZeroDivisionError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(complaint)
    return number / 100 if text.strip().endswith("%") else number


def unquote(text: str) -> str:
    """Decode a string that SageMaker has JSON-encoded; return any other string unchanged."""
    if len(text) >= 2 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


READERS: dict[type, Callable[[str], Any]] = {bool: read_bool, int: read_int, float: read_float, str: unquote}


def convert(flag: Flag, value: Any, spelling: str) -> Any:
    """Return ``value`` (text, or a value of a configuration file) as the type of ``flag``; None if it is empty.

    A `ConfigError` begins with ``spelling``, the flag as the user wrote it.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if _is_empty(flag, value):
        return None
    try:
        return [_scalar(flag, item) for item in _items(flag, value)] or None if flag.many else _scalar(flag, value)
    except ValueError as problem:
        raise ConfigError(f"{spelling} {value!r}: {problem}") from None


def _is_empty(flag: Flag, value: Any) -> bool:
    if not isinstance(value, str):
        return value is None
    text = unquote(value).strip()
    # "none" in lower case may be the value of a text flag.
    return text in {"", "None", "null"} or (flag.kind is not str and text.lower() == "none")


def _items(flag: Flag, value: Any) -> list[Any]:
    """Return the items of a list: several words, ``[1, 2]`` as JSON or Python writes it, or ``1,2`` for numbers."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            items = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            items = None
        if not isinstance(items, list):
            raise ValueError("is not a list such as [1, 2]")
        return items
    return value.split(",") if isinstance(value, str) and flag.kind is not str else [value]


def _scalar(flag: Flag, value: Any) -> Any:
    if isinstance(value, list | tuple):
        raise ValueError("expects one value")
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
