"""Fine-tuning: whatever form the weights come in, the run that starts from them is the same."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from smp_train.arguments import Arguments
from smp_train.backends.smp_model import give_weights
from smp_train.checkpoints.find import open_checkpoint
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.errors import CheckpointError, ConfigError, SmpTrainError
from smp_train.models.build import build_meta
from smp_train.models.hub_names import canonical_name
from smp_train.models.resolve import resolve
from tests import harness
from tests.s3_server import bucket, environment, serving, upload
from tests.training import NO_MODEL, TINY, built, exact, flags, group, read_checkpoint, same, saved, steps, train

COMMON = {**NO_MODEL, "finetune": 1, "max_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as transformers saves it, and beside it the same weights in other forms."""
    folder = tmp_path_factory.mktemp("models")
    spec = resolve(Arguments(**{**TINY, "tie_word_embeddings": 1}))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(spec.config)
    model.save_pretrained(folder / "tiny")
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    torch.save({"model": model.state_dict()}, folder / "full.pt")
    CheckpointManager([Policy(str(folder), 5, 1)], run_name="ours", model_type="llama_v2").save(
        5, {"model": state, "optim": {"x": torch.ones(1)}}, {"model_config": spec.config.to_dict()}
    )
    dcp.save({"model": model.state_dict(), "optimizer": {"x": torch.ones(1)}}, checkpoint_id=folder / "foreign")
    return folder


def forms(models: Path | str) -> dict[str, dict[str, Any]]:
    """Return command lines that start from the same weights, in a folder or in S3."""
    tiny = {"pretrained_model_name": f"{models}/tiny"}
    return {
        "folder": tiny,
        "folder by name": {"pretrained_model_name": "tiny", "finetune_checkpoint_load_dir": models},
        "one file": {**tiny, "pretrained_checkpoint_file": f"{models}/full.pt"},
        "safetensors": {"pretrained_checkpoint_file": f"{models}/tiny/model.safetensors"},
        "our checkpoint": {"pretrained_checkpoint_file": f"{models}/ours/llama_v2-5steps"},
        "our checkpoints": {**tiny, "finetune_checkpoint_load_dir": f"{models}/ours"},
        "another's DCP": {**tiny, "pretrained_checkpoint_file": f"{models}/foreign"},
        "without the flag": {"finetune": 0, "hf_pretrained_model_name_or_dir": f"{models}/tiny"},
        "by widths": {
            **TINY, "max_steps": 2, "tie_word_embeddings": 1, "pretrained_checkpoint_file": f"{models}/full.pt",
        },
    }  # fmt: skip


def build(ranks: Any, device: Any, changes: dict[str, Any]) -> Any:
    """Return the model of a command line, built as a run would."""
    _, backend, spec = built(ranks, device, **{**COMMON, **changes})
    return backend.build(backend.check(spec, seq_len=16), seed=1)


def start_from(cases: dict[str, dict[str, Any]], url: str = "") -> dict[str, dict[str, torch.Tensor]]:
    """Return the whole parameters of the model of each command line."""
    os.environ.update(environment(url))
    found = {}
    with group() as (ranks, device):
        for name, changes in cases.items():
            parameters = build(ranks, device, changes).named_parameters()
            found[name] = {canonical_name(n): p.full_tensor() for n, p in parameters}
    return found


def check(model: Path, found: dict[str, dict[str, torch.Tensor]]) -> None:
    """Assert that every case has the parameters of the model that transformers saved."""
    expected = dict(AutoModelForCausalLM.from_pretrained(model / "tiny", dtype=torch.float32).named_parameters())
    for name, parameters in found.items():
        assert parameters.keys() == expected.keys(), name
        assert all(torch.equal(parameters[key], p) for key, p in expected.items()), name


def test_every_form_of_weights_gives_the_same_model(model: Path) -> None:
    for found in harness.run(start_from, 2, forms(model)):
        check(model, found)


def given_to_rank_0(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """Give rank 0 the weights of each command line as the SMP backend does, and return what it has then."""
    found = {}
    with group() as (ranks, device):
        for name, changes in cases.items():
            *_, spec = built(ranks, device, **{**COMMON, **changes})
            model = build_meta(spec)
            given = give_weights(model, spec.pretrained, delayed=True, seed=1, draws_on=torch.device("cpu"))
            assert given == ranks.is_main
            found[name] = {key: p.detach() for key, p in model.named_parameters()} if ranks.is_main else {}
    return found


def test_on_smp_rank_0_reads_every_form_of_weights(model: Path) -> None:
    found, others = harness.run(given_to_rank_0, 2, forms(model))
    assert not any(others.values())
    check(model, found)


@pytest.mark.slow
def test_every_form_of_weights_in_s3_gives_the_same_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    with serving() as server:
        place = bucket(server, monkeypatch, "forms")
        upload(place, model)
        split = {"pretrained_model_name": f"{place}/tiny", "tensor_parallel_degree": 2}
        for found in harness.run(start_from, 2, {**forms(place), "by tensor": split}, server.url):
            check(model, found)


def test_a_finetune_resumes_without_its_weights(model: Path, tmp_path: Path) -> None:
    own = shutil.copytree(model / "tiny", tmp_path / "tiny")
    options = {**COMMON, "pretrained_model_name": own, "checkpoint_freq": 2, "num_kept_checkpoints": 9}
    options |= {"lr_decay_iters": 4}
    harness.run(train, 2, flags(tmp_path / "straight", **options | {"max_steps": 4}))
    resumable = {**options, "resume_from_checkpoint": tmp_path / "broken" / "checkpoints"}
    harness.run(train, 2, flags(tmp_path / "broken", **resumable))
    (own / "model.safetensors").unlink()
    harness.run(train, 2, flags(tmp_path / "broken", **resumable | {"max_steps": 4}))
    assert exact(tmp_path / "broken") == exact(tmp_path / "straight")
    same(saved(tmp_path / "broken", 4), saved(tmp_path / "straight", 4))


REFUSED = {
    "missing": (ConfigError, {"pretrained_checkpoint_file": "nowhere.pt"}, r"nowhere.pt does not exist"),
    "nameless": (ConfigError, {"pretrained_checkpoint_file": "full.pt"}, r"has no config.json beside it"),
    "deeper": (
        CheckpointError, {**TINY, "num_layers": 1, "pretrained_checkpoint_file": "foreign"},
        r"it has unexpected entries model.model.layers.1.",
    ),
    "wider": (
        CheckpointError, {**TINY, "hidden_width": 64, "pretrained_checkpoint_file": "full.pt"},
        r"is \[256, 32\] there, .* is \[256, 64\] here|full.pt does not fit",
    ),
    "another": (
        CheckpointError,
        {**TINY, "model_type": "gpt2", "num_key_value_heads": None, "pretrained_checkpoint_file": "foreign"},
        r"holds no transformer.wte.weight",
    ),
}  # fmt: skip


def refusals(cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return what this rank raised in each case."""
    said = {}
    with group() as (ranks, device):
        for name, changes in cases.items():
            with pytest.raises(SmpTrainError) as refused:
                build(ranks, device, changes)
            said[name] = f"{type(refused.value).__name__}: {refused.value}"
    return said


def test_weights_that_do_not_fit_are_refused_by_all_ranks(model: Path, tmp_path: Path) -> None:
    file = "pretrained_checkpoint_file"
    cases = {name: {**changes, file: model / changes[file]} for name, (_, changes, _) in REFUSED.items()}
    damaged = tmp_path / "ours"
    shutil.copytree(model / "ours", damaged)
    shard = damaged / "llama_v2-5steps" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    cases["damaged"] = {"pretrained_model_name": model / "tiny", "finetune_checkpoint_load_dir": damaged}
    expected = {name: rf"{kind.__name__}: .*{words}" for name, (kind, _, words) in REFUSED.items()}
    expected["damaged"] = r"Damaged: .*is damaged: __0_0.distcp has CRC-32"
    for said in harness.run(refusals, 2, cases):
        for name, message in said.items():
            assert re.match(expected[name], message), message
    assert (damaged / "llama_v2-5steps" / "COMMITTED").exists()  # another run's stays as it is
    assert not (damaged / "llama_v2-5steps" / "DAMAGED").exists()


def refused_at_start(command_line: list[str]) -> str:
    with pytest.raises(ConfigError) as refused:
        train(command_line)
    return str(refused.value)


def test_a_tokenizer_that_cannot_be_read_is_found_at_start(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    options = {"save_final_model": 1, "model_dir": tmp_path / "final", "tokenizer": tmp_path / "none"}
    for said in harness.run(refused_at_start, 2, flags(tmp_path, **options)):
        assert f"tokenizer {tmp_path}/none cannot be read" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or steps(tmp_path) == []


def test_the_final_model_opens_in_hugging_face(tmp_path: Path) -> None:
    options = {"save_final_model": 1, "model_dir": tmp_path / "final", "max_steps": 3, "checkpoint_type": "full"}
    options |= {"checkpoint_freq": 1, "num_kept_checkpoints": 2}
    harness.run(train, 2, flags(tmp_path, **options))
    last = tmp_path / "checkpoints" / "run" / "llama_v2-3steps"
    entries = read_checkpoint(last)
    for folder in (tmp_path / "final", last / "hf"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        assert all(torch.equal(model[name], entries[f"model.{name}"]) for name in model)
    # Each checkpoint has its own model beside it, and goes with it.
    there = sorted(path.parts[-3] for path in tmp_path.glob("checkpoints/run/*/hf/config.json"))
    assert there == ["llama_v2-2steps", "llama_v2-3steps"]
    assert open_checkpoint(last).verify() == []
    written = (last / "hf" / "model.safetensors").read_bytes()
    (last / "hf" / "config.json").unlink()  # as if it had been killed before it had written this, and half of that
    (last / "hf" / "model.safetensors").write_bytes(b"half")
    harness.run(train, 1, flags(tmp_path, **options, resume_from_checkpoint=tmp_path / "checkpoints"))
    assert (last / "hf" / "model.safetensors").read_bytes() == written
    assert (last / "hf" / "config.json").is_file()
