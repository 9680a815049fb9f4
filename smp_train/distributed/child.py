"""A process that a rank starts beside itself: it takes one request, answers in lines of JSON, and ends with the rank.

Answers have a descriptor of their own, as the log, model code, NCCL and forked workers write to stdout.
"""

from __future__ import annotations

import json
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
    """Start ``python -m module`` with a request, which it takes by `served`; on leaving, kill it.

    Its answers go to one file and all else that it writes to another, which are emptied first.
    """
    with ExitStack() as opened:
        out, other = (opened.enter_context(path.open("w", encoding="utf-8")) for path in (answers, log))
        child = subprocess.Popen(
            [sys.executable, "-m", module, str(out.fileno())], pass_fds=[out.fileno()], stdin=subprocess.PIPE,
            stdout=other, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **environ},
        )  # fmt: skip
        opened.callback(child.communicate)  # which closes its stdin and waits
        opened.callback(child.kill)
        assert child.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: its exit code says so
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        yield child


def served() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """Return the request and what writes an answer; from then on this process ends when the rank does, however."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_rank, daemon=True).start()
    return request, lambda answer: print(json.dumps(answer), file=answers, flush=True)


def _end_with_rank() -> None:
    os.read(sys.stdin.fileno(), 1)  # returns when the rank's end of the pipe is closed
    os._exit(1)
