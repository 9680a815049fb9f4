"""Checkpoints of the SMP v2 sample, written on the stand-in, resumed natively on another mesh, on SMP, and imported."""

from __future__ import annotations

import json
import os
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
from tests.smp import DATA, MIXTRAL, NATIVE, NEOX, OF_THE_MODEL, alike, numbers, refusal_of, smp, train_on_smp
from tests.training import flags, read_checkpoint, records, train

pytestmark = pytest.mark.slow
needs_native = pytest.mark.skipif(not NATIVE, reason="the native backend needs torch 2.6")

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


MIXTRAL_NATIVE = {key: value for key, value in MIXTRAL.items() if key != "moe"}
FOR_BOTH = {*MIXTRAL, *NEOX, "tie_word_embeddings"} - {"moe"}


def written(tmp_path: Path, name: str) -> tuple[Path, smp_trees.State]:
    """Train two steps on SMP; return the checkpoint written as the sample does, and its tensors."""
    world, changes, kind, form = WRITTEN[name]
    line = smp(tmp_path / "theirs", **{**SHARED, **changes})
    family = changes.get("model_type", "llama_v2")
    folder = tmp_path / "aws" / f"{family}-2steps"
    return folder, harness.run(smp_trees.write, world, line, str(folder), kind, form)[0]


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
    ours = {**SHARED, **model, "max_steps": 4, "train_batch_size": batch // 2, "resume_from_checkpoint": folder.parent}
    line = flags(tmp_path / "native", **DATA, **ours)
    step, consumed, found = harness.run(smp_trees.take_up, 2, line)[0]
    assert (step, consumed) == (2, 2 * batch)
    same(saved, found)
    own = flags(tmp_path / "own", **DATA, **ours | {"resume_from_checkpoint": tmp_path / "theirs" / "checkpoints"})
    step, _, found = harness.run(smp_trees.take_up, 2, own)[0]
    assert step == 2
    same(saved, found)
    harness.run(train, 2, line)
    # The run on SMP, from its own checkpoint of the same step.
    straight = {**SHARED, **changes, "max_steps": 4, "resume_from_checkpoint": tmp_path / "theirs" / "checkpoints"}
    harness.run(train_on_smp, world, smp(tmp_path / "straight", **straight))
    alike(numbers(tmp_path / "native"), numbers(tmp_path / "straight"))
    assert smp_trees.contents(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]


@pytest.mark.parametrize("name", ["tp2 llama", "hybrid llama", "rank files, gpt-neox"])
def test_resumes_on_smp(name: str, tmp_path: Path) -> None:
    world, changes, _, _ = WRITTEN[name]
    folder, _ = written(tmp_path, name)
    again = {**SHARED, **changes, "max_steps": 4}
    both = {"theirs": folder, "ours": tmp_path / "theirs" / "checkpoints"}
    for who, place in both.items():
        harness.run(train_on_smp, world, smp(tmp_path / who / "on", **again, resume_from_checkpoint=place))
    assert numbers(tmp_path / "theirs" / "on") == numbers(tmp_path / "ours" / "on")


@needs_native
def test_full_model_is_taken_up_without_moments(tmp_path: Path) -> None:
    folder = tmp_path / "aws" / "llama_v2-2steps"
    saved = harness.run(smp_trees.write, 2, smp(tmp_path, **SHARED, tensor_parallel_degree=2), str(folder), "full")[0]
    line = flags(tmp_path / "native", **DATA, **{**SHARED, "resume_from_checkpoint": folder.parent})
    step, _, found = harness.run(smp_trees.take_up, 2, line)[0]
    assert step == 2
    assert all(torch.equal(found[name], saved[name]) for name in found if name.startswith("model."))
    assert all(not value.any() for name, value in found.items() if name.startswith("exp_avg"))
    other = flags(tmp_path / "other", **{**DATA, **SHARED, "num_heads": 8, "num_key_value_heads": 4},
                  resume_from_checkpoint=folder.parent)  # fmt: skip
    assert "(--num_heads: 4 there, 8 here" in harness.run(refusal_of, 1, other, False)[0]


@needs_native
def test_incomplete_ones_are_passed_over_or_refused(tmp_path: Path) -> None:
    changes = {**SHARED, "tensor_parallel_degree": 2}
    older, newer = (tmp_path / "aws" / f"llama_v2-{step}steps" for step in (2, 4))
    harness.run(smp_trees.write, 2, smp(tmp_path, **changes), str(older))
    shutil.copytree(older, newer)
    (newer / "tp0_ep0" / ".metadata").unlink()
    before = smp_trees.contents(tmp_path / "aws")

    def line(**changes: Any) -> list[str]:
        return flags(tmp_path / "native", **DATA, **{**SHARED, "max_steps": 3, **changes})

    assert harness.run(smp_trees.take_up, 2, line(resume_from_checkpoint=tmp_path / "aws"))[0][0] == 2
    for place, more in ((tmp_path / "aws", {"strict_resume": 1}), (newer, {})):
        refused = harness.run(refusal_of, 2, line(resume_from_checkpoint=place, **more), False)
        assert all("tp0_ep0/.metadata" in message for message in refused)
    (newer / "tp0_ep0" / ".metadata").write_bytes(b"cut short")
    assert harness.run(smp_trees.take_up, 2, line(resume_from_checkpoint=tmp_path / "aws"))[0][0] == 2
    (newer / "tp0_ep0" / ".metadata").unlink()
    shutil.rmtree(older / "tp1_ep0")
    refused = harness.run(refusal_of, 2, line(resume_from_checkpoint=older), False)
    assert all("trees of some ranks are missing" in message for message in refused)
    shutil.rmtree(older)
    refused = harness.run(refusal_of, 2, line(resume_from_checkpoint=tmp_path / "aws"), False)
    assert all(str(tmp_path / "aws") in message for message in refused)
    assert smp_trees.contents(newer) == {os.path.relpath(name, newer.name): data for name, data in before.items()
                                         if name.startswith(newer.name)}  # fmt: skip


@needs_native
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_heads": 8, "num_key_value_heads": 4}, "(--num_heads: 4 there, 8 here)"),
        ({"rotary_emb_base": 500000}, "(--rotary_emb_base: 10000 there, 500000"),
    ],
)
def test_another_model_of_the_same_shapes_is_refused(changed: dict[str, int], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "aws" / "llama_v2-2steps"
    harness.run(smp_trees.write, 1, smp(tmp_path, **SHARED), str(folder), "sharded", "")
    other = {**SHARED, **changed, "resume_from_checkpoint": folder.parent}
    refused = harness.run(refusal_of, 1, flags(tmp_path / "native", **DATA, **other), False)[0]
    assert said in refused
    allowed = flags(tmp_path / "native", **DATA, **other, allow_model_change=1)
    assert harness.run(smp_trees.take_up, 1, allowed)[0][0] == 2


@pytest.mark.parametrize(
    ("name", "backend"),
    [pytest.param("tp2 gpt-neox", "native", marks=needs_native), ("ep2 mixtral", "smp"), ("rank files", "smp")],
)
def test_finetunes_from_the_weights(name: str, backend: str, tmp_path: Path) -> None:
    world, changes, _, _ = WRITTEN[name]
    folder, saved = written(tmp_path, name)
    config = smp_trees.config_of(tmp_path / "theirs" / "checkpoints" / folder.name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = {"finetune": 1, "pretrained_model_name": tmp_path, "pretrained_checkpoint_file": folder}
    same_run = {**SHARED, **changes} if backend == "smp" else SHARED
    line = {**DATA, **same_run, **dict.fromkeys(OF_THE_MODEL), **start, "max_context_width": None}
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
    folder = tmp_path / "aws" / "llama_v2-2steps"
    saved = harness.run(smp_trees.write, 2, smp(tmp_path, **SHARED, tensor_parallel_degree=2), str(folder))[0]
    config = tmp_path / "model"
    config.mkdir()
    saved_config = smp_trees.config_of(tmp_path / "checkpoints" / "llama_v2-2steps")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    (config / "config.json").write_text(json.dumps(saved_config | heads))
    with pytest.raises(CheckpointError, match="--num_heads: 4 there, 8 here"):
        cli.main(["import", str(folder.parent), str(tmp_path / "ours"), "--model", str(config)])
    (config / "config.json").write_text(json.dumps(saved_config))
    assert cli.main(["import", str(folder.parent), str(tmp_path / "ours"), "--model", str(config)]) == 0
    line = flags(tmp_path / "native", **DATA, **{**SHARED, "resume_from_checkpoint": tmp_path / "ours"})
    step, consumed, found = harness.run(smp_trees.take_up, 2, line)[0]
    assert (step, consumed) == (2, 2 * 4)
    same(saved, found)


def read_apart() -> str:
    """Let each rank read a tree of its own, as tensor ranks do; that of rank 1 is broken."""
    from smp_train import distributed
    from smp_train.checkpoints.dcp import load_state
    from smp_train.checkpoints.saver import Library
    from smp_train.checkpoints.translated import TensorReader

    class Broken(TensorReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            raise OSError(5, "broken")

    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=300)
    reader = (Broken if ranks.rank == 1 else TensorReader)({"model.a": torch.ones(2)})
    try:
        load_state({"model": {"a": torch.zeros(2)}}, reader, "trees", load=Library().load)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_tree_that_one_rank_cannot_read_stops_all() -> None:
    assert all("cannot load trees" in said and "broken" in said for said in harness.run(read_apart, 2))


@needs_native
def test_a_start_beside_them_leaves_them_alone(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    folder = place / "llama_v2-2steps"
    harness.run(smp_trees.write, 2, smp(tmp_path / "theirs", **SHARED), str(folder), "sharded", "")
    before = smp_trees.contents(folder)
    train_line = flags(tmp_path, **DATA, **{**SHARED, "max_steps": 1, "checkpoint_freq": 1, "num_kept_checkpoints": 1})
    harness.run(train, 1, train_line)
    assert smp_trees.contents(folder) == before
    assert str(folder.name) in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@needs_native
def test_a_run_goes_on_in_their_folder_and_then_from_its_own(tmp_path: Path) -> None:
    place = tmp_path / "aws"
    folder = place / "llama_v2-2steps"
    harness.run(smp_trees.write, 2, smp(tmp_path / "theirs", **SHARED), str(folder), "sharded", "")
    before = smp_trees.contents(folder)
    more = {"run_name": "on", "checkpoint_dir": place, "resume_from_checkpoint": place, "num_kept_checkpoints": 1}
    for steps in (2, 3, 4):  # nothing left to do: its own checkpoint of the same step; then two starts
        harness.run(train, 1, flags(tmp_path, **DATA, **{**SHARED, **more, "max_steps": steps}))
        assert smp_trees.contents(folder) == before
    resumed = [record["checkpoint"] for record in records(tmp_path) if record.get("event") == "resume"]
    assert [Path(each) == folder for each in resumed] == [True, False, False]
    steps_of = [record["step"] for record in records(tmp_path) if "loss" in record and "event" not in record]
    assert steps_of == [3, 4]


@needs_native
@pytest.mark.parametrize("form", ["app", "top"])
def test_trees_of_other_programs_with_optimizer_state(form: str, tmp_path: Path) -> None:
    harness.run(train, 1, flags(tmp_path / "ours", **{**SHARED, "lr": 1e-3}))
    own = tmp_path / "ours" / "checkpoints" / "llama_v2-2steps"
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
    model = dict.fromkeys((*OF_THE_MODEL, "max_context_width")) | {"finetune": 1, "pretrained_model_name": tmp_path}
    harness.run(train, 1, flags(tmp_path / "tuned", **{**SHARED, **model, "pretrained_checkpoint_file": theirs}))


@needs_native
def test_resumes_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    folder = tmp_path / "aws" / "llama_v2-2steps"
    saved = harness.run(smp_trees.write, 2, smp(tmp_path, **SHARED, tensor_parallel_degree=2), str(folder))[0]
    with serving() as server:
        place = bucket(server, monkeypatch, "trees")
        upload(f"{place}/aws", folder.parent)
        line = flags(tmp_path / "native", **DATA, **{**SHARED, "resume_from_checkpoint": f"{place}/aws"})
        step, _, found = harness.run(smp_trees.take_up, 2, line, **environment(server.url))[0]
        assert step == 2
        same(saved, found)
        files = tmp_path / "files" / "llama_v2-2steps"
        files.mkdir(parents=True)
        (files / "0.pt").write_bytes(b"of a rank")
        upload(f"{place}/files", files.parent)
        line = flags(tmp_path / "other", **DATA, **{**SHARED, "resume_from_checkpoint": f"{place}/files"})
        assert "not read from S3" in harness.run(refusal_of, 1, line, False, **environment(server.url))[0]


@needs_native
@pytest.mark.parametrize(("name", "world"), [("tp2 mixtral", 4), ("ep2 mixtral", 2)])
def test_experts_resume_under_native_tensor_parallelism(name: str, world: int, tmp_path: Path) -> None:
    folder, saved = written(tmp_path, name)
    changes = {**SHARED, **MIXTRAL_NATIVE, "tensor_parallel_degree": 2, "resume_from_checkpoint": folder.parent}
    step, _, found = harness.run(smp_trees.take_up, world, flags(tmp_path / "native", **DATA, **changes))[0]
    assert step == 2
    same(saved, found)
