"""Reports of a failing rank to its peers and its launcher, so that the first failing rank is named.

Peers read the report in the store where the ranks met. torchrun reads ``TORCHELASTIC_ERROR_FILE``, in the format of
torch's ``distributed.elastic.multiprocessing.errors.ErrorHandler``, and takes the earliest failure for the cause.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from smp_train.distributed import group, heartbeat
from smp_train.errors import CAUSE_VARIABLE, LOST_PEER

T = TypeVar("T")

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FIRST = "failed"
"""Key in the store: the message of the rank that failed first, not because of another rank."""
SURVIVORS = "lost"
"""Key in the store: the ranks that have lost a connection."""
PATIENCE_SECONDS = group.ANSWER_SECONDS
"""How long survivors wait for each other before they name the silent ranks."""
POLL_SECONDS = 0.05


def write_error_file(text: str, code: int, callstack: str = "") -> None:
    """Write the failure to torchrun's error file, if torchrun started this process; never raises."""
    extra = {"py_callstack": callstack or text, "timestamp": str(int(time.time())), "rank": os.environ.get("RANK")}
    _write(ERROR_FILE, json.dumps({"message": {"message": text, "errorCode": code, "extraInfo": extra}}))


def write_cause() -> None:
    """Report to the launcher that this rank ends because another rank failed; never raises."""
    _write(CAUSE_VARIABLE, LOST_PEER)


def _write(variable: str, text: str) -> None:
    if path := os.environ.get(variable):
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(text)


def tell_peers(text: str) -> None:
    """Write this rank's failure to the store, unless another rank failed before; never raises."""
    met = group.meeting()
    if met is None:
        return
    text = f"rank {met.runtime.rank} on {met.runtime.hostname} failed: {text}"
    with suppress(Exception):  # the store is gone if rank 0 is
        within(2 * PATIENCE_SECONDS, lambda: met.store.compare_set(FIRST, "", text))


def first_failure() -> str:
    """Return which rank failed before this rank lost its connection; "" if the store does not show it."""
    met = group.meeting()
    if met is None:
        return ""
    host, port = met.runtime.hostname, met.runtime.master_port
    try:
        return within(3 * PATIENCE_SECONDS, lambda: _ask_store(met))
    except Exception:  # the rank or agent that serves the store is gone
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (killed := heartbeat.killed_here(host)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # a killed process closes its connections before it disappears
        return killed or f"the store at {met.runtime.master_addr}:{port} does not answer"


def _ask_store(met: group.Meeting) -> str:
    """Wait until a rank has reported its failure, or every rank has lost a connection; else name the silent ranks."""
    store = met.store
    store.append(SURVIVORS, f"{met.runtime.rank} ")
    silent = [met.runtime.rank]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while silent and time.monotonic() < deadline and not store.check([FIRST]):
        survivors = set(map(int, store.get(SURVIVORS).split()))
        silent = [rank for rank in range(met.runtime.world_size) if rank not in survivors]
        if killed := heartbeat.killed_here(met.runtime.hostname, survivors):
            return str(store.compare_set(FIRST, "", killed).decode())  # other nodes read it too
        time.sleep(POLL_SECONDS)
    if store.check([FIRST]):
        return str(store.get(FIRST).decode())
    if not silent:
        return ""
    # If several ranks are silent, one has failed, and the rest still wait in a collective for its peers.
    names = [f"{rank} on {store.get(f'here/{rank}').decode()}" for rank in silent[:8]]
    silent_ranks = f"ranks {', '.join(names)}, one of which was" if len(silent) > 1 else f"rank {names[0]}, which was"
    return f"no word from {silent_ranks} killed, hangs or is cut off"


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``, or raise `TimeoutError`: torch waits forever for a stopped server."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as failure:
            result.set_exception(failure)

    threading.Thread(target=run, name="smp-train-store", daemon=True).start()
    return result.result(timeout=seconds)
