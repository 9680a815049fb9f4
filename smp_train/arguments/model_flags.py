"""The flags of the model: what is trained, from which weights, and how it is distributed over the processes."""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included
# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_train.arguments.flag import flag


def shape(help: str, must: str = "", **fields: Any) -> Any:
    """Declare a flag of the model's shape; its default is the preset's value, else the architecture's."""
    return flag(None, help, must=must, **{"shown": "the model's", **fields})


def of_experts(default: bool, help: str) -> Any:
    """Declare a flag of SMP's mixture of experts."""
    return flag(default, help, idle_without="moe", smp_only="SMP's own experts alone read it")


@dataclass(frozen=True)
class ModelArguments:
    """Model: a preset, a Hugging Face model, or single widths on top of either."""

    model_type: str | None = flag(
        None, "Family: gpt_neox, gpt2, llama_v2, llama_v3, mistral, mixtral, falcon, phi, codellama, ...",
        shown="gpt_neox; scratch with --model_size", values={"mingpt": "gpt2"})
    model_size: str | None = flag(None, "Preset of the family, such as 7b", shown="no preset")
    hf_pretrained_model_name_or_dir: str | None = flag(
        None, "Hugging Face model by name, folder or s3://: its configuration, and its weights if it has any",
        aliases="hf_model model_name_or_path", path="read")
    trust_remote_code: bool = flag(False, "Run the model's or tokenizer's code if transformers has no class for it")
    from_scratch: bool = flag(False, "Train a preset of the from-scratch ladder (350m to 70b; --model_size, or 7b)")
    max_context_width: int | None = shape(
        "Sequence length in tokens", ">=2", shown="2048, or the model's if less",
        aliases="seq_len block_size max_seq_length model_max_length")
    vocab_size: int | None = shape("Size of the vocabulary", ">=1")
    hidden_width: int | None = shape(
        "Width of the hidden states", ">=1", shown="the preset's, else 768", aliases="embed_size")
    num_layers: int | None = shape("Decoder layers", ">=1", shown="the preset's, else 12")
    num_heads: int | None = shape("Attention heads", ">=1", shown="the preset's, else 12")
    num_key_value_heads: int | None = shape("Key-value heads (grouped-query attention)", ">=1")
    intermediate_size: int | None = shape("Width of the feed-forward layer", ">=1", aliases="llama_intermediate_size")
    rotary_pct: float | None = shape("Share of a head's width that is rotated (GPT-NeoX)", ">0 <=1")
    rotary_emb_base: float | None = shape("Base of the rotary position embedding", ">0")
    rope_scaling_type: str | None = shape("Rotary scaling for long contexts", choices=("default", "llama3"))
    rope_scaling_factor: float | None = shape("Factor of the rotary scaling", ">0")
    rope_scaling_high_freq_factor: float | None = shape("High-frequency factor of the rotary scaling", ">0")
    rope_scaling_low_freq_factor: float | None = shape("Low-frequency factor of the rotary scaling", ">0")
    rope_scaling_original_max_position_embeddings: int | None = shape("Context before scaling, in tokens", ">=1")
    resid_pdrop: float | None = shape("Dropout after each residual branch", ">=0 <1", aliases="dropout")
    embd_pdrop: float | None = shape("Dropout of the embeddings", ">=0 <1", aliases="dropout")
    attn_pdrop: float | None = shape("Dropout of the attention weights", ">=0 <1", aliases="dropout")
    initializer_range: float | None = shape("Standard deviation of the initial weights", ">0")
    tie_word_embeddings: bool | None = shape("Share input and output embeddings")
    sliding_window: int | None = shape("Window of attention in tokens (Mistral)", ">=1")
    num_local_experts: int | None = shape("Experts per layer (Mixtral)", ">=1")
    num_experts_per_tok: int | None = shape("Experts per token (Mixtral)", ">=1")
    attn_implementation: str = flag(
        "sdpa", "Attention", choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"))


@dataclass(frozen=True)
class FinetuneArguments:
    """Fine-tuning: start from pretrained weights."""

    finetune: bool = flag(
        False, "Start from pretrained weights; with --resume_from_checkpoint, from the run's checkpoint if it has one")
    pretrained_model_name: str | None = flag(
        None, "Model by name, folder or s3://: its configuration, and its weights by default", needs="finetune",
        path="read")
    pretrained_checkpoint_file: str | None = flag(
        None, "Weights: a file (.safetensors, .bin, .pt), a folder of files, or a checkpoint; also s3://. The model is "
        "--pretrained_model_name, else --model_type and its widths, else the config.json next to the file",
        needs="finetune", path="read")
    finetune_checkpoint_load_dir: str | None = flag(
        None, "Folder or s3:// with the weights of --pretrained_model_name, or with models by name",
        shown="the model's own", needs="finetune", path="read")
    lora_rank: int | None = flag(None, "Train low-rank adapters (LoRA) of this rank and freeze the weights", must=">=1")
    lora_alpha: float | None = flag(
        None, "Scale of the adapters times the rank", shown="twice the rank", must=">0", idle_without="lora_rank")
    lora_target_modules: list[str] = flag(
        ["all-linear"], "Adapted modules, as q_proj v_proj; all-linear: all but the head", idle_without="lora_rank")
    lora_dropout: float = flag(0.0, "Dropout of the adapters' input", must=">=0 <1", idle_without="lora_rank")


NO_HISTORY = "each tensor is scaled by its largest value, and no history is kept"


@dataclass(frozen=True)
class ParallelArguments:
    """Parallelism and memory: how the model is distributed over the processes, and what saves memory."""

    backend: str = flag(
        "auto", "smp (torch.sagemaker), native (FSDP2), or auto: smp if installed", choices=("auto", "smp", "native"))
    auto: str = flag(
        "off", "For this machine, choose degrees, activation checkpointing, offloading, micro-batch and accumulation "
        "where no flag sets them",
        choices=("off", "plan"), values={"1": "plan", "0": "off"}, switch=True)
    smp_names: str | None = flag(
        None, "JSON or YAML file of SMP's parameter names, written by `doctor --smp`, for transformed checkpoints",
        path="read")
    sharding_strategy: str = flag(
        "full_shard", "Shard parameters, gradients and optimizer over all processes (full_shard) or groups of "
        "--hybrid_shard_degree processes, by default a node's (hybrid_shard); gradients and optimizer only "
        "(shard_grad_op, _hybrid_shard_zero2); nothing (no_shard)",
        choices=("full_shard", "hybrid_shard", "shard_grad_op", "_hybrid_shard_zero2", "no_shard"),
        shown="full_shard; hybrid_shard with --hybrid_shard_degree",
        values={
            "full": "full_shard", "fsdp": "full_shard", "hybrid": "hybrid_shard", "hsdp": "hybrid_shard",
            "hybrid_full_shard": "hybrid_shard", "grad_shard": "shard_grad_op", "ddp": "no_shard",
            "hybrid_grad_shard": "_hybrid_shard_zero2", "hybrid_shard_zero2": "_hybrid_shard_zero2",
        },
        aliases="sharding")
    hybrid_shard_degree: int | None = flag(
        None, "Processes that share one copy of the model; 0: the strategy decides; 1: no sharding",
        shown="the strategy's", must=">=0", smp_key=True, aliases="shard_degree")
    tensor_parallel_degree: int = flag(1, "Processes that share each matrix", must=">=1", smp_key=True)
    context_parallel_degree: int = flag(
        1, "Processes that share each sequence; part of the shard degree", must=">=1", smp_key=True)
    expert_parallel_degree: int = flag(1, "Processes that share the experts of a layer", must=">=1", smp_key=True)
    bf16: bool | None = flag(
        None, "Compute in bfloat16, with weights and optimizer in float32; 0: all in float32",
        shown="1; natively on a CPU 0", aliases="mixed_precision")
    fp8: bool = flag(False, "Compute the decoder's linear layers in 8-bit floating point (Hopper, torchao)")
    fp8_amax_history_len: int = flag(
        1024, "Steps of history for FP8 scales", must=">=1", idle_without="fp8", smp_only=NO_HISTORY)
    fp8_amax_compute_algo: str = flag(
        "max", "FP8 scale from its history", choices=("max", "most_recent"), idle_without="fp8", smp_only=NO_HISTORY)
    activation_checkpointing: str = flag(
        "full", "The backward pass recomputes none; full: each layer from its input; selective:op: all but matrix "
        "products, attention and communication; selective:N: every N-th layer; selective:1/3: a third of the layers",
        values={"1": "full", "0": "none"}, switch=True,
        aliases="fsdp_activation_checkpointing activation_checkpoints gradient_checkpointing")
    selective_checkpointing: float = flag(
        1.0, "Checkpoint every N-th layer in full, or a share of the layers (0.5, 1/3)", must="share or count")
    sm_activation_offloading: bool = flag(
        False, "Keep activations in host memory until the backward pass", smp_key=True, aliases="offload_activations")
    activation_loading_horizon: int = flag(
        2, "Layers loaded ahead", must=">=1", idle_without="sm_activation_offloading", smp_key=True)
    cpu_offload: bool = flag(False, "Keep parameters, gradients and optimizer states in host memory")
    memory_check: bool = flag(
        True, "Refuse at start a model whose weights, gradients and optimizer exceed the memory; 0: warn")
    chunked_loss: bool = flag(True, "Compute the loss in chunks of tokens, without all logits at once (plain heads)")
    use_torch_compile: bool | None = flag(
        None, "Compile layers and loss", shown="1 on GPUs with Triton and a C compiler", aliases="torch_compile")
    torch_compile_backend: str = flag("inductor", "Backend of torch.compile", idle_without="use_torch_compile")
    limit_all_gathers: bool = flag(
        True, "Limit the all-gathers in flight",
        only_natively=((True,), "FSDP2 gathers at most one layer ahead and has no unlimited mode; leave it at 1"))
    forward_prefetch: bool = flag(True, "Gather the next layer's parameters before this layer's forward pass")
    backward_fetch_policy: str = flag(
        "backward_pre", "When the backward pass gathers the next layer", choices=("backward_pre", "backward_post"),
        only_natively=(("backward_pre",), "FSDP2 always gathers it before this layer's gradients; give backward_pre"))
    cp_comm_type: str = flag(
        "p2p", "Context ranks' exchange", choices=("p2p", "all_gather"), smp_only="keys and values are always gathered")
    moe: bool = flag(
        False, "Mixture of experts: SMP's implementation on SMP, the model's own natively, with these router losses")
    moe_load_balancing: str = flag(
        "sinkhorn", "Load balancing of the experts", choices=("sinkhorn", "balanced", "aux_loss", "none"),
        idle_without="moe",
        only_natively=(("aux_loss", "none"), "only SMP overrides the router's choice; give aux_loss or none"))
    moe_aux_loss_coeff: float = flag(0.001, "Coefficient of the load-balancing loss", must=">=0", idle_without="moe")
    moe_z_loss_coeff: float = flag(
        0.001, "Coefficient of the loss that keeps router logits small", must=">=0", idle_without="moe")
    global_token_shuffle: bool = of_experts(False, "Shuffle tokens over ranks before the experts")
    moe_all_to_all_dispatcher: bool = of_experts(True, "Send tokens to experts by all-to-all")
    moe_fp8_checkpoint_attn: bool = of_experts(True, "Checkpoint attention of FP8 expert layers")
    moe_fp8_checkpoint_moe: bool = of_experts(True, "Checkpoint the experts of FP8 expert layers")
    use_smp_implementation: bool = flag(False, "SMP's own model", smp_only="the model is transformers' own")
    delayed_param: bool = flag(
        True, "Create parameters once sharded", smp_only="this is always done", aliases="low_cpu_fsdp meta_init")
    random_seed: int | None = flag(
        None, "Seed of SMP's tensor-parallel modules", smp_only="initial weights depend on --seed alone", smp_key=True)
    fsdp_cache_flush_warnings: bool = flag(
        True, "Warn when SMP flushes the CUDA cache", smp_only="SMP alone reads it", smp_key=True)
    allow_empty_shards: bool = flag(
        False, "Allow shards without elements", smp_only="uneven shards are always allowed", smp_key=True)
