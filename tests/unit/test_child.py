"""A process beside a rank's own: what it answers, and that it ends with the rank."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from smp_train.distributed.host import python_path

# It prints as model code, libraries and other processes do, and would never end by itself.
CHILD = """
import os, threading
print("imported")
from smp_train.distributed import child
request, answer = child.served()
print("model code")
os.system("echo library")
answer({"pid": os.getpid()})
answer(request)
alive = os.open(request["alive"], os.O_WRONLY)
threading.Event().wait()
"""
RANK = """
import sys, threading
from pathlib import Path
from smp_train.distributed import child
answers, log, alive = map(Path, sys.argv[1:])
with child.started("beside", {"alive": str(alive)}, answers, log):
    threading.Event().wait()
"""


def test_only_answers_are_among_its_answers_and_a_rank_that_is_killed_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(CHILD)
    answers, log, alive = (tmp_path / name for name in ("answers", "log", "alive"))
    os.mkfifo(alive)
    environ = {**os.environ, "PYTHONPATH": f"{python_path()}{os.pathsep}{tmp_path}"}
    with subprocess.Popen([sys.executable, "-c", RANK, answers, log, alive], env=environ) as rank:
        try:
            held = os.open(alive, os.O_RDONLY)  # waits for the child
            lines = answers.read_text().splitlines()
        finally:
            rank.kill()
    ended, _, _ = select.select([held], [], [], 60)
    os.close(held)
    pid, request = map(json.loads, lines)
    if not ended:
        os.kill(pid["pid"], signal.SIGKILL)
    assert ended
    assert request == {"alive": str(alive)}
    assert log.read_text().splitlines() == ["imported", "model code", "library"]
