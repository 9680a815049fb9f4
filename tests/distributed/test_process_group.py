"""Ranks that meet, ranks that fail together, and what is said when they cannot meet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import CheckpointError, ConfigError, DataError, LostPeerError, SmpTrainError
from tests.harness import free_port, run

ROOT = Path(__file__).parents[2]


def begin() -> Any:
    from smp_train import distributed

    place = distributed.detect()
    device = distributed.start(place, timeout_seconds=240)
    return distributed, place, device


def meet() -> tuple:
    distributed, place, device = begin()
    import torch
    import torch.distributed as dist

    total = torch.tensor([place.rank + 1])
    dist.all_reduce(total)
    seen = (distributed.rank(), distributed.world_size(), device.type, dist.get_backend(), int(total))
    distributed.stop()
    distributed.stop()  # twice is harmless
    return (*seen, distributed.rank(), distributed.world_size())


@pytest.mark.parametrize("world", [1, 2, 4])
def test_start_and_stop(world: int) -> None:
    expected = [(rank, world, "cpu", "gloo", world * (world + 1) // 2, 0, 1) for rank in range(world)]
    assert run(meet, world) == expected


def agree(failing: dict[int, Exception]) -> Any:
    """Fail on some ranks inside `together`; return what this rank got, once the group has worked on."""
    distributed, place, _ = begin()
    import torch
    import torch.distributed as dist

    outcome: Any = "nothing"
    try:
        with distributed.together("reading the shards"):
            if place.rank in failing:
                raise failing[place.rank]
    except SmpTrainError as error:
        outcome = (type(error).__name__, str(error), type(error.__cause__).__name__, getattr(error, "repeats", None))
    total = torch.tensor([1])
    dist.all_reduce(total)
    assert int(total) == place.world_size
    return outcome


TOGETHER: dict[str, tuple[int, dict[int, Exception], tuple[int, str, str]]] = {
    # world, failing ranks; the rank whose failure is raised, its class and message
    "one rank": (3, {1: DataError("shard.json:7: broken")}, (1, "DataError", "shard.json:7: broken")),
    "the lowest of several": (
        4, {1: CheckpointError("no space"), 3: ConfigError(""), 2: ValueError()}, (1, "CheckpointError", "no space"),
    ),
    "a defect": (
        2, {0: ValueError("what\nnow é")}, (0, "SmpTrainError", "while reading the shards: ValueError: what now é"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOGETHER.values(), ids=TOGETHER)
def test_a_failure_of_one_rank_is_raised_on_all(case: tuple[int, dict[int, Exception], tuple[int, str, str]]) -> None:
    world, failing, (first, expected, message) = case
    for rank, (kind, text, cause, repeats) in enumerate(run(agree, world, failing)):
        assert (kind, repeats) == (expected, rank != first)
        assert re.fullmatch(rf"(rank {first} on \S+: )?{re.escape(message)}", text)
        assert text.startswith("rank ") == repeats
        assert cause == type(failing.get(rank)).__name__


def test_ranks_without_a_failure_go_on_together() -> None:
    assert run(agree, 2, {}) == ["nothing"] * 2


def test_together_alone_lets_the_error_through() -> None:
    from smp_train.distributed import together

    error = DataError("x")
    with pytest.raises(DataError) as caught, together("reading"):
        raise error
    assert caught.value is error


def values() -> list[Any]:
    """Return what each function of agreement gives this rank, together and alone."""
    distributed, place, _ = begin()
    mine = place.rank
    seen = [
        distributed.gather("telling", lambda: ("rank", mine)), distributed.on_main("choosing", lambda: f"by {mine}"),
        distributed.any_rank(mine == 1), distributed.any_rank(False), distributed.largest([mine, -mine]),
        distributed.from_main(b"abc"[mine:]), distributed.from_main(b"abc"[:mine]),
    ]  # fmt: skip
    with distributed.alone():
        seen += [distributed.gather("telling", lambda: mine), distributed.any_rank(mine == 1), distributed.rank()]
    return [*seen, distributed.rank()]


def test_values_are_known_to_all_ranks_unless_alone() -> None:
    shared = [[("rank", 0), ("rank", 1), ("rank", 2)], "by 0", True, False, [2, 0], b"abc", b""]
    assert run(values, 3) == [[*shared, [rank], rank == 1, 0, rank] for rank in range(3)]


TRAIN = """
import sys, types
from pathlib import Path
from smp_train import cli, distributed
from smp_train.run import stop
from smp_train.errors import DataError

def main(resolved, place):
    stop.StopRequest(Path("nowhere"))  # as training does: a launcher that ends the peers of a rank lets them speak
    distributed.start(place, timeout_seconds=240)
    import torch, torch.distributed as dist
    dist.barrier()  # all have met: what comes then is no failure to meet
    if resolved.args.run_name == "together":
        with distributed.together("reading"):
            if place.rank == 1:
                raise DataError("shard.json:3: broken")
    elif resolved.args.run_name == "alone":
        if place.rank == 1:
            raise DataError("shard.json:3: broken")
        dist.all_reduce(torch.ones(1))  # rank 1 never comes
    else:
        dist.all_reduce(torch.ones(1))  # who leaves sooner is lost to those that are still connecting
    distributed.stop()
    return 0

module = types.ModuleType("stand_in")
module.main = main
sys.modules["stand_in"] = module
cli.VERBS["train"] = cli.Verb("stand-in", "stand_in")
sys.exit(cli.main(["train", "--use_synthetic_data", "1", "--run_name", sys.argv[1], *sys.argv[2:]]))
"""


def openmpi(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world), "MASTER_PORT": str(port),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
    }  # fmt: skip


def processes(folder: Path, world: int, *words: str) -> list[subprocess.Popen[str]]:
    """Start the processes of a stand-in for training, as Open MPI would."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    port = free_port()
    ranks = []
    for rank in range(world):
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environ |= openmpi(rank, world, port)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen([sys.executable, str(script), *words], env=environ, text=True, **pipes))
    return ranks


def finish(ranks: list[subprocess.Popen[str]], seconds: float = 240) -> list[tuple[int, list[str]]]:
    """Return exit code and our lines on stderr of every process."""
    results = []
    try:
        for process in ranks:
            _, err = process.communicate(timeout=seconds)
            results.append((process.returncode, [line for line in err.splitlines() if line.startswith("smp-train")]))
    finally:
        for process in ranks:
            process.kill()
    return results


@pytest.mark.slow
def test_exit_codes(tmp_path: Path) -> None:
    assert finish(processes(tmp_path, 2, "fine")) == [(0, []), (0, [])]
    (code, first), (other, second), (third_code, third) = finish(processes(tmp_path, 3, "together"))
    assert (code, other, third_code) == (3, 3, 3)
    assert len(first) == len(second) == 1
    assert first[0].startswith("smp-train: [rank 0 on ")
    assert ": shard.json:3: broken" in first[0]
    assert second[0].endswith("] error: shard.json:3: broken")
    assert third == []


@pytest.mark.slow
def test_a_failing_rank_ends_at_once_and_alone(tmp_path: Path) -> None:
    """Its peers are in a collective that it never enters: gloo tells them, or their launcher would."""
    (peer, complaint), (code, lines) = finish(processes(tmp_path, 2, "alone"))
    assert (peer, code) == (1, 3)
    assert lines[0].endswith("] error: shard.json:3: broken")
    assert re.search(r"lost touch with another rank; rank 1 on \S+ failed: shard.json:3: broken", complaint[0])


def tell() -> str:
    """Rank 1 leaves word as it fails; rank 0 returns what it reads."""
    distributed, place, _ = begin()
    import torch.distributed as dist

    from smp_train.distributed import failures

    dist.TCPStore = None  # type: ignore[assignment, misc]  # one that goes away while it is connected to logs a page
    if place.rank == 1:
        failures.tell_peers("broken")
    dist.barrier()
    said = failures.first_failure() if place.rank == 0 else ""
    dist.barrier()
    distributed.stop()
    return said


def test_who_fails_needs_no_new_connection_to_say_so() -> None:
    assert re.fullmatch(r"rank 1 on \S+ failed: broken", run(tell, 2)[0])


def test_ranks_that_never_start_are_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from smp_train import progress
    from smp_train.distributed import detect, start

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    place = detect(openmpi(0, 3, free_port()))
    with pytest.raises(LostPeerError) as refused:
        start(place, timeout_seconds=60, rendezvous_seconds=1)
    message = str(refused.value)
    assert refused.value.exit_code == 1, "no mistake of the user's: another start may go well"
    assert "no word from ranks 1, 2" in message
    assert re.match(r"Waiting for all 3 ranks: \d s\n", capfd.readouterr().err)
    assert f"{place.master_addr}:{place.master_port}" in message
    assert "\n" not in message


def test_restarted_ranks_meet_each_other_however_their_agents_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of torchrun's agent outlives the workers; only an agent whose own worker failed counts the restart."""
    from concurrent.futures import ThreadPoolExecutor
    from datetime import timedelta

    import torch.distributed as dist

    from smp_train.distributed import detect, group

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    place = replace(detect({}), master_addr="127.0.0.1", master_port=port)

    def meet_as(rank: int, world: int) -> None:
        started = uuid.uuid4().hex
        store = group.meet(replace(place, rank=rank, world_size=world), 60)
        store.append("those who met", started)
        while len(store.get("those who met")) < world * len(started):  # all of this start, and nobody of another
            pass
        assert len(store.get("those who met")) == world * len(started)

    for world in (3, 3, 2):  # the last: a node is gone
        with ThreadPoolExecutor(world) as pool:
            late = [pool.submit(meet_as, rank, world) for rank in range(1, world)]  # these find the former round
            main = pool.submit(meet_as, 0, world)
            [future.result() for future in (main, *late)]
    del agent


def test_nodes_that_start_different_numbers_of_processes_are_told_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from smp_train.distributed import detect, group

    place = replace(detect({}), master_addr="127.0.0.1", master_port=free_port())
    places = [replace(place, rank=0, world_size=3), replace(place, rank=1, world_size=2)]
    with ThreadPoolExecutor(2) as pool:
        failures = [future.exception() for future in [pool.submit(group.meet, place, 240) for place in places]]
    for failure in failures:
        assert re.search("are of a world of (2, others of 3|3, others of 2): start as many on each", str(failure))


def test_a_master_that_is_not_there_is_named() -> None:
    from smp_train.distributed import detect, start

    port = free_port()
    place = detect(openmpi(1, 2, port))
    with pytest.raises(LostPeerError, match=f"rank 1 of 2 .* at 127.0.0.1:{port} within 1 s"):
        start(place, timeout_seconds=60, rendezvous_seconds=1)


def test_a_gpu_backend_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from smp_train.distributed import detect, start

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--distributed_backend nccl "):
        start(detect({}), distributed_backend="nccl", timeout_seconds=5)


def devices(count: int, launcher: str, local_rank: int, local_world: int) -> str:
    import dataclasses
    from unittest import mock

    import torch

    from smp_train.distributed import detect
    from smp_train.distributed.group import device_of

    place = dataclasses.replace(
        detect({}), launcher=launcher, local_rank=local_rank, local_world_size=local_world, world_size=local_world
    )
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=count),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        return str(device_of(place, "auto"))


def test_devices() -> None:
    assert devices(8, "torchrun", 3, 8) == "cuda:3"
    # Slurm shows each task its own GPU.
    assert devices(1, "srun", 3, 8) == "cuda:0"
    for launcher, count in (("torchrun", 1), ("torchrun", 4), ("openmpi", 1), ("srun", 2)):
        with pytest.raises(ConfigError, match=f"8 processes on .* but {count} visible GPU"):
            devices(count, launcher, 7, 8)


def test_start_in_a_world_of_one_needs_no_port() -> None:
    assert run(world_of_one, 1) == ["gloo"]


def world_of_one() -> str:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_RUN_ID"]
    _, place, _ = begin()
    import torch.distributed as dist

    assert place.launcher == "python"
    return str(dist.get_backend())


def past_the_mesh() -> bool:
    """Return, on rank 1, whether rank 0 was past the making of a mesh before rank 1 had made its part."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import device_mesh

    from smp_train.distributed.degrees import Degrees
    from smp_train.parallel.mesh import Mesh

    distributed, place, _ = begin()
    store = dist.distributed_c10d._get_default_store()
    make, seen = device_mesh.init_device_mesh, False

    def slowly(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        made = make(*args, **kwargs)
        try:
            store.wait(["past"], timedelta(seconds=0.3))
            seen = True
        except RuntimeError:
            pass
        return made

    if place.rank == 1:
        device_mesh.init_device_mesh = slowly
    Mesh(Degrees(replicate=1, shard=2, context=1, tensor=1), "cpu")
    if place.rank == 0:
        store.set("past", "1")
    dist.barrier()
    distributed.stop()
    return seen


def test_no_rank_leaves_while_another_still_makes_its_mesh() -> None:
    """Rank 0 may serve the store through which groups meet: a refusal there would cut its peers off."""
    assert run(past_the_mesh, 2) == [False, False]
