"""Checkpoints in S3 by several processes: killed at every stage of a save, resumed on other meshes."""

from __future__ import annotations

import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from transformers import AutoModelForCausalLM

from smp_train.checkpoints import CheckpointManager, Policy, open_checkpoint, storage_s3
from smp_train.checkpoints.export import export
from smp_train.checkpoints.storage_s3 import S3Storage
from smp_train.errors import CheckpointError
from tests.distributed.test_checkpoints import KILLS, group, loaded, resume, same_on_all, save_steps, write
from tests.distributed.test_resume import MESHES
from tests.harness import RankFailed, run
from tests.s3_server import download, environment, serving
from tests.training import flags, steps, train


@pytest.fixture(scope="module")
def server():
    with serving() as proxy:
        yield proxy


@pytest.fixture
def place(server, monkeypatch, request):
    """Return a prefix of a bucket of this test's own."""
    for name, value in environment(server.url).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{random.Random(request.node.nodeid).randrange(10**9)}"
    S3Storage(f"s3://{bucket}").client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/run"


def there(url: str, function: Any, *args: Any) -> Any:
    """Call ``function`` in a rank, which does not have this process's variables."""
    os.environ.update(environment(url))
    return function(*args)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "stage", "newest"), KILLS)
def test_a_rank_killed_at_any_stage_loses_no_committed_checkpoint(server, place, monkeypatch, victim, stage, newest):
    asynchronous = stage in ("checksum", "publish")
    with pytest.raises(RankFailed, match=f"rank {victim}: no result .exit code -9"):
        run(there, 2, server.url, save_steps, place, [1, 2, 3], victim, stage, asynchronous)
    assert loaded(place) == (newest, float(newest))
    run(there, 2, server.url, save_steps, place, [3, 4])
    assert loaded(place) == (4, 4.0)
    monkeypatch.setattr(storage_s3, "IN_FLIGHT_SECONDS", -math.inf)
    S3Storage(place).sweep(-math.inf)
    assert {key.partition("/")[0] for key in S3Storage(place).entries("")} == {"m-3steps", "m-4steps"}


def lose_a_peer(folder: str) -> None:
    """Save steps 1 and 2; rank 1 dies as rank 0 is about to commit the second."""
    with group():
        processes: list[Any] = [None, None]
        dist.all_gather_object(processes, os.getpid())
        reached = []

        def on_stage(stage: str) -> None:
            reached.append(stage)
            if stage == "publish" and reached.count(stage) == 2:
                os.kill(processes[1], signal.SIGKILL)

        manager = CheckpointManager([Policy(folder, 1, 2)], model_type="m", on_stage=on_stage)
        for step in (1, 2):
            values = {f"w{dist.get_rank()}": torch.full((50,), float(step)), "shared": torch.full((9,), float(step))}
            manager.save(step, {"model": values}, {"step_was": step})


@pytest.mark.parametrize("s3", [False, True], ids=["folder", "s3"])
def test_a_peer_that_is_lost_while_the_commit_is_made_takes_nothing_back(server, place, tmp_path, s3):
    where = place if s3 else str(tmp_path)
    with pytest.raises(RankFailed, match=r"rank 1: no result .exit code -9"):
        run(there, 2, server.url, lose_a_peer, where)
    assert loaded(where) == (2, 2.0)


@pytest.mark.slow
def test_any_mesh_loads_what_another_saved(server, place):
    before = same_on_all(run(there, 4, server.url, write, place, ["tensor"]))
    after = same_on_all(run(there, 2, server.url, resume, place, ["fsdp"], list(before)))
    assert [(source, here) for here, source in after] == [("tensor4/small", "fsdp2")]
    assert all(found["saved"] == before[source]["saved"] for (_, source), found in after.items())


def exact(folder: Path) -> list[list[Any]]:
    names = ("step", "loss", "grad_norm", "lr", "tokens", "consumed")
    return [[record[name] for name in names] for record in steps(folder)]


@pytest.mark.slow
def test_a_run_resumes_from_s3_as_if_it_had_never_stopped(server, place, tmp_path):
    options = {"lr_decay_iters": 6, "checkpoint_freq": 2, "train_batch_size": 2}
    run(train, 2, flags(tmp_path / "straight", **options, max_steps=6))
    options |= {"checkpoint_dir": place, "resume_from_checkpoint": place}
    for last in (4, 6):
        run(there, 2, server.url, train, flags(tmp_path / "s3", **options, max_steps=last))
    assert exact(tmp_path / "s3") == exact(tmp_path / "straight")
    world, changes = MESHES["tp2-fsdp2"]
    final = {"checkpoint_type": "full", "save_final_model": 1, "model_dir": f"{place}-final"}
    run(there, world, server.url, train, flags(tmp_path / "s3", **options | changes | final, max_steps=7))
    assert steps(tmp_path / "s3")[-1]["step"] == 7
    said = (tmp_path / "s3" / "run" / "logs" / "rank-0.log").read_text()
    assert said.count("It was saved on another mesh") == 1
    assert {key.partition("/")[0] for key in S3Storage(place).entries("")} == {"llama_v2-6steps", "llama_v2-7steps"}
    export(open_checkpoint(f"{place}/llama_v2-7steps"), tmp_path / "exported")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    for number, written in enumerate((final["model_dir"], f"{place}/llama_v2-7steps/hf")):
        model = AutoModelForCausalLM.from_pretrained(download(written, tmp_path / str(number)), dtype=torch.float32)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def stopped_early(command_line: list[str]) -> str:
    with pytest.raises(CheckpointError) as refused:
        train(command_line)
    return str(refused.value)


def test_a_place_for_the_final_model_that_cannot_be_written_to_stops_at_the_start(server, place, tmp_path):
    options = {"save_final_model": 1, "model_dir": "s3://no-such-bucket/final"}
    for said in run(there, 2, server.url, stopped_early, flags(tmp_path, **options)):
        assert "--model_dir: s3://no-such-bucket/final/.probe" in said
        assert "no such bucket (404 NoSuchBucket)" in said
    assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").glob("*steps"))
