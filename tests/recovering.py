"""A run whose dead ranks are replaced: the coordinator in this process, ranks forked from a warm server.

The part of the nodes' supervisors is played here, in a few lines, so that a replacement does not import torch again.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from smp_train.distributed import heartbeat
from smp_train.distributed.environment import GENERATION
from smp_train.launch.coordinator import End, Event, Generation, Recovery
from smp_train.launch.node import Node
from tests import dying
from tests.harness import free_port
from tests.system.command import Command, environment, warm

Death = tuple[int, int, str]
"""(rank, step, phase)."""
PATIENCE_SECONDS = 300.0


class Recovering:
    """The ranks of a run, started on entry and killed on exit."""

    def __init__(
        self, folder: Path, world: int, *words: str, deaths: Sequence[Death] = (), number: int = signal.SIGKILL,
        lose: Callable[[int], object] = lambda rank: None, nodes: int = 1, **environ: Any,
    ) -> None:  # fmt: skip
        """``lose`` is called before a rank is replaced; ``environ`` are further variables of `tests.dying`."""
        self.folder, self.words, self.lose = folder, words, lose
        port = free_port()
        self.nodes = [Node(world // nodes, nodes, node, master_port=port) for node in range(nodes)]
        self.node, self.world_size = self.nodes[0], world
        markers = folder / "markers"
        markers.mkdir(parents=True)
        self.environ = {
            dying.DEATHS: json.dumps([(*death, int(number)) for death in deaths]), dying.MARKERS: str(markers),
            **{name: str(value) for name, value in environ.items()},
        }  # fmt: skip
        self.supervisors, self.messages = list(map(Recovery, self.nodes)), queue.SimpleQueue[Any]()
        self.answers = [threading.Event() for _ in self.nodes]
        """Set while a node's supervisor lives; it hangs otherwise."""
        self.recovery = self.supervisors[0]
        self.ranks: dict[int, tuple[int, Command]] = {}
        self.ended: list[Command] = []
        self.reported: set[Command] = set()
        self.generations: list[Generation] = []

    def __enter__(self) -> Recovering:
        for node, answers in enumerate(self.answers):
            answers.set()
            self.supervisors[node].start(self.messages.put if node == 0 else lambda message: None, answers.wait)
        for rank in range(self.world_size):
            self.start(rank, 1)
        return self

    def __exit__(self, *_: object) -> None:
        for _, command in self.ranks.values():
            command.kill()
        for node, answers in enumerate(self.answers):
            answers.set()
            heartbeat.unlink(heartbeat.lasting_name(self.node.master_addr, self.node.master_port, node))
        for supervisor in self.supervisors:
            supervisor.flush()

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that first joins ``generation``."""
        environ = self.node.environment(rank, environment(self.folder, self.environ), self.world_size)
        environ[GENERATION] = str(generation)
        self.ranks[rank] = generation, warm(self.folder, dying.__file__, "train", *self.words, environ=environ)

    def lose_node(self, node: int) -> None:
        """Kill a node's ranks, and let its supervisor hang until `find_node`."""
        self.answers[node].clear()
        for rank in range(node * self.node.processes, (node + 1) * self.node.processes):
            self.ranks[rank][1].kill()
            self.reported.add(self.ranks[rank][1])

    def find_node(self, node: int) -> None:
        """Let a lost node's supervisor go on, without ranks."""
        self.answers[node].set()

    def until_the_end(self) -> End:
        """Replace ranks until the coordinator ends the run, and return the end."""
        end = self.attend(lambda: False, "the end")
        assert end is not None
        return end

    def attend(self, condition: Callable[[], bool], what: str) -> End | None:
        """Replace ranks until ``condition()`` holds, or until the coordinator ends the run; return the end, if any."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            if condition():
                return None
            for rank, (generation, command) in self.ranks.items():
                if command not in self.reported and command._ended(0):
                    self.reported.add(command)
                    code = command.code()
                    code, known = code if code >= 0 else 128 - code, len(self.generations) + 1
                    self.recovery.report(Event(rank, generation, code, "here", known=known))
            try:
                message = self.messages.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(message, End):
                return message
            if isinstance(message, Generation):
                self.generations.append(message)
                if message.world is not None:
                    before, self.world_size = self.ranks, len(message.world)
                    self.ranks = {rank: before[old] for rank, old in enumerate(message.world) if old >= 0}
                    left_out = [before[rank][1] for rank in before.keys() - {*message.world}]
                    for command in left_out:
                        command.kill()
                    self.ended += left_out
                for rank in message.replaced:
                    if rank in self.ranks:
                        self.ranks[rank][1].kill()
                        self.ended.append(self.ranks[rank][1])
                        self.lose(rank)
                    self.start(rank, message.number)
        raise AssertionError(f"no sign of {what} after {PATIENCE_SECONDS:.0f} s\n{self.err}")

    @property
    def err(self) -> str:
        """All that the ranks have printed."""
        commands = [*self.ended, *(command for _, command in self.ranks.values())]
        return "\n".join(f"{command.out[-3000:]}{command.err[-2000:]}" for command in commands)
