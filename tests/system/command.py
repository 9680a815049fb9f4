"""Runs smp-train as a user would: a command in processes of its own, read while it runs, and surely ended.

`Command` starts a new interpreter. `warm` runs the same program in a process forked from one that has imported
torch and transformers, with a session, an environment and output files of its own: the same to whoever looks
from outside, but for the seven seconds of imports. `torchrun` is torchrun itself.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.harness import forkserver, free_port

ROOT = Path(__file__).parents[2]
MARK = "SMP_TRAIN_TEST_COMMAND"
POLL_SECONDS = 0.02
PATIENCE_SECONDS = 400.0
"""For what takes seconds on a machine of one's own; less than a test has."""


def environment(folder: Path, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command: this process's, made for tests, with ``changes``."""
    common = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **common, **(changes or {})}


class Command:
    """A command that was started in ``folder``; what it prints lies in files. Leaving the block kills its rest."""

    def __init__(self, folder: Path, words: list[str], changes: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.words = words
        self.mark = uuid.uuid4().hex
        self.stdout = folder / f"stdout-{self.mark[:8]}"
        self.stderr = folder / f"stderr-{self.mark[:8]}"
        self.began = time.monotonic()
        self._start(folder, {**environment(folder, changes), MARK: self.mark})

    def _start(self, folder: Path, environ: dict[str, str]) -> None:
        with self.stdout.open("wb") as out, self.stderr.open("wb") as err:
            self._process: Any = subprocess.Popen(
                self.words, cwd=folder, env=environ, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def out(self) -> str:
        return self.stdout.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.stderr.read_text(errors="replace")

    @property
    def complaints(self) -> list[str]:
        """The lines on stderr that are ours."""
        return [line for line in self.err.splitlines() if line.startswith("smp-train: ")]

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def _ended(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def code(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        if not self._ended(timeout):
            raise self._failure(f"still running after {timeout:.0f} s")
        return int(self._process.returncode)

    def until(self, condition: Callable[[], Any], what: str, timeout: float = PATIENCE_SECONDS) -> Any:
        """Wait until ``condition()`` is true, and return it, while the command is running."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self._ended(POLL_SECONDS)
            # Asked after the end too: what was to be seen may be its last act.
            found = condition()
            if found:
                return found
            if ended:
                raise self._failure(f"ended with code {self.code()} before {what}")
            if time.monotonic() > deadline:
                raise self._failure(f"no {what} after {timeout:.0f} s")

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the command that are alive, in whatever session."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self, number: int) -> int:
        """Return the process id of a rank under torchrun."""
        for process in self.processes():
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(number):
                    return int(process.pid)
        raise self._failure(f"there is no process of rank {number}")

    def signal(self, number: signal.Signals, *, rank: int | None = None) -> None:
        """Send a signal to the process that was started, or to one rank of it."""
        os.kill(self.pid if rank is None else self.rank(rank), number)

    def kill(self) -> None:
        """End every process of the command at once."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        if self._process is not None:
            self._process.kill()
            self._ended(10)

    def _failure(self, what: str) -> AssertionError:
        return AssertionError(
            f"{' '.join(self.words)}\n{what}\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"
        )


class _Warm(Command):
    """A command in a forked process. A process of its own kind has no children, and no marked environment."""

    def _start(self, folder: Path, environ: dict[str, str]) -> None:
        args = (self.words, str(folder), environ, str(self.stdout), str(self.stderr))
        self.stdout.touch()
        self.stderr.touch()
        self._process = forkserver().Process(target=_become, args=args)
        self._process.start()

    def _ended(self, seconds: float) -> bool:
        # Waits for the process itself, where join() would also take the first to be reaped for the end.
        return bool(multiprocessing.connection.wait([self._process.sentinel], seconds))

    def code(self, timeout: float = PATIENCE_SECONDS) -> int:
        if not self._ended(timeout):
            raise self._failure(f"still running after {timeout:.0f} s")
        self._process.join()
        return int(self._process.exitcode)

    def processes(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [] if self._ended(0) else [psutil.Process(self.pid)]
        return []


def _become(words: list[str], folder: str, environ: dict[str, str], out: str, err: str) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # asked for anew, of this environment
    os.umask(int(environ.get("SMP_TRAIN_TEST_UMASK", "022"), 8))
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    if "SMP_TRAIN_TEST_STDIN" in environ:
        os.dup2(os.open(environ["SMP_TRAIN_TEST_STDIN"], os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0)
    if "SMP_TRAIN_TEST_MEMORY" in environ:  # more than is taken now
        most = psutil.Process().memory_info().vms + int(environ["SMP_TRAIN_TEST_MEMORY"])
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    sys.path.insert(0, str(ROOT))
    sys.argv = ["smp-train", *words]
    try:
        if words[0].endswith(".py"):
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module("smp_train", run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def warm(folder: Path, *words: str, environ: Mapping[str, str] | None = None) -> Command:
    """Start ``python -m smp_train WORDS`` in a forked process, or ``python WORDS`` where the first is a script."""
    return _Warm(folder, list(words), environ)


def torchrun(folder: Path, world: int, *words: str, environ: Mapping[str, str] | None = None) -> Command:
    """Start ``torchrun --nproc_per_node WORLD -m smp_train WORDS``."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    # How long it waits for ranks that it has asked to stop: by itself 30 s.
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{PATIENCE_SECONDS:.0f}"}
    return Command(folder, [*launcher, "-m", "smp_train", *words], {**patience, **(environ or {})})


class Ranks:
    """One warm command per rank, as some launcher would have started them on one node; a context manager."""

    def __init__(
        self, folder: Path, world: int, *words: str, launcher: Callable[[int, int, int], dict[str, str]]
    ) -> None:
        port = free_port()
        self.ranks = [warm(folder, *words, environ=launcher(rank, world, port)) for rank in range(world)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()

    def __getitem__(self, rank: int) -> Command:
        return self.ranks[rank]

    def codes(self, timeout: float = PATIENCE_SECONDS) -> list[int]:
        """Wait for the end of all and return their exit codes, by rank."""
        return [rank.code(timeout) for rank in self.ranks]

    @property
    def err(self) -> str:
        return "".join(rank.err for rank in self.ranks)


def write_shard(path: Path, rows: int, *, tokens: int = 16, vocab: int = 256, first: int = 0) -> None:
    """Write a shard of ``rows`` rows, each unlike the others, counting from ``first``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in range(first, first + rows):
            ids = [(row * 31 + place * 7 + row * place) % vocab for place in range(tokens)]
            file.write(json.dumps({"input_ids": ids, "attention_mask": [1] * tokens}) + "\n")
