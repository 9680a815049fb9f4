"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """A subject, its level (ok, warn, fail), the observation, and the remedy."""

    name: str
    level: str
    seen: str
    fix: str = ""

    def line(self) -> str:
        """Return the finding as a line for people."""
        return f"{self.level:<5}{self.name}: {self.seen}" + (f"; {self.fix}" if self.fix else "")


def ok(name: str, seen: str, fix: str = "") -> Finding:
    """Return a finding that needs no action."""
    return Finding(name, OK, seen, fix)


def warn(name: str, seen: str, fix: str = "") -> Finding:
    """Return a finding that affects some runs."""
    return Finding(name, WARN, seen, fix)


def fail(name: str, seen: str, fix: str = "") -> Finding:
    """Return a finding that stops runs on this machine."""
    return Finding(name, FAIL, seen, fix)
