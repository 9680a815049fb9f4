"""Run other programs, and report to the user. Standard library only, Python 3.8 or newer: batch jobs import it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from smp_train.errors import ConfigError


def say(line: str) -> None:
    """Print a line on stderr."""
    print(f"smp-train: {line}", file=sys.stderr, flush=True)


def node_name() -> str:
    """Return this node's name: Slurm's name if Slurm started this process, else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def ignore_sigterm() -> None:
    """Ignore SIGTERM in a child process: Slurm sends it to all processes of a batch job that it requeues."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent(*ignored: int) -> None:
    """In the child: end with the supervisor, however that ends, and ignore requests to stop during start-up.

    SIGUSR1 and SIGUSR2 would kill the program before it has its handlers; ignored signals stay ignored over exec.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, *ignored):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent


def replace_rank() -> None:
    """In a replacement: as `die_with_parent`, and a request to stop must not kill it while its peers wait for it."""
    die_with_parent(signal.SIGTERM)


def ask(*command: str, seconds: float = 60, survives: bool = False) -> tuple[int, str]:
    """Run a command and return (exit code, output): code 124 on a time-out, 127 if the program is not installed.

    The output is stdout after success, stdout and stderr after a failure. A command that ``survives`` ignores SIGTERM.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=seconds, errors="replace",
            preexec_fn=ignore_sigterm if survives else None,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {seconds:g} s"
    except OSError as problem:
        return 127, str(problem)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()


def call(
    *command: str, text: str, absent: str, advice: Sequence[tuple[str, str]]
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a cluster's command with ``text`` as its input.

    Raises:
        ConfigError: with the command's own error and its remedy from ``advice``, or ``absent`` if it is not installed.
    """
    if not shutil.which(command[0]):
        raise ConfigError(f"there is no {command[0]} here; {absent}")
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split()).replace(f"{command[0]}: error: ", "")
        raise ConfigError(f"{command[0]}: {output}{advise(output, advice)}")
    return done


def advise(message: str, advice: Sequence[tuple[str, str]]) -> str:
    """Return "; " and the remedy for the first part in ``advice`` that ``message`` contains; "" if there is none."""
    return next((f"; {remedy}" for part, remedy in advice if part.lower() in message.lower()), "")
