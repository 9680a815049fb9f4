"""Logging: each rank's handlers, the two log lines that dashboards parse, and their regular expressions.

Imports no torch: the launchers pass `METRIC_DEFINITIONS` to SageMaker from machines without it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smp_train.distributed import ALL_RANKS
from smp_train.errors import ConfigError, redacted
from smp_train.progress import without_bars

_FORMAT = "%(asctime)s %(levelname).1s [%(module)s] %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"

_NUMBER = r"([-+]?[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?)"

# SageMaker searches every log line for each expression and keeps the first group. "nan" and "inf" do not match.
METRIC_DEFINITIONS: tuple[dict[str, str], ...] = (
    {"Name": "train:loss", "Regex": rf"Batch [0-9]+ Loss: {_NUMBER}"},
    {"Name": "train:samples_per_sec", "Regex": rf"Speed: {_NUMBER} samples/sec"},
    {"Name": "train:tflops_per_gpu", "Regex": rf"Model TFLOPS/GPU: {_NUMBER}"},
    {"Name": "train:lr", "Regex": rf"lr: {_NUMBER}"},
    {"Name": "train:grad_norm", "Regex": rf"gradnorm: {_NUMBER}"},
    {"Name": "train:tokens_per_sec_per_device", "Regex": rf"tokens/sec/device: {_NUMBER}"},
    {"Name": "train:mfu_percent", "Regex": rf"MFU: {_NUMBER}%"},
    {"Name": "train:memory_gib", "Regex": rf"memory: {_NUMBER} GiB"},
    {"Name": "validation:perplexity", "Regex": rf"Validation loss: .*perplexity: {_NUMBER}"},
    {"Name": "validation:loss", "Regex": rf"Batch [0-9]+ Validation loss: {_NUMBER}"},
)


class _Formatter(logging.Formatter):
    """Removes possible secrets in URLs from log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _Console(logging.StreamHandler):
    """Writes log lines above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with without_bars(self.stream):
            super().emit(record)


class _LogFile(logging.FileHandler):
    """Logs one warning if the file cannot be written; Python would print a traceback for every record."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        failure = sys.exc_info()[1]
        if not isinstance(failure, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            get_logger().warning("%s: log lines are being lost (%s)", self.baseFilename, failure.strerror)

    def close(self) -> None:
        with suppress(OSError):  # `handleError` has logged the loss
            super().close()


def get_logger() -> logging.Logger:
    """Return the package's logger. Silent below warnings until `setup_logging` has run."""
    return logging.getLogger("smp_train")


def setup_logging(rank: int, *, log_dir: str | Path | None = None, level: int | str = logging.INFO) -> None:
    """Set the handlers of the package's log; a later call replaces them.

    Rank 0 writes to stdout. Every other rank writes only warnings and errors, to stderr, prefixed with its number, and
    leaves out messages that all ranks log (`ALL_RANKS`). With ``log_dir`` each rank also appends all its lines to
    ``<log_dir>/rank-<rank>.log``. Raises `ConfigError` if that file cannot be opened.
    """
    logger = get_logger()
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = False

    console: logging.Handler
    if rank == 0:
        console = _Console(sys.stdout)
        console.setFormatter(_Formatter(_FORMAT, _TIME))
    else:
        console = _Console(sys.stderr)
        console.setLevel(logging.WARNING)
        console.addFilter(lambda record: not ALL_RANKS.keys() <= record.__dict__.keys())
        console.setFormatter(_Formatter(f"rank {rank}: {_FORMAT}", _TIME))
    logger.addHandler(console)

    if log_dir is not None:
        path = Path(log_dir) / f"rank-{rank}.log"
        with writing(path, "the log"):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _LogFile(path, encoding="utf-8")
        file.setFormatter(_Formatter(_FORMAT, _TIME))
        logger.addHandler(file)


@contextmanager
def writing(path: str | Path, content: str, flag: str = "--run_dir") -> Iterator[None]:
    """Raise a `ConfigError` that proposes another value of ``flag`` if the body cannot write ``content``."""
    try:
        yield
    except OSError as failure:
        raise ConfigError(f"{path}: cannot write {content} ({failure.strerror}); set {flag}") from None


def batch_line(record: Mapping[str, Any]) -> str:
    """Return the log line of a step record (see `smp_train.telemetry.metrics`).

    Order and wording up to ``gradnorm`` are the original system's, because dashboards parse them.
    """
    return (
        f"Batch {record['step']} Loss: {_fixed(record.get('loss'), 5)},"
        f" Speed: {_fixed(record.get('samples_per_sec'), 2)} samples/sec,"
        f" Model TFLOPS/GPU: {_fixed(record.get('tflops_per_device'), 2)},"
        f" lr: {_rate(record.get('lr'))},"
        f" gradnorm: {_fixed(record.get('grad_norm'), 4)},"
        f" tokens/sec/device: {_fixed(record.get('tokens_per_sec_per_device'), 1)},"
        f" MFU: {_fixed(record.get('mfu'), 1, scale=100, unit='%')},"
        f" memory: {_fixed(record.get('memory_gib'), 2, unit=' GiB')}"
    )


def validation_line(step: int, loss: float) -> str:
    """Return the log line of a validation: its loss in nats per counted token, and the perplexity."""
    return f"Batch {step} Validation loss: {_fixed(loss, 5)}, perplexity: {_fixed(perplexity(loss), 2)}"


def perplexity(loss: float) -> float:
    """Return e to the power of a loss in nats per token, at most e^20, as Megatron-LM does; nan stays nan."""
    return math.exp(min(loss, 20.0))


def _fixed(value: float | None, digits: int, *, scale: float = 1, unit: str = "") -> str:
    return "n/a" if value is None else f"{value * scale:.{digits}f}{unit}"


def _rate(value: float | None) -> str:
    """Return a learning rate with six decimals, as the original logs it, or with an exponent below 1e-5."""
    if value is None:
        return "n/a"
    return f"{value:.6f}" if value == 0 or not math.isfinite(value) or abs(value) >= 1e-5 else f"{value:.3e}"
