"""What `smp-train plan` says of a run that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from smp_train.planning.cli import complaint

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
