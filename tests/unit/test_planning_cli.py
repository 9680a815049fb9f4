"""What `smp-train plan` says of a run that does not fit, and of its host's memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from smp_train.arguments import Arguments
from smp_train.planning import fitting
from smp_train.planning.cli import complaint
from smp_train.planning.stepping import UPDATE
from smp_train.planning.tracker import GRADIENTS, OPTIMIZER, PARAMETERS
from smp_train.planning.world import Memory

GIB = 2**30
A, B = "--chunked_loss 1", "--cpu_offload 1"


@pytest.mark.parametrize(
    ("lower", "said", "unsaid"),
    [
        ({A: 30 * GIB, B: 19 * GIB, "more devices": None}, "; give --cpu_offload 1 (19.00 GiB)", A),
        ({A: 30 * GIB, B: 26 * GIB, "more devices": None}, "none of these changes alone is enough", "give"),
        ({A: 30 * GIB, B: 26 * GIB}, "--chunked_loss 1 (30.00 GiB); --cpu_offload 1 (26.00 GiB)", "give"),
        ({"more devices": None}, "; take more or larger devices", "alone"),
        ({}, "; take more or larger devices", "alone"),
    ],
)
def test_only_a_change_that_is_enough_is_told_to_be_given(
    lower: dict[str, int | None], said: str, unsaid: str
) -> None:
    found: dict[str, Any] = {"devices": 8, "needed": 31 * GIB, "memory": 20 * GIB, "lower": lower}
    line = complaint(found)
    assert line.startswith("each of 8 devices needs 31.00 GiB and has 20.00 GiB; ")
    assert said in line
    assert unsaid not in line


def test_a_host_that_is_too_small_is_named() -> None:
    found = {"devices": 1, "needed": 7 * GIB, "memory": 20 * GIB, "host_needed": 9 * GIB, "host_memory": 8 * GIB}
    assert complaint(found).startswith("the device needs 9.00 GiB of its host's memory, which has 8.00 GiB")


@pytest.mark.parametrize(
    ("cpu_offload", "gpu", "on_host", "while_saving"),
    [(False, True, 0, 24), (True, True, 16 + 10, 15), (False, False, 0, 15), (True, False, 0, 15)],
)
def test_what_is_page_locked_is_counted_by_blocks(
    cpu_offload: bool, gpu: bool, on_host: int, while_saving: int
) -> None:
    state = Counter({PARAMETERS: 5, GRADIENTS: 5, OPTIMIZER: 10})
    memory = Memory({(UPDATE, 0): state}, 1, pinned=16, saved=24)
    args = Arguments(cpu_offload=cpu_offload)
    assert fitting.on_host(args, memory, gpu=gpu) == on_host
    assert fitting.while_saving(args, memory, gpu=gpu) == while_saving
