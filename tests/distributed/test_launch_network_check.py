"""Before training, the nodes of a run reach each other, or those that do not are named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from smp_train.distributed import Runtime
from smp_train.launch import network_check as net
from smp_train.launch import supervisor
from tests.harness import free_port, run
from tests.system.command import torchrun, warm

NAMES = ["n0", "n1", "n2", "n3", "n4"]


@pytest.mark.parametrize(
    ("absent", "alone", "broken", "named", "said"),
    [
        ([], [], [], [], ""),
        ([1, 3], [2], [(0, 1)], ["n1", "n3"], "no word from n1, n3: look whether the run starts there, and reaches n0"),
        ([], [2], [(1, 2), (2, 3)], ["n2"], "n2: the processes of this node do not finish an all-reduce"),
        ([], [], [(1, 2), (2, 3)], ["n2"], "n2 does not finish an all-reduce with either of its neighbours"),
        ([], [], [(4, 0), (0, 1)], ["n0"], "n0 does not finish"),
        ([], [], [(1, 2)], ["n1", "n2"], "n1 and n2 do not finish an all-reduce with each other; the security group"),
    ],
)
def test_verdicts(
    absent: list[int], alone: list[int], broken: list[tuple[int, int]], named: list[str], said: str
) -> None:
    verdict = net.judge(NAMES, absent, alone, broken)
    assert verdict.nodes == named
    assert verdict.message.startswith(said)


def test_each_node_meets_its_two_neighbours() -> None:
    for nodes in range(1, 10):
        rounds = net.links(nodes)
        pairs = [frozenset(pair) for one in rounds for pair in one]
        assert len(set(pairs)) == len(pairs) == {1: 0, 2: 1}.get(nodes, nodes)
        for one in rounds:
            taking_part = [node for pair in one for node in pair]
            assert len(set(taking_part)) == len(taking_part), "nobody is in two places at once"


def test_what_nccl_goes_through() -> None:
    efa = "ip-1:7:7 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 32 nics)\n"
    sockets = "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\nNCCL INFO Using network Socket\n"
    runtime = Runtime("torchrun", 0, 16, 0, 8, 0, 2, "n1", 1, "n1", False)
    fine = net.Verdict([], "", 181.257)
    assert net.describe(fine, runtime, "cuda", efa, 32) == [
        "preflight: 16 ranks on 2 nodes reach each other: all-reduce of 256 MiB at 181.26 GB/s through efa"
    ]
    assert "warning: preflight: NCCL goes through sockets" in net.describe(fine, runtime, "cuda", sockets, 32)[1]
    assert "through" not in net.describe(fine, runtime, "cuda", "", 32)[0]


class Impatient(net.NetworkCheck):
    """A check that does not wait for ranks that do not come."""

    def report(self, name: str, text: str, seconds: float) -> list[int]:
        return super().report(name, text, 0.3)


class Late(net.NetworkCheck):
    """A check in which one node's network carries nothing, as both ends notice at once.

    The last rank reads the verdict late, while a launcher already ends the ranks of rank 0's node.
    """

    def reduce(self, name: str, ranks: list[int], seconds: float) -> float:
        if len(ranks) == 2 and 1 in ranks:
            raise RuntimeError("no route to host")
        return super().reduce(name, ranks, seconds)

    def share(self, verdict: net.Verdict) -> net.Verdict:
        if self.runtime.rank == 2:
            folder = Path(os.environ["FOLDER"])
            self.store.wait(["verdict"], timedelta(seconds=60))
            assert (folder / "verdict.json").exists(), "a launcher may end rank 0 from now on"
            os.kill(int((folder / "pid-0").read_text()), signal.SIGTERM)
            time.sleep(0.3)
        return super().share(verdict)


class Silent(net.NetworkCheck):
    """A check in which one node's network swallows everything, and the other finds that out after the verdict."""

    def step(self, name: str, groups: list[list[int]], seconds: float) -> None:
        super().step(name, groups, 0.3)

    def reduce(self, name: str, ranks: list[int], seconds: float) -> float:
        while self.runtime.rank == 1 or not Path(os.environ["FOLDER"], "verdict.json").exists():
            time.sleep(0.05)
        raise RuntimeError("no connection within 0.3 s")


def body(
    folder: str, port: int, local_world: int, seconds: float, kind: type[net.NetworkCheck], absent: int | None
) -> int | None:
    net.SLACK_SECONDS = 60.0 if kind is not Late else 0.1  # nobody is late who is only slow
    net.LEAVE_SECONDS = 60.0
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == absent:
        return None
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    os.environ |= {
        "FOLDER": folder, "SLURMD_NODENAME": f"host{rank // local_world}",
        "LOCAL_RANK": str(rank % local_world), "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(rank // local_world), "GROUP_WORLD_SIZE": str(world // local_world),
        "MASTER_PORT": str(port),  # where rank 0 serves
    }  # fmt: skip
    words = ["--seconds", str(seconds), "--verdict", f"{folder}/verdict.json"]
    with open(f"{folder}/said-{rank}", "w") as said, contextlib.redirect_stderr(said):
        return net.main(words, kind)


def verdict(folder: Path) -> net.Verdict:
    return net.Verdict(**json.loads((folder / "verdict.json").read_text()))


def test_all_reach_each_other(tmp_path: Path) -> None:
    assert run(body, 4, str(tmp_path), free_port(), 2, 240.0, net.NetworkCheck, None) == [0, 0, 0, 0]
    assert verdict(tmp_path).message == ""
    assert verdict(tmp_path).rate > 0


@pytest.mark.parametrize(
    ("kind", "world", "absent", "named", "said"),
    [
        (Impatient, 2, 1, 1, "no word from node-1"),
        (Late, 3, None, 1, "does not finish an all-reduce with either of its neighbours"),
        (Silent, 2, None, 2, "do not finish an all-reduce with each other"),
    ],
)
def test_the_node_at_fault_is_named_to_all(
    kind: type[net.NetworkCheck], world: int, absent: int | None, named: int, said: str, tmp_path: Path
) -> None:
    codes = run(body, world, str(tmp_path), free_port(), 1, 240.0, kind, absent)
    assert codes == [None if rank == absent else net.BAD_NODE for rank in range(world)]
    found = verdict(tmp_path)
    assert (len(found.nodes), said in found.message) == (named, True), found
    assert (tmp_path / "said-0").read_text().splitlines()[-1] == f"smp-train: error: preflight: {found.message}"
    assert net.LEAVE_SECONDS <= supervisor.GRACE_SECONDS, "else a launcher ends it before, in the middle"


def test_the_doctor_asks_all_ranks_of_a_launcher(tmp_path: Path) -> None:
    """Alone it says what to start it with."""
    words = ["doctor", "--network", "240"]
    with torchrun(tmp_path, 2, *words) as ranks, warm(tmp_path, *words) as alone:
        assert (ranks.code(), "2 ranks on 1 nodes reach" in ranks.err) == (0, True), ranks.err
        assert (alone.code(), "srun" in alone.err) == (2, True), alone.err


def test_rank_0_that_is_not_there(tmp_path: Path) -> None:
    assert run(body, 2, str(tmp_path), free_port(), 1, 0.5, net.NetworkCheck, 0) == [None, net.UNREACHABLE]
    said = (tmp_path / "said-1").read_text()
    assert "does not reach 127.0.0.1:" in said
