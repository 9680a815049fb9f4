"""The SMP backend as users start it: torchrun, in processes of their own that have the stand-in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.system.command import ROOT, torchrun
from tests.training import flags


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.skipif(os.environ.get("SMP_STANDIN", "tests.standin") != "tests.standin", reason="of this stand-in alone")
def test_torchrun_trains_on_smp(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    environ = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/standin/site'}",
        "SMP_STANDIN_INSTALL": "1",
        "SMP_STANDIN_JOURNAL": str(journal),
        "SM_HP_MP_PARAMETERS": json.dumps({"tensor_parallel_degree": 2, "placement_strategy": "cluster"}),
    }
    program = flags(tmp_path, backend="auto", max_steps=1)  # SMP is here, so auto takes it
    with torchrun(tmp_path, 2, "train", *program, environ=environ) as command:
        assert command.code() == 0, command.err
        assert "Backend: smp" in command.out
    assert (tmp_path / "run" / "DONE").exists()
    for rank in (0, 1):
        calls = (journal / f"rank-{rank}").read_text().splitlines()
        assert [call for call in calls if call in ("init", "transform", "FSDP", "optimizer", "clip_grad_norm_")] == [
            "init", "transform", "FSDP", "optimizer", "clip_grad_norm_",
        ]  # fmt: skip
