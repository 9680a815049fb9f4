"""What a failing rank leaves for its peers and its launcher, so that the rank that failed first is the one named.

Peers read it in the store where the ranks met. torchrun reads ``TORCHELASTIC_ERROR_FILE``, in the format of torch's
``distributed.elastic.multiprocessing.errors.ErrorHandler``, and takes the failure with the earliest time for the cause.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from smp_train.distributed import group, heartbeat
from smp_train.distributed.agree import unless
from smp_train.errors import CAUSE_VARIABLE, LOST_PEER

T = TypeVar("T")

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FIRST = "failed"
"""Key of the message of the first rank with an error of its own."""
SURVIVORS = "lost"
"""Key of the ranks that have lost a connection, in the order in which they noticed."""
PATIENCE_SECONDS = group.ANSWER_SECONDS
"""How long survivors wait for each other before they name the silent ranks."""
POLL_SECONDS = 0.05


def write_error_file(text: str, code: int, callstack: str = "") -> None:
    """Write the failure where torchrun looks for it, if torchrun started this process; never raises."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": callstack or text, "timestamp": str(int(time.time())), "rank": os.environ.get("RANK")}
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "errorCode": code, "extraInfo": extra}}, file)


def write_cause() -> None:
    """Leave word for the launcher that this rank ends because of another; never raises."""
    path = os.environ.get(CAUSE_VARIABLE)
    if path:
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            file.write(LOST_PEER)


def tell_peers(text: str) -> None:
    """Leave in the store why this rank fails, if no other rank was first; never raises."""
    met = group.meeting()
    if met is None:
        return
    text = f"rank {met.runtime.rank} on {met.runtime.hostname} failed: {text}"
    with suppress(Exception):  # rank 0 may be gone, and the store with it
        within(2 * PATIENCE_SECONDS, lambda: met.store.compare_set(FIRST, "", text))


def first_failure() -> str:
    """Return which rank failed before this one lost its connection, as far as the store tells; "" if it does not.

    A silent rank may also wait in a collective for one that has just lost its peer: of several, only one went first.
    """
    met = group.meeting()
    if met is None:
        return ""
    here, port = met.runtime.hostname, met.runtime.master_port
    try:
        return within(3 * PATIENCE_SECONDS, lambda: _ask_store(met))
    except Exception:  # the rank or agent that serves the store is gone
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (killed := heartbeat.killed_here(here)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # a process that is killed closes its connections before it is gone
        return killed or f"the store at {met.runtime.master_addr}:{port} does not answer"


def _ask_store(met: group.Meeting) -> str:
    store = met.store
    store.append(SURVIVORS, f"{met.runtime.rank} ")
    silent = [met.runtime.rank]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while silent and time.monotonic() < deadline and not store.check([FIRST]):
        heard = set(map(int, store.get(SURVIVORS).split()))
        silent = [rank for rank in range(met.runtime.world_size) if rank not in heard]
        if killed := heartbeat.killed_here(met.runtime.hostname, heard):
            return str(store.compare_set(FIRST, "", killed).decode())  # other nodes read it, too
        time.sleep(POLL_SECONDS)
    if store.check([FIRST]):
        return str(store.get(FIRST).decode())
    if not silent:
        return ""
    named = [f"{rank} on {store.get(f'here/{rank}').decode()}" for rank in silent[:8]]
    which = f"ranks {', '.join(named)}, one of which was" if len(silent) > 1 else f"rank {named[0]}, which was"
    return f"no word from {which} killed, hangs or is cut off"


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise `TimeoutError`: torch waits without limit for a server that is stopped."""
    done: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            value = work()
        except Exception as failure:
            done.put(partial(unless, failure, None))
        else:
            done.put(lambda: value)

    threading.Thread(target=run, name="smp-train-store", daemon=True).start()
    try:
        answer = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    return answer()
