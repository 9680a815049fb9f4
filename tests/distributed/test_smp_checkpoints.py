"""Checkpoints of the SMP backend on a stand-in for `torch.sagemaker`: resumed, and moved to the native backend."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.checkpoints import cli
from smp_train.checkpoints.find import open_checkpoint
from tests import harness
from tests.smp import (
    DATA,
    MIXTRAL,
    NATIVE,
    NEEDS_NATIVE,
    alike,
    numbers,
    pretrained_folder,
    smp,
    train_alone,
    train_on_smp,
    tuned,
)  # fmt: skip
from tests.tiers import core
from tests.training import flags, read_checkpoint, records, same, train

LATER = {"checkpoint_type": "async_sharded"}
TENSOR: dict[str, Any] = {"train_batch_size": 4, "tensor_parallel_degree": 2}
EXPERT: dict[str, Any] = {"train_batch_size": 2, "moe": 1, "expert_parallel_degree": 2}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders: of a Llama and a Mixtral."""
    models: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": {**MIXTRAL, "moe": None}}
    return {name: pretrained_folder(tmp_path_factory.mktemp(name), **model) for name, model in models.items()}


# --- between backends -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason=NEEDS_NATIVE)
@pytest.mark.parametrize(
    ("way", "world", "changes"),
    [
        ("smp to native", 4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
        ("native to smp", 2, {"train_batch_size": 2, "tie_word_embeddings": 1}),
        ("native to smp", 2, {"train_batch_size": 2, "hybrid_shard_degree": 1}),
    ],
    ids=["smp to native, 2 of 4", "native to smp, full", "native to smp, replicated"],
)
def test_runs_move_between_backends(way: str, world: int, changes: dict[str, Any], tmp_path: Path) -> None:
    shared = {"checkpoint_freq": 2, "lr_decay_iters": 4, **changes}
    kinds = [(train_on_smp, "smp"), (train, "native")]
    (first, name), (second, other) = kinds if way == "smp to native" else kinds[::-1]
    harness.run(first, world, flags(tmp_path, **DATA, **shared, max_steps=4, backend=name))
    checkpoint = tmp_path / "checkpoints" / "run" / "llama_v2-2steps"
    resumed = {**shared, "resume_from_checkpoint": checkpoint, "max_steps": 4}
    harness.run(second, world, flags(tmp_path / "resumed", **DATA, **resumed, backend=other))
    alike(numbers(tmp_path / "resumed"), numbers(tmp_path)[2:])
    # What was read is what was saved: taken up and saved again in a step that changes neither weights nor moments.
    idle = {"max_steps": 3, "checkpoint_freq": 1, "lr": 1e-30, "min_lr": 0, "weight_decay": 0}
    idle |= {"beta1": 1 - 1e-12, "beta2": 1 - 1e-12}
    harness.run(second, world, flags(tmp_path / "idle", **DATA, **{**resumed, **idle}, backend=other))
    after = tmp_path / "idle" / "checkpoints" / "run" / "llama_v2-3steps"
    saved, again = (read_checkpoint(path) for path in (checkpoint, after))
    assert saved.keys() == again.keys()
    weights, means, squares = (
        [key for key in saved if key.startswith(start) and key.endswith(end)]
        for start, end in (("model.", ""), ("optim.", ".exp_avg"), ("optim.", ".exp_avg_sq"))
    )
    assert len(weights) >= len(means) == len(squares) > 0
    assert all(torch.equal(saved[key], again[key]) for key in weights)
    for key in means + squares:
        assert saved[key].abs().max() > 0
        torch.testing.assert_close(again[key], saved[key], rtol=1e-5, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason=NEEDS_NATIVE)
def test_experts_of_native_ranks_move_to_those_of_smp(tmp_path: Path) -> None:
    # The stand-in adds no router loss.
    shared = {**MIXTRAL, **EXPERT, "moe_load_balancing": "none", "moe_z_loss_coeff": 0, "lr_decay_iters": 4}
    harness.run(train, 2, flags(tmp_path, **DATA, **shared, checkpoint_freq=2, max_steps=4, backend="native"))
    resumed = {**shared, "resume_from_checkpoint": tmp_path / "checkpoints" / "run" / "mixtral-2steps", "max_steps": 4}
    harness.run(train_on_smp, 2, smp(tmp_path / "resumed", **resumed))
    alike(numbers(tmp_path / "resumed"), numbers(tmp_path)[2:])


# --- resumed on SMP ---------------------------------------------------------------------------------

RESUMED: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "full, asynchronous": (2, {"train_batch_size": 2, **LATER}, [""]),
    "tp2 shard1": (4, {**TENSOR, "hybrid_shard_degree": 1}, ["tp0_ep0", "tp1_ep0"]),
    "tp2 shard2, 2 replicas, asynchronous": (
        8, {**TENSOR, "train_batch_size": 1, "hybrid_shard_degree": 2, **LATER}, ["tp0_ep0", "tp1_ep0"],
    ),
    "ep2": (2, {**MIXTRAL, **EXPERT}, ["tp0_ep0", "tp0_ep1"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", core(RESUMED, {"ep2"}.__contains__))
def test_resume_is_exact(layout: str, tmp_path: Path) -> None:
    world, changes, parts = RESUMED[layout]
    shared = {"checkpoint_freq": 1, "num_kept_checkpoints": 2, "lr_decay_iters": 3, "max_steps": 3, **changes}
    harness.run(train_on_smp, world, smp(tmp_path / "straight", **shared))
    kind = "mixtral" if "moe" in changes else "llama_v2"
    straight, resumed = (tmp_path / name / "checkpoints" / "run" for name in ("straight", "resumed"))
    assert sorted(path.name for path in straight.glob("*steps")) == [f"{kind}-2steps", f"{kind}-3steps"]
    again = smp(tmp_path / "resumed", **shared, resume_from_checkpoint=straight / f"{kind}-2steps")
    harness.run(train_on_smp, world, again)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "straight")[2:]
    assert open_checkpoint(str(straight / f"{kind}-3steps")).verify() == []
    for part in parts:
        same(*(read_checkpoint(folder / f"{kind}-3steps" / part) for folder in (straight, resumed)))


@pytest.mark.slow
def test_resumes_from_the_nodes_own_disks(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    words = ["--checkpoint_dir", f"local:{near}", str(far), "--checkpoint_freq", "1", "9"]
    words += ["--num_kept_checkpoints", "2", "2", "--resume_from_checkpoint", str(far)]
    unset = dict.fromkeys(("checkpoint_dir", "checkpoint_freq", "num_kept_checkpoints"))
    for steps in (2, 3):
        line = smp(tmp_path, train_batch_size=1, hybrid_shard_degree=2, max_steps=steps, **unset)
        harness.run(train_on_smp, 4, [*line, *words])
        for path in far.glob("run/*steps"):
            shutil.rmtree(path)
    (resume,) = [record for record in records(tmp_path) if record.get("event") == "resume"]
    assert resume["checkpoint"] == str(near / "run" / "rank00000" / "llama_v2-2steps")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["no transform", "tp2"])
def test_resume_of_a_finetune_does_not_read_the_weights_again(
    layout: str, pretrained: dict[str, Path], tmp_path: Path
) -> None:
    changes = {**tuned(pretrained["llama"]), "checkpoint_freq": 1, "num_kept_checkpoints": 9}
    changes |= {"lr_decay_iters": 3, "max_steps": 3}
    changes |= TENSOR if layout == "tp2" else {"train_batch_size": 2}
    harness.run(train_on_smp, 2, smp(tmp_path / "straight", **changes))
    (first,) = (tmp_path / "straight" / "checkpoints" / "run").glob("*-1steps")
    for journal in harness.run(train_on_smp, 2, smp(tmp_path, **changes, resume_from_checkpoint=first)):
        facts = dict(journal)
        # On every rank: all parameters come from the checkpoint.
        assert "validate_params_and_buffers_inited" in facts
        assert eval(facts["FSDP"]["given"])["sync_module_states"] is False
        assert [what for what, _ in journal].count("barrier") == 1  # after FSDP: no rank reads weights
        if layout == "tp2":
            assert (facts["transform"]["meta"], facts["transform"]["load_state_dict_from_rank0"]) == ("True", "False")
    assert numbers(tmp_path) == numbers(tmp_path / "straight")[1:]


# --- for others to read -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "ep2"])
def test_the_final_model_is_what_anything_reads(
    layout: str, pretrained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    changes = TENSOR if layout == "tp2" else EXPERT
    model = pretrained["llama" if layout == "tp2" else "mixtral"]
    final = {"save_final_model": 1, "model_dir": tmp_path / "final", "checkpoint_freq": 4}
    harness.run(train_on_smp, 2, smp(tmp_path / "smp", **tuned(model), **changes, **final))
    native = tmp_path / "native"
    train_alone(flags(native, **{**DATA, **tuned(model)}, train_batch_size=4, **final | {"model_dir": native / "m"}))
    one, two = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "final", native / "m"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-5)
    (checkpoint,) = (tmp_path / "smp" / "checkpoints" / "run").glob("*steps")
    # What the command line makes of it: the parts' sum, and the same model, put together from the parts.
    entries = sum(len(read_checkpoint(part)) for part in checkpoint.glob("tp*"))
    assert cli.main(["show", str(checkpoint)]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert sum(int(shown[kind].split()[0]) for kind in ("model.*", "optim.*")) == entries
    assert shown["model.*"].endswith("in 2 parts")
    assert cli.main(["export", str(checkpoint), str(tmp_path / "exported")]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert exported.keys() == one.keys()
    assert all(torch.equal(exported[name], value) for name, value in one.items())
