"""The SMP backend as users start it: torchrun, in processes of their own that have the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import flags

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.skipif(os.environ.get("SMP_STANDIN", "tests.standin") != "tests.standin", reason="of this stand-in alone")
def test_torchrun_trains_on_smp(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.mkdir()
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/standin/site'}",
        "SMP_STANDIN_INSTALL": "1",
        "SMP_STANDIN_JOURNAL": str(journal),
        "SM_HP_MP_PARAMETERS": json.dumps({"tensor_parallel_degree": 2, "placement_strategy": "cluster"}),
    }
    program = flags(tmp_path, backend="auto", max_steps=1)  # SMP is here, so auto takes it
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "smp_train", "train", *program], env=environ, cwd=tmp_path, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "DONE").exists()
    assert "Backend: smp" in done.stdout
    for rank in (0, 1):
        calls = (journal / f"rank-{rank}").read_text().splitlines()
        assert [call for call in calls if call in ("init", "transform", "FSDP", "optimizer", "clip_grad_norm_")] == [
            "init", "transform", "FSDP", "optimizer", "clip_grad_norm_",
        ]  # fmt: skip
