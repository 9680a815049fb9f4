"""SMP's logger."""

import logging


class _Logger(logging.Logger):
    def off(self) -> None:
        """Say nothing from now on."""
        self.setLevel(logging.CRITICAL + 1)


_logger = _Logger("smp-standin")


def get_logger() -> logging.Logger:
    """Return the logger."""
    return _logger
