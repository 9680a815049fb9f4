"""The parser of a verb that has flags of its own beside those of a run."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from smp_train.errors import ConfigError


class VerbParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are `ConfigError`: one line and exit code 2, as for any other mistake."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument; a switch, whose choices are 0 and 1, is 1 where nothing follows it."""
        if options.get("choices") == (0, 1):
            options = {"nargs": "?", "const": 1, **options}
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")
