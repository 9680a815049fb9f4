"""Makes this process's collectives fail after a rank has died, so that the process can meet its peers again."""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from typing import Any

ABORT_SECONDS = 30.0
"""How long NCCL may take to abort."""
STUCK_SECONDS = 30.0
"""A call into torch.distributed that lasts for so long after all connections are shut never returns."""
QUIET_MS = 20
BUSY_SECONDS = 1.0
"""Connections are shut once no data has passed for `QUIET_MS`, or after `BUSY_SECONDS`.

If a connection breaks while gloo sends, gloo loses the send, and the call waits until the group's time-out.
"""
COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


def unblock(hosts: Collection[str] = ()) -> None:
    """Make current and later collectives of this process's groups fail. Call it in a thread, on every living rank.

    gloo has no abort, so connections between ranks are shut. Each living rank shuts the connections that it accepted;
    the kernel of a dead rank's host has already closed the dead rank's connections. New groups are not affected, but
    no group may be formed before this function returns.

    If NCCL does not abort within `ABORT_SECONDS`, this process ends itself, and is replaced.

    Args:
        hosts: Lost hosts. Their kernels close no connections, so this rank also shuts its connections to them.
    """
    abort_nccl()
    store_port = int(os.environ.get("MASTER_PORT", 0))
    lost = {address for host in hosts for address in _addresses(host)}
    with ExitStack() as stack:
        sockets = [stack.enter_context(connection) for connection in tcp_sockets()]
        # Only gloo listens in a rank: accepted connections are between ranks, never to a store, S3 or a tracker.
        listening = {s.getsockname()[1] for s in sockets if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}
        between_ranks = []
        for connection in sockets:
            with suppress(OSError):  # a socket that is not connected has no peer
                address, port = connection.getpeername()[:2]
                to_lost = address.removeprefix("::ffff:") in lost and port != store_port
                if connection.getsockname()[1] in listening or to_lost:
                    between_ranks.append(connection)
        deadline = time.monotonic() + BUSY_SECONDS
        while time.monotonic() < deadline and not all(map(_is_quiet, between_ranks)):
            time.sleep(QUIET_MS / 2000)
        for connection in between_ranks:
            with suppress(OSError):  # gloo has closed it
                # gloo reads the data that has arrived, then end-of-file, and closes; until then its sends succeed.
                connection.shutdown(socket.SHUT_RD)


def main_thread_call() -> int | None:
    """Return an id of the main thread's call into torch.distributed; None if the thread is elsewhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    for _ in range(8):  # a functional collective waits in an operator, a few frames deeper
        if frame is not None and not frame.f_code.co_filename.endswith(COLLECTIVES):
            frame = frame.f_back
    inside = frame is not None and frame.f_code.co_filename.endswith(COLLECTIVES)
    return id(frame) if inside else None


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process; the original may be closed at any time."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now, or not a socket
            duplicate = os.dup(int(descriptor))
            try:
                connection = socket.socket(fileno=duplicate)
            except OSError:
                os.close(duplicate)
                continue
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection
            else:
                connection.close()


def _is_quiet(connection: socket.socket) -> bool:
    """Return whether no data has passed for a while, in either direction."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
    sent, _, received = struct.unpack_from("=3I", info, 44)  # tcpi_last_data_sent, ..._ack_sent, ..._data_recv, in ms
    return bool(min(sent, received) >= QUIET_MS)


def _addresses(host: str) -> set[str]:
    with suppress(OSError):  # a host that has no address has no connection either
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return set()


def abort_nccl() -> None:
    """Abort NCCL's communicators; end this process if that takes longer than `ABORT_SECONDS`."""
    abort = threading.Thread(target=_abort_communicators, name="smp-train-abort", daemon=True)
    abort.start()
    abort.join(ABORT_SECONDS)
    if abort.is_alive():
        os._exit(1)


def _abort_communicators() -> None:
    """Abort the communicators of all process groups, in one NCCL group, since one abort can wait for another."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return
    cuda, communicators = sys.modules["torch"].device("cuda"), []
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group of CPUs
            backend = group._get_backend(cuda)
            if type(backend) is not dist.ProcessGroupGloo:
                communicators.append(backend)
    if communicators:
        first = communicators[0]
        of_old_class = hasattr(first, "_group_start")  # torch 2.15 has a second class for NCCL
        (first._group_start if of_old_class else first._start_coalescing)()
        for communicator in communicators:
            communicator.abort()
        (first._group_end if of_old_class else first._end_coalescing)()
