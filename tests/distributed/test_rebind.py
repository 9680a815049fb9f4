"""A step breaks on every rank; the ranks part, meet again and repeat it: the model goes on with the same numbers.

No rank dies here: one raises at a marked point of the step, and the other ranks are then waiting for it.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.distributed import generation
from tests import harness
from tests.distributed.test_same_numbers import WIDTH, arguments_of, rows_of
from tests.releases import need
from tests.tiers import core
from tests.training import built

POINTS = ("vote", "forward", "backward", "clip")
PLAIN = ("none", 0, 1)
OFFLOADED = ("none", 1, 1)
COMPILED = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}
CELLS: dict[str, tuple[int, str, str, tuple[str, int, int], dict[str, Any]]] = {
    # ranks, family, mesh, way of saving memory, other flags
    "hybrid": (4, "llama", "hsdp2x2", PLAIN, {}),
    "full": (4, "llama", "fsdp4", PLAIN, {}),
    "kept": (2, "llama", "fsdp2", PLAIN, {"sharding_strategy": "shard_grad_op", "bf16": 1}),
    "accumulated": (4, "llama", "hsdp2x2", PLAIN, {}),
    "tensor": (4, "llama", "tp2-fsdp2", ("full", 0, 1), {}),
    "tensor, hybrid": (8, "llama", "tp2-hsdp2x2", PLAIN, {}),
    "context": (2, "llama", "cp2", PLAIN, {}),
    "experts": (4, "mixtral", "ep2-hsdp2", PLAIN, {"moe": 1, "moe_load_balancing": "aux_loss"}),
    "offloaded": (2, "llama", "fsdp2", OFFLOADED, {}),
    "compiled": (4, "llama", "hsdp2x2", PLAIN, COMPILED),
    "compiled, tensor": (2, "llama", "tp2", ("full", 0, 1), COMPILED),
    "compiled, context": (2, "llama", "cp2", OFFLOADED, COMPILED),
}  # fmt: skip


class Broken(RuntimeError):
    """The failure of the rank that breaks the step."""


class Ranks:
    """A rank, this process, that can part from the other ranks and meet them again."""

    def __init__(self) -> None:
        from smp_train import distributed

        self.runtime = distributed.detect()
        self.store, self._events = self._connect(), self._connect()
        self.generation = 0
        self.meet()

    def _connect(self) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(self.runtime.master_addr, self.runtime.master_port, None, False)

    def meet(self) -> None:
        """Form the process group of the next generation."""
        import torch.distributed as dist

        self.generation += 1
        store = dist.PrefixStore(f"g/{self.generation}", self.store)
        dist.init_process_group("gloo", store=store, rank=self.runtime.rank, world_size=self.runtime.world_size)

    def part(self, task: Callable[[], None], culprit: int, install: Callable[[Callable[[], None]], Any]) -> None:
        """Run ``task``, which must fail on every rank: ``culprit`` breaks it where ``install`` installs the breakage.

        The other ranks learn of it in a thread, which unblocks them. Then leave the process group.
        """
        import torch.distributed as dist

        from smp_train.distributed.unblock import unblock

        broken = f"broken/{self.generation}"

        def watch() -> None:
            self._events.wait([broken])
            unblock()

        def break_step() -> None:
            self.store.set(broken, "")
            raise Broken

        watcher = threading.Thread(target=watch)
        watcher.start()
        remove = install(break_step) if self.runtime.rank == culprit else lambda: None
        expected = Broken if self.runtime.rank == culprit else RuntimeError
        with pytest.raises(expected):
            task()
        remove()
        watcher.join()
        dist.destroy_process_group()


def breakage(point: str, model: Any, calls: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a function that installs a call at a point of the last of ``calls`` micro-batches; it returns its removal.

    Forward breaks before the last layer, backward after it.
    """
    from smp_train.distributed import heartbeat
    from smp_train.models.build import decoder_layers

    layers = [layer for _, layer in decoder_layers(model)]

    def install(action: Callable[[], None]) -> Callable[[], None]:
        passed = 0

        def before_last(module: Any, args: Any) -> None:
            nonlocal passed
            passed += 1
            if passed == calls:
                action()

        def after_first(module: Any, args: Any, output: Any) -> None:
            nonlocal passed
            passed += 1
            if passed == calls:
                tensor = output if not isinstance(output, tuple) else output[0]
                tensor.register_hook(lambda gradient: action())

        if point == "forward":
            return layers[-1].register_forward_pre_hook(before_last).remove
        if point == "backward":
            return layers[0].register_forward_hook(after_first).remove
        phase = {"vote": heartbeat.VOTE, "clip": heartbeat.CLIP}[point]
        heartbeat.listeners.append(lambda entered: action() if entered == phase else None)
        return heartbeat.listeners.clear

    return install


class Training:
    """A model in training."""

    def __init__(self, ranks: Ranks, command_line: list[str], micro_batches: int) -> None:
        import torch

        from smp_train import train_utils

        self.micro_batches = micro_batches

        self.args, self.backend, spec = built(ranks.runtime, torch.device("cpu"), command_line)
        self.model = self.backend.build(self.backend.check(spec, seq_len=WIDTH), seed=self.args.seed)
        self.optimizer = train_utils.build_optimizer(self.args, self.backend, self.model)

    def step(self, step: int) -> tuple[float, float]:
        """Make one update; return the mean loss and the gradient norm."""
        from smp_train import train_utils
        from smp_train.distributed import heartbeat

        args, backend = self.args, self.backend
        count, rank = args.train_batch_size, backend.topology.dp_rank
        rows = [rows_of(step + 10 * number, rank, count) for number in range(self.micro_batches)]
        train_utils.seed_for(backend, args, step)
        heartbeat.enter(heartbeat.VOTE)
        vote = train_utils.Vote(backend, train_utils.Ballot(sum(batch.counted_tokens() for batch, _ in rows)))
        result = train_utils.train_step(
            backend, self.model, self.optimizer, [batch for batch, _ in rows], tokens=vote.tokens, lr=1e-2,
            max_grad_norm=1.0,
        )  # fmt: skip
        assert vote.outcome().tokens == sum(tokens for _, tokens in rows)
        return result.mean_loss.item(), result.grad_norm.item()

    def state(self) -> list[Any]:
        """Return this rank's part of each parameter and of each value of the optimizer."""
        from smp_train.distributed.dtensor import local_tensor

        values = [value for of_one in self.optimizer.state.values() for value in of_one.values()]
        return [local_tensor(tensor.detach()) for tensor in [*self.model.parameters(), *values]]


def begin(name: str) -> tuple[Ranks, Training, list[Any]]:
    """Train a cell for two steps; return its state then."""
    world, family, mesh, mode, changes = CELLS[name]
    ranks = Ranks()
    training = Training(ranks, arguments_of(family, mesh, mode, world, **changes), 2 if name == "accumulated" else 1)
    for step in range(2):
        training.step(step)
    return ranks, training, copy.deepcopy(training.state())


def break_step(ranks: Ranks, training: Training, start: list[Any], point: str, culprit: int) -> None:
    """Break the third step at a point, and prepare for repeating it."""
    for tensor, value in zip(training.state(), start, strict=True):
        tensor.copy_(value)
    install = breakage(point, training.model, training.micro_batches)
    ranks.part(lambda: training.step(2), culprit % ranks.runtime.world_size, install)
    ranks.meet()
    training.backend.rebind(training.model)


def break_and_go_on(name: str) -> tuple[list[Any], dict[str, list[Any]], list[int]]:
    """Return the numbers of three steps, those after a broken one, by its point, and the graphs before and after."""
    import torch
    from torch._dynamo.utils import counters

    ranks, training, start = begin(name)
    expected = [training.step(step) for step in range(2, 5)]
    end = copy.deepcopy(training.state())
    graphs, after = [counters["stats"]["unique_graphs"]], {}
    for culprit, point in enumerate(POINTS):
        break_step(ranks, training, start, point, culprit)
        after[point] = [training.step(step) for step in range(2, 5)]
        for tensor, value in zip(training.state(), end, strict=True):
            assert torch.equal(tensor, value), point
    return expected, after, [*graphs, counters["stats"]["unique_graphs"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", core(CELLS, {"hybrid"}.__contains__))
def test_a_broken_step_is_repeated_with_the_same_numbers(name: str) -> None:
    world, family, mesh, *_ = CELLS[name]
    need(family, mesh)
    for expected, after, (graphs_before, graphs_after) in harness.run(break_and_go_on, world, name):
        assert after == dict.fromkeys(POINTS, expected)
        assert graphs_after == graphs_before
        assert (graphs_before > 0) == ("compiled" in name)


def break_often(times: int) -> list[tuple[int, int, int]]:
    """Return the open descriptors, the threads and the resident MiB after 20 broken steps, and after ``times`` more."""
    ranks, training, start = begin("kept")
    figures = []
    for culprit in range(20 + times):
        break_step(ranks, training, start, POINTS[culprit % len(POINTS)], culprit // len(POINTS))
        training.step(2)
        if culprit + 1 in (20, 20 + times):
            gc.collect()
            descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            figures.append((descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE") >> 20))
    return figures


@pytest.mark.slow
def test_200_broken_steps_leave_nothing_behind() -> None:
    for (*at_first, memory_at_first), (*at_last, memory_at_last) in harness.run(break_often, 2, 200):
        assert at_last == at_first
        assert memory_at_last < memory_at_first + 10


def shut_connections() -> list[bool]:
    """Return which of three connections to another process `unblock` shuts."""
    from smp_train.distributed.unblock import unblock

    port, shut = int(os.environ["MASTER_PORT"]), []
    for store_port, lost_hosts in ((port, ["localhost"]), (1, []), (1, ["localhost"])):
        os.environ["MASTER_PORT"] = str(store_port)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            unblock(lost_hosts)
            try:
                shut.append(connection.recv(1, socket.MSG_DONTWAIT) == b"")
            except BlockingIOError:
                shut.append(False)
    return shut


def test_connections_to_other_processes_stay_but_for_those_to_lost_hosts() -> None:
    to_store, to_others, to_lost = harness.run(shut_connections, 1)[0]
    assert (to_store, to_others, to_lost) == (False, False, True)


def wait_in_vain(err: Path) -> None:
    """Wait in torch.distributed when a new generation begins, as a rank whose send gloo forgot."""
    sys.stderr = err.open("w")
    import torch.distributed as dist

    from smp_train import distributed
    from smp_train.distributed import environment, generation

    runtime = distributed.detect()
    store = dist.TCPStore(runtime.master_addr, runtime.master_port, None, False)
    for number in (1, 2):
        record = json.dumps({"replaced": [], "reason": "", "hosts": [], "world": None, "resized": False})
        store.set(f"{generation.KEYS}/generation/{number}", record)
    os.environ[environment.GENERATION] = "1"
    generation.STUCK_SECONDS = 0.2
    generation.Member(runtime, 60)
    code = compile("wait()", "torch/distributed/distributed_c10d.py", "exec")
    exec(code, {"wait": threading.Event().wait})


def test_a_rank_that_nothing_unblocks_ends_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(harness.RankFailed, match="exit code 1, late: False"):
        harness.run(wait_in_vain, 1, tmp_path / "err", timeout=60)
    expected = f"smp-train: [rank 0 on {socket.gethostname()}] warning: {generation.STUCK}\n"
    assert (tmp_path / "err").read_text() == expected
