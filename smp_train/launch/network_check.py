"""``python -m smp_train.launch.network_check``: do the nodes reach each other, and how fast? Every rank runs it once.

In order: all ranks report; each node reduces among its own GPUs; each node reduces with the next one, around the ring;
all reduce together. Every reduction is a process group of its own and has its own time, so that one that hangs stops
none of the others, and the two neighbours that a node fails with name it. Rank 0 sums up, and tells the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from smp_train.distributed import Runtime, detect

BAD_NODE = 75
UNREACHABLE = 74
"""Exit code of a rank that could not reach rank 0, which therefore cannot tell it anything."""
HOSTS = "SMP_TRAIN_HOSTS"
"""Names of the nodes in their order, for those that never report."""
CPU_BYTES, GPU_BYTES = 1 << 22, 1 << 28
LEAVING_SECONDS = 3.0
HEARING_SECONDS = 30.0
"""How long rank 0, with whom the words go, stays for ranks that are slow to hear its verdict."""
FAULT_SECONDS = 10.0
"""The same after a fault, as a broken node may never answer: what ends a step waits longer (Slurm's KillWait: 30 s), so
that the first node can still leave word of which one it is."""


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found: ``nodes`` are those to look at, ``message`` says why; both empty when all is well."""

    nodes: list[str]
    message: str
    rate: float = 0.0
    """GB/s of the reduction over all ranks: bytes x 2 (n - 1) / n / seconds, as nccl-tests' bus bandwidth."""
    at_fault: bool = False
    """Whether it is the nodes themselves, and not what lies between them."""


def links(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of nodes: each node with its neighbours on a ring, in no round with both."""
    if nodes < 2:
        return []
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    last = [ring.pop()] if nodes > 2 and nodes % 2 else []
    return [one for one in (ring[::2], ring[1::2], last) if one]


def judge(
    names: Sequence[str], absent: Sequence[int], alone: Sequence[int], broken: Sequence[tuple[int, int]]
) -> Verdict:
    """Say which nodes are at fault.

    Args:
        names: Names of all nodes.
        absent: Nodes with ranks that never reported.
        alone: Nodes whose own ranks did not finish a reduction.
        broken: Pairs of nodes that did not finish one.
    """
    if absent:
        return Verdict(
            [names[node] for node in absent],
            f"no word from {_listed(names, absent)}: look whether the run starts there, and reaches {names[0]}",
            at_fault=True,
        )
    if alone:
        return Verdict(
            [names[node] for node in alone],
            f"{_listed(names, alone)}: the processes of this node do not finish an all-reduce among themselves; "
            "replace or reboot the node",
            at_fault=True,
        )
    failing = [node for pair in broken for node in pair]
    often = sorted({node for node in failing if failing.count(node) > 1})
    if often:
        return Verdict(
            [names[node] for node in often],
            f"{_listed(names, often)} does not finish an all-reduce with either of its neighbours; replace or reboot "
            "the node, or look at its security group",
            at_fault=True,
        )
    if broken:
        said = ", ".join(f"{names[one]} and {names[other]}" for one, other in broken)
        return Verdict(
            [names[node] for pair in broken for node in pair],
            f"{said} do not finish an all-reduce with each other; the security group must allow all traffic within "
            "itself, in both directions",
        )
    return Verdict([], "")


def _listed(names: Sequence[str], nodes: Sequence[int]) -> str:
    return ", ".join(names[node] for node in nodes)


def network(log: str) -> str:
    """Return what NCCL's own log (INIT, NET) says it goes through: efa or another provider, sockets, or ""."""
    provider = re.search(r"NET/OFI Selected provider is (\S+)", log, re.IGNORECASE)
    if provider:
        return provider[1].rstrip(",")
    return "sockets" if re.search(r"NET/Socket\s*: ?Using|Using network Socket", log) else ""


def reach(host: str, port: int, seconds: float) -> None:
    """Wait until something listens there; RuntimeError with the last reason when the time is up."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as problem:
            if time.monotonic() + 0.5 > deadline:
                raise RuntimeError(problem.strerror or str(problem)) from None
        time.sleep(0.5)


class Meeting:
    """One rank's part. ``reduce`` is what a step does; a test puts something else there."""

    def __init__(self, runtime: Runtime, seconds: float, backend: str, device: Any) -> None:
        self.runtime, self.backend, self.device = runtime, backend, device
        self.seconds = seconds
        self.store: Any = None
        self.rate = 0.0
        self.present: list[int] = []

    def run(self) -> Verdict:
        """Return rank 0's verdict, which rank 0 has yet to `tell`; RuntimeError when rank 0 cannot be reached."""
        import torch.distributed as dist

        place, limit = self.runtime, timedelta(seconds=self.seconds)
        if not place.is_main:
            reach(place.master_addr, place.master_port, self.seconds)
        self.store = dist.TCPStore(
            place.master_addr, place.master_port, place.world_size, place.is_main, limit, wait_for_workers=False
        )
        self.store.set(f"here/{place.rank}", place.hostname)
        everyone = [f"here/{rank}" for rank in range(place.world_size)]
        if place.is_main:
            absent = self._missing(everyone, self.seconds / 2)
            self._say("meet", json.dumps(absent))
            self.present = [rank for rank in range(place.world_size) if rank not in absent]
            if absent:
                nodes = sorted({rank // place.local_world_size for rank in absent})
                return judge(self._names(absent), nodes, [], [])
        elif json.loads(self._hear("meet", self.seconds)):
            return self._told()
        # Clocks start anew here, where all are known to be: the steps then have equal time on every rank.
        rounds = links(place.num_nodes)
        share = self.seconds / 2 / (len(rounds) + 2)
        self._step("alone", self._local() if place.local_world_size > 1 else None, share)
        for number, pairs in enumerate(rounds):
            mine = next((pair for pair in pairs if place.node_rank in pair), None)
            ranks = [node * place.local_world_size for node in mine] if mine else []
            self._step(f"round{number}", ranks if place.rank in ranks else None, share)
        if place.is_main:
            verdict = self._judged(rounds)
            self._say("links", verdict.message or "-")
            if verdict.message:
                return verdict
        elif self._hear("links", share) != "-":
            return self._told()
        self._step("all", list(range(place.world_size)), share)
        return self._last() if place.is_main else self._told()

    def _local(self) -> list[int]:
        first = self.runtime.node_rank * self.runtime.local_world_size
        return list(range(first, first + self.runtime.local_world_size))

    def _step(self, name: str, ranks: list[int] | None, seconds: float) -> None:
        """Reduce over ``ranks`` and leave word whether that ended well; wait until all have left theirs."""
        ended: list[float] = []
        if ranks is not None:
            thread = threading.Thread(target=self._work, args=(name, ranks, seconds, ended), daemon=True)
            thread.start()
            thread.join(seconds)
        self._say(f"{name}/{self.runtime.rank}", "ok" if ended or ranks is None else "failed")
        self._missing([f"{name}/{rank}" for rank in range(self.runtime.world_size)], seconds + LEAVING_SECONDS)

    def _work(self, name: str, ranks: list[int], seconds: float, ended: list[float]) -> None:
        try:
            ended.append(self.reduce(name, ranks, seconds))
        except Exception as problem:  # of whatever library is below: the step has failed
            first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            print(f"smp-train: preflight: [{self.runtime.hostname}] {name}: {first[:200]}", file=sys.stderr, flush=True)
        if ended and name == "all":
            self.rate = ended[-1]

    def reduce(self, name: str, ranks: list[int], seconds: float) -> float:
        """All-reduce over ``ranks`` in a group of its own, twice; return the second one's rate in GB/s."""
        import torch
        import torch.distributed as dist

        # A client of its own: a thread that hangs in one must not keep the others from it.
        place, limit = self.runtime, timedelta(seconds=seconds)
        client = dist.TCPStore(place.master_addr, place.master_port, None, False, limit, wait_for_workers=False)
        store = dist.PrefixStore(f"group/{name}/{ranks[0]}", client)
        # Not through init_process_group, which has one group at a time: one that hangs is left alone here.
        kind: Any = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        group = kind(store, ranks.index(place.rank), len(ranks), limit)
        size = CPU_BYTES if self.device.type == "cpu" else GPU_BYTES
        data = torch.ones(size // 4, device=self.device)
        began = 0.0
        for _ in range(2):  # the first one makes the connections
            data.fill_(1)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            began = time.monotonic()
            group.allreduce([data]).wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        if float(data[0]) != len(ranks) or float(data[-1]) != len(ranks):
            raise RuntimeError(f"the sum of {len(ranks)} ones came out as {float(data[0]):g}")
        return size * 2 * (len(ranks) - 1) / len(ranks) / max(time.monotonic() - began, 1e-9) / 1e9

    def _missing(self, keys: list[str], seconds: float) -> list[int]:
        """Wait for words; return the numbers of those that were not left in time."""
        try:
            self.store.wait(keys, timedelta(seconds=max(seconds, 0.1)))
        except RuntimeError:
            return [number for number, key in enumerate(keys) if not self.store.check([key])]
        return []

    def _say(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def _hear(self, key: str, seconds: float) -> str:
        self.store.wait([key], timedelta(seconds=seconds + LEAVING_SECONDS))
        return bytes(self.store.get(key)).decode()

    def _ok(self, name: str, rank: int) -> bool:
        return bool(self.store.check([f"{name}/{rank}"])) and bytes(self.store.get(f"{name}/{rank}")) == b"ok"

    def _names(self, absent: Sequence[int] = ()) -> list[str]:
        place, known = self.runtime, [name for name in os.environ.get(HOSTS, "").split(",") if name]
        names = [f"node-{node}" for node in range(place.num_nodes)]
        for node in range(place.num_nodes):
            first = node * place.local_world_size
            if first not in absent:
                names[node] = bytes(self.store.get(f"here/{first}")).decode()
            elif len(known) == place.num_nodes:
                names[node] = known[node]
        return names

    def _judged(self, rounds: list[list[tuple[int, int]]]) -> Verdict:
        place = self.runtime
        size = place.local_world_size
        alone = sorted({rank // size for rank in range(place.world_size) if not self._ok("alone", rank)})
        broken = [
            pair
            for number, pairs in enumerate(rounds)
            for pair in pairs
            if not all(self._ok(f"round{number}", node * size) for node in pair)
        ]
        return judge(self._names(), [], alone, broken)

    def _last(self) -> Verdict:
        place = self.runtime
        failed = [rank for rank in range(place.world_size) if not self._ok("all", rank)]
        if failed:
            return Verdict([], "every node reaches its neighbours, but an all-reduce over all of them does not end")
        return Verdict([], "", rate=self.rate)

    def tell(self, verdict: Verdict) -> None:
        """Tell the others, who leave then."""
        self._say("verdict", json.dumps(asdict(verdict)))

    def _told(self) -> Verdict:
        return Verdict(**json.loads(self._hear("verdict", self.seconds)))

    def leave(self, seconds: float) -> None:
        """End with rank 0 as the last, which serves the store; it waits so long for the others."""
        place = self.runtime
        try:
            self._say(f"bye/{place.rank}", "")
            if place.is_main:
                self._missing([f"bye/{rank}" for rank in self.present], seconds)
        except RuntimeError:
            return


def describe(verdict: Verdict, place: Runtime, device: str, log: str, efa: int) -> list[str]:
    """Return what rank 0 prints of a verdict."""
    if verdict.message:
        return [f"error: preflight: {verdict.message}"]
    size = (CPU_BYTES if device == "cpu" else GPU_BYTES) >> 20
    through = network(log)
    lines = [
        f"preflight: {place.world_size} ranks on {place.num_nodes} nodes reach each other: all-reduce of {size} MiB at "
        f"{verdict.rate:.2f} GB/s" + (f" through {through}" if through else "")
    ]
    if efa and place.num_nodes > 1 and through == "sockets":
        lines.append(
            f"warning: preflight: NCCL goes through sockets, and each node has {efa} EFA adapters: the image has no "
            "EFA plugin (aws-ofi-nccl), or it cannot be used"
        )
    return lines


def main(argv: Sequence[str] | None = None, make: Callable[..., Meeting] = Meeting) -> int:
    """Run this rank's part; 0: all reach each other, 75: rank 0 named a fault, 74: rank 0 was not reached."""
    options = argparse.ArgumentParser(prog="python -m smp_train.launch.network_check", allow_abbrev=False)
    options.add_argument("--seconds", type=float, required=True, help="how long all of it may take")
    options.add_argument("--verdict", type=Path, required=True, help="file that rank 0 writes what it found to")
    options.add_argument("--backend", default="auto", help="gloo: on the CPU; else NCCL where there are GPUs")
    options.add_argument("--efa", type=int, default=0, help="EFA adapters that a node of this type has")
    given = options.parse_args(argv)
    # Else a group that was given up takes the process with it, watched by a thread of NCCL's.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a store that times out says so with a stack of C++
    import torch

    place = detect()
    gpus = torch.cuda.is_available() and given.backend != "gloo"
    device = torch.device("cuda", place.local_rank) if gpus else torch.device("cpu")
    log = _nccl_log(given.verdict.parent, place) if gpus else None
    meeting = make(place, given.seconds, "nccl" if gpus else "gloo", device)
    try:
        verdict = meeting.run()
    except RuntimeError as problem:
        if place.local_rank == 0:
            first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            print(
                f"smp-train: error: preflight: {place.hostname} does not reach {place.master_addr}:{place.master_port} "
                f"within {given.seconds:g} s ({first[:160]}): look whether the run starts there, and at the security "
                "group",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return UNREACHABLE
    if place.is_main:
        text = log.read_text(errors="replace") if log and log.exists() else ""
        for line in describe(verdict, place, device.type, text, given.efa):
            print(f"smp-train: {line}", file=sys.stderr, flush=True)
        with suppress(OSError):  # it is said above, too
            given.verdict.write_text(json.dumps(asdict(verdict)) + "\n", encoding="utf-8")
        # Last, as whoever hears of a fault leaves with it, and a launcher then ends the others of that node: this rank
        # must have said all, and must still serve those who have not heard.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        meeting.tell(verdict)
    meeting.leave(FAULT_SECONDS if verdict.message else HEARING_SECONDS)
    return BAD_NODE if verdict.message else 0


def _nccl_log(folder: Path, place: Runtime) -> Path | None:
    """Have NCCL say what it goes through, in a file of rank 0's; unless the user has it say things already."""
    environ: Mapping[str, str] = os.environ
    if not place.is_main or environ.get("NCCL_DEBUG", "WARN").upper() not in ("WARN", "VERSION"):
        return None
    path = folder / "preflight-nccl.log"
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path))
    return path


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a group that was given up must not be waited for
