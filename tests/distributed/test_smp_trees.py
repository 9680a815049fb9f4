"""Checkpoints of the SMP v2 sample, written on the stand-in, resumed natively on another mesh, on SMP, and imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from smp_train.checkpoints import cli
from smp_train.errors import CheckpointError
from tests import harness, smp_trees
from tests.s3_server import bucket, environment, serving, upload
from tests.smp import (
    DATA,
    MIXTRAL,
    NATIVE,
    NEEDS_NATIVE,
    NEOX,
    alike,
    numbers,
    refusal_of,
    smp,
    train_on_smp,
)
from tests.training import NO_MODEL, flags, read_checkpoint, records, train

pytestmark = pytest.mark.slow
needs_native = pytest.mark.skipif(not NATIVE, reason=NEEDS_NATIVE)

SHARED: dict[str, Any] = {"lr_decay_iters": 4, "max_steps": 2, "train_batch_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2, "train_batch_size": 4}
WRITTEN: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "hybrid llama": (4, {"hybrid_shard_degree": 2, "train_batch_size": 1}, "sharded", ""),
    "tied llama": (2, {"tie_word_embeddings": 1}, "sharded", ""),
    "tp2 llama": (4, TENSOR | {"train_batch_size": 2}, "sharded", "tp{tp}_ep{ep}"),
    "tp2 llama, earlier names": (4, TENSOR | {"train_batch_size": 2}, "sharded", "tp{tps}-{tp}"),
    "tp2 mistral, local": (4, TENSOR | {"train_batch_size": 2, "model_type": "mistral"}, "local", "tp{tp}_ep{ep}"),
    "local llama": (2, {}, "local", "tp{tp}_ep{ep}"),
    "rank files": (2, {}, "files", ""),
    "rank files, gpt-neox": (2, NEOX, "files", ""),
    "own llama": (2, {"use_smp_implementation": 1}, "sharded", "tp{tp}_ep{ep}"),
    "tp2 gpt-neox": (4, NEOX | TENSOR | {"train_batch_size": 2}, "sharded", "tp{tp}_ep{ep}"),
    "ep2 mixtral": (2, MIXTRAL | {"expert_parallel_degree": 2}, "sharded", "tp{tp}_ep{ep}"),
    "tp2 mixtral": (4, MIXTRAL | TENSOR | {"train_batch_size": 2}, "sharded", "tp{tp}_ep{ep}"),
}


FOR_BOTH = {*MIXTRAL, *NEOX, "tie_word_embeddings", "expert_parallel_degree"} - {"moe"}


def write(tmp_path: Path, world: int, kind: str = "sharded", form: str = "tp{tp}_ep{ep}", **changes: Any) -> Any:
    """Train two steps on SMP; return the checkpoint written as the sample does, and its tensors."""
    folder = tmp_path / "aws" / f"{changes.get('model_type', 'llama_v2')}-2steps"
    line = smp(tmp_path / "theirs", **{**SHARED, **changes})
    return folder, harness.run(smp_trees.write, world, line, str(folder), kind, form)[0]


def written(tmp_path: Path, name: str) -> Any:
    world, changes, kind, form = WRITTEN[name]
    return write(tmp_path, world, kind, form, **changes)


def native(folder: Path, place: object, **changes: Any) -> list[str]:
    """Return the command line of a native run that resumes from ``place``."""
    return flags(folder, **DATA, **{**SHARED, "resume_from_checkpoint": place, **changes})


def same(one: smp_trees.State, two: smp_trees.State) -> None:
    lacking = {name for name in set(one) ^ set(two) if not name.endswith("lm_head.weight")}
    assert not lacking
    assert any(name.startswith("exp_avg_sq.") for name in two)
    assert [name for name in two if not torch.equal(one[name], two[name])] == []
    assert any(value.abs().max() > 0 for name, value in two.items() if name.startswith("exp_avg."))


@needs_native
@pytest.mark.parametrize("name", WRITTEN)
def test_resumes_natively_on_another_mesh(name: str, tmp_path: Path) -> None:
    world, changes, _, _ = WRITTEN[name]
    folder, saved = written(tmp_path, name)
    before = smp_trees.contents(folder)
    batch = changes.get("train_batch_size", 2) * world // changes.get("tensor_parallel_degree", 1)
    model = {key: value for key, value in changes.items() if key in FOR_BOTH}
    ours = {**model, "max_steps": 4, "train_batch_size": batch // 2}
    line, own = native(tmp_path / "native", folder.parent, **ours), tmp_path / "theirs" / "checkpoints"
    step, consumed, found = harness.run(smp_trees.take_up, 2, line)[0]
    assert (step, consumed) == (2, 2 * batch)
    same(saved, found)
    step, _, found = harness.run(smp_trees.take_up, 2, native(tmp_path / "own", own, **ours))[0]
    assert step == 2
    same(saved, found)
    harness.run(train, 2, line)
    # The run on SMP, from its own checkpoint of the same step.
    straight = smp(tmp_path / "straight", **{**SHARED, **changes, "max_steps": 4, "resume_from_checkpoint": own})
    harness.run(train_on_smp, world, straight)
    alike(numbers(tmp_path / "native"), numbers(tmp_path / "straight"))
    assert smp_trees.contents(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.mark.parametrize("name", ["tp2 llama", "hybrid llama", "rank files, gpt-neox"])
def test_resumes_on_smp(name: str, tmp_path: Path) -> None:
    world, changes, _, _ = WRITTEN[name]
    folder, _ = written(tmp_path, name)
    for who, place in (("aws", folder), ("ours", tmp_path / "theirs" / "checkpoints")):
        again = {**SHARED, **changes, "max_steps": 4, "resume_from_checkpoint": place}
        harness.run(train_on_smp, world, smp(tmp_path / who / "on", **again))
    assert numbers(tmp_path / "aws" / "on") == numbers(tmp_path / "ours" / "on")


@needs_native
def test_full_model_is_taken_up_without_moments(tmp_path: Path) -> None:
    folder, saved = write(tmp_path, 2, "full", tensor_parallel_degree=2)
    step, _, found = harness.run(smp_trees.take_up, 2, native(tmp_path / "native", folder.parent))[0]
    assert step == 2
    assert all(torch.equal(found[name], saved[name]) for name in found if name.startswith("model."))
    assert all(not value.any() for name, value in found.items() if name.startswith("exp_avg"))
    other = native(tmp_path / "other", folder.parent, num_heads=8, num_key_value_heads=4)
    assert "(--num_heads: 4 there, 8 here" in harness.run(refusal_of, 1, other, False)[0]


@needs_native
def test_incomplete_ones_are_passed_over_or_refused(tmp_path: Path) -> None:
    older, _ = write(tmp_path, 2, tensor_parallel_degree=2)
    newer = older.with_name("llama_v2-4steps")
    shutil.copytree(older, newer)
    (newer / "tp0_ep0" / ".metadata").unlink()
    before = smp_trees.contents(newer)

    def refused(place: Path, named: str, **changes: Any) -> None:
        line = native(tmp_path / "native", place, max_steps=3, **changes)
        assert all(named in message for message in harness.run(refusal_of, 2, line, False))

    def step_of_the_whole_one() -> int:
        line = native(tmp_path / "native", older.parent, max_steps=3)
        step: int = harness.run(smp_trees.take_up, 2, line)[0][0]
        return step

    assert step_of_the_whole_one() == 2
    refused(older.parent, "tp0_ep0/.metadata", strict_resume=1)
    refused(newer, "tp0_ep0/.metadata")
    (newer / "tp0_ep0" / ".metadata").write_bytes(b"cut short")
    assert step_of_the_whole_one() == 2
    (newer / "tp0_ep0" / ".metadata").unlink()
    shutil.rmtree(older / "tp1_ep0")
    refused(older, "trees of some ranks are missing")
    shutil.rmtree(older)
    refused(older.parent, str(older.parent))
    assert smp_trees.contents(newer) == before


@needs_native
def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, 1, form="")
    other = native(tmp_path / "native", folder.parent, rotary_emb_base=500000)
    assert "(--rotary_emb_base: 10000 there, 500000" in harness.run(refusal_of, 1, other, False)[0]
    assert harness.run(smp_trees.take_up, 1, [*other, "--allow_model_change=1"])[0][0] == 2


@pytest.mark.parametrize(
    ("name", "backend"),
    [pytest.param("tp2 gpt-neox", "native", marks=needs_native), ("ep2 mixtral", "smp"), ("rank files", "smp")],
)
def test_finetunes_from_the_weights(name: str, backend: str, tmp_path: Path) -> None:
    world, changes, _, _ = WRITTEN[name]
    folder, saved = written(tmp_path, name)
    config = smp_trees.config_of(tmp_path / "theirs" / "checkpoints" / "run" / folder.name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = {"finetune": 1, "pretrained_model_name": tmp_path, "pretrained_checkpoint_file": folder}
    same_run = {**SHARED, **changes} if backend == "smp" else SHARED
    line = {**DATA, **same_run, **NO_MODEL, **start, "max_context_width": None}
    if backend == "smp":
        step, found = harness.run(smp_trees.take_up_on_smp, world, flags(tmp_path / "tuned", backend="smp", **line))[0]
    else:
        step, _, found = harness.run(smp_trees.take_up, 2, flags(tmp_path / "tuned", **line))[0]
    assert step == 0
    weights = {name for name in saved if name.startswith("model.")}
    assert weights == {name for name in found if name.startswith("model.")}
    assert [name for name in weights if not torch.equal(saved[name], found[name])] == []


@needs_native
@pytest.mark.core
def test_import_gives_a_checkpoint_that_resumes(tmp_path: Path) -> None:
    folder, saved = write(tmp_path, 2, tensor_parallel_degree=2)
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    saved_config = smp_trees.config_of(tmp_path / "theirs" / "checkpoints" / "run" / folder.name)
    line = ["import", str(folder.parent), str(tmp_path / "ours"), "--model", str(config.parent)]
    config.write_text(json.dumps(saved_config | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}))
    with pytest.raises(CheckpointError, match="--num_heads: 4 there, 8 here"):
        cli.main(line)
    config.write_text(json.dumps(saved_config))
    assert cli.main(line) == 0
    step, consumed, found = harness.run(smp_trees.take_up, 2, native(tmp_path / "native", tmp_path / "ours"))[0]
    assert (step, consumed) == (2, 2 * 4)
    same(saved, found)


@needs_native
def test_a_run_leaves_them_alone_beside_it_and_goes_on_in_their_folder(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, 2, form="")
    place, before = folder.parent, smp_trees.contents(folder)
    kept = {"checkpoint_dir": place, "checkpoint_freq": 1, "num_kept_checkpoints": 1}
    beside = flags(tmp_path / "beside", **DATA, **{**SHARED, **kept, "run_name": "beside", "max_steps": 1})
    harness.run(train, 1, beside)
    assert smp_trees.contents(folder) == before
    assert folder.name in (tmp_path / "beside" / "run" / "logs" / "rank-0.log").read_text()
    more = {**kept, "run_name": "on", "checkpoint_freq": None}
    for steps in (2, 3, 4):  # nothing left to do: its own checkpoint of the same step; then two starts
        harness.run(train, 1, native(tmp_path, place, **more, max_steps=steps))
        assert smp_trees.contents(folder) == before
    resumed = [record["checkpoint"] for record in records(tmp_path) if record.get("event") == "resume"]
    assert [Path(each) == folder for each in resumed] == [True, False, False]
    steps_of = [record["step"] for record in records(tmp_path) if "loss" in record and "event" not in record]
    assert steps_of == [3, 4]


@needs_native
@pytest.mark.parametrize("form", ["app", "top"])
def test_trees_of_other_programs_with_optimizer_state(form: str, tmp_path: Path) -> None:
    harness.run(train, 1, flags(tmp_path / "ours", **{**SHARED, "lr": 1e-3}))
    own = tmp_path / "ours" / "checkpoints" / "run" / "llama_v2-2steps"
    saved = read_checkpoint(own)
    tree: dict[str, Any] = {"model": {}, "optim": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    for key, value in saved.items():
        if key.startswith("model."):
            tree["model"][key.removeprefix("model.")] = value
        else:
            name, _, what = key.removeprefix("optim.state.").rpartition(".")
            tree["optim"]["state"].setdefault(name, {})[what] = value
    state = {"app": tree} if form == "app" else {**tree, "total_steps": 2}
    theirs = tmp_path / "theirs" / "llama_v2-2steps"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True)

    resumed = [harness.run(smp_trees.take_up, 1, flags(tmp_path / who, **SHARED, resume_from_checkpoint=place))[0]
               for who, place in (("one", own), ("two", theirs))]  # fmt: skip
    assert resumed[0][0] == resumed[1][0] == 2
    same(resumed[0][2], resumed[1][2])
    config = tmp_path / "config.json"
    config.write_text(json.dumps(smp_trees.config_of(own)))
    model = {**NO_MODEL, "max_context_width": None, "finetune": 1, "pretrained_model_name": tmp_path}
    harness.run(train, 1, flags(tmp_path / "tuned", **{**SHARED, **model, "pretrained_checkpoint_file": theirs}))


@needs_native
def test_resumes_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    folder, saved = write(tmp_path, 2, tensor_parallel_degree=2)
    with serving() as server:
        place = bucket(server, monkeypatch, "trees")
        upload(f"{place}/aws", folder.parent)
        line = native(tmp_path / "native", f"{place}/aws")
        step, _, found = harness.run(smp_trees.take_up, 2, line, **environment(server.url))[0]
        assert step == 2
        same(saved, found)
        upload(f"{place}/files", {"llama_v2-2steps/0.pt": b"of a rank"})
        line = native(tmp_path / "other", f"{place}/files")
        assert "not read from S3" in harness.run(refusal_of, 1, line, False, **environment(server.url))[0]
