"""Recovery in place: processes that died are replaced while the other ranks stay.

A generation is a set of processes, one for each rank. When processes die, the coordinator publishes the next
generation: the ranks to replace, and the node that starts each replacement. It runs in a thread of node 0's supervisor,
which also serves the store where the ranks meet, so that the store survives every rank. The other supervisors are
clients of that store: they report deaths and heartbeats, and follow the generations. torch is imported on use.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from smp_train.distributed.group import RENDEZVOUS_SECONDS
from smp_train.distributed.job import KUBERNETES_JOB
from smp_train.errors import LOST_PEER
from smp_train.launch.command import node_name, say
from smp_train.launch.node import Failure, Node
from smp_train.launch.world import Sizes, larger_world, smaller_world

PREFIX = "recovery"
"""Prefix of this module's keys in the store."""
POLL_SECONDS = 0.02
COLLECT_SECONDS = 0.05
"""Deaths within this time of the first one are answered by the same generation."""
BEAT_SECONDS = 0.5
NODE_SECONDS = 5.0
"""A node without a heartbeat for this long is lost, and its ranks with it."""
SILENT_SECONDS = 30.0
"""A supervisor ends its processes if the store has not answered for this long."""
AT_ONE_STEP = 3
"""After this many recoveries without progress, the next death ends the run."""
BEGINS = "the next generation begins"
"""Value of the key ``after/N`` if generation N has a successor; if training ends in N, rank 0 sets the key first."""
LOST_NODE = 75
POD_IP = "POD_IP"
"""Set by our Kubernetes manifests: other pods do not know a pod's host name."""


class Event(NamedTuple):
    """A rank's process has ended. ``generation`` is the first generation that the process joined."""

    rank: int
    generation: int
    code: int
    host: str
    cause: str = ""
    asked: bool = False
    """Whether the process had been asked to stop before it ended."""
    known: int = 1
    """The newest generation that the supervisor knew: ``rank`` is the process's rank in that generation."""

    def description(self) -> str:
        """Return how the process ended, in words."""
        number = self.code - 128
        signals = {each.value: each.name for each in signal.Signals}
        how = f"was killed ({signals.get(number, number)})" if number > 0 else f"ended with exit code {self.code}"
        return f"rank {self.rank} on {self.host} {how}"


@dataclass(frozen=True)
class Generation:
    """A generation, described by its differences from the previous generation."""

    number: int
    replaced: list[int]
    reason: str = ""
    hosts: list[str] = field(default_factory=list)
    """Hosts that were lost with all their ranks."""
    nodes: dict[int, int] = field(default_factory=dict)
    """The node that starts the replacement, by rank."""
    world: list[int] | None = None
    """By new rank, the rank before, or -1 for an added rank; None if the ranks are the same."""
    resized: bool = False
    """Whether all ranks build the run again, as their number has changed now or in an unfinished recovery before."""

    def text(self) -> str:
        """Return the value of this generation's key."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "number"})

    @staticmethod
    def read(number: int, text: bytes) -> Generation:
        """Return the generation that `text` describes."""
        values = json.loads(text)
        return Generation(number, **(values | {"nodes": {int(rank): node for rank, node in values["nodes"].items()}}))


class End(NamedTuple):
    """The end of the run: the failure that ends it, if any, and why the failed processes are not replaced."""

    failure: Failure | None
    why: str = ""


class Warm(NamedTuple):
    """A message to a supervisor: this is a good time to start a warm process."""


class Joined(NamedTuple):
    """A message to a supervisor: its node's number. A supervisor that was started again is a new spare node."""

    node: int


class Beat(NamedTuple):
    """A heartbeat of a node's supervisor: its host, and its name in Slurm."""

    host: str
    name: str
    time: float
    warm: bool = True
    """Whether the node's warm processes are ready to become ranks, and it was not asked to stop."""


@dataclass
class Members:
    """The processes of the current generation."""

    nodes: dict[int, int]
    """The node of each rank."""
    joined: dict[int, int]
    """The generation that each rank's process joined first."""
    generation: int = 1
    finished: set[int] = field(default_factory=set)
    """Ranks that have ended with exit code 0."""
    steps: list[int | None] = field(default_factory=list)
    """Step after each recovery since the last progress; None for an unfinished recovery."""
    used: set[int] = field(default_factory=set)
    """Nodes that have, or had, ranks."""
    awaited: set[int] = field(default_factory=set)
    """Lost nodes whose ranks wait for a node in the current generation."""
    joining: set[int] = field(default_factory=set)
    """Nodes that an unfinished recovery adds."""
    sent_away: set[int] = field(default_factory=set)
    """Nodes that failed while they joined; they get no ranks again."""
    resized: bool = False
    """Whether the current generation builds the run again."""
    renumbered: int = 1
    """The newest generation that gave ranks new numbers."""

    @staticmethod
    def first(node: Node) -> Members:
        """Return the members of generation 1."""
        ranks = range(node.nodes * node.processes)
        nodes = {rank: rank // node.processes for rank in ranks}
        return Members(nodes, dict.fromkeys(ranks, 1), used={*range(node.nodes)})

    def ended(self, events: Sequence[Event]) -> list[Event]:
        """Return the deaths of current processes among ``events``, and record which ranks have finished."""
        # A supervisor reports again by the new rank what it has reported by a rank from before a renumbering.
        events = [event for event in events if event.known >= self.renumbered]
        current = [event for event in events if event.generation == self.joined.get(event.rank)]
        self.finished |= {event.rank for event in current if event.code == 0}
        return [event for event in current if event.code]

    def on(self, lost: Collection[int]) -> list[int]:
        """Return the unfinished ranks on lost nodes."""
        return [rank for rank, node in self.nodes.items() if node in lost and rank not in self.finished]

    def recovered(self, step: int | None) -> bool:
        """Record at which ``step`` the last recovery ended; return whether the last few recoveries made progress."""
        if self.generation > 1:
            known = [earlier for earlier in self.steps if earlier is not None]
            progress = step is not None and (not known or step > max(known))
            self.steps = [step] if progress else [*self.steps, step]
        # After a return to a checkpoint, steps stay below the highest one for a while: deaths in recoveries that did
        # end later must not add up.
        counted = self.steps[-AT_ONE_STEP:] if step is None else self.steps
        return counted.count(step) < AT_ONE_STEP

    def next_generation(
        self, nodes: dict[int, int], reason: str, hosts: Collection[str], world: list[int], *, unfinished: bool = False
    ) -> Generation:
        """Return the next generation, in which ``nodes`` start processes; ``unfinished`` recoveries are repeated."""
        changed = world != [*self.nodes]
        return Generation(
            self.generation + 1, sorted(nodes), reason, sorted(filter(None, hosts)), nodes, world if changed else None,
            changed or (self.resized and unfinished),
        )  # fmt: skip

    def join(self, generation: Generation, lost: Collection[int] = ()) -> None:
        """Make the replacements of a generation current, in place of their predecessors."""
        self.generation, self.resized = generation.number, generation.resized
        if generation.world is not None:
            self.renumbered = generation.number
            before = {*self.nodes.values()}
            staying = {new: old for new, old in enumerate(generation.world) if old >= 0}
            self.nodes = {new: self.nodes[old] for new, old in staying.items()}
            self.joined = {new: self.joined[old] for new, old in staying.items()}
            self.used -= before - {*self.nodes.values()} - self.sent_away
            if added := {generation.nodes[new] for new, old in enumerate(generation.world) if old < 0}:
                self.joining = added
        self.nodes |= generation.nodes
        self.used |= {*generation.nodes.values()}
        self.joined |= dict.fromkeys(generation.replaced, generation.number)
        self.awaited = {*lost} & {*self.nodes.values()}


def decide(
    members: Members, deaths: Sequence[Event], lost: Collection[int], beats: Mapping[int, Beat], *, training: bool,
    refused: str, step: int | None, sizes: Sizes, patience: float = 0.0, silence: float = NODE_SECONDS,
) -> Generation | End | None:  # fmt: skip
    """Return the next generation, or the end of the run, after ``deaths`` of members and losses of nodes.

    ``beats`` are the last heartbeats of all nodes. ``refused`` is a rank's reason why nothing can be recovered, or "".
    ``step`` is where training went on after the last recovery; None if that recovery has not ended. Without a spare
    node for each lost node, the run goes on with the largest possible number of ranks on the living nodes. If no
    smaller number is possible, the ranks of lost nodes stay there until a node returns or is started again, and the
    other ranks wait. The run ends when the longest ``silence`` of a lost node exceeds ``patience``. Returns None
    meanwhile. A node that fails while it joins is sent away, and the run goes on without it.
    """
    if step is not None:
        members.joining = set()
    failed_joiners = members.joining & {*lost, *(members.nodes[event.rank] for event in deaths)}
    members.sent_away |= failed_joiners
    lost = {*lost} | failed_joiners
    homeless = members.on(lost)
    others = [event for event in deaths if members.nodes[event.rank] not in failed_joiners]
    mistake = next((event for event in others if event.code in (2, 3, 4)), None)
    # The run goes on as it was before it grew; it may then grow onto spare nodes.
    spares = [] if failed_joiners else sorted(beats.keys() - members.used - lost)
    gone = sorted({members.nodes[rank] for rank in homeless})
    takers, staying = dict(zip(gone, spares, strict=False)), [*members.nodes]
    if len(takers) < len(gone) and (smaller := smaller_world(members.nodes, lost, sizes)):
        takers, staying = {}, smaller
    shrinks = len(staying) < len(members.nodes)
    waits = len(takers) < len(gone) and not shrinks
    new = {event.rank for event in deaths} | {rank for rank in homeless if members.nodes[rank] not in members.awaited}
    dead = sorted(new | {rank for rank in homeless if members.nodes[rank] in takers})
    obstacles = {
        "training has not begun": not training,
        "it would fail again": mistake is not None,
        "the run was asked to stop": any(event.asked for event in others),
        "other ranks have finished": bool(members.finished),
        refused: bool(refused),
        "no rank is left": len(new.union(homeless)) == len(members.nodes),
        "no spare node is left": waits and silence > patience,
    }
    why = next((why for why, holds in obstacles.items() if holds), "")
    if not why and any(members.nodes[rank] not in failed_joiners for rank in new) and not members.recovered(step):
        why = f"{AT_ONE_STEP} recoveries brought no progress"
    if why and (first := mistake or next(iter(deaths), None)) is not None:
        return End(Failure(first.rank, first.host, first.code, first.cause), why)
    if why:
        return End(Failure(homeless[0], beats[members.nodes[homeless[0]]].name, LOST_NODE, "node"), why)
    if not dead:
        return None
    reasons = [event.description() for event in deaths if event.rank not in homeless or event not in others]
    silent = f"gave no sign of life for {NODE_SECONDS:g} s"
    away = "is sent away, as it failed while the run grew"
    reasons += [f"node {node} ({beats[node].name}) {away if node in failed_joiners else silent}" for node in gone]
    if waits:
        reasons.append(f"waiting up to {patience:g} s for a node to be started again")
    if shrinks:
        reasons.append(f"{len(staying)} ranks go on")
    # In tests several nodes share a host; a host is lost only if all of its nodes are.
    hosts = {beats[node].host for node in gone} - {beat.host for node, beat in beats.items() if node not in lost}
    nodes = {new: takers.get(members.nodes[old], members.nodes[old]) for new, old in enumerate(staying) if old in dead}
    return members.next_generation(nodes, "; ".join(reasons), hosts, staying, unfinished=step is None)


def grow(members: Members, lost: Collection[int], beats: Mapping[int, Beat], sizes: Sizes) -> Generation | None:
    """Return a generation with more ranks, on living nodes without ranks; None if that is not possible now."""
    living = beats.keys() - {*lost}
    if not all(beats[node].warm for node in living):
        return None
    spares = sorted(living - members.used)
    added = larger_world(members.nodes, spares, sizes)
    if not added:
        return None
    names = ", ".join(f"{node} ({beats[node].name})" for node in sorted({*added.values()}))
    world = [*members.nodes, *(-1 for _ in added)]
    return members.next_generation(added, f"node {names} joins: {len(world)} ranks go on", (), world)


class Coordinator:
    """Serves the store, and publishes generations until the run ends; runs in node 0's supervisor."""

    def __init__(self, node: Node) -> None:
        """Serve the store at the node's address. Raises `RuntimeError` if the port is in use."""
        import torch.distributed as dist

        self.node, self.members = node, Members.first(node)
        self.served = dist.TCPStore(node.master_addr, node.master_port, None, True, wait_for_workers=False)
        self.store = dist.PrefixStore(PREFIX, self.served)
        self.store.set("generation/1", Generation(1, []).text())
        self.read: set[int] = set()
        self.beats: dict[int, Beat] = {}
        self.silence: dict[int, float] = {}
        """Seconds without a new heartbeat, by node."""

    def run(self) -> None:
        """Answer deaths and losses of nodes until the run has ended and all supervisors have read that."""
        looked = time.monotonic()
        asked = False
        while True:
            time.sleep(POLL_SECONDS)
            if events := self._events():
                time.sleep(COLLECT_SECONDS)
                events += self._events()
            asked |= any(event.asked for event in events)
            deaths = self.members.ended(events)
            if look := time.monotonic() - looked > BEAT_SECONDS:
                looked = time.monotonic()
                self._look()
            lost = {node for node, silent in self.silence.items() if silent > NODE_SECONDS}
            self.members.awaited &= lost
            answer: Generation | End | None = None
            if deaths or (lost and self.members.on(lost)):
                answer = self._answer(deaths, lost)
            elif len(self.members.finished) == len(self.members.nodes):
                # Kubernetes starts a pod again unless its exit code is 0.
                again = asked and KUBERNETES_JOB in os.environ
                answer = End(Failure(0, node_name(), 143, "stopped") if again else None)
            elif look and self._value("step") and not self._refused():
                answer = grow(self.members, lost, self.beats, self._sizes())
            if isinstance(answer, Generation) and not self._begins():
                answer = self._answer(deaths, lost) if deaths or self.members.on(lost) else None
            if isinstance(answer, End):
                self.store.set("end", json.dumps([asdict(answer.failure) if answer.failure else None, answer.why]))
                break
            if answer is not None:
                self.members.join(answer, lost)
                self.store.delete_key("step")
                self.store.set(f"generation/{answer.number}", answer.text())
        self._look()
        living = [node for node, silent in self.silence.items() if silent <= NODE_SECONDS]
        deadline = time.monotonic() + NODE_SECONDS
        while self.store.add("left", 0) < len(living) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _answer(self, deaths: Sequence[Event], lost: Collection[int]) -> Generation | End | None:
        training, step = self.store.check(["training"]), self._value("step")
        silence = max((self.silence[self.members.nodes[rank]] for rank in self.members.on(lost)), default=0.0)
        return decide(
            self.members, deaths, lost, self.beats, training=training, refused=self._refused(),
            step=int(step) if step else None, sizes=self._sizes(), patience=self.node.patience, silence=silence,
        )  # fmt: skip

    def _begins(self) -> bool:
        """Return whether the present generation may have a successor: training has not ended in it."""
        return bool(self.store.compare_set(f"after/{self.members.generation}", "", BEGINS).decode() == BEGINS)

    def _refused(self) -> str:
        """Return the reason of a rank why no generation can follow, or ""."""
        return self._value("refused") or self._value(f"after/{self.members.generation}")

    def _value(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def _sizes(self) -> Sizes:
        sharing, *sizes = json.loads(self._value("sizes") or "[1]")
        return Sizes(sharing, sizes)

    def _events(self) -> list[Event]:
        """Return the events that have not been read yet."""
        new = {*range(1, self.store.add("events", 0) + 1)} - self.read
        # A supervisor counts an event before it writes it.
        new = {number for number in new if self.store.check([f"event/{number}"])}
        self.read |= new
        return [Event(**json.loads(self.store.get(f"event/{number}"))) for number in sorted(new)]

    def _look(self) -> None:
        """Read the heartbeats. Each call counts as `BEAT_SECONDS` of silence: this process may have been suspended."""
        training = self.store.check(["training"])
        for number in range(self.node.nodes + self.node.spares + self.store.add("restarted", 0)):
            beat = self.beats.get(number, Beat("", f"node-{number}", 0.0))
            if self.store.check([f"node/{number}"]):
                beat = Beat(*json.loads(self.store.get(f"node/{number}")))
            elif not training or number >= self.node.nodes:  # it may still start
                continue
            new = number == 0 or beat != self.beats.get(number)
            self.silence[number] = 0.0 if new else self.silence[number] + BEAT_SECONDS
            self.beats[number] = beat


Message = Generation | End | Warm | Joined


class Recovery:
    """A supervisor's connection to the coordinator; on node 0 it also runs the coordinator."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.heard = float("inf")
        """When the store last answered, by the monotonic clock; inf before the first answer."""
        self.coordinator: Coordinator | None = None
        self.is_warm: Callable[[], bool] = lambda: True
        self.threads: list[threading.Thread] = []

    def start(self, receive: Callable[[Message], None], is_warm: Callable[[], bool] = lambda: True) -> None:
        """Connect in a thread, which calls ``receive`` with the coordinator's decisions, and reports ``is_warm()``."""
        self.is_warm = is_warm
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is a page of C++ frames
        self._in_thread(lambda: self._run(receive))

    def _in_thread(self, work: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=work, name="smp-train-recovery", daemon=True))
        self.threads[-1].start()

    def flush(self) -> None:
        """Wait for a limited time until all reports are sent and the other supervisors have read how the run ends."""
        deadline = time.monotonic() + NODE_SECONDS
        for thread in self.threads[1:]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def report(self, event: Event) -> None:
        """Report the end of a process, in a thread: the store may not answer."""

        def send() -> None:
            with suppress(RuntimeError):
                store = self._connect()
                store.set(f"event/{store.add('events', 1)}", json.dumps(event._asdict()))

        self._in_thread(send)

    def silent(self) -> bool:
        """Return whether the coordinator, on another node, has not answered for `SILENT_SECONDS`."""
        return self.node.node_rank > 0 and time.monotonic() - self.heard > SILENT_SECONDS

    def lost(self) -> End:
        """Return the `End` of a run whose coordinator does not answer."""
        address = f"{self.node.master_addr}:{self.node.master_port}"
        failure = Failure(self.node.first_rank, node_name(), 1, LOST_PEER)
        return End(failure, f"the coordinator on node 0, at {address}, does not answer")

    def _connect(self) -> Any:
        import torch.distributed as dist

        address, limit = (self.node.master_addr, self.node.master_port), timedelta(seconds=RENDEZVOUS_SECONDS)
        return dist.PrefixStore(PREFIX, dist.TCPStore(*address, None, False, limit, wait_for_workers=False))

    def _run(self, receive: Callable[[Message], None]) -> None:
        import torch.distributed  # noqa: F401

        gc.freeze()  # at exit, Python would search all objects of torch for garbage
        try:
            if self.node.node_rank == 0:
                self.coordinator = Coordinator(self.node)
                self._in_thread(lambda: self._coordinate(receive))
            self._follow(receive)
        except RuntimeError as problem:
            if self.node.node_rank == 0:
                say(f"error: {' '.join(str(problem).split())[:300]}; set MASTER_PORT to a port that is free here")
            receive(self.lost())

    def _coordinate(self, receive: Callable[[Message], None]) -> None:
        assert self.coordinator is not None
        try:
            self.coordinator.run()
        except Exception as problem:  # without a coordinator, ranks would wait for ever
            say(f"error: the coordinator failed: {type(problem).__name__}: {' '.join(str(problem).split())[:300]}")
            receive(self.lost())

    def _follow(self, receive: Callable[[Message], None]) -> None:
        """Send heartbeats, and pass on each generation and the end of the run."""
        import torch.distributed as dist

        store, number, generation, warmed = self._connect(), self.node.node_rank, 1, 0
        if store.add(f"starts/{number}", 1) > 1:
            number = self.node.nodes + self.node.spares + store.add("restarted", 1) - 1
        receive(Joined(number))
        host = os.environ.get(POD_IP) or socket.gethostname()
        while True:
            store.set(f"node/{number}", json.dumps(Beat(host, node_name(), time.time(), self.is_warm())))
            if store.check(["end"]):
                failure, why = json.loads(store.get("end"))
                store.add("left", 1)
                receive(End(Failure(**failure) if failure else None, why))
                return
            # The imports of a warm process would slow down a start or a recovery.
            if warmed < generation and store.check(["training" if generation == 1 else "step"]):
                warmed = generation
                receive(Warm())
            key = f"generation/{generation + 1}"
            with suppress(dist.DistStoreError):  # no new generation yet
                store.wait([key], timedelta(seconds=BEAT_SECONDS))
            if store.check([key]):
                generation += 1
                receive(Generation.read(generation, store.get(key)))
            self.heard = time.monotonic()
