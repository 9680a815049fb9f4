"""Failing ranks: reports to peers and launcher, and processes that died without a report. The first failure is named.

Peers read the report in the store where the ranks met. torchrun reads ``TORCHELASTIC_ERROR_FILE``, in the format of
torch's ``distributed.elastic.multiprocessing.errors.ErrorHandler``, and takes the earliest failure for the cause.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from smp_train.distributed import agree, group, heartbeat
from smp_train.errors import CAUSE_VARIABLE, LOST_PEER, LostPeerError

T = TypeVar("T")

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FIRST = "failed"
"""Key in the store: the message of the rank that failed first; ranks that only lost a peer do not set it."""
SURVIVORS = "lost"
"""Key in the store: the ranks that have lost a connection."""
PATIENCE_SECONDS = group.ANSWER_SECONDS
"""How long survivors wait for each other before they name the silent ranks."""
POLL_SECONDS = 0.05
GIVE_WAY_SECONDS = 5.0
"""Wait of a rank that ends because of another rank: some launchers blame the first process that ends."""
DUMP_BYTES = 1 << 16
"""Number of bytes at the end of a log in which to look for a stack."""
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d ", re.MULTILINE)
_FUNCTION = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')
LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|socket|remote process exited", re.IGNORECASE
)
"""Matches messages of communication libraries about a peer that is gone or silent."""



def lost_peer(failure: BaseException) -> bool:
    """Return whether this rank failed because it lost another rank, whose own message gives the cause."""
    if isinstance(failure, LostPeerError):
        return True
    return isinstance(failure, RuntimeError) and agree.world_size() > 1 and bool(LOST.search(str(failure)))


def write_error_file(text: str, code: int, callstack: str = "") -> None:
    """Write the failure to torchrun's error file, if torchrun started this process; never raises."""
    extra = {"py_callstack": callstack or text, "timestamp": str(int(time.time())), "rank": os.environ.get("RANK")}
    _write(ERROR_FILE, json.dumps({"message": {"message": text, "errorCode": code, "extraInfo": extra}}))


def give_way(text: str, *, wait: bool = True) -> None:
    """Report to the launcher that this rank ends for the reason ``text``, which another rank has reported."""
    if wait:
        time.sleep(GIVE_WAY_SECONDS)
    write_error_file(text, 1)
    write_cause()


def write_cause() -> None:
    """Report to the launcher that this rank ends because another rank failed; never raises."""
    _write(CAUSE_VARIABLE, LOST_PEER)


def _write(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(text)


def tell_peers(text: str) -> None:
    """Write this rank's failure to the store, unless another rank failed before; never raises."""
    if (met := group.meeting()) is not None:
        text = f"rank {met.runtime.rank} on {met.runtime.hostname} failed: {text}"
        with suppress(Exception):  # the store is gone if rank 0 is
            within(2 * PATIENCE_SECONDS, lambda: met.store.compare_set(FIRST, "", text))


def first_failure() -> str:
    """Return which rank failed before this rank lost its connection; "" if the store does not show it."""
    if (met := group.meeting()) is None:
        return ""
    try:
        return within(3 * PATIENCE_SECONDS, lambda: _ask_store(met))
    except Exception:  # the rank or agent that serves the store is gone
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (killed := dead_ranks(met.runtime.hostname)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # a killed process closes its connections before it disappears
        return killed or f"the store at {met.runtime.master_addr}:{met.runtime.master_port} does not answer"


def _ask_store(met: group.Meeting) -> str:
    """Wait until a rank has reported its failure, or every rank has lost a connection; else name the silent ranks."""
    store = met.store
    store.append(SURVIVORS, f"{met.runtime.rank} ")
    silent = [met.runtime.rank]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while silent and time.monotonic() < deadline and not store.check([FIRST]):
        survivors = set(map(int, store.get(SURVIVORS).split()))
        silent = [rank for rank in range(met.runtime.world_size) if rank not in survivors]
        if killed := dead_ranks(met.runtime.hostname, survivors):
            return str(store.compare_set(FIRST, "", killed).decode())  # the other nodes read this key, too
        time.sleep(POLL_SECONDS)
    if store.check([FIRST]):
        return str(store.get(FIRST).decode())
    if not silent:
        return ""
    # If several ranks are silent, one has failed; the other ranks still wait in a collective and have seen no error.
    names = [f"{rank} on {store.get(f'here/{rank}').decode()}" for rank in silent[:8]]
    silent_ranks = f"ranks {', '.join(names)}, one of which was" if len(silent) > 1 else f"rank {names[0]}, which was"
    return f"no word from {silent_ranks} killed, hangs or is cut off"


def dead_ranks(host: str, alive: Iterable[int] = ()) -> str:
    """Return which of this node's ranks died without a report, and in which step; ranks in ``alive`` did not."""
    if (board := heartbeat.board) is None:
        return ""
    deaths = []
    for beat in board.read():
        if beat.phase != heartbeat.END and beat.rank not in alive and process_state(beat.pid) == "gone":
            crash = crash_in(board.log(beat.rank))
            death, line = ("crashed", f", at {crash}") if crash else ("was killed", "")
            phase = heartbeat.PHASES[beat.phase]
            deaths.append(f"rank {beat.rank} on {host} {death} in step {beat.step}, {phase}{line}")
    return ", ".join(deaths)


def process_state(pid: int) -> str:
    """Return ``gone``, ``stopped`` or ``blocked`` (in the kernel); "" for a process that may run, or is unknown."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if os.path.exists("/proc/self/stat") else ""
    except OSError:
        return "gone"  # the process ended during the read
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped", "D": "blocked"}.get(letter, "")


def crash_in(log: Path) -> str:
    """Return where and why a process crashed, if its log ends with the crash; else ""."""
    _, crash, dump = _end_of(log).rpartition("Fatal Python error: ")
    if not crash or _LOGGED.search(dump):  # log lines follow: the crash was in an earlier start
        return ""
    stack = _innermost(dump.partition("urrent thread 0x")[2].partition("\n\n")[0])
    return f"{stack or 'no line of Python'} ({dump.partition(chr(10))[0]})"


def stack_in(log: Path) -> str:
    """Return the main thread's innermost functions in the last stacks that `faulthandler` wrote after a time-out."""
    return _innermost(_end_of(log).rpartition("Timeout (")[2].rpartition("hread 0x")[2])


def _end_of(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - DUMP_BYTES))
        return file.read().decode(errors="replace")
    return ""


def _innermost(dump: str) -> str:
    """Return the innermost two functions of a stack that `faulthandler` wrote."""
    return " < ".join(f"{name} ({os.path.basename(path)}:{line})" for path, line, name in _FUNCTION.findall(dump)[:2])


def start_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a thread that does not keep the process alive; return its future."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as failure:
            result.set_exception(failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, or raise `TimeoutError`: torch waits forever for a stopped server."""
    result = start_thread(work, "smp-train-store")
    if not wait([result], seconds).done:
        raise TimeoutError
    return result.result()
