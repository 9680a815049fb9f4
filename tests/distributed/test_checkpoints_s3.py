"""Checkpoints in S3 by several processes: saved by one mesh, resumed on others, and refused places."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from transformers import AutoModelForCausalLM

from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.hf.export import export
from smp_train.errors import CheckpointError
from smp_train.storage.client import client
from tests.checkpoint_files import committed, names
from tests.distributed.test_resume import MESHES
from tests.harness import run
from tests.s3_server import download, there
from tests.training import NO_MODEL, exact, flags, steps, train


@pytest.fixture
def place(s3_place):
    return s3_place


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
    assert committed(f"{place}/run") == names(f"{place}/run")[::-1] == ["llama_v2-7steps", "llama_v2-6steps"]
    export(open_verified(f"{place}/run/llama_v2-7steps"), tmp_path / "exported")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    for number, written in enumerate((final["model_dir"], f"{place}/run/llama_v2-7steps/hf")):
        model = AutoModelForCausalLM.from_pretrained(download(written, tmp_path / str(number)), dtype=torch.float32)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def requests_of_a_start(command_line: list[str]) -> list[str]:
    """Train, and return this rank's requests: operation and path."""
    requests: list[str] = []

    def asked(model: Any, params: dict[str, Any], **_: Any) -> None:
        requests.append(f"{model.name} {params['url_path']}")

    client().meta.events.register("before-call.s3", asked)
    train(command_line)
    return requests


@pytest.mark.slow
@pytest.mark.parametrize("named_by", ["model", "checkpoint"])
def test_a_start_searches_once_on_rank_0(server, place, tmp_path, named_by):
    """Three checkpoints; the other ranks get the answer, and read nothing but their share of the one that is chosen."""
    options: dict[str, Any] = {"checkpoint_dir": place, "resume_from_checkpoint": place, "checkpoint_freq": 1}
    options |= {"num_kept_checkpoints": 3, "checkpoint_type": "sharded"}
    run(there, 2, server.url, train, flags(tmp_path, **options, max_steps=3))
    if named_by == "checkpoint":
        options |= {**NO_MODEL, "max_context_width": None}
    first, second = run(there, 2, server.url, requests_of_a_start, flags(tmp_path, **options, max_steps=3))
    assert not [each for each in second if each.startswith("List")], second
    assert not [each for each in second if "COMMITTED" in each or "1steps" in each or "2steps" in each], second
    markers = [each for each in first if each.startswith("GetObject") and each.endswith("steps/COMMITTED")]
    steps_read = sorted(each.rpartition("-")[2].partition("steps")[0] for each in markers)
    assert steps_read == ["1", "2", "3", "3", "3"], "one search; then the newest is opened, and verified"
    lists = [each for each in first if each.startswith("List")]
    assert 0 < len(lists) <= 13, lists


def stopped_early(command_line: list[str]) -> str:
    with pytest.raises(CheckpointError) as refused:
        train(command_line)
    return str(refused.value)


def test_a_place_for_the_final_model_that_cannot_be_written_to_stops_at_the_start(server, place, tmp_path):
    options = {"save_final_model": 1, "model_dir": "s3://no-such-bucket/final"}
    for said in run(there, 2, server.url, stopped_early, flags(tmp_path, **options)):
        assert "cannot write to s3://no-such-bucket/final: " in said
        assert "give another --model_dir" in said
        assert "no such bucket (404 NoSuchBucket)" in said
    assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").glob("*/*steps"))
