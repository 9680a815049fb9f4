"""Runs go from the versions of SMP v2's container (torch 2.5.1, transformers 4.44.2) to today's, and back, bit for bit.

Skipped where ``.venv-smp`` is not there; ``make test-smp-container-versions`` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.checkpoints import cli
from tests import harness
from tests.sample_run import STEPS, options
from tests.smp import NATIVE
from tests.smp_trees import config_of
from tests.training import flags, read_checkpoint, same, train
from tests.versions import FAMILIES

ROOT = Path(__file__).parents[2]
TODAYS = sys.executable
CONTAINERS = ROOT / ".venv-smp" / "bin" / "python"
"""The interpreters of both environments."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".venv-smp" / ".installed").is_file(), reason="make test-smp-container-versions"),
    pytest.mark.skipif(not NATIVE, reason="it is today's versions that call the others"),
    pytest.mark.timeout(1800),
]


def hand_on(interpreter: Path | str, *steps: tuple[int, dict[str, Any], Path | None, Path]) -> None:
    """Carry out hand-overs (ranks, flags, source, target) with the versions of an interpreter."""
    call(interpreter, "tests.versions", steps)


def call(interpreter: Path | str, program: str, steps: Any) -> None:
    """Run a program of the tests with the versions of an interpreter."""
    given = json.dumps(steps, default=str)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(interpreter), "-m", program, given], cwd=ROOT, env=environ, capture_output=True, text=True,
        check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def content(folder: Path, family: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / family / f"{family}-1steps")


def test_a_run_goes_to_the_containers_versions_and_back(tmp_path: Path) -> None:
    first, theirs, back, own = (tmp_path / name for name in ("first", "theirs", "back", "own"))
    hand_on(TODAYS, (4, {"hybrid_shard_degree": 2}, None, first))
    hand_on(CONTAINERS, (2, {}, first, theirs), (4, {"hybrid_shard_degree": 2}, None, own))
    hand_on(TODAYS, (4, {"tensor_parallel_degree": 2}, theirs, back), (2, {}, own, tmp_path / "taken over"))
    for family in FAMILIES:
        saved = content(first, family)
        same(saved, content(theirs, family))
        same(saved, content(back, family))
        drawn = content(own, family)
        same(drawn, content(tmp_path / "taken over", family))
        if family != "mixtral":  # transformers 5 draws all experts of a layer as one parameter
            # From scratch the weights are the same too.
            same(*({name: each[name] for name in each if name.startswith("model.")} for each in (saved, drawn)))


# Family, flags, ranks, shard degree, --checkpoint_type, --use_orig_params, whether it is resumed on SMP's stand-in too.
SAMPLES = (
    ("llama_v2", {"tie_word_embeddings": 1}, 4, 2, "local", False, True),
    ("mixtral", {}, 2, 2, "local", False, True),
    ("gpt_neox", {}, 3, 3, "local", False, False),
    ("llama_v2", {"tie_word_embeddings": 1}, 3, 3, "async_local", True, False),
    ("gpt_neox", {}, 2, 2, "async_local", True, True),
    ("mixtral", {}, 2, 2, "async_local", False, False),
)


def test_what_fsdp1_holds_on_each_rank_resumes(tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(len(SAMPLES))]
    writing, resuming = [], []
    for place, (family, changes, world, shards, kind, orig, again) in zip(places, SAMPLES, strict=True):
        model = options(family, **changes)
        writing.append(("write", world, flags(place, **model), place / "aws", kind, shards, orig))
        if again:
            line = flags(place / "smp", **model, backend="smp", resume_from_checkpoint=place / "aws")
            resuming.append(("resume", 2, line))
    call(CONTAINERS, "tests.sample_run", writing)
    call(CONTAINERS, "tests.sample_run", resuming)
    for place, (family, changes, *_, again) in zip(places, SAMPLES, strict=True):
        name = f"{family}-{STEPS}steps"
        line = flags(place / "native", **options(family, **changes), resume_from_checkpoint=place / "aws")
        harness.run(train, 2, line)  # no step is left: it saves what it has resumed from
        native = place / "native" / "checkpoints" / "run" / name
        truth = torch.load(place / "aws" / "truth.pt")
        if changes:
            truth.pop("model.lm_head.weight")  # a tied weight is saved once
        assert any(value.abs().max() > 0 for key, value in truth.items() if key.endswith("exp_avg"))
        same(truth, read_checkpoint(native))
        if again:
            same(truth, read_checkpoint(place / "smp" / "checkpoints" / "run" / name))
            (place / "config.json").write_text(json.dumps(config_of(native)))
            assert cli.main(["import", str(place / "aws"), str(place / "ours"), "--model", str(place)]) == 0
            same(truth, read_checkpoint(place / "ours" / name))
