"""Expected failures, of input or machine, and their exit codes. Any other exception is a defect and ends in code 1."""

from __future__ import annotations  # the host's Python that runs batch jobs may be 3.8

import re
from collections.abc import Sequence

_URL_SECRETS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)([^\s/?'\"\\@]*@)?([^\s?'\"\\]*)(\?[^\s'\"\\]+)?")

_NO_MEMORY = re.compile(r"OutOfMemoryError|can't allocate memory", re.IGNORECASE)
_SENTENCE = re.compile(r"\. (?:If|See|Error code|Process|Including)")


class SmpTrainError(Exception):
    """A failure with a one-line message that says what, where, and what to do about it."""

    exit_code = 1


class LostPeerError(SmpTrainError):
    """Another rank is gone or cannot be reached, for a reason this rank does not know."""


class ConfigError(SmpTrainError):
    """Bad arguments, a bad combination of them, or an environment that does not fit them."""

    exit_code = 2


class DataError(SmpTrainError):
    """Data that is missing, unreadable or malformed; the message names file and line."""

    exit_code = 3


class CheckpointError(SmpTrainError):
    """A checkpoint that is missing, damaged, unwritable, or of another model."""

    exit_code = 4


CAUSE_VARIABLE = "SMP_TRAIN_CAUSE_FILE"
"""Names the file in which a process leaves the cause for its launcher, where its exit code does not suffice."""
LOST_PEER = "lost-peer"

EXIT_CODES: dict[int, type[SmpTrainError]] = {
    cls.exit_code: cls for cls in (SmpTrainError, ConfigError, DataError, CheckpointError)
}


def one_line(failure: BaseException) -> str:
    """Return the message of another library's exception in one line, or its type where the message is empty.

    Where the exception wraps a failed import, the message of that import is returned.
    """
    failure = _broken_import(failure) or failure
    return " ".join(str(failure).split()) or type(failure).__name__


def first_few(items: Sequence[str], separator: str = ", ", most: int = 3) -> str:
    """Return the first items for a message, and how many there are besides."""
    more = len(items) - most
    return separator.join(items[:most]) + (f" and {more} more" if more > 0 else "")


def no_memory(failure: BaseException) -> str | None:
    """Return what an allocator says in one sentence where memory ran out; None for another failure.

    torch has an exception of its own on a GPU; on a CPU only the message of its allocator tells.
    """
    text = one_line(failure)
    if isinstance(failure, MemoryError) or _NO_MEMORY.search(f"{type(failure).__name__}: {text}"):
        return _SENTENCE.split(text)[0]
    return None


def first_line(failure: BaseException) -> str:
    """Return the first line of the message of another library's exception, or its type where the message is empty."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]


def install(extras: str) -> str:
    """Return the command that installs extras of this package, which is on no package index."""
    return f"pip install '.[{extras}]' in smp-train's checkout"


def redacted(text: str) -> str:
    """Return ``text`` without user names, passwords and queries (which may be signatures) in URLs."""
    return _URL_SECRETS.sub(lambda url: f"{url[1]}{'...@' if url[2] else ''}{url[3]}{'?...' if url[4] else ''}", text)


def explained(failure: Exception) -> Exception:
    """Return `ConfigError` where an installed package cannot be imported, else ``failure`` itself.

    A retry of the same image or environment would fail again, so launchers must not retry.
    """
    broken = None if isinstance(failure, SmpTrainError) else _broken_import(failure)
    if broken is None or (getattr(broken, "name", None) or "").startswith("smp_train"):
        return failure
    error = ConfigError(
        f"this environment, or image, is broken: {type(broken).__name__}: {' '.join(str(broken).split())}; "
        "install the package again, or take another image"
    )
    error.__cause__ = failure
    return error


def _broken_import(failure: BaseException) -> BaseException | None:
    """Return the first cause of a failure to import a package or to load its library; None for other failures."""
    of_import = False
    while True:
        # transformers wraps what an import raised: in RuntimeError up to 4, in ModuleNotFoundError since 5.
        of_import = of_import or isinstance(failure, ImportError) or "Failed to import" in str(failure)
        of_import = of_import or (isinstance(failure, OSError) and "shared object" in str(failure))
        if failure.__cause__ is None:
            return failure if of_import else None
        failure = failure.__cause__
