"""The flags of the model: what is trained, from which weights, and how it is spread over the processes."""

# fmt: off

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smp_train.arguments.flag import (
    ABOVE_0,
    ABOVE_0_TO_1,
    AT_LEAST_0,
    AT_LEAST_1,
    AT_LEAST_2,
    BELOW_1,
    FSDP2,
    MINIMAL,
    PROFILING,
    SMP,
    TRAINER,
    Only,
    flag,
    share_or,
)


def shape(help: str, **known: Any) -> Any:
    """Declare a flag of the model's shape: not given, it is the preset's, or the architecture's own default."""
    return flag(None, help, shown="the model's", **known)


def of_experts(default: Any, help: str, **known: Any) -> Any:
    """Declare a flag of SMP's mixture of experts."""
    return flag(default, help, idle_without="moe", no_effect_natively="it is of SMP's experts (--moe 1)", **known)


@dataclass
class ModelArguments:
    """Model: what is trained. A preset, a Hugging Face model, or widths given one by one on top of either."""

    model_type: str | None = flag(
        None, "Model family: gpt_neox, gpt2, llama_v2, llama_v3, mistral, mixtral, falcon, phi, codellama, ...",
        shown="gpt_neox; scratch with --model_size", values={"mingpt": "gpt2"},
    )
    model_size: str | None = flag(None, "Size of the preset within the family, such as 7b", shown="no preset")
    hf_pretrained_model_name_or_dir: str | None = flag(
        None,
        "Folder (also s3://) of a Hugging Face model, or its name: its configuration, and its weights where it has any",
        aka={FSDP2: "hf_model", TRAINER: "model_name_or_path"},
    )
    trust_remote_code: bool = flag(
        False, "Run the code that comes with that model or its tokenizer, where transformers has no class for it"
    )
    from_scratch: bool = flag(False, "Train a preset of the from-scratch ladder (350m to 70b; --model_size, or 7b)")
    max_context_width: int | None = flag(
        None, "Sequence length of training", unit="tokens", shown="2048, or the model's where that is less",
        must=AT_LEAST_2,
        aka={MINIMAL: "seq_len", FSDP2: "seq_len", TRAINER: "block_size max_seq_length model_max_length"},
    )
    vocab_size: int | None = flag(
        None, "Size of the vocabulary", shown="the preset's, else the architecture's", must=AT_LEAST_1
    )
    hidden_width: int | None = flag(
        None, "Width of the hidden states", shown="the preset's, else 768", must=AT_LEAST_1, aka={MINIMAL: "embed_size"}
    )
    num_layers: int | None = flag(None, "Number of decoder layers", shown="the preset's, else 12", must=AT_LEAST_1)
    num_heads: int | None = flag(None, "Number of attention heads", shown="the preset's, else 12", must=AT_LEAST_1)
    num_key_value_heads: int | None = shape("Number of key-value heads (grouped-query attention)", must=AT_LEAST_1)
    intermediate_size: int | None = shape(
        "Width of the feed-forward layer", must=AT_LEAST_1, aka={SMP: "llama_intermediate_size"}
    )
    rotary_pct: float | None = shape("Share of a head's width that is rotated (GPT-NeoX)", must=ABOVE_0_TO_1)
    rotary_emb_base: float | None = shape("Base of the rotary position embedding", must=ABOVE_0)
    rope_scaling_type: str | None = shape(
        "Scaling of the rotary embedding for long contexts", choices=("default", "llama3")
    )
    rope_scaling_factor: float | None = shape("Factor of the rotary scaling", must=ABOVE_0)
    rope_scaling_high_freq_factor: float | None = shape("High-frequency factor of it", must=ABOVE_0)
    rope_scaling_low_freq_factor: float | None = shape("Low-frequency factor of it", must=ABOVE_0)
    rope_scaling_original_max_position_embeddings: int | None = shape(
        "Context the model had before scaling", unit="tokens", must=AT_LEAST_1
    )
    resid_pdrop: float | None = shape("Dropout after each residual branch", must=BELOW_1, aka={MINIMAL: "dropout"})
    embd_pdrop: float | None = shape("Dropout of the embeddings", must=BELOW_1, aka={MINIMAL: "dropout"})
    attn_pdrop: float | None = shape("Dropout of the attention weights", must=BELOW_1, aka={MINIMAL: "dropout"})
    initializer_range: float | None = shape("Standard deviation of the initial weights", must=ABOVE_0)
    tie_word_embeddings: bool | None = shape("Share input and output embeddings")
    sliding_window: int | None = shape("Width of windowed attention (Mistral)", unit="tokens", must=AT_LEAST_1)
    num_local_experts: int | None = shape("Number of experts per layer (Mixtral)", must=AT_LEAST_1)
    num_experts_per_tok: int | None = shape("Experts that each token is sent to (Mixtral)", must=AT_LEAST_1)
    attn_implementation: str = flag(
        "sdpa", "Attention kernel",
        choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"),
    )


@dataclass
class FinetuneArguments:
    """Fine-tuning: start from weights instead of random numbers."""

    finetune: bool = flag(
        False, "Start from pretrained weights; with --resume_from_checkpoint from its checkpoint once there is one"
    )
    pretrained_model_name: str | None = flag(
        None,
        "The pretrained model's folder (also s3://) or name: its configuration, and its weights if no others are given",
        needs="finetune",
    )
    pretrained_checkpoint_file: str | None = flag(
        None,
        "The pretrained weights: a file (.safetensors, .bin, .pt), or a folder of them or of a checkpoint; also "
        "s3://. The model is that of --pretrained_model_name, else of --model_type and its widths, else that of "
        "config.json beside it", needs="finetune",
    )
    finetune_checkpoint_load_dir: str | None = flag(
        None, "Folder with the weights of --pretrained_model_name, or of models by name; also s3://",
        shown="the model's own", needs="finetune",
    )


@dataclass
class ParallelArguments:
    """Parallelism and memory: how the model is spread over the processes, and what memory is traded for."""

    backend: str = flag(
        "auto", "What spreads the model: SMP (torch.sagemaker) where it can be imported, else FSDP2",
        choices=("auto", "smp", "native"),
    )
    sharding_strategy: str = flag(
        "full_shard",
        "What is sharded over which processes: everything over all (full_shard) or within groups that are copies of "
        "one another (hybrid_shard); gradients and optimizer only (shard_grad_op, _hybrid_shard_zero2); nothing "
        "(no_shard). Groups have --hybrid_shard_degree processes, else one node's",
        choices=("full_shard", "hybrid_shard", "shard_grad_op", "_hybrid_shard_zero2", "no_shard"),
        shown="full_shard; hybrid_shard with --hybrid_shard_degree",
        values={
            "full": "full_shard", "hybrid": "hybrid_shard", "fsdp": "full_shard", "hsdp": "hybrid_shard",
            "ddp": "no_shard", "grad_shard": "shard_grad_op", "hybrid_full_shard": "hybrid_shard",
            "hybrid_grad_shard": "_hybrid_shard_zero2", "hybrid_shard_zero2": "_hybrid_shard_zero2",
        },
        aka={MINIMAL: "sharding"},
    )
    hybrid_shard_degree: int | None = flag(
        None, "Processes that share one copy of the model. 0: as the strategy says; 1: no sharding", unit="processes",
        shown="the strategy's", must=AT_LEAST_0, smp_key=True, aka={SMP: "shard_degree"},
    )
    tensor_parallel_degree: int = flag(
        1, "Processes that share each matrix", unit="processes", must=AT_LEAST_1, smp_key=True
    )
    context_parallel_degree: int = flag(
        1, "Processes that share each sequence; part of the shard degree", unit="processes", must=AT_LEAST_1,
        smp_key=True,
    )
    expert_parallel_degree: int = flag(
        1, "Processes that share the experts of a layer", unit="processes", must=AT_LEAST_1,
        only_natively=Only(
            (1,), "a degree of its own for experts is SMP's (--backend smp); --tensor_parallel_degree distributes a "
            "layer's experts",
        ),
        smp_key=True,
    )
    bf16: bool = flag(
        True, "Compute in bfloat16 (weights and optimizer stay in float32); 0: float32", aka={FSDP2: "mixed_precision"}
    )
    fp8: bool = flag(
        False, "Compute the decoder layers' linear layers in 8-bit floating point, on Hopper GPUs, by torchao"
    )
    fp8_amax_history_len: int = flag(
        1024, "Steps of history that FP8 scales are taken from", unit="steps", must=AT_LEAST_1, idle_without="fp8",
        no_effect_natively="each tensor is scaled by its own largest value, and no history is kept",
    )
    fp8_amax_compute_algo: str = flag(
        "max", "How an FP8 scale follows from its history", choices=("max", "most_recent"), idle_without="fp8",
        no_effect_natively="each tensor is scaled by its own largest value, and no history is kept",
    )
    activation_checkpointing: str = flag(
        "full",
        "What the backward pass computes again instead of keeping it: none; full, all of a layer but its input; "
        "selective:op, all but the results of matrix products, attention and communication; selective:N, every N-th "
        "layer in full (selective:1/3: that share of the layers)", values={"1": "full", "0": "none"}, switch=True,
        aka={
            PROFILING: "fsdp_activation_checkpointing", MINIMAL: "activation_checkpoints",
            TRAINER: "gradient_checkpointing",
        },
    )
    selective_checkpointing: float = flag(
        1.0, "Checkpoint in full every N-th layer only, or a share of the layers when below 1 (0.5, 1/3)",
        must=share_or("every N-th layer"),
    )
    sm_activation_offloading: bool = flag(
        False, "Keep in host memory what a layer's backward pass needs, until it is needed", smp_key=True,
        aka={SMP: "offload_activations"},
    )
    activation_loading_horizon: int = flag(
        2, "Layers ahead that offloaded activations are loaded", unit="layers", must=AT_LEAST_1,
        idle_without="sm_activation_offloading", smp_key=True,
    )
    cpu_offload: bool = flag(False, "Keep parameters, gradients and optimizer states in host memory")
    memory_check: bool = flag(
        True, "Refuse at start a model whose weights, gradients and optimizer exceed the memory there is; 0: only warn"
    )
    chunked_loss: bool = flag(
        True, "Compute the loss by chunks of tokens, never holding all logits (models with a plain head)"
    )
    use_torch_compile: bool = flag(False, "Compile each decoder layer", aka={TRAINER: "torch_compile"})
    torch_compile_backend: str = flag(
        "inductor", "What compiles it: a backend's name in torch.compile", idle_without="use_torch_compile"
    )
    limit_all_gathers: bool = flag(
        True, "Bound the all-gathers in flight",
        only_natively=Only(
            (True,), "FSDP2 gathers at most one layer ahead by construction and has no unlimited mode; leave it at 1",
        ),
    )
    forward_prefetch: bool = flag(True, "Ask for the next layer's parameters before this one's forward pass")
    backward_fetch_policy: str = flag(
        "backward_pre", "When the backward pass gathers the next layer", choices=("backward_pre", "backward_post"),
        only_natively=Only(
            ("backward_pre",),
            "FSDP2 always asks for the next layer before it computes this one's gradients; leave it at backward_pre",
        ),
    )
    cp_comm_type: str = flag(
        "p2p", "Exchange of context parallelism", choices=("p2p", "all_gather"),
        no_effect_natively="keys and values are always gathered",
    )
    moe: bool = flag(
        False, "Use SMP's mixture-of-experts implementation",
        only_natively=Only(
            (False,), "the expert implementation is SMP's (--backend smp); --model_type mixtral trains without it",
        ),
    )
    moe_load_balancing: str = of_experts(
        "sinkhorn", "Load balancing of SMP's experts", choices=("sinkhorn", "balanced", "aux_loss", "none")
    )
    global_token_shuffle: bool = of_experts(False, "Shuffle tokens over ranks before SMP's experts")
    moe_all_to_all_dispatcher: bool = of_experts(True, "Send tokens to SMP's experts by all-to-all")
    moe_fp8_checkpoint_attn: bool = of_experts(True, "Checkpoint attention of FP8 expert layers")
    moe_fp8_checkpoint_moe: bool = of_experts(True, "Checkpoint the experts of FP8 expert layers")
