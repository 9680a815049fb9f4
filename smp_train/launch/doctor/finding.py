"""The result of one check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """A subject, its level (ok, warn, fail), what was found, and what to do about it."""

    name: str
    level: str
    seen: str
    fix: str = ""

    def line(self) -> str:
        """Return it as people read it."""
        return f"{self.level:<5}{self.name}: {self.seen}" + (f"; {self.fix}" if self.fix else "")


def _of(level: str) -> Callable[..., Finding]:
    return lambda name, seen, fix="": Finding(name, level, seen, fix)


ok, warn, fail = _of(OK), _of(WARN), _of(FAIL)
"""Findings that need no action, that affect some runs, and that stop runs on this machine."""
