"""Every training flag, in typed groups, combined in one flat `Arguments`.

A field's name is the flag's name; its type says how text is read; its metadata carry what `--help`,
``docs/flags.md`` and the check of values need. ``None`` means "not given": for a model's shape that leaves
the value to the preset, or to the architecture's own default.
"""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import PurePosixPath

from smp_train.arguments import checkpointing
from smp_train.arguments.flag import Flag, flag, flags_of

STRATEGIES = ("full_shard", "hybrid_shard", "shard_grad_op", "_hybrid_shard_zero2", "no_shard")
LR_STYLES = ("constant", "linear", "cosine", "exponential", "plateau", "wsd")
PRESET = "the model's"


@dataclass
class ModelArguments:
    """Model: what is trained. A preset, a Hugging Face model, or widths given one by one on top of either."""

    model_type: str | None = flag(
        None,
        "Model family: gpt_neox, gpt2, llama_v2, llama_v3, mistral, mixtral, falcon, phi, codellama, ...",
        shown="gpt_neox; scratch with --model_size",
        values={"mingpt": "gpt2"},
    )
    model_size: str | None = flag(None, "Size of the preset within the family, such as 7b", shown="no preset")
    hf_pretrained_model_name_or_dir: str | None = flag(
        None,
        "Folder (also s3://) of a Hugging Face model, or its name: its configuration, and its weights where it has any",
    )
    trust_remote_code: bool = flag(
        False, "Run the code that comes with that model or its tokenizer, where transformers has no class for it"
    )
    from_scratch: bool = flag(
        False, "Train a preset of the from-scratch ladder (350m to 70b; --model_size, or 7b)"
    )
    max_context_width: int | None = flag(
        None, "Sequence length of training", unit="tokens", shown="2048, or the model's where that is less"
    )
    vocab_size: int | None = flag(
        None, "Size of the vocabulary", shown="the preset's, else the architecture's"
    )
    hidden_width: int | None = flag(None, "Width of the hidden states", shown="the preset's, else 768")
    num_layers: int | None = flag(None, "Number of decoder layers", shown="the preset's, else 12")
    num_heads: int | None = flag(None, "Number of attention heads", shown="the preset's, else 12")
    num_key_value_heads: int | None = flag(
        None, "Number of key-value heads (grouped-query attention)", shown=PRESET
    )
    intermediate_size: int | None = flag(None, "Width of the feed-forward layer", shown=PRESET)
    rotary_pct: float | None = flag(None, "Share of a head's width that is rotated (GPT-NeoX)", shown=PRESET)
    rotary_emb_base: float | None = flag(None, "Base of the rotary position embedding", shown=PRESET)
    rope_scaling_type: str | None = flag(
        None, "Scaling of the rotary embedding for long contexts", choices=("default", "llama3"), shown=PRESET
    )
    rope_scaling_factor: float | None = flag(None, "Factor of the rotary scaling", shown=PRESET)
    rope_scaling_high_freq_factor: float | None = flag(None, "High-frequency factor of it", shown=PRESET)
    rope_scaling_low_freq_factor: float | None = flag(None, "Low-frequency factor of it", shown=PRESET)
    rope_scaling_original_max_position_embeddings: int | None = flag(
        None, "Context the model had before scaling", unit="tokens", shown=PRESET
    )
    resid_pdrop: float | None = flag(None, "Dropout after each residual branch", shown=PRESET)
    embd_pdrop: float | None = flag(None, "Dropout of the embeddings", shown=PRESET)
    attn_pdrop: float | None = flag(None, "Dropout of the attention weights", shown=PRESET)
    initializer_range: float | None = flag(None, "Standard deviation of the initial weights", shown=PRESET)
    tie_word_embeddings: bool | None = flag(None, "Share input and output embeddings", shown=PRESET)
    sliding_window: int | None = flag(
        None, "Width of windowed attention (Mistral)", unit="tokens", shown=PRESET
    )
    num_local_experts: int | None = flag(None, "Number of experts per layer (Mixtral)", shown=PRESET)
    num_experts_per_tok: int | None = flag(None, "Experts that each token is sent to (Mixtral)", shown=PRESET)
    attn_implementation: str = flag(
        "sdpa",
        "Attention kernel",
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
    )
    pretrained_checkpoint_file: str | None = flag(
        None,
        "The pretrained weights: a file (.safetensors, .bin, .pt), or a folder of them or of a checkpoint; also s3://. "
        "The model is that of --pretrained_model_name, else of --model_type and its widths, else that of config.json "
        "beside it",
    )
    finetune_checkpoint_load_dir: str | None = flag(
        None,
        "Folder with the weights of --pretrained_model_name, or of models by name; also s3://",
        shown="the model's own",
    )


@dataclass
class ParallelArguments:
    """Parallelism and memory: how the model is spread over the processes, and what memory is traded for."""

    backend: str = flag(
        "auto",
        "What spreads the model: SMP (torch.sagemaker) where it can be imported, else FSDP2",
        choices=("auto", "smp", "native"),
    )
    sharding_strategy: str = flag(
        "full_shard",
        "What is sharded over which processes: everything over all (full_shard) or within groups that are "
        "copies of one another (hybrid_shard); gradients and optimizer only (shard_grad_op, "
        "_hybrid_shard_zero2); nothing "
        "(no_shard). Groups have --hybrid_shard_degree processes, else one node's",
        choices=STRATEGIES,
        shown="full_shard; hybrid_shard with --hybrid_shard_degree",
        values={
            "full": "full_shard", "hybrid": "hybrid_shard", "fsdp": "full_shard", "hsdp": "hybrid_shard",
            "ddp": "no_shard", "grad_shard": "shard_grad_op", "hybrid_full_shard": "hybrid_shard",
            "hybrid_grad_shard": "_hybrid_shard_zero2", "hybrid_shard_zero2": "_hybrid_shard_zero2",
        },
    )  # fmt: skip
    hybrid_shard_degree: int | None = flag(
        None,
        "Processes that share one copy of the model. 0: as the strategy says; 1: no sharding",
        unit="processes",
        shown="the strategy's",
    )
    tensor_parallel_degree: int = flag(1, "Processes that share each matrix", unit="processes")
    context_parallel_degree: int = flag(
        1, "Processes that share each sequence; part of the shard degree", unit="processes"
    )
    expert_parallel_degree: int = flag(1, "Processes that share the experts of a layer", unit="processes")
    bf16: bool = flag(True, "Compute in bfloat16 (weights and optimizer stay in float32); 0: float32")
    fp8: bool = flag(
        False, "Compute the decoder layers' linear layers in 8-bit floating point, on Hopper GPUs, by torchao"
    )
    fp8_amax_history_len: int = flag(1024, "Steps of history that FP8 scales are taken from", unit="steps")
    fp8_amax_compute_algo: str = flag(
        "max", "How an FP8 scale follows from its history", choices=("max", "most_recent")
    )
    activation_checkpointing: str = flag(
        "full",
        "What the backward pass computes again instead of keeping it: none; full, all of a layer but its input; "
        "selective:op, all but the results of matrix products, attention and communication; selective:N, every "
        "N-th layer in full (selective:1/3: that share of the layers)",
        values={"1": "full", "0": "none"},
        switch=True,
    )
    selective_checkpointing: float = flag(
        1.0, "Checkpoint in full every N-th layer only, or a share of the layers when below 1 (0.5, 1/3)"
    )
    sm_activation_offloading: bool = flag(
        False, "Keep in host memory what a layer's backward pass needs, until it is needed"
    )
    activation_loading_horizon: int = flag(
        2, "Layers ahead that offloaded activations are loaded", unit="layers"
    )
    cpu_offload: bool = flag(False, "Keep parameters, gradients and optimizer states in host memory")
    memory_check: bool = flag(
        True, "Refuse at start a model whose weights, gradients and optimizer exceed the memory there is; 0: only warn"
    )
    chunked_loss: bool = flag(
        True, "Compute the loss by chunks of tokens, never holding all logits (models with a plain head)"
    )
    use_torch_compile: bool = flag(False, "Compile each decoder layer")
    torch_compile_backend: str = flag("inductor", "What compiles it: a backend's name in torch.compile")
    limit_all_gathers: bool = flag(True, "Bound the all-gathers in flight")
    forward_prefetch: bool = flag(True, "Ask for the next layer's parameters before this one's forward pass")
    backward_fetch_policy: str = flag(
        "backward_pre",
        "When the backward pass gathers the next layer",
        choices=("backward_pre", "backward_post"),
    )
    cp_comm_type: str = flag("p2p", "Exchange of context parallelism", choices=("p2p", "all_gather"))
    moe: bool = flag(False, "Use SMP's mixture-of-experts implementation")
    moe_load_balancing: str = flag(
        "sinkhorn", "Load balancing of SMP's experts", choices=("sinkhorn", "balanced", "aux_loss", "none")
    )
    global_token_shuffle: bool = flag(False, "Shuffle tokens over ranks before SMP's experts")
    moe_all_to_all_dispatcher: bool = flag(True, "Send tokens to SMP's experts by all-to-all")
    moe_fp8_checkpoint_attn: bool = flag(True, "Checkpoint attention of FP8 expert layers")
    moe_fp8_checkpoint_moe: bool = flag(True, "Checkpoint the experts of FP8 expert layers")


@dataclass
class OptimizerArguments:
    """Training: batch, length, optimizer and schedule."""

    train_batch_size: int = flag(2, "Sequences per data-parallel rank and micro-step", unit="sequences")
    gradient_accumulation_steps: int = flag(1, "Micro-steps per optimizer step")
    max_steps: int = flag(
        5000, "Optimizer steps of the whole run", unit="steps", shown="5000; no limit with --epochs"
    )
    epochs: int | None = flag(
        None, "Passes over the data, each row once in each; a max_steps that is given may end the run before"
    )
    steps_per_epoch: int | None = flag(
        None, "Ends the run after epochs times so many steps", unit="steps", shown="the data's"
    )
    lr: float = flag(1e-4, "Peak learning rate")
    min_lr: float = flag(1e-5, "Learning rate at the end of the decay")
    lr_decay_style: str = flag("cosine", "Shape of the schedule after warm-up", choices=LR_STYLES)
    lr_decay_iters: int | None = flag(
        None, "Steps the schedule is stretched over", unit="steps", shown="the run's"
    )
    warmup: float = flag(
        0.0032, "Linear warm-up: a fraction of lr_decay_iters below 1, a number of steps from 1 on"
    )
    plateau: float = flag(
        0.0, "Time at the peak before the decay, counted like warmup; wsd without it decays over the last fifth"
    )
    weight_decay: float = flag(0.2, "Decay of matrices; biases and norms are not decayed")
    beta1: float = flag(0.9, "AdamW: decay of the first moment")
    beta2: float = flag(0.95, "AdamW: decay of the second moment")
    adam_epsilon: float = flag(1e-8, "AdamW: term that keeps the denominator from zero")
    grad_clip: float = flag(1.0, "Largest norm of the whole gradient; 0: no clipping")
    seed: int = flag(12345, "Fixes initial weights, order of the data, and dropout")
    same_seed: bool = flag(False, "Draw the same dropout on every data-parallel rank")


@dataclass
class DataArguments:
    """Data: what is read, in which order, and what is validated on."""

    training_dir: list[str] | None = flag(
        None,
        "Folder of the training shards; several, as a:0.7 b:0.3, are blended by weight",
        shown="SM_CHANNEL_TRAIN",
    )
    test_dir: str | None = flag(None, "Folder of the validation shards", shown="SM_CHANNEL_TEST")
    use_synthetic_data: bool = flag(
        False, "Train on random tokens that depend on the seed and position alone"
    )
    dataset_type: str = flag(
        "gpt_jsonl",
        "Kind of the data: found out; hf insists on a Hugging Face data set on disk",
        choices=("gpt_jsonl", "hf"),
    )
    data_type: str = flag("gpt", "Kind of model the data is for", choices=("gpt", "bert"))
    zipped_data: bool | None = flag(None, "Insist on .gz shards (1) or on plain ones (0)", shown="found out")
    data_num_workers: int | None = flag(
        None, "Processes per rank that convert shards, once", unit="processes", shown="the cores over the ranks"
    )
    shuffle: str = flag(
        "global",
        "Order of each epoch: global (a permutation of the whole), none (as stored), or window:K (K shards at a time, "
        "with two windows on disk)",
    )
    long: str | None = flag(
        None,
        "Of a row longer than the context: its beginning, all its pieces, a random window, or an error",
        choices=("truncate", "split", "crop", "error"),
        shown="truncate; split with --short concat or pack",
    )
    short: str = flag(
        "pad",
        "A row shorter than the context is padded, joined end to end with others, or packed whole beside others",
        choices=("pad", "concat", "pack"),
    )
    bad_rows: str = flag(
        "stop", "A malformed row, or one with nothing to learn, stops the run or is left out", choices=("stop", "skip")
    )
    max_bad: float = flag(0.001, "Fraction of all rows that may be left out by --bad_rows skip, as 0.1%")
    allow_data_change: bool = flag(False, "Resume although the training data is not what it was")
    data_cache_dir: str | None = flag(None, "Folder for the index of the shards", shown="beside the data")
    data_audit: bool = flag(False, "Write every consumed sample's identity to data_audit-rank<r>.jsonl")
    dataset: str | None = flag(
        None,
        "Text to tokenise on the fly: a file or folder of jsonl, parquet or text, s3://, or a name on the Hugging Face "
        "hub, such as allenai/c4",
    )
    dataset_config_name: str | None = flag(None, "Its configuration on the hub, such as en")
    tokenizer: str | None = flag(
        None, "Tokenizer of that text: tokenizer.json, a folder, or a name on the hub", shown="the model's own"
    )
    text_column: str = flag("text", "Field or column of that text")
    validation_freq: int | None = flag(None, "Steps between validations", unit="steps", shown="never")
    validation_batches: int = flag(10, "Batches of one validation", unit="batches")
    val_batch_size: int = flag(4, "Sequences per data-parallel rank and validation batch", unit="sequences")
    fast_validation: bool = flag(True, "Validate on the last shard only")
    evaluate_only: bool = flag(False, "Validate once and train nothing")


@dataclass
class CheckpointArguments:
    """Checkpoints: where, how often, how many are kept. Lists of equal length make one policy per folder."""

    checkpoint_dir: list[str] = flag(
        [],
        "Folders checkpoints are written to, or s3://bucket/prefix; local:DIR is each node's own disk",
        shown="checkpoints/<run_name>; on SageMaker /opt/ml/checkpoints",
    )
    checkpoint_freq: list[int] = flag([1000], "Steps between checkpoints, per folder", unit="steps")
    num_kept_checkpoints: list[int] = flag([2], "Newest checkpoints of the run kept, per folder; 0: all")
    checkpoint_type: str | None = flag(
        None,
        "How checkpoints are written: in the background from a copy in host memory (where there is no room for one, as "
        "sharded), while training waits (sharded), or so and with the model in Hugging Face format in hf/ beside it "
        "(full). All resume",
        choices=("sharded", "full", "local", "use_pg_with_util", "async_sharded", "async_local"),
        shown="async_sharded; sharded on SMP",
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "A checkpoint, or a folder or s3:// prefix of them, of which the run's newest complete one is taken; without "
        "--run_name that of the run that saved last, which then goes on",
    )
    allow_model_change: bool = flag(False, "Resume although the checkpoint's model computes something else")
    strict_resume: bool = flag(
        False, "Stop when the newest checkpoint is damaged, rather than set it aside and take the next older one"
    )
    break_checkpoint_lock: bool = flag(
        False, "Save though another job seems to be saving this run there; that one then saves no more"
    )
    save_final_model: bool = flag(False, "Write the model in Hugging Face format at the end")
    model_dir: str | None = flag(None, "Folder, or s3://, the final model is written to", shown="SM_MODEL_DIR")


@dataclass
class LoggingArguments:
    """Logging and profiling: what a run tells, and where it writes it."""

    run_name: str = flag(
        "",
        "Name of the run: a start of the same name goes on with it, another one is another run",
        shown="a fresh one, such as llama_v2-7b-20261122-1; that of the run resumed",
    )
    run_dir: str = flag(
        "", "Folder for run.json, metrics.jsonl, logs and report", shown="runs/<run_name>; SM_OUTPUT_DATA_DIR"
    )
    logging_freq: int = flag(1, "Steps between log lines", unit="steps")
    logging_freq_for_avg: int = flag(50, "Steps that averaged speeds are taken over", unit="steps")
    tensorboard_dir: list[str] | None = flag(
        None, "Folders for TensorBoard files; {run_dir} in them is the run folder", shown="none"
    )
    enable_memory_profiling: bool = flag(False, "Log memory at every stage of set-up and of the first steps")
    use_profiler: bool = flag(False, "Record the PyTorch profiler")
    profile_nsys: bool = flag(False, "Mark steps for Nsight Systems")
    profile_start: int = flag(6, "First step to profile, counted from each start of the run", unit="steps")
    profile_steps: int = flag(3, "Steps to profile", unit="steps")


@dataclass
class RuntimeArguments:
    """Running: configuration files, communication and debugging."""

    config: str | None = flag(None, "YAML or JSON file of flags; flags given elsewhere win over it")
    smp_config: str | None = flag(None, "JSON file of SMP v2's configuration keys; flags given elsewhere win over it")
    print_config: bool = flag(False, "Print every setting with where its value came from, and exit")
    debug: bool = flag(False, "Print tracebacks")
    distributed_backend: str = flag(
        "auto", "Communication: nccl on GPUs, else gloo; gloo trains on the CPU",
        choices=("auto", "nccl", "smddp", "gloo"),
    )  # fmt: skip
    distributed_timeout_minutes: float = flag(30.0, "Longest wait inside a collective", unit="minutes")
    prompt: str | None = flag(None, "Text to continue: belongs to generation")
    num_tokens: int | None = flag(None, "Tokens to generate: belongs to generation")


@dataclass
class LegacyArguments:
    """Accepted for old command lines: these have no effect here, and a run that is given one says so."""

    delayed_param: bool = flag(True, "Create parameters only once they are sharded")
    use_orig_params: bool = flag(False, "FSDP1: keep original parameters")
    auto_wrap_policy: str = flag("transformer_auto_wrap_policy", "FSDP1: which modules are wrapped")
    patch_neox_rope: bool = flag(True, "Patch of an old transformers release")
    framework: str = flag("fsdp", "Training framework")
    use_smp_flash_attn: bool = flag(True, "SMP's own flash attention")
    use_smp_implementation: bool = flag(False, "SMP's own model implementation")
    log_reduced_training_loss: bool = flag(False, "Log the loss averaged over ranks")
    preserve_np_state: bool = flag(False, "Restore numpy's random state after validation")
    clean_cache: bool = flag(False, "Empty the CUDA cache every step")
    summary_first_pdrop: float = flag(0.1, "Dropout of GPT-2's classification head")
    nccl_test_log: str = flag("", "Output of an NCCL test, logged with the metrics", shown="none")
    environment: str | None = flag(None, "Kind of machine", choices=("pbs", "local"))
    fsdp_cache_flush_warnings: bool = flag(True, "SMP: warn when the CUDA cache is flushed")
    allow_empty_shards: bool = flag(False, "SMP: allow shards without elements")
    random_seed: int | None = flag(None, "SMP: seed of tensor-parallel modules")


GROUPS: tuple[type, ...] = (
    ModelArguments,
    ParallelArguments,
    OptimizerArguments,
    DataArguments,
    CheckpointArguments,
    FinetuneArguments,
    LoggingArguments,
    RuntimeArguments,
    LegacyArguments,
)


@dataclass
class Arguments(
    LegacyArguments,
    RuntimeArguments,
    LoggingArguments,
    FinetuneArguments,
    CheckpointArguments,
    DataArguments,
    OptimizerArguments,
    ParallelArguments,
    ModelArguments,
):
    """All settings of a training run, flat. `smp_train.arguments.parse` makes one from a command line."""

    def __post_init__(self) -> None:
        """Settle what follows from other settings; idempotent, so `dataclasses.replace` is safe."""
        if self.from_scratch:
            self.model_type = self.model_type or "scratch"
            self.model_size = self.model_size or "7b"
        self.model_size = self.model_size.lower() if self.model_size else None
        # 0 is SMP's and SageMaker's way to say "not given".
        self.hybrid_shard_degree = self.hybrid_shard_degree or None
        self.validation_freq = self.validation_freq or None
        # SMP's rule (its reference, hybrid_shard_degree): 1 is no sharding; from 2 on, a strategy that is not
        # hybrid becomes hybrid_shard. A contradiction with an explicit no_shard is refused by `validate`.
        if self.hybrid_shard_degree == 1:
            self.sharding_strategy = "no_shard"
        elif self.hybrid_shard_degree and self.sharding_strategy in ("full_shard", "shard_grad_op"):
            self.sharding_strategy = "hybrid_shard"
        # One setting says what is checkpointed; a contradiction is refused by `validate`.
        if self.activation_checkpointing == checkpointing.FULL:
            self.activation_checkpointing = checkpointing.of_layers(self.selective_checkpointing)
        if self.run_name:
            self.run_dir = self.run_dir or f"runs/{self.run_name}"
            self.checkpoint_dir = self.checkpoint_dir or [f"checkpoints/{self.run_name}"]

    @property
    def label(self) -> str:
        """The model's type and size: what a launcher calls a run without a name, and how a fresh name begins."""
        pretrained = self.hf_pretrained_model_name_or_dir or (self.finetune and self.pretrained_model_name)
        if pretrained:
            return PurePosixPath(pretrained).name or "model"
        family = self.model_type or ("scratch" if self.model_size else "gpt_neox")
        return "-".join(part for part in (family, self.model_size) if part)


@functools.cache
def flags() -> dict[str, Flag]:
    """Return every flag by name, in the order of the groups."""
    return {found.name: found for group in GROUPS for found in flags_of(group)}
