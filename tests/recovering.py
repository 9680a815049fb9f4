"""A run whose dead ranks are replaced, on one node: the coordinator in this process, ranks forked from a warm server.

The supervisor's part is played here, in a few lines, so that a replacement does not import torch again.
"""

from __future__ import annotations

import json
import queue
import signal
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
        lose: Callable[[int], object] = lambda rank: None, per_node: int = 0,
    ) -> None:  # fmt: skip
        """Ranks take themselves for ``per_node`` ranks of a node; ``lose`` is called before a rank is replaced."""
        self.folder, self.words, self.lose = folder, words, lose
        self.node = Node(world, master_port=free_port())
        markers = folder / "markers"
        markers.mkdir(parents=True)
        self.environ = {
            dying.DEATHS: json.dumps([(*death, int(number)) for death in deaths]), dying.MARKERS: str(markers),
        }  # fmt: skip
        per_node = per_node or world
        self.place = Node(per_node, world // per_node, master_port=self.node.master_port)
        self.recovery, self.messages = Recovery(self.node), queue.SimpleQueue[Any]()
        self.ranks: dict[int, tuple[int, Command]] = {}
        self.ended: list[Command] = []
        self.reported: set[Command] = set()
        self.generations: list[Generation] = []

    def __enter__(self) -> Recovering:
        self.recovery.start(self.messages.put)
        for rank in range(self.node.processes):
            self.start(rank, 1)
        return self

    def __exit__(self, *_: object) -> None:
        for _, command in self.ranks.values():
            command.kill()
        self.recovery.flush()
        heartbeat.unlink(heartbeat.lasting_name(self.node.master_addr, self.node.master_port, 0))

    def start(self, rank: int, generation: int) -> None:
        """Start the process of a rank that first joins ``generation``."""
        environ = self.place.environment(rank, environment(self.folder, self.environ)) | {GENERATION: str(generation)}
        self.ranks[rank] = generation, warm(self.folder, dying.__file__, "train", *self.words, environ=environ)

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
                    self.recovery.report(Event(rank, generation, code if code >= 0 else 128 - code, "here"))
            try:
                message = self.messages.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(message, End):
                return message
            if isinstance(message, Generation):
                self.generations.append(message)
                for rank in message.replaced:
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
