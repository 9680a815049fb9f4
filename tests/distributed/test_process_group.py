"""Ranks that meet, ranks that fail together, and what is said when they cannot meet."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import Any

import pytest

from smp_train.errors import CheckpointError, ConfigError, DataError, LostPeerError, SmpTrainError
from tests.harness import free_port, run


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


def values() -> list[Any]:
    """Return what each function of agreement gives this rank, together and alone."""
    distributed, place, _ = begin()
    mine = place.rank
    seen = [
        distributed.gather("telling", lambda: ("rank", mine)), distributed.on_main("choosing", lambda: f"by {mine}"),
        distributed.any_rank(mine == 1), distributed.any_rank(False), distributed.largest([mine, -mine]),
        distributed.from_main({"of": mine}),
    ]  # fmt: skip
    with distributed.alone():
        seen += [distributed.gather("telling", lambda: mine), distributed.any_rank(mine == 1), distributed.rank()]
    return [*seen, distributed.rank()]


def test_values_are_known_to_all_ranks_unless_alone() -> None:
    shared = [[("rank", 0), ("rank", 1), ("rank", 2)], "by 0", True, False, [2, 0], {"of": 0}]
    assert run(values, 3) == [[*shared, [rank], rank == 1, 0, rank] for rank in range(3)]


def openmpi(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world), "MASTER_PORT": str(port),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
    }  # fmt: skip


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


@pytest.mark.parametrize(
    ("launcher", "count", "local_rank", "expected"),
    [
        ("torchrun", 8, 3, "cuda:3"), ("srun", 1, 3, "cuda:0"),  # Slurm shows each task its own GPU
        *((launcher, count, 7, "8 processes on .* but {} visible GPU") for launcher, count in
          (("torchrun", 1), ("torchrun", 4), ("openmpi", 1), ("srun", 2))),
    ],
)  # fmt: skip
def test_devices(
    launcher: str, count: int, local_rank: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from smp_train.distributed import detect
    from smp_train.distributed.group import device_of

    for name, value in (("is_available", True), ("device_count", count), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    place = replace(detect({}), launcher=launcher, local_rank=local_rank, local_world_size=8, world_size=8)
    if expected.startswith("cuda"):
        assert str(device_of(place, "auto")) == expected
        return
    with pytest.raises(ConfigError, match=expected.format(count)):
        device_of(place, "auto")


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
