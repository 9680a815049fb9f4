"""What this version does not do, as data: delete a row when its capability lands.

`REFUSED`: flags that are accepted at their off values only. `REFUSED_NATIVELY`: the same outside SMP. `INEFFECTIVE`:
flags that are accepted at any value, change nothing on the native backend, and are answered with one line when given.
"""

from __future__ import annotations

from typing import Any

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "checkpoint_type": (
        (None, "sharded", "async_sharded", "full"),
        "it is SMP's; sharded, async_sharded and full checkpoints load on any mesh",
    ),
    "data_type": (("gpt",), "only decoder-only models are trained"),
    "prompt": ((None,), "generating text is not available in this version; leave it out"),
    "num_tokens": ((None,), "generating text is not available in this version; leave it out"),
}

# What SMP has and the native backend has not.
REFUSED_NATIVELY: dict[str, tuple[tuple[Any, ...], str]] = {
    "expert_parallel_degree": (
        (1,),
        "a degree of its own for experts is SMP's (--backend smp); --tensor_parallel_degree deals a layer's experts "
        "out",
    ),
    "moe": (
        (False,),
        "the expert implementation is SMP's (--backend smp); --model_type mixtral trains without it",
    ),
    "limit_all_gathers": (
        (True,),
        "FSDP2 gathers at most one layer ahead by construction and has no unlimited mode; leave it at 1",
    ),
    "backward_fetch_policy": (
        ("backward_pre",),
        "FSDP2 always asks for the next layer before it computes this one's gradients; leave it at backward_pre",
    ),
}

# Flags that name a place, which may not be in S3: files there are written line by line, or mapped.
LOCATIONS = ("run_dir", "tensorboard_dir", "data_cache_dir")
NODE_LOCAL = "local:"
"""Before a checkpoint folder that is on each node's own disk."""
LOCATION_PREFIXES = ("s3://",)
LOCATION_REASON = "this is written little by little, which S3 cannot do; give a folder"

# Flags that change nothing while another one is off, and that are answered with one line when given then.
DEPENDENT: dict[str, str] = {
    "activation_loading_horizon": "sm_activation_offloading",
    "torch_compile_backend": "use_torch_compile",
    "fp8_amax_history_len": "fp8",
    "fp8_amax_compute_algo": "fp8",
    "moe_load_balancing": "moe",
    "global_token_shuffle": "moe",
    "moe_all_to_all_dispatcher": "moe",
    "moe_fp8_checkpoint_attn": "moe",
    "moe_fp8_checkpoint_moe": "moe",
}

# Flags of `INEFFECTIVE` that SMP reads.
OF_SMP = frozenset(
    {
        "delayed_param", "use_smp_implementation", "fsdp_cache_flush_warnings", "allow_empty_shards", "random_seed",
        "fp8_amax_history_len", "fp8_amax_compute_algo", "cp_comm_type", "moe_load_balancing", "global_token_shuffle",
        "moe_all_to_all_dispatcher", "moe_fp8_checkpoint_attn", "moe_fp8_checkpoint_moe",
    }
)  # fmt: skip

INEFFECTIVE: dict[str, str] = {
    "delayed_param": "parameters are always created after sharding",
    "use_orig_params": "FSDP2 always keeps the original parameters",
    "auto_wrap_policy": "every decoder layer is sharded by itself",
    "patch_neox_rope": "current transformers needs no patch",
    "framework": "there is one",
    "use_smp_flash_attn": "the attention kernel is chosen by --attn_implementation",
    "use_smp_implementation": "the model is transformers' own",
    "log_reduced_training_loss": "the logged loss is always that of the global batch",
    "preserve_np_state": "numpy's random state is not used",
    "clean_cache": "the allocator needs no emptying",
    "nccl_test_log": "it is not read",
    "environment": "the launcher is found out",
    "fsdp_cache_flush_warnings": "it is SMP's",
    "allow_empty_shards": "uneven shards are always allowed",
    "random_seed": "initial weights depend on --seed alone",
    "summary_first_pdrop": "a language model has no classification head",
    "fp8_amax_history_len": "each tensor is scaled by its own largest value, and no history is kept",
    "fp8_amax_compute_algo": "each tensor is scaled by its own largest value, and no history is kept",
    "cp_comm_type": "keys and values are always gathered",
    "moe_load_balancing": "it is of SMP's experts (--moe 1)",
    "global_token_shuffle": "it is of SMP's experts (--moe 1)",
    "moe_all_to_all_dispatcher": "it is of SMP's experts (--moe 1)",
    "moe_fp8_checkpoint_attn": "it is of SMP's experts (--moe 1)",
    "moe_fp8_checkpoint_moe": "it is of SMP's experts (--moe 1)",
    "logging_freq_for_avg": "speeds are averaged from one log line to the next",
}
