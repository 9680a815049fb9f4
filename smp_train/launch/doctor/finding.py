"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """A subject, the observation, the remedy, and the level: warn affects some runs, fail stops runs here."""

    name: str
    seen: str
    fix: str = ""
    level: str = OK

    def line(self) -> str:
        """Return the finding as a line for people."""
        return f"{self.level:<5}{self.name}: {self.seen}" + (f"; {self.fix}" if self.fix else "")


ok, warn, fail = Finding, partial(Finding, level=WARN), partial(Finding, level=FAIL)
