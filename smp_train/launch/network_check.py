"""Whether the nodes of a run have the same hardware, whether they reach each other, and how fast.

A node agent calls `compare` and `run` before training. The check itself is a program that every rank runs once:
``python -m smp_train.launch.network_check``, or ``smp-train doctor --network SECONDS`` under any launcher. In order:
all ranks report; each node all-reduces among its GPUs; each node with its neighbours on a ring; all together. Every
all-reduce has a separate process group and time limit, so that a hang does not stop the others, and the node that
fails with both of its neighbours is identified. Rank 0 decides and sends its verdict to all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from smp_train.distributed import Runtime, detect, failures
from smp_train.errors import one_line
from smp_train.failure_report import exit_immediately
from smp_train.launch.command import node_name, say
from smp_train.launch.node import Failure, Node
from smp_train.launch.supervisor import supervise

BAD_NODE = 75
UNREACHABLE = 74
"""Exit code of a rank that could not reach rank 0, and so has no verdict."""
CPU_BYTES, GPU_BYTES = 1 << 22, 1 << 28
SLACK_SECONDS = 3.0
"""How much later than its time limit a rank may report."""
LEAVE_SECONDS = 10.0
"""How long rank 0, which serves the store, waits until all ranks have read its verdict; after a fault a broken node may
never answer. This is less than a launcher waits for a faulty node to end (Slurm's KillWait: 30 s), so that the first
node can still record the fault."""


def compare(
    folder: Path, hosts: Sequence[str], node_rank: int, processes: int, efa: int, seconds: float
) -> tuple[list[str], str]:
    """Compare the nodes' counts through a shared folder. Every node returns the same (nodes at fault, message).

    Every node must have the same number of processes: if a node lacked a GPU, all ranks would wait for a rank that does
    not exist. ``hosts`` names the nodes in order; ``efa`` counts this node's Elastic Fabric Adapters, or is 0 if
    they do not matter. Raises OSError if the folder cannot be written.
    """
    scratch = folder / f".node-{node_rank}.json"
    scratch.write_text(json.dumps([processes, efa]), encoding="utf-8")
    scratch.replace(folder / f"node-{node_rank}.json")
    counts: dict[str, tuple[int, int]] = {}
    deadline = time.monotonic() + seconds
    while True:
        for number, host in enumerate(hosts):
            with suppress(OSError, ValueError):
                counts[host] = tuple(json.loads((folder / f"node-{number}.json").read_text(encoding="utf-8")))
        if len(counts) == len(hosts) or time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    if silent := [host for host in hosts if host not in counts]:
        return silent, f"no word from {', '.join(silent)} within {seconds:g} s: the task has not started there"
    frequency = Counter(counts.values())
    usual = max(frequency, key=lambda kind: (frequency[kind], kind))  # of two halves, the one with more GPUs
    odd = [host for host in hosts if counts[host] != usual]
    if not odd:
        return [], ""
    gpus, adapters = counts[odd[0]]
    return odd, (
        f"{', '.join(odd)}: {gpus} GPUs and {adapters} EFA adapters, other nodes have {usual[0]} and {usual[1]}; "
        "replace the node, or set NPROC and INSTANCE_TYPE"
    )


def run(
    node: Node, seconds: float, backend: str, efa: int, environ: Mapping[str, str], logs: Path
) -> tuple[int, Failure | None]:
    """Run the check on this node's ranks; return (exit code, failure that names the node at fault).

    Rank 0 reports for all nodes; another node has a failure only if it could not reach rank 0.
    """
    file = logs / "preflight.json"
    command = [sys.executable, "-m", "smp_train.launch.network_check", "--seconds", str(seconds)]
    command += ["--verdict", str(file), "--backend", backend, "--efa", str(efa)]
    # Another port than training's, which may begin while rank 0 still serves this one.
    check_node = replace(node, master_port=node.master_port + 1)
    code, failure = supervise(command, check_node, environ=environ, log_dir=logs, say=lambda line: None)
    if failure is None or (failure.code == BAD_NODE and node.node_rank > 0):
        return code, None
    if failure.code in (BAD_NODE, UNREACHABLE):
        verdict: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # the file is empty if the disk was full
            verdict = json.loads(file.read_text(encoding="utf-8"))
        # The next start excludes nodes that are at fault themselves, not both ends of a bad link.
        cause = "node" if verdict.get("at_fault") else "network"
        failure = Failure(-1, ",".join(verdict.get("nodes", [])) or failure.node, BAD_NODE, cause)
    say(failure.line())
    return failure.code, failure


@dataclass(frozen=True)
class Verdict:
    """Rank 0's result: the nodes to look at, and a message with the reason; both empty if all is well."""

    nodes: list[str]
    message: str
    rate: float = 0.0
    """GB/s of the all-reduce over all ranks: bytes x 2 (n - 1) / n / seconds, as nccl-tests' bus bandwidth."""
    at_fault: bool = False
    """Whether the nodes themselves are at fault, and not the link between them."""


def links(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of nodes: each node with its neighbours on a ring, in at most one pair of a round."""
    if nodes < 2:
        return []
    ring = [(node, (node + 1) % nodes) for node in range(nodes if nodes > 2 else 1)]
    last = [ring.pop()] if nodes > 2 and nodes % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def judge(
    names: Sequence[str], absent: Sequence[int], alone: Sequence[int], failed_pairs: Sequence[tuple[int, int]]
) -> Verdict:
    """Return the verdict on the nodes.

    Args:
        names: The nodes' names.
        absent: Nodes with ranks that never reported.
        alone: Nodes whose ranks did not finish an all-reduce among themselves.
        failed_pairs: Pairs of nodes that did not finish an all-reduce.
    """
    failing = [node for pair in failed_pairs for node in pair]
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
    if failed_pairs:
        pairs = ", ".join(f"{names[first]} and {names[second]}" for first, second in failed_pairs)
        return Verdict(
            [names[node] for node in failing],
            f"{pairs} do not finish an all-reduce with each other; the security group must allow all traffic within "
            "itself, in both directions",
        )
    return Verdict([], "")


class NetworkCheck:
    """The check of one rank. A test replaces `reduce`, the work of a step."""

    def __init__(self, runtime: Runtime, seconds: float, backend: str, device: Any) -> None:
        """Connect to rank 0's store; RuntimeError if it cannot be reached in time."""
        import torch.distributed as dist

        self.runtime, self.seconds, self.backend, self.device = runtime, seconds, backend, device
        self.everyone = list(range(runtime.world_size))
        self.store = dist.TCPStore(
            runtime.master_addr, runtime.master_port, runtime.world_size, runtime.is_main, timedelta(seconds=seconds),
            wait_for_workers=False,
        )  # fmt: skip

    def run(self) -> Verdict:
        """Do all steps; return rank 0's verdict on rank 0, and an empty verdict on other ranks."""
        absent = self.report("here", node_name(), self.seconds / 2)
        # Time limits begin when all ranks have arrived, so that they end together.
        steps = [] if absent else [*self.node_steps(), [self.everyone]]
        for number, groups in enumerate(steps):
            self.step(f"step{number}", groups, self.seconds / 2 / len(steps))
        return self.judge_steps(absent, steps) if self.runtime.is_main else Verdict([], "")

    def report(self, name: str, text: str, seconds: float) -> list[int]:
        """Publish this rank's ``text``; return the ranks that publish no text within ``seconds``."""
        self.store.set(f"{name}/{self.runtime.rank}", text)
        keys = [f"{name}/{rank}" for rank in self.everyone]
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return [rank for rank in self.everyone if not self.store.check([keys[rank]])]
        return []

    def reported(self, name: str, rank: int) -> str:
        """Return the text that a rank has published, "" without one."""
        key = f"{name}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def node_steps(self) -> list[list[list[int]]]:
        """Return the groups of ranks of each step: all ranks of each node, then the first ranks of pairs of nodes."""
        size = self.runtime.local_world_size
        of_nodes = [self.everyone[first : first + size] for first in self.everyone[::size] if size > 1]
        pairs_of_nodes = [[[node * size for node in pair] for pair in pairs] for pairs in links(self.runtime.num_nodes)]
        return [of_nodes, *pairs_of_nodes]

    def step(self, name: str, groups: list[list[int]], seconds: float) -> None:
        """All-reduce over this rank's group, report its rate, and wait for the reports of all ranks."""
        ranks = next((ranks for ranks in groups if self.runtime.rank in ranks), [])
        rate = ""
        try:
            rate = str(failures.within(seconds, lambda: self.reduce(name, ranks, seconds))) if ranks else ""
        except TimeoutError:
            pass
        except Exception as problem:  # any exception of torch means that the step has failed
            say(f"preflight: [{self.runtime.hostname}] {name}: {one_line(problem)[:200]}")
        self.report(name, rate, seconds + SLACK_SECONDS)

    def reduce(self, name: str, ranks: list[int], seconds: float) -> float:
        """All-reduce over ``ranks`` twice, in a new group; return the rate of the second one in GB/s."""
        import torch
        import torch.distributed as dist

        # A new client: a thread that hangs in a client must not block other threads.
        runtime, limit, gpu = self.runtime, timedelta(seconds=seconds), self.device.type == "cuda"
        client = dist.TCPStore(runtime.master_addr, runtime.master_port, None, False, limit, wait_for_workers=False)
        store = dist.PrefixStore(f"group/{name}/{ranks[0]}", client)
        if gpu:
            torch.cuda.set_device(self.device)
        # init_process_group has one default group at a time; a group made directly can be abandoned if it hangs.
        kind: Any = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
        group = kind(store, ranks.index(runtime.rank), len(ranks), limit)
        size = GPU_BYTES if gpu else CPU_BYTES
        data = torch.empty(size // 4, device=self.device)
        for _ in range(2):  # the first all-reduce also opens the connections
            data.fill_(1)
            data[-1].item()  # waits until the GPU has filled the tensor
            began = time.monotonic()
            group.allreduce([data]).wait()
            if gpu:
                torch.cuda.synchronize(self.device)
            seconds = time.monotonic() - began
        if float(data[0]) != len(ranks) or float(data[-1]) != len(ranks):
            raise RuntimeError(f"the sum of {len(ranks)} ones came out as {float(data[0]):g}")
        return size * 2 * (len(ranks) - 1) / len(ranks) / max(seconds, 1e-9) / 1e9

    def judge_steps(self, absent: list[int], steps: list[list[list[int]]]) -> Verdict:
        """Return rank 0's verdict from the reports of all ranks."""
        size = self.runtime.local_world_size
        names = [self.reported("here", first) or f"node-{first // size}" for first in self.everyone[::size]]
        alone, *pairs, everyone = [
            [[rank // size for rank in ranks] for ranks in groups
             if not all(self.reported(f"step{number}", rank) for rank in ranks)]
            for number, groups in enumerate(steps)
        ] or ([], [])  # fmt: skip
        failed_pairs = [(first, second) for step in pairs for first, second in step]
        verdict = judge(names, sorted({rank // size for rank in absent}), [nodes[0] for nodes in alone], failed_pairs)
        if verdict.message:
            return verdict
        if everyone:
            return Verdict([], "every node reaches its neighbours, but an all-reduce over all of them does not end")
        return Verdict([], "", float(self.reported(f"step{len(steps) - 1}", 0)))

    def share(self, verdict: Verdict) -> Verdict:
        """Send rank 0's verdict to all ranks and return it; rank 0 waits until they have it, for a while."""
        if self.runtime.is_main:
            self.store.set("verdict", json.dumps(asdict(verdict)))
        else:
            self.store.wait(["verdict"], timedelta(seconds=self.seconds + SLACK_SECONDS))
            verdict = Verdict(**json.loads(self.store.get("verdict")))
        with suppress(RuntimeError):
            self.report("bye", "", LEAVE_SECONDS if self.runtime.is_main else 0.1)
        return verdict


def describe(verdict: Verdict, runtime: Runtime, device: str, log: str, efa: int) -> list[str]:
    """Return rank 0's lines on a verdict; ``log`` is NCCL's, ``efa`` counts the adapters of each node."""
    if verdict.message:
        return [f"error: preflight: {verdict.message}"]
    size = (CPU_BYTES if device == "cpu" else GPU_BYTES) >> 20
    provider = re.search(r"NET/OFI Selected provider is ([^\s,]+)", log, re.IGNORECASE)
    sockets = re.search(r"NET/Socket\s*: ?Using|Using network Socket", log)
    through = provider[1] if provider else "sockets" if sockets else ""
    lines = [
        f"preflight: {runtime.world_size} ranks on {runtime.num_nodes} nodes reach each other: all-reduce of {size} "
        f"MiB at {verdict.rate:.2f} GB/s" + (f" through {through}" if through else "")
    ]
    if efa and runtime.num_nodes > 1 and through == "sockets":
        lines.append(
            f"warning: preflight: NCCL goes through sockets, and each node has {efa} EFA adapters: the image has no "
            "EFA plugin (aws-ofi-nccl), or it cannot be used"
        )
    return lines


def main(argv: Sequence[str] | None = None, make: type[NetworkCheck] = NetworkCheck) -> int:
    """Run this rank's part; 0: all reach each other, 75: rank 0 named a fault, 74: rank 0 was not reached."""
    parser = argparse.ArgumentParser(prog="python -m smp_train.launch.network_check", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the whole check")
    parser.add_argument("--verdict", type=Path, help="file that rank 0 writes its verdict to")
    parser.add_argument("--backend", default="auto", help="gloo: on the CPU; else NCCL if there are GPUs")
    parser.add_argument("--efa", type=int, default=0, help="EFA adapters of each node")
    options = parser.parse_args(argv)
    # A group that hangs is abandoned. NCCL's watchdog would end the process for it.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a store that times out logs a stack of C++
    import torch

    runtime = detect()
    gpus = torch.cuda.is_available() and options.backend != "gloo"
    device = torch.device("cuda", runtime.local_rank) if gpus else torch.device("cpu")
    log = None
    logs_little = os.environ.get("NCCL_DEBUG", "WARN").upper() in ("WARN", "VERSION")
    if gpus and options.verdict and runtime.is_main and logs_little:
        log = options.verdict.parent / "preflight-nccl.log"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
    try:
        check = make(runtime, options.seconds, "nccl" if gpus else "gloo", device)
        verdict = check.run()
        if runtime.is_main:  # before the ranks leave with the verdict: a launcher may then end rank 0's node
            text = log.read_text(errors="replace") if log and log.exists() else ""
            for line in describe(verdict, runtime, device.type, text, options.efa):
                say(line)
            with suppress(OSError):  # the lines above have the verdict too
                if options.verdict:
                    options.verdict.write_text(json.dumps(asdict(verdict)) + "\n", encoding="utf-8")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 serves the ranks that have not read it
        verdict = check.share(verdict)
    except RuntimeError as problem:
        if runtime.local_rank == 0:
            say(
                f"error: preflight: {runtime.hostname} does not reach {runtime.master_addr}:{runtime.master_port} "
                f"within {options.seconds:g} s ({one_line(problem)[:160]}): look whether the run starts there, and at "
                "the security group"
            )
        return UNREACHABLE
    return BAD_NODE if verdict.message else 0


if __name__ == "__main__":
    exit_immediately(main())  # without waiting for abandoned groups
