"""The SMP backend on a stand-in for `torch.sagemaker`: the native numbers, refusals, releases.

Its calls are in test_smp_calls.py, its checkpoints in test_smp_checkpoints.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from smp_train import arguments
from smp_train.backends import smp_fp8, smp_library, smp_model
from smp_train.backends.smp import SmpBackend, refuse, refuse_model
from smp_train.errors import ConfigError, SmpTrainError
from tests import harness
from tests.smp import (
    DATA,
    MIXTRAL,
    NATIVE,
    NEOX,
    Journal,
    alike,
    install,
    numbers,
    pretrained_folder,
    smp,
    train_alone,
    train_on_smp,
    tuned,
)  # fmt: skip
from tests.training import SAMPLE, flags, read_checkpoint, records, train


@cache
def native(folder: Path) -> list[tuple[float, float]]:
    train_alone(flags(folder, **DATA, train_batch_size=4))
    return numbers(folder)


# --- from scratch: the same seed gives the same weights, on this backend and the other -------------

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train_batch_size": 4}),
    "full": (2, {"train_batch_size": 2}),
    "degree 2 of 4": (4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
    "replicated, accumulation": (
        2, {"train_batch_size": 1, "gradient_accumulation_steps": 2, "hybrid_shard_degree": 1},
    ),
    "offloaded": (2, {"train_batch_size": 2, "sm_activation_offloading": 1, "activation_loading_horizon": 1}),
    "every second layer": (2, {"train_batch_size": 2, "activation_checkpointing": "selective:2"}),
    "full logits, not delayed": (2, {"train_batch_size": 2, "chunked_loss": 0, "delayed_param": 0}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_like_the_native_backend(
    layout: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, changes = LAYOUTS[layout]
    harness.run(train_on_smp, world, smp(tmp_path, **changes))
    alike(numbers(tmp_path), native(tmp_path_factory.getbasetemp() / "smp-native"))


@pytest.mark.slow
def test_bf16_and_validation(tmp_path: Path) -> None:
    """bfloat16 has 8 bits: 1e-2 is two of its steps, where float32's numbers would be 3e-3 away."""
    changes: dict[str, Any] = {"bf16": 1, "validation_freq": 2, "validation_batches": 2}
    changes |= {"test_dir": SAMPLE / "test"}
    harness.run(train_on_smp, 2, smp(tmp_path / "smp", train_batch_size=2, val_batch_size=2, **changes))
    train_alone(flags(tmp_path / "native", **DATA, train_batch_size=4, val_batch_size=4, **changes))
    alike(numbers(tmp_path / "smp"), numbers(tmp_path / "native"), 1e-2)
    ours, theirs = (
        [record["loss"] for record in records(tmp_path / name) if record.get("event") == "evaluate"]
        for name in ("smp", "native")
    )
    assert ours
    assert ours == pytest.approx(theirs, rel=1e-2)


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


def test_the_seed_draws_the_weights_of_a_transformed_model(tmp_path: Path) -> None:
    changes = {"max_steps": 1, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1, "num_layers": 1}
    one = harness.run(initial_weights, 4, smp(tmp_path / "1", seed=1, **changes))
    assert one[0] == one[2]  # replicas of the two tensor ranks
    assert one[1] == one[3]
    (two, _) = harness.run(initial_weights, 2, smp(tmp_path / "2", seed=2, **changes))
    assert {name for name in two if two[name] == one[0][name]} == {name for name in two if "norm" in name}
    said = (tmp_path / "2" / "run" / "logs" / "rank-0.log").read_text()
    assert "Initial weights: drawn by SMP, from seed 2" in said


# --- configuration ----------------------------------------------------------------------------------


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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders: of a Llama, a Mixtral and a GPT-NeoX."""
    models: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": {**MIXTRAL, "moe": None}, "neox": NEOX}
    return {name: pretrained_folder(tmp_path_factory.mktemp(name), **model) for name, model in models.items()}


def family(layout: str) -> str:
    return "mixtral" if layout.startswith("ep") else "neox" if layout.startswith("neox") else "llama"


TUNED: dict[str, tuple[int, dict[str, Any]]] = {
    "no transform": (2, {"train_batch_size": 2}),
    "tp2, not delayed": (2, {"train_batch_size": 4, "tensor_parallel_degree": 2, "delayed_param": 0}),
    "tp2 shard2": (4, {"train_batch_size": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "tp2 shard1": (4, {"train_batch_size": 2, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1}),
    "tp2 shard2, 2 replicas": (
        8, {"train_batch_size": 1, "tensor_parallel_degree": 2, "hybrid_shard_degree": 2},
    ),
    "transform alone": (2, {"train_batch_size": 2, "use_smp_implementation": 1}),
    "neox tp2": (2, {"train_batch_size": 4, "tensor_parallel_degree": 2}),
    "cp2": (2, {"train_batch_size": 4, "context_parallel_degree": 2}),
    "tp2 cp2 shard2": (
        4, {"train_batch_size": 4, "tensor_parallel_degree": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 2},
    ),
    "cp2 shard2, 2 replicas": (4, {"train_batch_size": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 2}),
    "ep2, accumulation": (
        2, {"train_batch_size": 1, "gradient_accumulation_steps": 2, "moe": 1, "expert_parallel_degree": 2},
    ),
    "ep2 shard2": (4, {"train_batch_size": 1, "moe": 1, "expert_parallel_degree": 2, "hybrid_shard_degree": 2}),
}  # fmt: skip


def native_tuned(model: Path, base: Path) -> Path:
    """Return the folder of the native run that starts from ``model``; it runs once."""
    folder = base / f"native-{model.parent.name}"
    if not (folder / "run" / "DONE").exists():
        train_alone(flags(folder, **{**DATA, **tuned(model)}, train_batch_size=4))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", TUNED)
def test_finetunes_like_the_native_backend(
    layout: str, folders: dict[str, Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, changes = TUNED[layout]
    model = folders[family(layout)]
    journals = harness.run(train_on_smp, world, smp(tmp_path, **tuned(model), **changes))
    alike(numbers(tmp_path), numbers(native_tuned(model, tmp_path_factory.getbasetemp())))
    for rank, journal in enumerate(journals):
        facts = dict(journal)
        # Only rank 0 has weights; the others' parameters wait on the meta device for FSDP to send them.
        waits = rank > 0 and "delayed_param" not in changes
        calls = [what for what, _ in journal if what != "forward"]
        order = ["init", "barrier", *["transform"] * ("transform" in facts), *["DelayedParamIniter"] * waits]
        start = [*order, "FSDP", "barrier", "activation_checkpointing", "optimizer", "clip_grad_norm_"]
        assert calls[: len(start)] == start
        wrapped = eval(facts["FSDP"]["given"])
        assert (wrapped["sync_module_states"], wrapped["param_init_fn"]) == (True, "function" if waits else None)
        if "transform" in facts:
            assert facts["transform"]["load_state_dict_from_rank0"] == "True"
            assert facts["transform"]["meta"] == repr(waits)
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
def test_rows_padded_behind_need_no_mask(folders: dict[str, Path], tmp_path: Path) -> None:
    changes = {**padded(tmp_path / "data", in_front=0), **tuned(folders["llama"]), "train_batch_size": 4}
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

    install()
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


    os.environ.update(environ)

    if installed:
        install()
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
    # The norm is taken without the wrapper of offloading.
    "2.4, asynchronous, offloading": (
        "2.4", 2, {"checkpoint_type": "async_sharded", "sm_activation_offloading": 1}, "torch's own saver",
    ),
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
    "experts": ("2.2", 2, {**MIXTRAL}, r"--moe 1 needs torch\.sagemaker\.moe\.moe_config, which came with SMP 2\.3"),
    "tensor parallelism of Mistral": (
        "2.5", 2, {"model_type": "mistral", "tensor_parallel_degree": 2}, r"transform refuses .* came with SMP 2\.6",
    ),
    "communication": (
        "2.5", 2, {"context_parallel_degree": 2, "cp_comm_type": "all_gather"}, r"came with SMP 2\.6, and this release",
    ),
}  # fmt: skip


def refusal_by(command_line: list[str], release: str) -> str:
    install(release)
    return refusal_of(command_line, installed=False)


@pytest.mark.parametrize("case", TOO_OLD)
def test_what_a_release_lacks_is_named(case: str, tmp_path: Path) -> None:
    import re

    release, world, changes, message = TOO_OLD[case]
    for said in harness.run(refusal_by, world, smp(tmp_path, **changes), release):
        assert re.search(message, said), said
