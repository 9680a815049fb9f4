"""The flags of the model: what is trained, from which weights, and how it is spread over the processes."""

# fmt: off

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_train.arguments.flag import Only, flag


def shape(help: str, must: str = "", **known: Any) -> Any:
    """Declare a flag of the model's shape: not given, it is the preset's, or the architecture's own default."""
    return flag(None, help, must=must, **{"shown": "the model's", **known})


def of_experts(default: Any, help: str, **known: Any) -> Any:
    """Declare a flag of SMP's mixture of experts."""
    return flag(default, help, idle_without="moe", no_effect_natively="it is of SMP's own experts", **known)


@dataclass(frozen=True)
class ModelArguments:
    """Model: a preset, a Hugging Face model, or single widths on top of either."""

    model_type: str | None = flag(
        None, "Family: gpt_neox, gpt2, llama_v2, llama_v3, mistral, mixtral, falcon, phi, codellama, ...",
        shown="gpt_neox; scratch with --model_size", values={"mingpt": "gpt2"})
    model_size: str | None = flag(None, "Preset of the family, such as 7b", shown="no preset")
    hf_pretrained_model_name_or_dir: str | None = flag(
        None, "Hugging Face model by name, folder or s3://: its configuration, and its weights where it has any",
        fsdp2="hf_model", trainer="model_name_or_path")
    trust_remote_code: bool = flag(False, "Run that model's or tokenizer's code where transformers has no class for it")
    from_scratch: bool = flag(False, "Train a preset of the from-scratch ladder (350m to 70b; --model_size, or 7b)")
    max_context_width: int | None = shape(
        "Sequence length in tokens", ">=2", shown="2048, or the model's if less",
        minimal="seq_len", fsdp2="seq_len", trainer="block_size max_seq_length model_max_length")
    vocab_size: int | None = shape("Size of the vocabulary", ">=1")
    hidden_width: int | None = shape(
        "Width of the hidden states", ">=1", shown="the preset's, else 768", minimal="embed_size")
    num_layers: int | None = shape("Decoder layers", ">=1", shown="the preset's, else 12")
    num_heads: int | None = shape("Attention heads", ">=1", shown="the preset's, else 12")
    num_key_value_heads: int | None = shape("Key-value heads (grouped-query attention)", ">=1")
    intermediate_size: int | None = shape("Width of the feed-forward layer", ">=1", smp="llama_intermediate_size")
    rotary_pct: float | None = shape("Share of a head's width that is rotated (GPT-NeoX)", ">0 <=1")
    rotary_emb_base: float | None = shape("Base of the rotary position embedding", ">0")
    rope_scaling_type: str | None = shape("Rotary scaling for long contexts", choices=("default", "llama3"))
    rope_scaling_factor: float | None = shape("Factor of that scaling", ">0")
    rope_scaling_high_freq_factor: float | None = shape("Its high-frequency factor", ">0")
    rope_scaling_low_freq_factor: float | None = shape("Its low-frequency factor", ">0")
    rope_scaling_original_max_position_embeddings: int | None = shape("Context before scaling, in tokens", ">=1")
    resid_pdrop: float | None = shape("Dropout after each residual branch", ">=0 <1", minimal="dropout")
    embd_pdrop: float | None = shape("Dropout of the embeddings", ">=0 <1", minimal="dropout")
    attn_pdrop: float | None = shape("Dropout of the attention weights", ">=0 <1", minimal="dropout")
    initializer_range: float | None = shape("Standard deviation of the initial weights", ">0")
    tie_word_embeddings: bool | None = shape("Share input and output embeddings")
    sliding_window: int | None = shape("Window of attention in tokens (Mistral)", ">=1")
    num_local_experts: int | None = shape("Experts per layer (Mixtral)", ">=1")
    num_experts_per_tok: int | None = shape("Experts per token (Mixtral)", ">=1")
    attn_implementation: str = flag(
        "sdpa", "Attention kernel",
        choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"))


@dataclass(frozen=True)
class FinetuneArguments:
    """Fine-tuning: start from pretrained weights."""

    finetune: bool = flag(
        False, "Start from pretrained weights; with --resume_from_checkpoint from its checkpoint once there is one")
    pretrained_model_name: str | None = flag(
        None, "Name, folder or s3:// of the model: its configuration, and its weights if no others are given",
        needs="finetune")
    pretrained_checkpoint_file: str | None = flag(
        None, "Weights: a file (.safetensors, .bin, .pt), a folder of them, or a checkpoint; also s3://. The model is "
        "--pretrained_model_name, else --model_type and its widths, else config.json beside the file", needs="finetune")
    finetune_checkpoint_load_dir: str | None = flag(
        None, "Folder or s3:// with the weights of --pretrained_model_name, or with models by name",
        shown="the model's own", needs="finetune")
    lora_rank: int | None = flag(
        None, "Train low-rank adapters of this rank (LoRA) and leave the weights as they are", must=">=1")
    lora_alpha: float | None = flag(
        None, "Scale of the adapters, before its division by the rank", shown="twice the rank", must=">0",
        idle_without="lora_rank")
    lora_target_modules: list[str] = flag(
        ["all-linear"], "Modules with adapters, such as q_proj v_proj; all-linear: all but the head",
        idle_without="lora_rank")
    lora_dropout: float = flag(0.0, "Dropout of the adapters' input", must=">=0 <1", idle_without="lora_rank")


NO_HISTORY = "each tensor is scaled by its own largest value, and no history is kept"


@dataclass(frozen=True)
class ParallelArguments:
    """Parallelism and memory: how the model is spread over the processes, and what memory is traded for."""

    backend: str = flag(
        "auto", "smp (torch.sagemaker), native (FSDP2), or auto: smp where it can be imported",
        choices=("auto", "smp", "native"))
    auto: str = flag(
        "off", "Choose tensor, context and shard degree, activation checkpointing, offloading, micro-batch and "
        "accumulation for the machine, where they are not given; the global batch stays",
        choices=("off", "plan"), values={"1": "plan", "0": "off"}, switch=True)
    smp_names: str | None = flag(
        None, "JSON or YAML file of names of SMP's parameters, as `doctor --smp` writes it, for transformed "
        "checkpoints")
    sharding_strategy: str = flag(
        "full_shard", "Shard everything over all processes (full_shard) or within groups (hybrid_shard); gradients and "
        "optimizer only (shard_grad_op, _hybrid_shard_zero2); nothing (no_shard). A group is --hybrid_shard_degree "
        "processes, else a node's",
        choices=("full_shard", "hybrid_shard", "shard_grad_op", "_hybrid_shard_zero2", "no_shard"),
        shown="full_shard; hybrid_shard with --hybrid_shard_degree",
        values={
            "full": "full_shard", "fsdp": "full_shard", "hybrid": "hybrid_shard", "hsdp": "hybrid_shard",
            "hybrid_full_shard": "hybrid_shard", "grad_shard": "shard_grad_op", "ddp": "no_shard",
            "hybrid_grad_shard": "_hybrid_shard_zero2", "hybrid_shard_zero2": "_hybrid_shard_zero2",
        },
        minimal="sharding")
    hybrid_shard_degree: int | None = flag(
        None, "Processes that share one copy of the model. 0: as the strategy says; 1: no sharding",
        shown="the strategy's", must=">=0", smp_key=True, smp="shard_degree")
    tensor_parallel_degree: int = flag(1, "Processes that share each matrix", must=">=1", smp_key=True)
    context_parallel_degree: int = flag(
        1, "Processes that share each sequence; part of the shard degree", must=">=1", smp_key=True)
    expert_parallel_degree: int = flag(
        1, "Processes that share the experts of a layer", must=">=1", smp_key=True)
    bf16: bool | None = flag(
        None, "Compute in bfloat16, with weights and optimizer in float32; 0: all in float32",
        shown="1; natively on a CPU 0", fsdp2="mixed_precision")
    fp8: bool = flag(False, "Compute the decoder's linear layers in 8-bit floating point (Hopper, torchao)")
    fp8_amax_history_len: int = flag(
        1024, "Steps of history for FP8 scales", must=">=1", idle_without="fp8", no_effect_natively=NO_HISTORY)
    fp8_amax_compute_algo: str = flag(
        "max", "FP8 scale from its history", choices=("max", "most_recent"), idle_without="fp8",
        no_effect_natively=NO_HISTORY)
    activation_checkpointing: str = flag(
        "full", "What the backward pass recomputes: none; full, a layer but its input; selective:op, all but matrix "
        "products, attention and communication; selective:N, every N-th layer in full (selective:1/3: that share of "
        "the layers)", values={"1": "full", "0": "none"}, switch=True,
        profiling="fsdp_activation_checkpointing", minimal="activation_checkpoints", trainer="gradient_checkpointing")
    selective_checkpointing: float = flag(
        1.0, "Checkpoint in full every N-th layer, or below 1 a share of the layers (0.5, 1/3)", must="share or count")
    sm_activation_offloading: bool = flag(
        False, "Keep activations in host memory until the backward pass", smp_key=True, smp="offload_activations")
    activation_loading_horizon: int = flag(
        2, "Layers ahead that offloaded activations are loaded", must=">=1", idle_without="sm_activation_offloading",
        smp_key=True)
    cpu_offload: bool = flag(False, "Keep parameters, gradients and optimizer states in host memory")
    memory_check: bool = flag(
        True, "Refuse at start a model whose weights, gradients and optimizer exceed the memory; 0: warn")
    chunked_loss: bool = flag(True, "Compute the loss by chunks of tokens, never holding all logits (plain heads)")
    use_torch_compile: bool | None = flag(
        None, "Compile each decoder layer and the loss", shown="1 on GPUs with Triton and a C compiler, else 0",
        trainer="torch_compile")
    torch_compile_backend: str = flag("inductor", "Backend of torch.compile", idle_without="use_torch_compile")
    limit_all_gathers: bool = flag(
        True, "Bound the all-gathers in flight",
        only_natively=Only((True,), "FSDP2 gathers at most one layer ahead and has no unlimited mode; leave it at 1"))
    forward_prefetch: bool = flag(True, "Gather the next layer's parameters before this one's forward pass")
    backward_fetch_policy: str = flag(
        "backward_pre", "When the backward pass gathers the next layer", choices=("backward_pre", "backward_post"),
        only_natively=Only(("backward_pre",), "FSDP2 always asks for the next layer before it computes this one's "
                                              "gradients; leave it at backward_pre"))
    cp_comm_type: str = flag(
        "p2p", "Exchange of context parallelism", choices=("p2p", "all_gather"),
        no_effect_natively="keys and values are always gathered")
    moe: bool = flag(
        False, "Mixture of experts: SMP's implementation on SMP, the model's own natively, with these router losses")
    moe_load_balancing: str = flag(
        "sinkhorn", "Load balancing of the experts", choices=("sinkhorn", "balanced", "aux_loss", "none"),
        idle_without="moe",
        only_natively=Only(("aux_loss", "none"), "SMP alone sends tokens to experts other than the router's; give "
                                                 "aux_loss or none, or --backend smp in SMP's container"))
    moe_aux_loss_coeff: float = flag(
        0.001, "Coefficient of the load-balancing loss", must=">=0", idle_without="moe")
    moe_z_loss_coeff: float = flag(
        0.001, "Coefficient of the loss that keeps the routers' logits small, with any load balancing", must=">=0",
        idle_without="moe")
    global_token_shuffle: bool = of_experts(False, "Shuffle tokens over ranks before the experts")
    moe_all_to_all_dispatcher: bool = of_experts(True, "Send tokens to experts by all-to-all")
    moe_fp8_checkpoint_attn: bool = of_experts(True, "Checkpoint attention of FP8 expert layers")
    moe_fp8_checkpoint_moe: bool = of_experts(True, "Checkpoint the experts of FP8 expert layers")
