"""Runs a function on N processes, as a launcher would start them, and hands back what each returned.

The processes are forked from a server that has already imported torch and transformers, so a case costs
milliseconds to start rather than seconds. Each gets the environment that torchrun would set.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import pkgutil
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# Imported once for all cases: what a rank imports itself costs it more than its training.
PRELOAD = [
    "smp_train.train_lib",
    *(
        module.name
        for floor in ("backends", "parallel", "models", "checkpoints", "data", "launch", "telemetry")
        for module in pkgutil.walk_packages([str(ROOT / "smp_train" / floor)], f"smp_train.{floor}.")
    ),
    "torch.nn.attention.bias",
    "torch.utils.serialization.config",
    *(
        f"transformers.models.{family}.modeling_{family}"
        for family in ("falcon", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "phi")
    ),
    "pytest",
    "hypothesis",
    "tests.warm",
]


REPORT_SECONDS = 30.0
"""For the peers of a failed rank to come to their own end, on a machine that others use too."""


class RankFailed(AssertionError):
    """A rank raised, died, or was still running when its time was up."""


# Below those that Linux gives to whoever asks for any.
_FIRST_PORT = random.SystemRandom().randrange(26000, 32000)
_PORTS = itertools.cycle([*range(_FIRST_PORT, 32000), *range(26000, _FIRST_PORT)])
_KEPT: collections.deque[socket.socket] = collections.deque()


def free_port() -> int:
    """Return a TCP port that nothing listens on, and that nobody is given before a rank comes to listen there.

    This process keeps it: it is neither another's that asks for any, nor that of a test beside this one.
    """
    while True:
        port, kept = next(_PORTS), socket.socket()
        try:
            kept.bind(("", port))
        except OSError:
            kept.close()
            continue
        # Whoever sets this too, as all that listen here do, may listen where somebody is bound who does not listen.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _KEPT.append(kept)
        if len(_KEPT) > 200:  # of a soak, say: the first ones' ranks are gone by now
            _KEPT.popleft().close()
        return port


@contextlib.contextmanager
def serving_store() -> Iterator[int]:
    """Serve the store through which ranks meet, as torchrun's agent does, and yield its port.

    Ranks that leave then cut nobody off who still connects, and no port is chosen before something listens there.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


def forkserver() -> Any:
    """Return the multiprocessing context whose server has imported torch and transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def as_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun gives to a rank, but for those of an agent that serves the store."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"test-{port}",
    }  # fmt: skip


def _body(function: Callable[..., Any], rank: int, world: int, port: int, out: str, args: tuple, kwargs: dict) -> None:
    os.setpgid(0, 0)
    store = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(as_torchrun(rank, world, port) | store | {"OMP_NUM_THREADS": "1"})
    import torch

    torch.set_num_threads(1)
    faulthandler.enable(sys.stderr, all_threads=True)
    try:
        result = ("ok", function(*args, **kwargs))
    except BaseException as failure:
        result = ("error", f"{type(failure).__name__}: {failure}\n{traceback.format_exc()}")
    path = Path(out) / f"{rank}.pkl"
    scratch = path.with_suffix(".tmp")
    scratch.write_bytes(pickle.dumps(result))
    scratch.rename(path)
    # Exit code 1 for a failed rank lets the parent stop waiting for its peers.
    os._exit(0 if result[0] == "ok" else 1)


def run(function: Callable[..., Any], world: int, *args: Any, timeout: float = 600.0, **kwargs: Any) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world`` processes and return their results, by rank.

    ``function`` must be defined at the top of a module. Raises `RankFailed` with the traceback of the first
    rank that failed; a rank that outlives ``timeout`` seconds is killed, its stacks printed.
    """
    with tempfile.TemporaryDirectory() as out, serving_store() as port:
        context = forkserver()
        ranks = [
            context.Process(target=_body, args=(function, rank, world, port, out, args, kwargs), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        # A failed rank leaves its peers inside a collective: give them a moment to report, then end them.
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode not in (None, 0) for process in ranks):
                deadline = min(deadline, time.monotonic() + REPORT_SECONDS)
            for process in ranks:
                process.join(0.02)
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(ranks[rank].pid, signal.SIGABRT)  # which prints where it is
            ranks[rank].join(2)
            ranks[rank].kill()
            ranks[rank].join()
        results: list[Any] = [None] * world
        problems = []
        for rank in range(world):
            path = Path(out) / f"{rank}.pkl"
            if not path.exists():
                problems.append(f"rank {rank}: no result (exit code {ranks[rank].exitcode}, late: {rank in late})")
                continue
            status, value = pickle.loads(path.read_bytes())
            if status == "ok":
                results[rank] = value
            else:
                problems.insert(0, f"rank {rank}: {value}")
        if problems:
            raise RankFailed("\n".join(problems))
        return results


def same_message(messages: list[str]) -> str:
    """Return the message of a failure, which all but the failing rank prefix with that rank's name."""
    whole = max(messages, key=len)
    assert all(whole.endswith(message) for message in messages)
    return whole
