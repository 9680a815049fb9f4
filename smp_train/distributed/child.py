"""A child process that takes one request from a rank, answers in lines of JSON, and ends when the rank ends.

Answers go to a separate file, since the log, model code, NCCL and forked workers write to stdout.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from smp_train.distributed.host import python_path


@contextmanager
def started(
    module: str, request: dict[str, Any], answers: Path, log: Path, **environ: str
) -> Iterator[subprocess.Popen[str]]:  # fmt: skip
    """Start ``python -m module`` with a request, which the module reads by `served`; kill it when the context ends.

    The file ``answers`` gets its answers, and ``log`` everything else that it writes.
    """
    with ExitStack() as opened:
        answers_file, log_file = (opened.enter_context(path.open("w", encoding="utf-8")) for path in (answers, log))
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(answers_file.fileno())], pass_fds=[answers_file.fileno()],
            stdin=subprocess.PIPE, stdout=log_file, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **environ},
        )  # fmt: skip
        opened.callback(child.communicate)  # closes the child's stdin and waits for its end
        opened.callback(child.kill)
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # the child has already ended
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        yield child


def served() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """Return the request and a function that writes an answer; from now on this process ends when the rank ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_rank, daemon=True).start()
    return request, lambda answer: print(json.dumps(answer), file=answers, flush=True)


def _end_with_rank() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the rank has closed the pipe or has died
    os._exit(1)


def end_with_parent() -> None:
    """Let this process of `multiprocessing` end when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
