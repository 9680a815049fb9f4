"""SMP's logger."""

import logging


def get_logger() -> logging.Logger:
    """Return the logger."""
    return logging.getLogger("smp-standin")
