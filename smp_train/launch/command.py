"""Other programs, asked and called."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from smp_train.errors import ConfigError

Advice = Sequence[tuple[str, str]]
"""Pairs of a part of an error message, without regard to case, and what to do about it."""


def ask(*command: str, seconds: float = 60) -> tuple[int, str]:
    """Run a command; return (exit code, its output): 124 when it does not end, 127 when it is not there.

    The output is stdout alone where the command succeeds, and both streams where it fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, errors="replace")
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {seconds:g} s"
    except OSError as problem:
        return 127, str(problem)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()


def call(*command: str, text: str, absent: str, advice: Advice) -> subprocess.CompletedProcess[str]:
    """Run a cluster's own command with ``text`` as its input.

    `ConfigError` has the command's own error and what to do about it, or ``absent`` where it is not installed.
    """
    if not shutil.which(command[0]):
        raise ConfigError(f"there is no {command[0]} here; {absent}")
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split()).replace(f"{command[0]}: error: ", "")
        raise ConfigError(f"{command[0]}: {output}{advise(output, advice)}")
    return done


def advise(message: str, advice: Advice) -> str:
    """Return what to do about an error message, to be appended to it; "" where nothing is known."""
    return next((f"; {remedy}" for part, remedy in advice if part.lower() in message.lower()), "")
