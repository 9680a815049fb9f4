"""Every family through every kind of mesh, one after another: what one saved, the next loads, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness import run
from tests.training import read_checkpoint, same
from tests.versions import NATIVE_FAMILIES, hand_over

NOT_BY_TENSOR = {"gpt2", "falcon"}
MESHES: dict[str, tuple[dict[str, Any], set[str]]] = {
    # options, and the families that have them; all others are sharded alone
    "fsdp4": ({}, set()),
    "hsdp2x2": ({"hybrid_shard_degree": 2}, {*NATIVE_FAMILIES}),
    "tp2-fsdp2": ({"tensor_parallel_degree": 2}, {*NATIVE_FAMILIES} - NOT_BY_TENSOR),
    "ep2-fsdp2": ({"expert_parallel_degree": 2}, {"mixtral"}),
}


@pytest.mark.slow
def test_every_family_goes_through_every_mesh_and_back(tmp_path: Path) -> None:
    """Each mesh fills models of other weights with what the mesh before saved, and saves that."""
    run(hand_over, 1, [*NATIVE_FAMILIES], {}, None, str(tmp_path / "first"))
    source = "first"
    for mesh, (options, families) in MESHES.items():
        for chosen, degrees in ((families, options), ({*NATIVE_FAMILIES} - families, {})):
            run(hand_over, 4, sorted(chosen), degrees, str(tmp_path / source), str(tmp_path / mesh))
        source = mesh
    for world in (2, 1):
        run(hand_over, world, [*NATIVE_FAMILIES], {}, str(tmp_path / source), str(tmp_path / f"on {world}"))
        source = f"on {world}"
    for family in NATIVE_FAMILIES:
        expected = read_checkpoint(tmp_path / "first" / family / f"{family}-1steps")
        for mesh in (*MESHES, "on 2", "on 1"):  # bytes that went through one mesh and every one before it
            same(read_checkpoint(tmp_path / mesh / family / f"{family}-1steps"), expected)
