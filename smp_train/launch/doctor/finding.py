"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is (ok, warn, fail), what was seen, and what to do about it."""

    name: str
    level: str
    seen: str
    fix: str = ""

    def line(self) -> str:
        """Return it as people read it."""
        return f"{self.level:<5}{self.name}: {self.seen}" + (f"; {self.fix}" if self.fix else "")


def ok(name: str, seen: str, fix: str = "") -> Finding:
    """Return a finding that needs nothing; ``fix`` is what could be had besides."""
    return Finding(name, OK, seen, fix)


def warn(name: str, seen: str, fix: str) -> Finding:
    """Return a finding that some runs will suffer from."""
    return Finding(name, WARN, seen, fix)


def fail(name: str, seen: str, fix: str) -> Finding:
    """Return a finding that stops what this machine is evidently there for."""
    return Finding(name, FAIL, seen, fix)
