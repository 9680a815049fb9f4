"""Generations of a run whose dead ranks are replaced (--recovery in_place). All ranks meet as each generation begins.

The supervisors serve the store and count the generations (`smp_train.launch.coordinator`). A rank joins the newest
generation. A thread waits for the next generation, and then makes this process's collectives fail, so that the main
thread leaves its step and joins it.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from smp_train.distributed.environment import GENERATION, Runtime
from smp_train.distributed.unblock import STUCK_SECONDS, abort_nccl, main_thread_call, tcp_sockets, unblock
from smp_train.errors import LostPeerError, SmpTrainError

KEYS = "recovery"
"""Prefix of the keys that ranks and supervisors share."""
ATTEMPT_SECONDS = 0.02
"""Time between two attempts to make collectives fail: connections that were being opened escape an attempt."""
STUCK = "a collective still waits although its connections are shut (a fault of gloo): this rank ends, to be replaced"

member: Member | None = None
"""This process's membership; None if dead ranks are not replaced."""


class Member:
    """Membership of this process in the generations of its run."""

    def __init__(self, runtime: Runtime, seconds: float) -> None:
        """Connect to the supervisors' store, which must answer within ``seconds``; follow generations in a thread."""
        self.runtime, self.seconds = runtime, seconds
        """This process's place in the generation that it joined last."""
        self._next: Runtime | None = runtime
        """Its place in the newest generation; None if the newest generation leaves it out."""
        self.first = int(os.environ[GENERATION])
        self.joined = 0
        """The generation that this process joined last."""
        self.newest = self.first
        self.resized = 0
        """The newest generation for which the run must be built again, with another number of ranks; 0 for none."""
        self.replaced: list[int] = []
        """Ranks that the newest generation replaced."""
        self.joins = False
        """Whether this process was added to the run, which has not recovered since: its failure ends no run."""
        self.noticed = time.monotonic() if self.first > 1 else None
        """When the recovery in progress began: this process noticed a newer generation, or was started for one."""
        self.refused = False
        """Whether this rank has forbidden further recoveries."""
        self.reason = ""
        """The newest generation's reason: which rank died, and how."""
        self._lost_hosts: list[str] = []
        self._joining = threading.Lock()
        self._changed = threading.Condition()
        self._store, followed = self._connect(), self._connect()
        self._lasting = self._store_connections()
        """Local ports of the connections to the store that outlive a generation."""
        for number in range(1, self.first + 1):  # the launcher has given this process its place in the last one
            self._read(number)
        self.run = self._store.compare_set(self._key("run"), "", uuid.uuid4().hex).decode()
        """An id of this run of the supervisors."""
        self._follower = threading.Thread(target=self._follow, args=(followed,), name="smp-train-member", daemon=True)
        self._follower.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """End the thread: the process would abort if the thread's wait ended while Python shuts down."""
        self._store_connections(shut_all_but=())
        self._follower.join(1.0)

    @property
    def _port(self) -> int:
        return self.runtime.master_port

    def _connect(self) -> Any:
        import torch.distributed as dist

        address, limit = self.runtime.master_addr, timedelta(seconds=self.seconds)
        return dist.TCPStore(address, self._port, None, False, limit, wait_for_workers=False)

    def _key(self, name: str) -> str:
        return f"{KEYS}/{name}"

    def _read(self, generation: int) -> None:
        record = json.loads(self._store.get(self._key(f"generation/{generation}")))
        self.replaced, self.reason, self._lost_hosts = record["replaced"], record["reason"], record["hosts"]
        if record["resized"]:
            self.resized = generation
        if record["world"] is not None and generation > self.first and self._next is not None:
            self._next = place_in(record["world"], self._next)
        elif record["world"] is not None and generation == self.first:
            self.joins = record["world"][self.runtime.rank] < 0

    def _follow(self, store: Any) -> None:
        """Answer each new generation by making collectives fail; end this process if the generation replaces it."""
        while True:
            key, asked = self._key(f"generation/{self.newest + 1}"), time.monotonic()
            try:
                store.wait([key], timedelta(seconds=60))
            except RuntimeError:
                if time.monotonic() - asked < 30:  # node 0's supervisor is gone; this node's ends this rank
                    return
                continue
            with self._changed:
                self._read(self.newest + 1)
                self.newest += 1
                self.noticed = self.noticed or time.monotonic()
                self._changed.notify_all()
            if self._next is None or self._next.rank in self.replaced:
                os._exit(1)
            call, since = main_thread_call(), time.monotonic()
            while self._fail_collectives():
                time.sleep(ATTEMPT_SECONDS)
                if call is None or main_thread_call() != call:
                    call, since = main_thread_call(), time.monotonic()
                elif time.monotonic() - since > STUCK_SECONDS:
                    place = f"[rank {self.runtime.rank} on {self.runtime.hostname}]"
                    print(f"smp-train: {place} warning: {STUCK}", file=sys.stderr, flush=True)
                    os._exit(1)  # the supervisors replace this rank as well

    def _fail_collectives(self) -> bool:
        """Make collectives and meetings fail, unless the newest generation is joined; return whether to do it again."""
        with self._joining:
            if self.superseded():
                unblock(self._lost_hosts)
                self._store_connections(shut_all_but=self._lasting)
            return self.superseded()

    def _store_connections(self, shut_all_but: Collection[int] | None = None) -> set[int]:
        """Return the local ports of connections to the store; shut those not in ``shut_all_but``, if that is given."""
        ports = set()
        for connection in tcp_sockets():
            with connection, suppress(OSError):  # a socket that is not connected has no peer
                if connection.getpeername()[1] == self._port:
                    ports.add(port := connection.getsockname()[1])
                    if shut_all_but is not None and port not in shut_all_but:
                        connection.shutdown(socket.SHUT_RDWR)
        return ports

    def superseded(self) -> bool:
        """Return whether a newer generation than the joined one has begun."""
        return self.joined < self.newest

    def wait(self, seconds: float) -> bool:
        """Return whether a newer generation begins within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(self.superseded, seconds)

    @property
    def replaces(self) -> bool:
        """Whether this process replaces a dead rank of a run that trains."""
        return self.first > 1

    @property
    def joined_resized(self) -> bool:
        """Whether all ranks of the joined generation build the run again."""
        return self.joined == self.resized

    @property
    def rebuilds(self) -> bool:
        """Whether the run is being built again in the joined generation."""
        return self.noticed is not None and self.joined_resized

    def recovered(self) -> None:
        """Record that the ranks of the joined generation are at the same position."""
        self.noticed, self.joins = None, False

    def leave(self, destroy_groups: Callable[[], object] = lambda: None) -> None:
        """Destroy this process's groups, and stop making collectives fail until there is a newer generation.

        gloo would end the process if connections were shut while their group is destroyed.
        """
        with self._joining:
            if self.superseded():
                abort_nccl()  # a communicator's end could wait for the dead rank
            destroy_groups()
            with self._changed:
                self.joined, self.runtime = self.newest, self._next or self.runtime

    def join(self, seconds: float) -> tuple[Any, str]:
        """Join the newest generation; once all ranks have joined it, return its store and the prefix of its keys.

        Raises `RuntimeError` after ``seconds``.
        """
        import torch.distributed as dist

        deadline, pause = time.monotonic() + seconds, ATTEMPT_SECONDS
        while True:
            self.leave()
            generation = self.joined
            prefix = f"g/{generation}"
            with suppress(RuntimeError):  # the connection is shut if a newer generation begins
                store = dist.PrefixStore(prefix, self._connect())
                store.set(f"here/{self.runtime.rank}", self.runtime.hostname)
                if store.add("joined", 1) == self.runtime.world_size:
                    store.set("all", "")
                while not store.check(["all"]):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"not all ranks have joined generation {generation} within {seconds:g} s")
                    time.sleep(pause)
                    pause = min(0.25, 1.2 * pause)
                return store, prefix
            if not self.superseded():
                raise RuntimeError(f"the store at {self.runtime.master_addr}:{self._port} does not answer")

    def begin_training(self, start: Sequence[Any], sharing: int, sizes: Sequence[int]) -> None:
        """Allow replacements from now on; they replay ``start``, the collectives of the run's start. Rank 0 only.

        ``sizes`` are the possible numbers of ranks, multiples of ``sharing``, the ranks of one replica; the first call
        counts.
        """
        self._store.compare_set(self._key("sizes"), "", json.dumps([sharing, *sizes]))
        self._store.set(self._key("training"), pickle.dumps(list(start)))

    def start_of_run(self) -> list[Any]:
        """Return the results that rank 0 passed to `begin_training`."""
        results: list[Any] = pickle.loads(self._store.get(self._key("training")))
        return results

    def report_step(self, step: int) -> None:
        """Report the step at which training goes on: too many recoveries at one step end the run. Rank 0 only."""
        self._store.set(self._key("step"), str(step))

    def end_training(self) -> bool:
        """Make the next death end the run; return False if the next generation begins, after which to try again.

        Rank 0 only.
        """
        ended = "training has ended"
        self.refused = self._store.compare_set(self._key(f"after/{self.joined}"), "", ended).decode() == ended
        return self.refused

    def refuse(self, reason: str) -> None:
        """Make the next death end the run, for the first reason that a rank gives; never raises."""
        self.refused = True
        with suppress(RuntimeError):
            self._store.compare_set(self._key("refused"), "", reason)


def place_in(world: Sequence[int], place: Runtime) -> Runtime | None:
    """Return a rank's place in a new ``world``, which lists the earlier rank of each rank; None if it is left out."""
    if place.rank not in world:
        return None
    rank, local = world.index(place.rank), place.local_world_size
    return replace(
        place, rank=rank, world_size=len(world), node_rank=rank // local, num_nodes=len(world) // local
    )  # fmt: skip


@contextmanager
def no_recovery(reason: str) -> Iterator[None]:
    """Make a failure in the body end the run, since a recovery would leave the ranks in different states."""
    try:
        yield
    except BaseException as failure:
        if member is not None:
            member.refused = True
            if not isinstance(failure, SmpTrainError) or isinstance(failure, LostPeerError):
                member.refuse(reason)  # this rank reports any other failure itself, which is a better reason
        raise


def joined() -> int:
    """Return the generation that this process joined last; 0 if dead ranks are not replaced."""
    return 0 if member is None else member.joined


def begin(runtime: Runtime, seconds: float) -> Member | None:
    """Return this process's `Member`, made by the first call; None if dead ranks are not replaced."""
    global member
    if member is None and GENERATION in os.environ and runtime.world_size > 1:
        member = Member(runtime, seconds)
    return member
