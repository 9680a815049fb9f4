"""The SMP backend on a stand-in for `torch.sagemaker`: SMP's own implementation of models, and FP8.

Numbers without it: test_backend. What SMP is called with: test_smp_calls. Its checkpoints: test_smp_checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.smp import (
    DATA,
    MIXTRAL,
    NEOX,
    alike,
    numbers,
    pretrained_folder,
    smp,
    train_alone,
    train_on_smp,
    tuned,
)  # fmt: skip
from tests.tiers import core
from tests.training import flags


@pytest.mark.slow
def test_the_seed_draws_the_weights_of_a_transformed_model(tmp_path: Path) -> None:
    changes = {"max_steps": 1, "tensor_parallel_degree": 2, "hybrid_shard_degree": 1, "num_layers": 1}
    losses = []
    for number, seed in enumerate((1, 1, 2)):
        harness.run(train_on_smp, 2, smp(tmp_path / str(number), seed=seed, shuffle="none", **changes))
        losses.append(numbers(tmp_path / str(number))[0])
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    log = (tmp_path / "2" / "run" / "logs" / "rank-0.log").read_text()
    assert "Initial weights: drawn by SMP, from seed 2" in log


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
    "transform alone": (2, {"train_batch_size": 2, "use_smp_implementation": 1}),
    "neox tp2": (2, {"train_batch_size": 4, "tensor_parallel_degree": 2}),
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
@pytest.mark.parametrize("layout", core(TUNED, {"tp2, not delayed"}.__contains__))
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
        wrapped = eval(facts["FSDP"]["given"])
        assert (wrapped["sync_module_states"], wrapped["param_init_fn"]) == (True, "function" if waits else None)
        if "transform" in facts:
            assert facts["transform"]["load_state_dict_from_rank0"] == "True"
            assert facts["transform"]["meta"] == repr(waits)
        if "moe" in changes:
            assert facts["transform"]["empty"] == repr(rank > 0)
            assert ("use_cpu_initialization=True" in facts["transform"]["config"]) == (rank == 0)


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
