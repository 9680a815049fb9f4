"""Memory savers on top of tensor and context parallelism: the numbers of one process all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import harness
from tests.training import SAMPLE, flags, steps, train

TOLERANCE = 1e-5

MESHES = {
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "cp2": (2, {"context_parallel_degree": 2}),
    "tp2-fsdp2": (4, {"tensor_parallel_degree": 2, "train_batch_size": 2}),
}
SAVERS = {
    "none": {"activation_checkpointing": "none"},
    "per-operation": {"activation_checkpointing": "selective:op"},
    "every-second": {"activation_checkpointing": "selective:2"},
    "offload": {"activation_checkpointing": "full", "sm_activation_offloading": 1, "activation_loading_horizon": 1},
    "offload-all": {"activation_checkpointing": "none", "sm_activation_offloading": 1, "chunked_loss": 0},
}


def options() -> dict:
    return {
        "use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 4096, "max_context_width": 64,
        "train_batch_size": 4, "num_layers": 3,
    }  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder = tmp_path_factory.mktemp("reference")
    harness.run(train, 1, flags(folder, **options(), activation_checkpointing="none", chunked_loss=0))
    return steps(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "saver"),
    [(mesh, saver) for mesh in MESHES for saver in SAVERS if (mesh, saver) != ("cp2", "per-operation")],  # refused
)
def test_savers_change_no_number(mesh: str, saver: str, reference: list[dict], tmp_path: Path) -> None:
    world, changes = MESHES[mesh]
    harness.run(train, world, flags(tmp_path, **{**options(), **changes, **SAVERS[saver]}))
    for ours, theirs in zip(steps(tmp_path), reference, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
