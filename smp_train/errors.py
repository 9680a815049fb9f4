"""Expected failures, of input or machine, and their exit codes. Any other exception is a defect and ends in code 1."""

from __future__ import annotations  # the host's Python that runs batch jobs may be 3.8

import re
from collections.abc import Sequence

_URL_SECRETS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?'\"\\@]*@)?([^\s?'\"\\]*)(\?[^\s'\"\\]+)?")

_NO_MEMORY = re.compile(r"OutOfMemoryError|can't allocate memory", re.IGNORECASE)
_SENTENCE = re.compile(r"\. (?:If|See|Error code|Process|Including)")


class SmpTrainError(Exception):
    """A failure with a one-line message: the value, its place, and the remedy."""

    exit_code = 1
    repeats = False
    """Whether another rank has raised, and reports, the same failure."""


class LostPeerError(SmpTrainError):
    """Another rank is gone or cannot be reached; this rank does not know why."""


class ConfigError(SmpTrainError):
    """Bad arguments, a bad combination of arguments, or an environment that does not fit them."""

    exit_code = 2


class DataError(SmpTrainError):
    """Data that is missing, unreadable or malformed; the message names file and line."""

    exit_code = 3


class CheckpointError(SmpTrainError):
    """A checkpoint that is missing, damaged, unwritable, or saved from a different model."""

    exit_code = 4


CAUSE_VARIABLE = "SMP_TRAIN_CAUSE_FILE"
"""Environment variable with the file in which a process reports to its launcher a cause that no exit code shows."""
LOST_PEER = "lost-peer"

EXIT_CODES: dict[int, type[SmpTrainError]] = {
    cls.exit_code: cls for cls in (SmpTrainError, ConfigError, DataError, CheckpointError)
}


def one_line(failure: BaseException) -> str:
    """Return the message of a library's exception in one line, or the exception's type if the message is empty.

    If the exception wraps a failed import, return the message of that import.
    """
    failure = _failed_import(failure) or failure
    return " ".join(str(failure).split()) or type(failure).__name__


def first_few(items: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """Return the first items, and the number of further items, for a message."""
    more = len(items) - most
    return separator.join(items[:most]) + (f" and {more} more" if more > 0 else "")


def no_memory(failure: BaseException) -> str | None:
    """Return the first sentence of the allocator's message if memory ran out, else None.

    On a GPU torch raises OutOfMemoryError; on a CPU it raises RuntimeError with the allocator's message.
    """
    text = one_line(failure)
    if isinstance(failure, MemoryError) or _NO_MEMORY.search(f"{type(failure).__name__}: {text}"):
        return _SENTENCE.split(text)[0]
    return None


def first_line(failure: BaseException) -> str:
    """Return the first line of a library's exception, or the exception's type if its message is empty."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def install(extras: str) -> str:
    """Return the command that installs extras of this package. No package index has this package."""
    return f"pip install '.[{extras}]' in smp-train's checkout"


def redacted(text: str) -> str:
    """Return ``text`` without user names, passwords and queries (which may be signatures) in URLs."""
    return _URL_SECRETS.sub(lambda url: f"{url[1]}{'...@' if url[2] else ''}{url[3]}{'?...' if url[4] else ''}", text)


def explained(failure: Exception) -> Exception:
    """Return `ConfigError` if an installed package cannot be imported, else ``failure`` itself.

    A new start in the same image or environment would fail again, so launchers must not retry.
    """
    failed_import = None if isinstance(failure, SmpTrainError) else _failed_import(failure)
    if failed_import is None or (getattr(failed_import, "name", None) or "").startswith("smp_train"):
        return failure
    error = ConfigError(
        f"this environment, or image, is broken: {type(failed_import).__name__}: {one_line(failed_import)}; "
        "install the package again, or take another image"
    )
    error.__cause__ = failure
    return error


def _failed_import(failure: BaseException) -> BaseException | None:
    """Return the first cause of a failure to import a package or to load its library; None for other failures."""
    importing = False
    while True:
        # transformers wraps the exception of an import: in RuntimeError up to 4, in ModuleNotFoundError since 5.
        importing |= isinstance(failure, ImportError) or "Failed to import" in str(failure)
        importing |= isinstance(failure, OSError) and "shared object" in str(failure)
        if failure.__cause__ is None:
            return failure if importing else None
        failure = failure.__cause__
