"""What the SMP backend calls, with what, and when: SMP's canonical order, and FSDP's whole argument set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.smp import MIXTRAL, NEOX, Journal, smp, train_on_smp
from tests.tiers import core

START = ["init"]
REST = ["FSDP", "barrier", "activation_checkpointing"]
DELAYED = ["DelayedParamIniter", "validate_params_and_buffers_inited"]
PLAIN = [*START, *DELAYED, *REST]
TRANSFORMED = [*START, "transform", *DELAYED, *REST]

BF16 = "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32, "
STOCK = {
    "backward_prefetch": "BACKWARD_PRE",
    "forward_prefetch": True,
    "limit_all_gathers": True,
    "device_id": None,  # on CPUs
    "use_orig_params": True,
    "param_init_fn": "function",
    "post_param_init_fn": "function",
    "sync_module_states": False,
}
"""What FSDP is given, by default, but for the layers' class and the strategy."""

# Ranks, flags, calls.
GOLDEN: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "shard0": (2, {}, PLAIN),
    "zero 2": (2, {"sharding_strategy": "shard_grad_op"}, PLAIN),
    "shard1": (
        2, {"hybrid_shard_degree": 1, "bf16": 1, "backward_fetch_policy": "backward_post", "forward_prefetch": 0,
            "limit_all_gathers": 0}, PLAIN,
    ),
    "hybrid zero 2": (4, {"hybrid_shard_degree": 2, "sharding_strategy": "_hybrid_shard_zero2"}, PLAIN),
    "tp2 shard4": (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 4, "bf16": 1}, TRANSFORMED),
    "tp2 shard0, offloaded": (
        4, {"tensor_parallel_degree": 2, "sm_activation_offloading": 1}, [*TRANSFORMED, "offload_wrapper"],
    ),
    "tp2 shard1, not delayed": (
        2, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1, "delayed_param": 0, **NEOX},
        [*START, "transform", *REST],
    ),
    "tp2 cp2 shard4": (
        8, {"tensor_parallel_degree": 2, "context_parallel_degree": 2, "hybrid_shard_degree": 4,
            "cp_comm_type": "all_gather"}, TRANSFORMED,
    ),
    "cp2 shard0": (2, {"context_parallel_degree": 2}, TRANSFORMED),
    "ep2 shard3 on 6": (
        6, {**MIXTRAL, "expert_parallel_degree": 2, "hybrid_shard_degree": 3, "moe_load_balancing": "none"},
        TRANSFORMED,
    ),
}  # fmt: skip


def names(journal: Journal) -> list[str]:
    """Return what was called, without what a step does many times."""
    return [what for what, _ in journal if what != "forward"]


@pytest.mark.slow
@pytest.mark.parametrize("case", core(GOLDEN, {"tp2 shard0, offloaded"}.__contains__))
def test_calls(case: str, tmp_path: Path) -> None:
    world, changes, order = GOLDEN[case]
    journals = harness.run(train_on_smp, world, smp(tmp_path, max_steps=1, **changes))
    transformed, delayed = "transform" in order, "DelayedParamIniter" in order
    layer = "TransformerLayer" if transformed else "LlamaDecoderLayer"
    for journal in journals:
        assert names(journal) == [*order, "optimizer", "clip_grad_norm_"]
        facts = dict(journal)
        check_configuration(facts["init"], changes, 2 if case == "cp2 shard0" else 0)
        wrapped = {key: eval(value) for key, value in facts["FSDP"].items()}
        expected: dict[str, Any] = {**STOCK, "auto_wrap_policy": ("transformer_auto_wrap_policy", [layer])}
        expected |= {key: bool(changes[key]) for key in ("forward_prefetch", "limit_all_gathers") if key in changes}
        expected["backward_prefetch"] = changes.get("backward_fetch_policy", "backward_pre").upper()
        if not delayed:
            expected |= {"param_init_fn": None, "post_param_init_fn": None}
        precision = wrapped["given"].pop("mixed_precision")
        assert precision.startswith(BF16) if "bf16" in changes else precision is None
        by_degree = {0: "full_shard", 1: "no_shard"}.get(changes.get("hybrid_shard_degree", 0), "hybrid_shard")
        strategy = changes.get("sharding_strategy", by_degree).upper()
        assert wrapped["given"] == {**expected, "sharding_strategy": strategy}
        assert (wrapped["positional"], wrapped["meta"]) == (0, delayed)  # the module, and nothing else by position
        assert facts["activation_checkpointing"] == {
            "classes": repr([layer]), "impl": "'REENTRANT'", "root": "'FullyShardedDataParallel'", "own": "False",
        }  # fmt: skip
        if "offload_wrapper" in order:
            assert facts["offload_wrapper"]["root"] == "'FullyShardedDataParallel'"
        assert facts["clip_grad_norm_"]["root"] == "'FullyShardedDataParallel'"
        if transformed:
            check_transform(facts, changes, delayed)


def check_configuration(init: dict[str, str], changes: dict[str, Any], shard: int) -> None:
    """Assert what init was told; ``shard``: the degree where none is given."""
    config = eval(init["config"])
    # Where nothing is said SMP settles it, but for what needs a degree that is said.
    assert config["hybrid_shard_degree"] == changes.get("hybrid_shard_degree", shard)
    for name in ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        assert config[name] == changes.get(name, 1)
    assert config["sm_activation_offloading"] is bool(changes.get("sm_activation_offloading"))
    # Nothing but what a release may not have yet is left to SMP's defaults.
    defaults = {key for key, source in eval(init["origin"]).items() if source == "default"}
    assert defaults <= {name for name in ("context_parallel_degree", "expert_parallel_degree") if config[name] == 1}
    assert init["group"] == "True"


def check_transform(facts: dict[str, dict[str, str]], changes: dict[str, Any], delayed: bool) -> None:
    """Assert what transform was told, of a model from scratch."""
    assert facts["forward"]["shape"] == f"(1, {64 // changes.get('context_parallel_degree', 1)})"
    told = facts["transform"]
    assert (told["meta"], told["load_state_dict_from_rank0"]) == (repr(delayed), "False")
    assert (told["dtype"], told["device"]) == ("None", "None")
    assert told["empty"] == repr("moe" in changes)
    assert told["cp_comm_type"] == repr(changes.get("cp_comm_type", "p2p"))
    balancing = changes.get("moe_load_balancing", "sinkhorn")
    assert f"moe_load_balancing='{balancing}'" in told["config"] if "moe" in changes else told["config"] == "None"
