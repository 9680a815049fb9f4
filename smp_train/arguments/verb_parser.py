"""The parser of a verb's own flags, for verbs other than ``train``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn

from smp_train.errors import ConfigError


def at_least(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return the ``type`` of an argument that is a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        if not least <= int(text) <= most:
            limit = f" and at most {most}" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}{limit}")
        return int(text)

    read.__name__ = "int"  # argparse shows it if the text is no number
    return read


def positive(text: str) -> float:
    """Read an argument that is a finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and finite")
    return float(text)


def parser_with_train_flags(verb: str, about: str, examples: str) -> VerbParser:
    """Return a parser of a verb's own flags, for a verb that also takes flags of ``train``, such as ``examples``."""
    return VerbParser(
        prog=f"smp-train {verb}", description=about, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"all other flags are those of `smp-train train`, such as {examples}",
    )  # fmt: skip


class VerbParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises `ConfigError`, so that a mistake is one line with exit code 2."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument. A switch (choices 0 and 1) without a value means 1. A repeated list is extended."""
        if options.get("nargs") == "+":
            options = {"action": "extend", **options}
        if options.get("choices") == (0, 1):
            options = {"nargs": "?", "const": 1, **options}
        return super().add_argument(*names, **options)

    def format_help(self) -> str:
        """Return the help without the double backquotes of docstrings."""
        return super().format_help().replace("``", "`")

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")
