"""The SMP backend on a stand-in for `torch.sagemaker`: the native numbers, the documented calls, in their order."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from smp_train import arguments
from smp_train.backends import smp_fp8, smp_library, smp_model, smp_state
from smp_train.backends.smp import SmpBackend, refuse, refuse_model
from smp_train.checkpoints import Checkpoint, cli
from smp_train.errors import CheckpointError, ConfigError, SmpTrainError
from tests import harness
from tests.training import SAMPLE, flags, read_checkpoint, steps, train

TOLERANCE = 1e-5
NATIVE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 6)
Journal = list[tuple[str, dict[str, str]]]

DATA = {"use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 4096, "max_context_width": 64}


def train_on_smp(command_line: list[str], release: str = "2.8", **environ: str) -> Journal:
    """Train on this rank with the stand-in installed, and return what it was asked."""
    import os

    from tests import standin

    os.environ.update(environ)

    library = standin.chosen()
    library.install(release)
    assert train(command_line) == 0
    return [(what, {key: repr(value) for key, value in facts.items()}) for what, facts in library.journal]


def smp(folder: Path, **changes: Any) -> list[str]:
    return flags(folder, backend="smp", **{**DATA, **changes})


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in steps(folder)]


def alike(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)


def train_alone(command_line: list[str]) -> None:
    """Train on one process: natively, or on SMP where torch is its container's and older than the native backend."""
    if NATIVE:
        harness.run(train, 1, command_line)
    else:
        harness.run(train_on_smp, 1, [*command_line, "--backend=smp"])


@cache
def native(folder: Path) -> list[tuple[float, float]]:
    train_alone(flags(folder, **DATA, train_batch_size=4))
    return numbers(folder)


# --- from scratch: the same seed gives the same weights, on this backend and the other -------------

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train_batch_size": 4}),
    "full": (2, {"train_batch_size": 2}),
    "accumulation": (2, {"train_batch_size": 1, "gradient_accumulation_steps": 2}),
    "degree 2 of 4": (4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
    "degree 4 of 4": (4, {"train_batch_size": 1, "hybrid_shard_degree": 4}),
    "replicated": (2, {"train_batch_size": 2, "hybrid_shard_degree": 1}),
    "offloaded": (2, {"train_batch_size": 2, "sm_activation_offloading": 1, "activation_loading_horizon": 1}),
    "every second layer": (2, {"train_batch_size": 2, "activation_checkpointing": "selective:2"}),
    "full logits, not delayed": (2, {"train_batch_size": 2, "chunked_loss": 0, "delayed_param": 0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_like_the_native_backend(
    layout: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, changes = LAYOUTS[layout]
    harness.run(train_on_smp, world, smp(tmp_path, **changes))
    alike(numbers(tmp_path), native(tmp_path_factory.getbasetemp() / "smp-native"))


@pytest.mark.slow
def test_tied_embeddings(tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": 1, "checkpoint_freq": 2}
    harness.run(train_on_smp, 2, smp(tmp_path / "smp", train_batch_size=2, **changes))
    train_alone(flags(tmp_path / "native", **DATA, train_batch_size=4, **changes))
    alike(numbers(tmp_path / "smp"), numbers(tmp_path / "native"))
    ours, theirs = (
        read_checkpoint(tmp_path / name / "checkpoints" / "llama_v2-2steps") for name in ("smp", "native")
    )
    assert ours.keys() == theirs.keys()


def initial_weights(command_line: list[str]) -> dict[str, list[float]]:
    """Train on this rank, and return what it held of each parameter before the first step."""
    build, found = SmpBackend.build, {}

    def built(*args: Any, **options: Any) -> torch.nn.Module:
        model = build(*args, **options)
        found.update({name: p.detach().flatten().tolist() for name, p in model.named_parameters()})
        return model

    SmpBackend.build = built  # type: ignore[method-assign]
    train_on_smp(command_line)
    return found


@pytest.mark.slow
def test_the_seed_draws_the_weights_of_a_transformed_model(tmp_path: Path) -> None:
    changes = {"max_steps": 1, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1, "num_layers": 1}
    one = harness.run(initial_weights, 4, smp(tmp_path / "1", seed=1, **changes))
    assert one[0] == one[2]  # replicas of the two tensor ranks
    assert one[1] == one[3]
    (two, _) = harness.run(initial_weights, 2, smp(tmp_path / "2", seed=2, **changes))
    assert {name for name in two if two[name] == one[0][name]} == {name for name in two if "norm" in name}
    said = (tmp_path / "2" / "run" / "logs" / "rank-0.log").read_text()
    assert "Initial weights: drawn by SMP, from seed 2" in said


# --- what is called, with what, and when -----------------------------------------------------------

ORDER = ["init", "DelayedParamIniter", "validate_params_and_buffers_inited", "FSDP", "activation_checkpointing"]


def names(journal: Journal) -> list[str]:
    """Return what was called, without what a step does many times, and the savers, which have tests of their own."""
    return [what for what, _ in journal if what not in ("forward", "save")]


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "moe": 1}
TRANSFORMED = ["init", "transform", *ORDER[1:]]
GOLDEN: dict[str, tuple[int, dict[str, Any], list[str], str]] = {
    "shard0": (2, {}, ORDER, "FULL_SHARD"),
    "shard2 with 4 replicas": (8, {"hybrid_shard_degree": 2}, ORDER, "HYBRID_SHARD"),
    "tp2 shard4": (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 4}, TRANSFORMED, "HYBRID_SHARD"),
    "tp2 shard0, offloaded": (
        4, {"tensor_parallel_degree": 2, "sm_activation_offloading": 1}, [*TRANSFORMED, "offload_wrapper"],
        "HYBRID_SHARD",
    ),
    "tp2 cp2 shard4": (
        8, {"tensor_parallel_degree": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 4,
            "cp_comm_type": "all_gather"}, TRANSFORMED, "HYBRID_SHARD",
    ),
    "cp2 shard0": (2, {"context_parallel_degree": 2}, TRANSFORMED, "HYBRID_SHARD"),
    "ep2 shard3 on 6": (
        6, {**MIXTRAL, "expert_parallel_degree": 2, "hybrid_shard_degree": 3, "moe_load_balancing": "none"},
        TRANSFORMED, "HYBRID_SHARD",
    ),
    "ep2 shard4": (
        8, {**MIXTRAL, "expert_parallel_degree": 2, "hybrid_shard_degree": 4}, TRANSFORMED, "HYBRID_SHARD",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN)
def test_calls(case: str, tmp_path: Path) -> None:
    world, changes, order, strategy = GOLDEN[case]
    journals = harness.run(train_on_smp, world, smp(tmp_path, max_steps=2, checkpoint_type="sharded", **changes))
    context = changes.get("context_parallel_degree", 1)
    for journal in journals:
        assert names(journal) == [*order, "optimizer", "clip_grad_norm_", "clip_grad_norm_"]
        facts = dict(journal)
        config = eval(facts["init"]["config"])
        # Where nothing is said SMP settles it, but for what needs a degree that is said.
        assert config["hybrid_shard_degree"] == changes.get("hybrid_shard_degree", 2 if case == "cp2 shard0" else 0)
        for name in ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
            assert config[name] == changes.get(name, 1)
        assert config["sm_activation_offloading"] is bool(changes.get("sm_activation_offloading"))
        assert set(eval(facts["init"]["origin"]).values()) == {"config"}  # nothing is left to SMP's defaults
        assert facts["init"]["group"] == "True"
        assert facts["FSDP"]["rewritten"] == repr(strategy)
        assert facts["FSDP"]["use_orig_params"] == "True"
        assert facts["FSDP"]["sync_module_states"] == "False"
        assert {"process_group", "device_mesh"}.isdisjoint(facts["FSDP"])
        layers = "TransformerLayer" if "transform" in order else "LlamaDecoderLayer"
        assert facts["activation_checkpointing"]["classes"] == repr([layers])
        assert facts["activation_checkpointing"]["impl"] == "'REENTRANT'"
        assert facts["clip_grad_norm_"]["root"] == "'FullyShardedDataParallel'"
        if "transform" in order:
            assert facts["forward"]["shape"] == f"(1, {64 // context})"
            assert facts["transform"]["meta"] == "True"
            assert facts["transform"]["empty"] == repr("moe" in changes)
            comm = changes.get("cp_comm_type", "p2p")
            assert facts["transform"]["cp_comm_type"] == repr(comm)
        if "moe" in changes:
            balancing = changes.get("moe_load_balancing", "sinkhorn")
            assert f"moe_load_balancing='{balancing}'" in facts["transform"]["config"]


LAUNCHED = json.dumps({"hybrid_shard_degree": 2, "random_seed": 7})


def test_configuration_comes_from_the_launcher_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "smp.json"
    file.write_text(json.dumps({"hybrid_shard_degree": 1, "activation_loading_horizon": 4, "allow_empty_shards": True}))
    journals = harness.run(
        train_on_smp, 2, smp(tmp_path, max_steps=1, smp_config=file), SM_HP_MP_PARAMETERS=LAUNCHED
    )
    config = eval(dict(journals[0])["init"]["config"])
    assert (config["hybrid_shard_degree"], config["activation_loading_horizon"]) == (2, 4)
    assert (config["allow_empty_shards"], config["random_seed"]) == (True, 7)
    assert "--allow_empty_shards" not in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


def test_a_launcher_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    asked = flags(tmp_path, backend="auto", **DATA, hybrid_shard_degree=1)
    for said in harness.run(refusal_of, 2, asked, True, SM_HP_MP_PARAMETERS=LAUNCHED):
        assert "SM_HP_MP_PARAMETERS sets hybrid_shard_degree to 2" in said
        assert "make it 1" in said


def test_a_library_that_settles_on_other_degrees_is_refused() -> None:
    library = SimpleNamespace(state=SimpleNamespace(tensor_parallel_degree=1, hybrid_shard_degree=4))
    smp_library.check_state(library, {"tensor_parallel_degree": 1, "hybrid_shard_degree": 0})
    with pytest.raises(ConfigError, match="given hybrid_shard_degree 2 and has 4"):
        smp_library.check_state(library, {"tensor_parallel_degree": 1, "hybrid_shard_degree": 2})


def test_what_fsdp_cuts_is_asked_of_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import ShardingStrategy

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    mesh = {"replicate": 4, "shard": 1}
    backend = object.__new__(SmpBackend)
    backend.shard = 1
    backend.args = SimpleNamespace(expert_parallel_degree=1)  # type: ignore[assignment]
    backend.topology = SimpleNamespace(mesh=mesh, tp_size=2, cp_size=1)  # type: ignore[assignment]
    group = SimpleNamespace(size=lambda: 2)
    backend._root = SimpleNamespace(sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=group)
    assert backend._settle_layout()
    assert mesh == {"replicate": 2, "shard": 2}
    backend._root.sharding_strategy = ShardingStrategy.NO_SHARD
    assert not backend._settle_layout()


# --- from weights, with SMP's own implementation ---------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Hugging Face folders: of a Llama, and, under True, of a Mixtral."""
    found = {}
    for moe in (False, True):
        folder = tmp_path_factory.mktemp("pretrained")
        model = {**MIXTRAL, "moe": None} if moe else {}
        settings = {"vocab_size": 4096, "save_final_model": 1, "model_dir": folder / "model", "seed": 5, **model}
        train_alone(flags(folder, max_steps=1, **settings))
        found[moe] = folder / "model"
    return found


@pytest.fixture
def pretrained(folders: dict[bool, Path]) -> Path:
    """A Llama."""
    return folders[False]


TUNED: dict[str, tuple[int, dict[str, Any]]] = {
    "no transform": (2, {"train_batch_size": 2}),
    "tp2": (2, {"train_batch_size": 4, "tensor_parallel_degree": 2}),
    "tp2 shard2": (4, {"train_batch_size": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "tp2 shard1": (4, {"train_batch_size": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1}),
    "tp2 shard2, 2 replicas": (
        8, {"train_batch_size": 1, "tensor_parallel_degree": 2, "hybrid_shard_degree": 2},
    ),
    "transform alone": (2, {"train_batch_size": 2, "use_smp_implementation": 1}),
    "cp2": (2, {"train_batch_size": 4, "context_parallel_degree": 2}),
    "tp2 cp2 shard2": (
        4, {"train_batch_size": 4, "tensor_parallel_degree": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 2},
    ),
    "cp2 shard2, 2 replicas": (4, {"train_batch_size": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "ep2": (2, {"train_batch_size": 2, "moe": 1, "expert_parallel_degree": 2}),
    "ep2 shard2": (4, {"train_batch_size": 1, "moe": 1, "expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
}  # fmt: skip
OF_THE_MODEL = ("model_type", "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads",
                "intermediate_size")  # fmt: skip


def tuned(pretrained: Path) -> dict[str, Any]:
    return {"hf_pretrained_model_name_or_dir": pretrained, **dict.fromkeys(OF_THE_MODEL)}


def native_tuned(model: Path, base: Path) -> Path:
    """Return the folder of the native run that starts from ``model``; it runs once."""
    folder = base / f"native-{model.parent.name}"
    if not (folder / "run" / "DONE").exists():
        train_alone(flags(folder, **{**DATA, **tuned(model)}, train_batch_size=4))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", TUNED)
def test_finetunes_like_the_native_backend(
    layout: str, folders: dict[bool, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, changes = TUNED[layout]
    model = folders["moe" in changes]
    journals = harness.run(train_on_smp, world, smp(tmp_path, **tuned(model), **changes))
    alike(numbers(tmp_path), numbers(native_tuned(model, tmp_path_factory.getbasetemp())))
    for rank, journal in enumerate(journals):
        facts = dict(journal)
        # Only rank 0 has weights; the others' parameters wait on the meta device for FSDP to send them.
        assert ("DelayedParamIniter" in facts) == (rank > 0)
        assert facts["FSDP"]["sync_module_states"] == "True"
        assert "validate_params_and_buffers_inited" not in facts
        if "transform" in facts:
            assert facts["transform"]["load_state_dict_from_rank0"] == "True"
            assert facts["transform"]["empty"] == repr("moe" in changes and rank > 0)
        if "moe" in changes:
            assert ("use_cpu_initialization=True" in facts["transform"]["config"]) == (rank == 0)


def padded(folder: Path, *, in_front: int) -> dict[str, Any]:
    """Return the flags of a data set of 4 padded rows, ``in_front`` of them in front of their tokens."""
    folder.mkdir()
    rows = []
    for index in range(4):
        mask = [1] * (50 - index) + [0] * (14 + index)
        ids = [(7 * index + 31 * place) % 4096 for place in range(64)]
        rows.append({"input_ids": ids, "attention_mask": mask[::-1] if index < in_front else mask})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**DATA, "training_dir": folder, "max_steps": 2}


@pytest.mark.slow
def test_rows_padded_behind_need_no_mask(pretrained: Path, tmp_path: Path) -> None:
    changes = {**padded(tmp_path / "data", in_front=0), **tuned(pretrained), "train_batch_size": 4}
    harness.run(train_on_smp, 2, flags(tmp_path / "smp", **changes, tensor_parallel_degree=2, backend="smp"))
    train_alone(flags(tmp_path / "native", **changes))
    alike(numbers(tmp_path / "smp"), numbers(tmp_path / "native"))


def test_a_row_padded_in_front_stops_all_ranks(tmp_path: Path) -> None:
    changes = padded(tmp_path / "data", in_front=1)  # read by one of the two
    asked = flags(tmp_path, **changes, train_batch_size=2, use_smp_implementation=1, backend="smp")
    for said in harness.run(refusal_of, 2, asked, True):
        assert "has padding in front of its tokens" in said


# --- FP8: Transformer Engine's contexts around SMP's layers ----------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_fp8(model: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"fp8": 1, "bf16": 1, "fp8_amax_history_len": 16, "use_smp_implementation": 1}
    changes |= MIXTRAL if model == "mixtral" else {}
    for journal in harness.run(train_on_smp, 2, smp(tmp_path, max_steps=1, **changes)):
        facts = dict(journal)
        assert facts["forward"]["fp8"] == "'world'"
        assert "amax_history_len=16" in facts["fp8_autocast"]["recipe"]
        assert facts["te.checkpoint"] == {"tracker": "True", "reentrant": "False", "distribute": "False"}
        passes = [
            (eval(entry["classes"]), entry["impl"], entry["own"])
            for what, entry in journal
            if what == "activation_checkpointing"
        ]
        whole = [(["TransformerLayer"], "'NO_REENTRANT'", "True")]
        parts = [
            (["MultiheadAttention"], "'NO_REENTRANT'", "True"), (["MoELayer"], "'NO_REENTRANT'", "False"),
        ]  # fmt: skip
        assert passes == (parts if model == "mixtral" else whole)


@pytest.mark.parametrize(
    ("module", "installed", "renamed"),
    [("1.2.1+c81733f", None, True), ("1.10.0", "1.2.1", False), (None, "1.2.1", True), (None, None, False)],
)
def test_transformer_engines_of_before_take_another_name(
    module: str | None, installed: str | None, renamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata
    import sys

    engine = ModuleType("transformer_engine")
    if module is not None:
        engine.__version__ = module  # type: ignore[attr-defined]

    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setitem(sys.modules, "transformer_engine", engine)
    monkeypatch.setattr(importlib.metadata, "version", version)
    fp8 = object.__new__(smp_fp8.Fp8)
    fp8._engine = SimpleNamespace(checkpoint=dict)
    fp8._state = SimpleNamespace(tp_process_group=None, get_rng_state_tracker="tracker")
    options = fp8.checkpoint()()
    assert ("get_cuda_rng_tracker" in options, "use_reentrant" in options) == (renamed, not renamed)


# --- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the native backend needs torch 2.6")
@pytest.mark.parametrize("way", ["smp to native", "native to smp"])
@pytest.mark.parametrize("layout", ["full", "degree 2 of 4", "replicated"])
def test_runs_move_between_backends(way: str, layout: str, tmp_path: Path) -> None:
    world, changes = LAYOUTS[layout]
    shared = {"checkpoint_freq": 2, "lr_decay_iters": 4, **changes}
    from_smp = way == "smp to native"
    kinds = [(train_on_smp, "smp"), (train, "native")]
    (first, name), (second, other) = kinds if from_smp else kinds[::-1]
    harness.run(first, world, flags(tmp_path, **DATA, **shared, max_steps=2, backend=name))
    resumed = {**shared, "resume_from_checkpoint": tmp_path / "checkpoints"}
    harness.run(second, world, flags(tmp_path, **DATA, **resumed, max_steps=4, backend=other))
    straight = tmp_path / "straight"
    harness.run(second, world, flags(straight, **DATA, **shared, max_steps=4, backend=other))
    alike(numbers(tmp_path), numbers(straight))
    # What was read is what was saved, bit for bit: taken up and saved again in a step that changes nothing.
    saved = read_checkpoint(tmp_path / "checkpoints" / "llama_v2-2steps")
    idle = {**shared, **only(tmp_path), "max_steps": 3, "checkpoint_freq": 1}
    idle |= {"lr": 1e-30, "min_lr": 0, "weight_decay": 0}
    harness.run(second, world, flags(tmp_path / "idle", **DATA, **idle, backend=other))
    again = read_checkpoint(tmp_path / "idle" / "checkpoints" / "llama_v2-3steps")
    assert saved.keys() == again.keys()
    weights = [name for name in saved if name.startswith("model.")]
    assert weights
    assert all((saved[name] == again[name]).all() for name in weights)


def only(folder: Path) -> dict[str, Any]:
    """Return the flag that resumes from the checkpoint of step 2, whatever came after it."""
    return {"resume_from_checkpoint": folder / "checkpoints" / "llama_v2-2steps"}


RESUMED: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "full": (*LAYOUTS["full"], [""]),
    "full, asynchronous": (2, {"train_batch_size": 2, "checkpoint_type": "async_sharded"}, [""]),
    "degree 2 of 4, asynchronous": (
        4, {"train_batch_size": 1, "hybrid_shard_degree": 2, "checkpoint_type": "async_sharded"}, [""],
    ),
    "tp2 shard1": (4, {**TUNED["tp2 shard1"][1], "checkpoint_type": "async_sharded"}, ["tp0_ep0", "tp1_ep0"]),
    "tp2 shard2, 2 replicas": (*TUNED["tp2 shard2, 2 replicas"], ["tp0_ep0", "tp1_ep0"]),
    "tp2 shard2, asynchronous": (
        4, {**TUNED["tp2 shard2"][1], "checkpoint_type": "async_sharded"}, ["tp0_ep0", "tp1_ep0"],
    ),
    "cp2": (*TUNED["cp2"], [""]),
    "ep2": (2, {**MIXTRAL, **TUNED["ep2"][1]}, ["tp0_ep0", "tp0_ep1"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", RESUMED)
def test_resume_is_exact(layout: str, tmp_path: Path) -> None:
    world, changes, parts = RESUMED[layout]
    shared = {"checkpoint_freq": 2, "lr_decay_iters": 4, **changes}
    harness.run(train_on_smp, world, smp(tmp_path / "straight", **shared, max_steps=4))
    harness.run(train_on_smp, world, smp(tmp_path / "resumed", **shared, max_steps=2))
    again = smp(tmp_path / "resumed", **shared, max_steps=4, resume_from_checkpoint=tmp_path / "resumed/checkpoints")
    harness.run(train_on_smp, world, again)
    assert numbers(tmp_path / "resumed") == numbers(tmp_path / "straight")
    said = (tmp_path / "straight" / "run" / "logs" / "rank-0.log").read_text()
    assert ("training waits for each save" in said) == (layout == "tp2 shard1")
    kind = "mixtral" if "moe" in changes else "llama_v2"
    for part in parts:
        one, two = (
            read_checkpoint(tmp_path / name / f"checkpoints/{kind}-4steps" / part) for name in ("straight", "resumed")
        )
        assert one.keys() == two.keys()
        assert one
        assert all((one[key] == two[key]).all() for key in one if hasattr(one[key], "all"))


def test_saves_by_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"checkpoint_freq": 1, "checkpoint_type": "async_sharded", **TUNED["tp2 shard2, 2 replicas"][1]}
    journals = harness.run(train_on_smp, 8, smp(tmp_path, **changes, max_steps=3))
    for rank, journal in enumerate(journals):
        calls = [(what, facts) for what, facts in journal if what in ("async_save", "maybe_finalize_async_calls")]
        if rank >= 4:  # the second replica: its shards are those of the first
            assert not calls
            continue
        peers = [rank % 2, rank % 2 + 2]
        saves = [facts for what, facts in calls if what == "async_save"]
        assert len(saves) == 3
        for facts in saves:
            assert (eval(facts["ranks"]), eval(facts["coordinator"]), facts["action"]) == (peers, peers[0], "True")
            assert facts["folder"] == f"'tp{rank % 2}_ep0'"
        assert len({facts["queue"] for _, facts in calls}) == 1
        # What was begun is ended before the next begins, and before the end.
        pending = 0
        for what, _ in calls:
            pending = pending + 1 if what == "async_save" else 0
            assert pending <= 1
        assert pending == 0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {"llama_v2-3steps"}
    # What the command line makes of it: the parts' sum, and a refusal where Hugging Face's names are needed.
    newest = tmp_path / "checkpoints" / "llama_v2-3steps"
    one, other = (len(read_checkpoint(newest / part)) for part in ("tp0_ep0", "tp1_ep0"))
    assert cli.main(["show", str(newest)]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    counts = [int(shown[kind].split()[0]) for kind in ("model", "optim")]
    assert sum(counts) == one + other
    assert shown["model"].endswith("in 2 parts")
    with pytest.raises(CheckpointError, match="what --save_final_model 1 writes there can be loaded anywhere"):
        cli.main(["convert", str(newest), str(tmp_path / "converted")])


def test_a_save_captures_the_step_it_was_asked_at(tmp_path: Path) -> None:
    changes = {"train_batch_size": 2, "checkpoint_freq": 1, "num_kept_checkpoints": 9}
    harness.run(train_on_smp, 2, smp(tmp_path / "now", **changes, max_steps=3))
    later = {"checkpoint_type": "async_sharded", "logging_freq": 100}  # no log step ends a save early
    harness.run(train_on_smp, 2, smp(tmp_path / "later", **changes, **later, max_steps=3))
    for step in (1, 2, 3):
        one, two = (read_checkpoint(tmp_path / name / f"checkpoints/llama_v2-{step}steps") for name in ("now", "later"))
        assert one.keys() == two.keys()
        assert all((one[key] == two[key]).all() for key in one if hasattr(one[key], "all"))


def test_parameters_that_fsdp_names_otherwise_are_not_left_out_of_a_checkpoint() -> None:
    tree = object.__new__(smp_state.Tree)
    tree.names = {"lm.weight", "lm.bias"}
    both = {"lm.weight": torch.ones(2), "lm.bias": torch.ones(2)}
    state = {name: {"step": value} for name, value in both.items()}
    extra = {"lm._extra_state": torch.zeros(1)}
    assert tree._arranged({**both, **extra}, {"state": state}, convert=False)["model"] == both
    with pytest.raises(CheckpointError, match=r"model lacks 2 of 2 parameters \(lm\.bias"):
        tree._arranged({f"wrapped.{name}": value for name, value in both.items()}, {"state": state}, convert=False)
    with pytest.raises(CheckpointError, match=r"optimizer lacks 1 of 2 parameters"):
        tree._arranged(both, {"state": {"lm.bias": {}}}, convert=False)


def test_a_resume_with_other_degrees_names_both() -> None:
    backend = object.__new__(SmpBackend)
    backend.transforms = True
    backend.topology = SimpleNamespace(mesh={"tensor": 4, "expert": 1})  # type: ignore[assignment]
    for saved, refused in (({"tensor": 4, "expert": 1, "shard": 8}, False), ({"tensor": 2, "expert": 1}, True)):
        meta = {"names": "smp", "mesh": saved}
        checkpoint = Checkpoint("/c", 1, meta, None, None, "c")  # type: ignore[arg-type]
        if not refused:
            backend.check_checkpoint(checkpoint)
            continue
        with pytest.raises(CheckpointError, match=r"saved with --tensor_.* 2 and .* this run has --tensor_.* 4 and"):
            backend.check_checkpoint(checkpoint)


def resumed_natively(command_line: list[str]) -> str:
    try:
        train(command_line)
    except CheckpointError as error:
        return str(error)
    return "it trained"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "cp2", "ep2"])
def test_the_final_model_is_what_anything_reads(
    layout: str, folders: dict[bool, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from transformers import AutoModelForCausalLM

    world, changes = TUNED[layout]
    model = folders["moe" in changes]
    final = {"save_final_model": 1, "model_dir": tmp_path / "final", "checkpoint_freq": 4}
    harness.run(train_on_smp, world, smp(tmp_path / "smp", **tuned(model), **changes, **final))
    native = tmp_path / "native"
    train_alone(flags(native, **{**DATA, **tuned(model)}, train_batch_size=4, **final | {"model_dir": native / "m"}))
    one, two = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (tmp_path / "final", native / "m"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-3, atol=1e-5)
    if NATIVE and layout == "tp2":
        (checkpoint,) = (tmp_path / "smp" / "checkpoints").glob("*steps")
        resumed = flags(tmp_path / "off", **{**DATA, **tuned(model)}, resume_from_checkpoint=checkpoint)
        (said,) = harness.run(resumed_natively, 1, resumed)
        assert "SMP's own implementation of the model" in said
        assert "--save_final_model 1" in said


@pytest.mark.slow
def test_resume_of_a_finetune_does_not_read_the_weights_again(pretrained: Path, tmp_path: Path) -> None:
    changes = {**tuned(pretrained), "train_batch_size": 2, "checkpoint_freq": 2, "lr_decay_iters": 4}
    harness.run(train_on_smp, 2, smp(tmp_path, **changes, max_steps=2))
    resumed = smp(tmp_path, **changes, max_steps=4, resume_from_checkpoint=tmp_path / "checkpoints")
    for journal in harness.run(train_on_smp, 2, resumed):
        facts = dict(journal)
        assert "DelayedParamIniter" in facts  # on every rank: all parameters come from the checkpoint
        assert facts["FSDP"]["sync_module_states"] == "False"
    harness.run(train_on_smp, 2, smp(tmp_path / "straight", **changes, max_steps=4))
    assert numbers(tmp_path) == numbers(tmp_path / "straight")


# --- where SMP cannot be used ----------------------------------------------------------------------


def train_where_smp_refuses(
    command_line: list[str], torch_needed: tuple[int, int] | None = None, failure: type[Exception] = RuntimeError
) -> tuple[int, str]:
    """Train with a `torch.sagemaker` whose init fails; return the exit code and what was logged."""
    import io
    import os
    from contextlib import redirect_stdout

    from smp_train import backends

    if torch_needed is not None:
        backends.OLDEST_TORCH = torch_needed  # type: ignore[misc]
    for name in [name for name in os.environ if name.startswith("SM_")]:
        del os.environ[name]  # not in a SageMaker job

    from smp_train.errors import SmpTrainError
    from tests import standin

    standin.install("2.8")
    import torch.sagemaker as tsm

    def refuse(config: Any) -> None:
        raise failure("this platform is not supported")

    tsm.init = refuse
    with redirect_stdout(io.StringIO()) as out:
        try:
            return train(command_line), out.getvalue()
        except SmpTrainError as error:
            return error.exit_code, str(error)


@pytest.mark.skipif(not NATIVE, reason="the native backend needs torch 2.6")
def test_an_unusable_library_is_named_and_done_without(tmp_path: Path) -> None:
    code, said = harness.run(train_where_smp_refuses, 2, flags(tmp_path, backend="auto"))[0]
    assert code == 0
    assert "SMP is here but cannot be used" in said
    assert "this platform is not supported" in said
    assert "on HyperPod, SMP needs /var/log/aws/clusters" in said
    assert "Backend: native (SMP cannot be used here)" in said


def test_an_unusable_library_stops_who_asks_for_it(tmp_path: Path) -> None:
    for code, said in harness.run(train_where_smp_refuses, 2, smp(tmp_path)):
        assert code == 2
        assert "torch.sagemaker.init refuses: this platform is not supported" in said


def test_where_neither_backend_can_run_both_causes_are_named(tmp_path: Path) -> None:
    asked = flags(tmp_path, backend="auto")
    ((code, said),) = harness.run(train_where_smp_refuses, 1, asked, (9, 9), ValueError)
    assert code == 2
    assert "init refuses: this platform is not supported;" in said  # not a failure that a mount explains
    assert "the native backend needs torch 9.9 or newer" in said


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no library": ({}, r"this torch has no torch\.sagemaker"),
    "FP8 of a plain model": ({"fp8": 1, "bf16": 1}, r"--fp8 1 .* give --use_smp_implementation 1"),
    "FP8 offloaded": (
        {"fp8": 1, "bf16": 1, "use_smp_implementation": 1, "sm_activation_offloading": 1}, r"do not go together on SMP",
    ),
    "a model that SMP has not": (
        {"model_type": "gpt2", "num_key_value_heads": None, "intermediate_size": None, "use_smp_implementation": 1},
        r"transform refuses this model",
    ),
    "experts of a dense model": ({"moe": 1}, r"transform refuses this model"),
    "compile": ({"use_torch_compile": 1}, r"--use_torch_compile 1 with --backend smp"),
    "per operation": ({"activation_checkpointing": "selective:op"}, r"SMP checkpoints whole layers"),
    "offload": (
        {"sm_activation_offloading": 1, "activation_checkpointing": "none"}, r"needs checkpointing",
    ),
}  # fmt: skip


def resolved(folder: Path, **changes: Any) -> Any:
    return arguments.parse(smp(folder, **changes)).args


def test_unsharded_tensor_ranks_do_not_go_over_smddp(tmp_path: Path) -> None:
    changes = {"tensor_parallel_degree": 2, "distributed_backend": "smddp"}
    refuse(resolved(tmp_path, **changes))
    with pytest.raises(ConfigError, match="over nccl only"):
        refuse(resolved(tmp_path, **changes, hybrid_shard_degree=1))


@pytest.mark.parametrize("given", ["fp8", "context_parallel_degree"])
def test_what_smp_has_not_for_a_sliding_window_is_refused(given: str, tmp_path: Path) -> None:
    args = resolved(tmp_path, **{given: 2 if "degree" in given else 1})
    for kind, window, refused in (("mistral", 8, True), ("mistral", None, False), ("llama", None, False)):
        config = SimpleNamespace(model_type=kind, sliding_window=window)
        if not refused:
            refuse_model(config, args)
            continue
        with pytest.raises(ConfigError, match=f"sliding window of 8 tokens with --{given}"):
            refuse_model(config, args)


def test_logits_of_a_part_of_the_vocabulary_are_refused() -> None:
    smp_model.check_logits(torch.zeros(2, 3, 8), torch.zeros(2, 3), 8)
    with pytest.raises(ConfigError, match=r"logits of shape \[2, 3, 4\], where \[2, 3, 8\]"):
        smp_model.check_logits(torch.zeros(2, 3, 4), torch.zeros(2, 3), 8)


def refusal_of(command_line: list[str], installed: bool, **environ: str) -> str:
    import os

    from tests import standin

    os.environ.update(environ)

    if installed:
        standin.install()
    try:
        train(command_line)
    except SmpTrainError as error:
        return str(error)
    return "it trained"


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    import re

    (said,) = harness.run(refusal_of, 1, smp(tmp_path, **changes), case != "no library")
    assert re.search(message, said), said


# --- what a release has, and what is done without it ------------------------------------------------

RELEASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "2.3, hybrid sharding": ("2.3", 4, {"hybrid_shard_degree": 2}, "torch's own saver; saving through SMP needs"),
    "2.4, asynchronous": ("2.4", 2, {"checkpoint_type": "async_sharded"}, "torch's own saver"),
    "2.3, offloading": ("2.3", 2, {"sm_activation_offloading": 1}, ""),  # the norm is taken without its wrapper
    "2.5, context parallelism": ("2.5", 2, {"context_parallel_degree": 2}, ""),
    "2.7, experts": ("2.7", 2, {**MIXTRAL, "expert_parallel_degree": 2}, ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", RELEASES)
def test_older_releases(case: str, tmp_path: Path) -> None:
    release, world, changes, said = RELEASES[case]
    harness.run(train_on_smp, world, smp(tmp_path, max_steps=2, checkpoint_freq=1, **changes), release)
    assert (tmp_path / "run" / "DONE").exists()
    assert said in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    resumed = smp(tmp_path, max_steps=3, resume_from_checkpoint=tmp_path / "checkpoints", **changes)
    harness.run(train_on_smp, world, resumed, release)


def before_context_parallelism(command_line: list[str]) -> Journal:
    """Train by a release that has neither context parallelism nor its key."""
    import sys

    sys.modules["torch.sagemaker.context_parallel"] = None  # type: ignore[assignment]
    return train_on_smp(command_line, "2.4")


def test_a_release_is_not_given_keys_that_came_later(tmp_path: Path) -> None:
    (journal,) = harness.run(before_context_parallelism, 1, smp(tmp_path, max_steps=1, num_layers=1))
    origin = eval(dict(journal)["init"]["origin"])
    assert {key for key, source in origin.items() if source == "default"} == {"context_parallel_degree"}


def test_how_context_ranks_communicate_is_said_to_what_takes_it() -> None:
    def named(model: Any, cp_comm_type: str = "p2p") -> None: ...

    def anything(*args: Any, **kwargs: Any) -> None: ...

    def told(transform: Any, wanted: str) -> dict[str, Any]:
        args = SimpleNamespace(cp_comm_type=wanted)
        return smp_library.context_options(SimpleNamespace(transform=transform), args)  # type: ignore[arg-type]

    assert told(named, "p2p") == {"cp_comm_type": "p2p"}
    assert told(anything, "all_gather") == {"cp_comm_type": "all_gather"}
    assert told(anything, "p2p") == {}


TOO_OLD = {
    "saving tensor ranks": (
        "2.4", 4, {"tensor_parallel_degree": 2}, r"needs torch\.sagemaker\.distributed\..* came with SMP 2\.5",
    ),
    "context parallelism": ("2.4", 2, {"context_parallel_degree": 2}, r"context_parallel_degree needs SMP 2\.5"),
    "communication": (
        "2.5", 2, {"context_parallel_degree": 2, "cp_comm_type": "all_gather"}, r"came with SMP 2\.6, and this release",
    ),
}  # fmt: skip


def refusal_by(command_line: list[str], release: str) -> str:
    from tests import standin

    standin.install(release)
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize("case", TOO_OLD)
def test_what_a_release_lacks_is_named(case: str, tmp_path: Path) -> None:
    import re

    release, world, changes, message = TOO_OLD[case]
    for said in harness.run(refusal_by, world, smp(tmp_path, **changes), release):
        assert re.search(message, said), said
