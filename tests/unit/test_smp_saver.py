"""Who writes which tree, as SMP's replication ranks have it."""

from __future__ import annotations

from smp_train.backends.smp_saver import each_tree_once


def test_one_group_writes_each_tree() -> None:
    assert each_tree_once([("", True, (0, 1)), ("", True, (0, 1))])
    assert each_tree_once([("", True, (0, 1)), ("", True, (0, 1)), ("", False, (2, 3)), ("", False, (2, 3))])
    assert each_tree_once(
        [("tp0_ep0", True, (0, 2)), ("tp1_ep0", True, (1, 3)), ("tp0_ep0", True, (0, 2)), ("tp1_ep0", True, (1, 3))]
    )


def test_nothing_is_written_twice_or_left_out() -> None:
    # torch's own hybrid sharding: two nodes, and SMP takes every rank for the first replica.
    assert not each_tree_once([("", True, (0, 1)), ("", True, (0, 1)), ("", True, (2, 3)), ("", True, (2, 3))])
    assert not each_tree_once([("", True, (0, 1)), ("", False, (0, 1))])
    assert not each_tree_once([("", False, (0, 1)), ("", False, (0, 1))])
