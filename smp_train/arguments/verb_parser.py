"""The parser of a verb that has flags of its own beside those of a run."""

from __future__ import annotations

import argparse
from typing import NoReturn

from smp_train.errors import ConfigError


class VerbParser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` whose errors are `ConfigError`: one line and exit code 2, as for any other mistake."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`."""
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")
