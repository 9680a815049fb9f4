"""Which generation answers deaths and lost nodes, and when the run ends instead."""

from __future__ import annotations

from typing import Any

import pytest

from smp_train.launch.coordinator import Beat, End, Event, Generation, Members, decide, grow
from smp_train.launch.node import Failure, Node
from smp_train.launch.world import Sizes

GOOD: dict[str, Any] = {"training": True, "refused": "", "step": None, "sizes": Sizes(1)}
BEATS = {node: Beat(f"host-{node}", f"n{node + 1}", 5.0) for node in range(4)}


def members(nodes: int = 2) -> Members:
    """Two ranks on each node."""
    return Members.first(Node(2, nodes))


def died(*ranks: int, code: int = 137, generation: int = 1, **changes: Any) -> list[Event]:
    return [Event(rank, generation, code, f"n{1 + rank // 2}", "killed", **changes) for rank in ranks]


def answer(run: Members, events: list[Event], *lost: int, nodes: int = 2, **changes: Any) -> Generation | End | None:
    """Return the answer to events and lost nodes, of ``nodes`` that were ever seen."""
    beats = {node: BEATS[node] for node in range(nodes)}
    return decide(run, run.ended(events), lost, beats, **(GOOD | changes))


def test_dead_ranks_are_replaced_on_their_nodes() -> None:
    found = answer(members(), died(3, 0))
    assert isinstance(found, Generation)
    assert (found.number, found.replaced, found.nodes, found.hosts) == (2, [0, 3], {0: 0, 3: 1}, [])
    assert found.reason == "rank 3 on n2 was killed (SIGKILL); rank 0 on n1 was killed (SIGKILL)"
    assert Generation.read(2, found.text().encode()) == found


def test_a_death_of_a_replaced_process_is_no_news() -> None:
    run = members()
    run.join(Generation(2, [3], nodes={3: 1}))
    assert run.ended(died(3)) == []
    (event,) = run.ended(died(3, generation=2))
    found = answer(run, [event])
    assert isinstance(found, Generation)
    assert found.number == 3


def test_a_spare_node_takes_all_ranks_of_a_lost_node() -> None:
    run = members()
    found = answer(run, died(3, 0), 1, nodes=4)
    assert isinstance(found, Generation)
    assert (found.replaced, found.nodes, found.hosts) == ([0, 2, 3], {0: 0, 2: 2, 3: 2}, ["host-1"])
    assert found.reason == "rank 0 on n1 was killed (SIGKILL); node 1 (n2) gave no sign of life for 5 s"
    run.join(found)
    assert (run.on([1]), run.on([2])) == ([], [2, 3])
    found = answer(run, [], 2, nodes=4)
    assert isinstance(found, Generation)
    assert found.nodes == {2: 3, 3: 3}, "no node that was lost before"


@pytest.mark.parametrize(
    ("events", "lost", "changes", "code", "cause", "why"),
    [
        (died(3, 0), [], {"training": False}, 137, "killed", "training has not begun"),
        (died(3) + died(0, code=3), [], {}, 3, "killed", "it would fail again"),
        (died(3, asked=True), [], {}, 137, "killed", "the run was asked to stop"),
        (died(1, code=0) + died(3), [], {}, 137, "killed", "other ranks have finished"),
        (died(3), [], {"refused": "streams"}, 137, "killed", "streams"),
        (died(3, 2, 1, 0), [], {}, 137, "killed", "no rank is left"),
        ([], [1], {}, 75, "node", "no spare node is left"),
    ],
)
def test_the_run_ends_as_without_recovery(
    events: list[Event], lost: list[int], changes: dict[str, Any], code: int, cause: str, why: str
) -> None:
    found = answer(members(), events, *lost, **changes)
    assert isinstance(found, End)
    assert found.failure is not None
    assert (found.failure.code, found.failure.cause, found.why) == (code, cause, why)


def test_ranks_of_a_lost_node_wait_until_one_is_started() -> None:
    run, patient = members(3), {"nodes": 3, "patience": 300.0, "silence": 6.0}
    found = answer(run, [], 1, **patient)
    assert isinstance(found, Generation)
    assert (found.replaced, found.nodes, found.hosts) == ([2, 3], {2: 1, 3: 1}, ["host-1"])
    assert found.reason.endswith("5 s; waiting up to 300 s for a node to be started again")
    run.join(found, [1])
    assert answer(run, [], 1, **patient) is None
    found = answer(run, died(0), 1, **patient)
    assert isinstance(found, Generation)
    assert (found.replaced, found.nodes) == ([0], {0: 0})
    run.join(found, [1])
    assert isinstance(answer(run, [], 1, **patient | {"silence": 301.0}), End)
    found = answer(run, [], 1, **patient | {"nodes": 4})
    assert isinstance(found, Generation)
    assert (found.replaced, found.nodes) == ([2, 3], {2: 3, 3: 3})
    run.join(found, [1])
    assert (run.on([1]), run.awaited) == ([], set())


def test_a_lost_node_is_named_for_the_next_start() -> None:
    found = answer(members(), [], 1)
    assert found == End(Failure(2, "n2", 75, "node"), "no spare node is left")


@pytest.mark.parametrize(
    ("steps", "recoveries"),
    [
        ([10, 10, 10], 3),
        ([10, None, 10, None, 10], 5),
        ([None, None, None], 3),
        ([10, 10, 20, 20, 20], 5),
        ([10, 11, 12, 13, 14, 15], None),
        ([100, 50, 60, None, 50, 50], 6),  # from a checkpoint
        ([44, None, None, 40, None, 45], None),
    ],
)
def test_recoveries_without_progress_come_to_an_end(steps: list[int | None], recoveries: int | None) -> None:
    run = members()
    for number, step in enumerate([None, *steps]):  # the first death is no recovery's
        found = answer(run, died(3, generation=number + 1), step=step)
        if isinstance(found, End):
            assert (number, found.why) == (recoveries, "3 recoveries brought no progress")
            return
        assert found is not None
        run.join(found)
    assert recoveries is None


def test_a_finished_rank_on_a_lost_node_is_not_missed() -> None:
    run = members()
    run.ended(died(2, 3, code=0))
    assert run.on([1]) == []


@pytest.mark.parametrize(
    ("processes", "nodes", "lost", "sizes", "world"),
    [
        (2, 3, [1], Sizes(2, [2, 4, 6]), [0, 1, 4, 5]),
        (2, 3, [1], Sizes(1, [2, 6]), [0, 1]),  # three nodes make a global batch that two cannot make
        (2, 3, [1], Sizes(1, [3, 6]), []),  # half a node
        (2, 4, [1], Sizes(4, [4, 8]), [4, 5, 6, 7]),  # the lost node's neighbour has half a replica
        (2, 4, [1, 2], Sizes(4, [4, 8]), []),
        (2, 3, [1], Sizes(3, [3, 6]), []),  # a replica ends inside a node
        (2, 3, [1], Sizes(6, [6]), []),
    ],
)
def test_whole_replicas_on_living_nodes_go_on(
    processes: int, nodes: int, lost: list[int], sizes: Sizes, world: list[int]
) -> None:
    beats = {node: Beat(f"host-{node}", f"n{node}", 5.0) for node in range(nodes)}
    answer = decide(Members.first(Node(processes, nodes)), [], lost, beats, **{**GOOD, "sizes": sizes})
    assert isinstance(answer, Generation) == bool(world)
    if isinstance(answer, Generation):
        assert (answer.world, answer.replaced, answer.resized) == (world, [], True)


def test_a_smaller_run_replaces_ranks_and_grows_again() -> None:
    run, sizes = members(3), Sizes(2, [2, 4, 6])
    found = answer(run, died(4), 1, nodes=3, sizes=sizes)
    assert isinstance(found, Generation)
    assert (found.world, found.replaced, found.nodes) == ([0, 1, 4, 5], [2], {2: 2})
    run.join(found)
    assert grow(run, [1], {node: BEATS[node] for node in range(3)}, sizes) is None, "the lost node"
    assert run.ended(died(3)) == run.ended(died(5)) == [], "ranks of before"
    found = answer(run, died(3, known=2), nodes=3, sizes=sizes)
    assert isinstance(found, Generation)
    assert (found.world, found.resized) == (None, True), "the run is being built"
    run.join(found)
    found = answer(run, died(3, generation=3, known=3), nodes=3, sizes=sizes, step=7)
    assert isinstance(found, Generation)
    assert (found.world, found.resized) == (None, False)
    run.join(found)
    found = grow(run, [1], {node: BEATS[node] for node in (0, 1, 2, 3)}, sizes)
    assert isinstance(found, Generation)
    assert (found.world, found.replaced, found.nodes) == ([0, 1, 2, 3, -1, -1], [4, 5], {4: 3, 5: 3})
    assert found.reason == "node 3 (n4) joins: 6 ranks go on"
    run.join(found)
    assert run.nodes == {0: 0, 1: 0, 2: 2, 3: 2, 4: 3, 5: 3}


def test_a_node_whose_ranks_fail_while_the_run_grows_gets_no_ranks_again() -> None:
    """Whatever the exit code; the other nodes go on as before, and so do those that joined with it."""
    run, sizes = members(1), Sizes(2, [2, 4, 6, 8])
    beats = {node: BEATS[node] for node in range(3)}
    grown = grow(run, [], beats, sizes)
    assert isinstance(grown, Generation)
    run.join(grown)
    found = answer(run, died(2, code=4, generation=2, known=2), nodes=4, sizes=sizes, refused="")
    assert isinstance(found, Generation)
    assert (found.world, found.replaced, found.resized) == ([0, 1, 4, 5], [], True)
    assert found.reason == (
        "rank 2 on n2 ended with exit code 4; node 1 (n2) is sent away, as it failed while the run grew; 4 ranks go on"
    )
    run.join(found)
    assert run.ended(died(3, code=4, generation=2, known=2)) == [], "of the node that was sent away"
    grown = grow(run, [], BEATS, sizes)
    assert isinstance(grown, Generation)
    assert grown.nodes == {4: 3, 5: 3}
    run.join(grown)
    found = answer(run, died(4, generation=4, known=4), 2, nodes=4, sizes=sizes)
    assert isinstance(found, Generation)
    assert found.world == [0, 1]
    run.join(found)
    assert grow(run, [2], BEATS, sizes) is None
    found = answer(run, died(1, known=5), nodes=4, sizes=sizes, step=7)
    assert isinstance(found, Generation)
    assert (found.replaced, found.world) == ([1], None)


def test_ranks_that_join_in_a_finished_recovery_are_replaced_as_others() -> None:
    run, sizes = members(1), Sizes(2, [2, 4])
    grown = grow(run, [], {node: BEATS[node] for node in range(2)}, sizes)
    assert grown is not None
    run.join(grown)
    for step in (9, None):
        found = answer(run, died(3, generation=run.joined[3], known=run.generation), sizes=sizes, step=step)
        assert isinstance(found, Generation)
        assert (found.replaced, found.world) == ([3], None)
        run.join(found)
    found = answer(run, died(3, generation=run.joined[3], known=run.generation, code=2), sizes=sizes, step=10)
    assert isinstance(found, End)


def test_nodes_that_are_sent_away_are_no_recoveries_without_progress() -> None:
    run, sizes = members(1), Sizes(2, [2, 4])
    for node in range(1, 8):
        beats = {each: Beat(f"host-{each}", f"n{each}", 5.0) for each in range(node + 1)}
        grown = grow(run, [], beats, sizes)
        assert grown is not None
        run.join(grown)
        found = decide(run, run.ended(died(2, generation=run.generation, known=run.generation)), [], beats, **GOOD | {
            "sizes": sizes
        })  # fmt: skip
        assert isinstance(found, Generation), found
        run.join(found)
