"""`--auto`: what it chooses is what training takes, and a resume keeps it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.training import flags, numbers, read_checkpoint, same, train

CHOOSES = {"train_batch_size": None, "run_name": "chosen"}


def command(folder: Path, **changes: Any) -> list[str]:
    known = {**CHOOSES, "gradient_accumulation_steps": 2, "max_steps": 2, **changes}
    return flags(folder, **known, resume_from_checkpoint=folder / "checkpoints")


def choice(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "run" / "run.json").read_text())
    assert found["config"].items() >= found["auto"]["flags"].items()
    return found["auto"]


@pytest.mark.slow
def test_it_trains_with_the_flags_it_prints_and_a_resume_keeps_them(tmp_path: Path) -> None:
    harness.run(train, 2, command(tmp_path / "auto", auto="plan"))
    first = choice(tmp_path / "auto")
    assert first["rows"] == 8
    assert first["flags"]["activation_checkpointing"] == "none"
    assert "gradient_accumulation_steps" not in first["flags"]
    by_hand = {**first["flags"], "auto": None}
    harness.run(train, 2, command(tmp_path / "hand", **by_hand))
    assert numbers(tmp_path / "auto") == numbers(tmp_path / "hand")
    one, other = (
        read_checkpoint(next((tmp_path / each / "checkpoints").glob("*2steps"))) for each in ("auto", "hand")
    )  # fmt: skip
    same(one, other)

    harness.run(train, 2, command(tmp_path / "auto", auto="plan", max_steps=3))
    again = choice(tmp_path / "auto")
    assert again.pop("kept") is True
    assert again == first
    # One process goes on with the same global batch.
    harness.run(train, 1, command(tmp_path / "auto", auto="plan", max_steps=4))
    alone = choice(tmp_path / "auto")
    assert "kept" not in alone
    assert (alone["devices"], alone["rows"], alone["flags"]["train_batch_size"]) == (1, 8, 4)
    assert len(numbers(tmp_path / "auto")) == 4


@pytest.mark.slow
def test_a_trial_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    found = harness.run(tried, 2, str(tmp_path))
    assert found[0] == found[1]
    assert found[0]["flags"] == found[0]["trial"][0]["flags"] == {"train_batch_size": 1}
    worked, failed, behind = found[0]["trial"]
    assert worked["step_seconds"] > 0
    assert "allocate" in failed["failed"]
    assert "not tried" in behind["failed"]


def tried(folder: str) -> dict[str, Any]:
    """More rows than there are addresses, so that an allocation fails on any machine."""
    from smp_train import arguments, trial
    from tests.training import group

    # Runs as its process starts, as an import that prints would.
    (Path(folder) / "sitecustomize.py").write_text("print('NCCL version 2.28.9+cuda13.0', flush=True)")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    args = arguments.parse(flags(Path(folder), trust_remote_code=1), {}).args
    with group() as (ranks, _):
        candidates = [{"train_batch_size": rows} for rows in (1, 10**12, 10**13)]
        return trial.run(args, ranks, candidates, candidates[1], Path(folder))


def test_a_trial_steps_drawn_weights_and_ids_and_keeps_compiled_code_in_the_run_folder(tmp_path: Path) -> None:
    steps, cache = harness.run(measured, 1, str(tmp_path))[0]
    assert len(steps) == 3
    for ids, finite in steps:
        assert len(ids) == 2
        assert ids == steps[0][0]
        assert min(len(set(each)) for each in ids) > 8
        assert finite
    assert Path(cache).parent == tmp_path / "run"


def measured(folder: str) -> tuple[list[tuple[list[list[int]], bool]], str]:
    """Return of each step the ids, and whether the weights are finite behind it; and where compiled code is kept."""
    from dataclasses import replace
    from types import SimpleNamespace

    import torch

    from smp_train import arguments, train_utils, trial
    from smp_train.backends.native import NativeBackend
    from smp_train.distributed.dtensor import local_tensor
    from smp_train.models.resolve import resolve
    from smp_train.parallel import compile
    from tests.training import group

    allocate, step = NativeBackend._allocate, train_utils.train_step
    seen = []

    def unset(backend: Any, model: Any) -> None:
        """Allocate weights as memory may be that nobody has set."""
        allocate(backend, model)
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).fill_(torch.nan)

    def watched(backend: Any, model: Any, optimizer: Any, batches: Any, **known: Any) -> Any:
        result = step(backend, model, optimizer, batches, **known)
        finite = all(bool(local_tensor(each).isfinite().all()) for each in model.parameters())
        seen.append(([batch.input_ids.flatten().tolist() for batch in batches], finite))
        return result

    def skipped(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(judged=torch.zeros(1))

    run = Path(folder) / "run"
    run.mkdir()
    args = arguments.parse(flags(Path(folder), gradient_accumulation_steps=4), {}).args
    spec = replace(resolve(args), pretrained="/weights/are/not/read")
    NativeBackend._allocate = unset  # type: ignore[method-assign]
    with group() as (ranks, device):
        train_utils.train_step = watched  # type: ignore[assignment]
        trial.seconds(args, spec, ranks, device)
        train_utils.train_step = skipped
        trial.seconds(replace(args, use_torch_compile=True), spec, ranks, device)
    return seen, os.environ[compile.CACHE]


WORKERS = """
import sys
from types import SimpleNamespace
from smp_train.planning.search import workers
with workers(SimpleNamespace(devices=2, per_node=2, gpu=False)) as pool:
    pool.submit(print, "began", flush=True).result()
    sys.stdin.read()
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_search_that_is_killed() -> None:
    """Nobody else has the other end of the pipe: it ends with the last of the workers."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORKERS], stdin=pipe, stdout=pipe, text=True) as search:
        assert search.stdout is not None
        assert search.stdout.readline() == "began\n"
        search.kill()
        assert search.communicate(timeout=300)[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["smp_train.trial", "smp_train.planning.choice"])
def test_what_a_rank_starts_ends_with_it(tmp_path: Path, module: str) -> None:
    from smp_train import arguments
    from tests.unit.test_auto import request

    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(harness.free_port())}  # fmt: skip
    asks = request(arguments.parse(flags(tmp_path, max_context_width=8192, num_layers=24), {}), 2**40)
    command = [sys.executable, "-m", module, "1"]
    with subprocess.Popen(command, env={**os.environ, **ranks}, stdin=subprocess.PIPE, text=True) as child:
        # The trial's rank 1 never comes, and the search would take longer.
        child.communicate(json.dumps({**asks, "candidates": []}) + "\n", timeout=300)
        assert child.returncode == 1
