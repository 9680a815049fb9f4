"""Whether the nodes of a run have the same hardware, whether they reach each other, and how fast.

A node agent calls `compare` and `run` before training. The check itself is a program that every rank runs once:
``python -m smp_train.launch.network_check``, or ``smp-train doctor --network SECONDS`` under any launcher. In order:
all ranks report; each node all-reduces among its own GPUs; each node with its neighbours on a ring; all together. Every
all-reduce has a process group and a time limit of its own, so that one that hangs stops none of the others, and the two
neighbours that a node fails with name it. Rank 0 decides and sends its verdict to the others.
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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from smp_train.distributed import Runtime, detect, expand_hostlist
from smp_train.errors import one_line
from smp_train.launch.srun_step import say
from smp_train.launch.supervisor import Failure, Place, supervise

BAD_NODE = 75
UNREACHABLE = 74
"""Exit code of a rank that could not reach rank 0, and so gets no verdict."""
HOSTS = "SMP_TRAIN_HOSTS"
"""Names of the nodes in their order, for those that never report."""
CPU_BYTES, GPU_BYTES = 1 << 22, 1 << 28
SLACK_SECONDS = 3.0
"""How much later than its own time limit a rank may report."""
VERDICT_SECONDS = 30.0
"""How long rank 0, which serves the store, waits for all to have read its verdict."""
FAULT_SECONDS = 10.0
"""The same after a fault, as a broken node may never answer: less than a launcher waits for the node that has the fault
to end (Slurm's KillWait: 30 s), so that the first node can still record which one it is."""


# --- on each node, before its processes start


def compare(
    folder: Path, hosts: Sequence[str], number: int, processes: int, efa: int, seconds: float
) -> tuple[list[str], str]:
    """Exchange what nodes count, through a shared folder; return (nodes at fault, message), the same on all of them.

    Ranks follow from the number of processes on each node: with one GPU less on a node, all would wait for a rank that
    nobody starts. ``hosts`` names the nodes in order, of which this is ``number``; ``efa`` counts its Elastic Fabric
    Adapters, 0 where they do not matter. Raises OSError when the folder cannot be written.
    """
    scratch = folder / f".node-{number}.json"
    scratch.write_text(json.dumps([processes, efa]), encoding="utf-8")
    scratch.replace(folder / f"node-{number}.json")
    found: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + seconds
    while True:
        for one, host in enumerate(hosts):
            with suppress(OSError, ValueError):
                found[host] = tuple(json.loads((folder / f"node-{one}.json").read_text(encoding="utf-8")))
        if len(found) == len(hosts) or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    silent = [host for host in hosts if host not in found]
    if silent:
        return silent, f"no word from {', '.join(silent)} within {seconds:g} s: the task has not started there"
    kinds = Counter(found.values())
    usual = max(kinds, key=lambda kind: (kinds[kind], kind))  # of two halves, the one that has more
    odd = [host for host in hosts if found[host] != usual]
    if not odd:
        return [], ""
    gpus, adapters = found[odd[0]]
    return odd, (
        f"{', '.join(odd)}: {gpus} GPUs and {adapters} EFA adapters, other nodes have {usual[0]} and {usual[1]}; "
        "replace the node, or set NPROC and INSTANCE_TYPE"
    )


def run(
    place: Place, seconds: float, backend: str, efa: int, environ: Mapping[str, str], logs: Path
) -> tuple[int, Failure | None]:
    """Run the check on this node's ranks; return (exit code, failure that names the node at fault).

    Rank 0 reports for all: on the other nodes there is a failure only when it could not be reached.
    """
    file = logs / "preflight.json"
    command = [sys.executable, "-m", "smp_train.launch.network_check", "--seconds", str(seconds)]
    command += ["--verdict", str(file), "--backend", backend, "--efa", str(efa)]
    hosts = environ.get("SLURM_STEP_NODELIST")
    known = {HOSTS: ",".join(expand_hostlist(hosts))} if hosts else {}
    # A port of its own: training may ask for its port while rank 0 still serves this one.
    here = replace(place, master_port=place.master_port + 1)
    code, failure = supervise(command, here, environ={**environ, **known}, log_dir=logs, say=lambda line: None)
    if failure is None or (failure.code == BAD_NODE and place.node_rank > 0):
        return code, None
    if failure.code in (BAD_NODE, UNREACHABLE):
        verdict: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # a full disk leaves an empty file
            verdict = json.loads(file.read_text(encoding="utf-8"))
        # The next start leaves nodes out for a fault of their own only, not for one of a link or of all together.
        cause = "node" if verdict.get("at_fault") else "network"
        failure = Failure(-1, ",".join(verdict.get("nodes", [])) or failure.node, BAD_NODE, cause)
    say(failure.line())
    return failure.code, failure


# --- on each rank


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found: ``nodes`` are those to look at, ``message`` says why; both empty when all is well."""

    nodes: list[str]
    message: str
    rate: float = 0.0
    """GB/s of the all-reduce over all ranks: bytes x 2 (n - 1) / n / seconds, as nccl-tests' bus bandwidth."""
    at_fault: bool = False
    """Whether it is the nodes themselves, and not what lies between them."""


def links(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of nodes: each node with its neighbours on a ring, at most one pair of it in a round."""
    if nodes < 2:
        return []
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    last = [ring.pop()] if nodes > 2 and nodes % 2 else []
    return [one for one in (ring[::2], ring[1::2], last) if one]


def judge(
    names: Sequence[str], absent: Sequence[int], alone: Sequence[int], broken: Sequence[tuple[int, int]]
) -> Verdict:
    """Return which nodes are at fault.

    ``absent``: with ranks that never reported; ``alone``: whose own ranks did not finish an all-reduce; ``broken``:
    pairs of nodes that did not finish one.
    """
    failing = [node for pair in broken for node in pair]
    often = sorted({node for node in failing if failing.count(node) > 1})
    for nodes, message in (
        (absent, f"no word from {{}}: look whether the run starts there, and reaches {names[0]}"),
        (alone, "{}: the processes of this node do not finish an all-reduce among themselves; replace or reboot it"),
        (often, "{} does not finish an all-reduce with either of its neighbours; replace or reboot the node, or look "
                "at its security group"),
    ):  # fmt: skip
        if nodes:
            listed = [names[node] for node in nodes]
            return Verdict(listed, message.format(", ".join(listed)), at_fault=True)
    if broken:
        pairs = ", ".join(f"{names[one]} and {names[other]}" for one, other in broken)
        return Verdict(
            [names[node] for node in failing],
            f"{pairs} do not finish an all-reduce with each other; the security group must allow all traffic within "
            "itself, in both directions",
        )
    return Verdict([], "")


class NetworkCheck:
    """One rank's part. ``reduce`` is what a step does; a test puts something else there."""

    def __init__(self, place: Runtime, seconds: float, backend: str, device: Any) -> None:
        self.place, self.seconds, self.backend, self.device = place, seconds, backend, device
        self.store: Any = None

    def run(self, report: Callable[[Verdict], None]) -> Verdict:
        """Return the verdict, after rank 0 has handed it to ``report``; RuntimeError when rank 0 cannot be reached."""
        import torch.distributed as dist

        place, world, size = self.place, self.place.world_size, self.place.local_world_size
        limit = timedelta(seconds=self.seconds)
        self.store = dist.TCPStore(
            place.master_addr, place.master_port, world, place.is_main, limit, wait_for_workers=False
        )
        self.store.set(f"here/{place.rank}", place.hostname)

        def decide(name: str, find: Callable[[], Verdict], *, last: bool = False) -> Verdict:
            """Let rank 0 decide and send its verdict to the others."""
            if not place.is_main:
                self.store.wait([name], timedelta(seconds=self.seconds + SLACK_SECONDS))
                return Verdict(**json.loads(self.store.get(name)))
            found = find()
            if found.message or last:
                # Before it is sent: whoever reads of a fault leaves, and a launcher may then end rank 0's node.
                report(found)
            self.store.set(name, json.dumps(asdict(found)))
            return found

        def absent() -> Verdict:
            missing = self.missing([f"here/{rank}" for rank in range(world)], self.seconds / 2)
            return judge(self._names(), sorted({rank // size for rank in missing}), [], [])

        verdict = decide("absent", absent)
        if verdict.message:
            return verdict
        # Clocks start anew here, where all ranks are known to be: the steps then have equal time on every rank.
        stages = [[list(range(first, first + size)) for first in range(0, world, size) if size > 1]]
        stages += [[[node * size for node in pair] for pair in pairs] for pairs in links(place.num_nodes)]
        share = self.seconds / 2 / (len(stages) + 1)
        for number, groups in enumerate(stages):
            self.step(f"stage{number}", groups, share)

        def broken() -> Verdict:
            alone, *pairs = (
                [[rank // size for rank in ranks] for ranks in groups if self.rate(f"stage{number}", ranks) is None]
                for number, groups in enumerate(stages)
            )
            return judge(self._names(), [], [nodes[0] for nodes in alone], [(a, b) for each in pairs for a, b in each])

        verdict = decide("links", broken)
        if verdict.message:
            return verdict
        everyone = list(range(world))
        self.step("all", [everyone], share)

        def together() -> Verdict:
            rate = self.rate("all", everyone)
            if rate is None:
                return Verdict([], "every node reaches its neighbours, but an all-reduce over all of them does not end")
            return Verdict([], "", rate)

        return decide("verdict", together, last=True)

    def step(self, name: str, groups: list[list[int]], seconds: float) -> None:
        """All-reduce over this rank's one of ``groups``, report its rate, and wait for the reports of all."""
        ranks = next((ranks for ranks in groups if self.place.rank in ranks), [])
        rates: list[float] = []
        problems: list[str] = []

        def work() -> None:
            try:
                rates.append(self.reduce(name, ranks, seconds))
            except Exception as problem:  # of whatever library is below: the step has failed
                problems.append(one_line(problem)[:200])

        if ranks:
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(seconds)
        for problem in problems:  # what comes later says no more, and may come after the verdict
            say(f"preflight: [{self.place.hostname}] {name}: {problem}")
        self.store.set(f"{name}/{self.place.rank}", str(rates[0]) if rates else "")
        self.missing([f"{name}/{rank}" for rank in range(self.place.world_size)], seconds + SLACK_SECONDS)

    def rate(self, name: str, ranks: list[int]) -> float | None:
        """Return the rate that the first of ``ranks`` reported for a step, None when one of them failed."""
        rates = [self.store.get(key) if self.store.check([key]) else b"" for key in (f"{name}/{one}" for one in ranks)]
        return float(rates[0]) if all(rates) else None

    def reduce(self, name: str, ranks: list[int], seconds: float) -> float:
        """All-reduce over ``ranks`` in a group of its own, twice; return the second one's rate in GB/s."""
        import torch
        import torch.distributed as dist

        # A client of its own: a thread that hangs in one must not keep the others from it.
        place, limit, gpu = self.place, timedelta(seconds=seconds), self.device.type == "cuda"
        client = dist.TCPStore(place.master_addr, place.master_port, None, False, limit, wait_for_workers=False)
        store = dist.PrefixStore(f"group/{name}/{ranks[0]}", client)
        if gpu:
            torch.cuda.set_device(self.device)
        # Not through init_process_group, which has one default group at a time: here a group that hangs is abandoned.
        kind: Any = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
        group = kind(store, ranks.index(place.rank), len(ranks), limit)
        size = GPU_BYTES if gpu else CPU_BYTES
        data = torch.empty(size // 4, device=self.device)
        for _ in range(2):  # the first one makes the connections
            data.fill_(1)
            data[-1].item()  # waits for a GPU
            began = time.monotonic()
            group.allreduce([data]).wait()
            if gpu:
                torch.cuda.synchronize(self.device)
            seconds = time.monotonic() - began
        if float(data[0]) != len(ranks) or float(data[-1]) != len(ranks):
            raise RuntimeError(f"the sum of {len(ranks)} ones came out as {float(data[0]):g}")
        return size * 2 * (len(ranks) - 1) / len(ranks) / max(seconds, 1e-9) / 1e9

    def missing(self, keys: list[str], seconds: float) -> list[int]:
        """Wait for keys of the store; return the numbers of those that were not set in time."""
        try:
            self.store.wait(keys, timedelta(seconds=max(seconds, 0.1)))
        except RuntimeError:
            return [number for number, key in enumerate(keys) if not self.store.check([key])]
        return []

    def _names(self) -> list[str]:
        """Return the nodes' names, as they report them or as the launcher has them."""
        place = self.place
        known = os.environ.get(HOSTS, "").split(",")
        names = known if len(known) == place.num_nodes else [f"node-{node}" for node in range(place.num_nodes)]
        for node in range(place.num_nodes):
            key = f"here/{node * place.local_world_size}"
            if self.store.check([key]):
                names[node] = self.store.get(key).decode()
        return names

    def leave(self, seconds: float) -> None:
        """End with rank 0 as the last, which serves the store; it waits so long for the others."""
        with suppress(RuntimeError):
            self.store.set(f"bye/{self.place.rank}", "")
            if self.place.is_main:
                self.missing([f"bye/{rank}" for rank in range(self.place.world_size)], seconds)


def network(log: str) -> str:
    """Return what NCCL uses by its own log (INIT, NET): efa or another provider, sockets, or ""."""
    provider = re.search(r"NET/OFI Selected provider is (\S+)", log, re.IGNORECASE)
    if provider:
        return provider[1].rstrip(",")
    return "sockets" if re.search(r"NET/Socket\s*: ?Using|Using network Socket", log) else ""


def describe(verdict: Verdict, place: Runtime, device: str, log: str, efa: int) -> list[str]:
    """Return what rank 0 prints of a verdict; ``log`` is NCCL's, ``efa`` counts the adapters of each node."""
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


def main(argv: Sequence[str] | None = None, make: Callable[..., NetworkCheck] = NetworkCheck) -> int:
    """Run this rank's part; 0: all reach each other, 75: rank 0 named a fault, 74: rank 0 was not reached."""
    options = argparse.ArgumentParser(prog="python -m smp_train.launch.network_check", allow_abbrev=False)
    options.add_argument("--seconds", type=float, required=True, help="how long all of it may take")
    options.add_argument("--verdict", type=Path, help="file that rank 0 writes its verdict to")
    options.add_argument("--backend", default="auto", help="gloo: on the CPU; else NCCL where there are GPUs")
    options.add_argument("--efa", type=int, default=0, help="EFA adapters that a node of this type has")
    given = options.parse_args(argv)
    # Else NCCL's watchdog ends the process for a group that was abandoned.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a store that times out logs a stack of C++
    import torch

    place = detect()
    gpus = torch.cuda.is_available() and given.backend != "gloo"
    device = torch.device("cuda", place.local_rank) if gpus else torch.device("cpu")
    log = None
    if gpus and given.verdict and place.is_main and os.environ.get("NCCL_DEBUG", "WARN").upper() in ("WARN", "VERSION"):
        log = given.verdict.parent / "preflight-nccl.log"  # unless the user has NCCL log already
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))

    def report(verdict: Verdict) -> None:
        text = log.read_text(errors="replace") if log and log.exists() else ""
        for line in describe(verdict, place, device.type, text, given.efa):
            say(line)
        with suppress(OSError):  # it is printed, too
            if given.verdict:
                given.verdict.write_text(json.dumps(asdict(verdict)) + "\n", encoding="utf-8")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 serves those who have not read it

    check = make(place, given.seconds, "nccl" if gpus else "gloo", device)
    try:
        verdict = check.run(report)
    except RuntimeError as problem:
        if place.local_rank == 0:
            reason = one_line(problem)[:160]
            try:  # torch's store reports only that the time is up
                socket.create_connection((place.master_addr, place.master_port), timeout=1).close()
            except OSError as refused:
                reason = refused.strerror or str(refused)
            say(
                f"error: preflight: {place.hostname} does not reach {place.master_addr}:{place.master_port} within "
                f"{given.seconds:g} s ({reason}): look whether the run starts there, and at the "
                "security group"
            )
        return UNREACHABLE
    check.leave(FAULT_SECONDS if verdict.message else VERDICT_SECONDS)
    return BAD_NODE if verdict.message else 0


def leave_now(code: int) -> None:
    """End the process without waiting for groups that were abandoned."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave_now(main())
