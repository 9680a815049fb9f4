"""The flags of the training: optimizer and schedule, data, and checkpoints."""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from smp_train.arguments.flag import (
    A_FOLDER,
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BELOW_1,
    FSDP,
    FSDP2,
    MINIMAL,
    PROFILING,
    SHARE,
    SMP,
    TRAINER,
    Only,
    flag,
    share_or,
)

NODE_LOCAL = "local:"
"""Prefix of a checkpoint folder that is on each node's own disk."""


@dataclass
class OptimizerArguments:
    """Training: batch, length, optimizer and schedule."""

    train_batch_size: int = flag(
        2, "Sequences per data-parallel rank and micro-step", unit="sequences", must=AT_LEAST_1,
        aka={
            PROFILING: "batch_size", MINIMAL: "batch_size", FSDP2: "batch_size", TRAINER: "per_device_train_batch_size",
        },
    )
    gradient_accumulation_steps: int = flag(
        1, "Micro-steps per optimizer step", must=AT_LEAST_1, aka={FSDP2: "grad_accum_steps"}
    )
    max_steps: int = flag(
        5000, "Optimizer steps of the whole run", unit="steps", shown="5000; no limit with --epochs", must=AT_LEAST_1,
        aka={SMP: "max_training_steps"},
    )
    epochs: int | None = flag(
        None, "Passes over the data, each row once in each; a max_steps that is given may end the run before",
        must=AT_LEAST_1, aka={FSDP2: "num_epochs", TRAINER: "num_train_epochs"},
    )
    steps_per_epoch: int | None = flag(
        None, "Ends the run after epochs times so many steps", unit="steps", shown="the data's", must=AT_LEAST_1
    )
    lr: float = flag(1e-4, "Peak learning rate", must=AT_LEAST_0, aka={FSDP2: "max_lr", TRAINER: "learning_rate"})
    min_lr: float = flag(1e-5, "Learning rate at the end of the decay", must=AT_LEAST_0)
    lr_decay_style: str = flag(
        "cosine", "Shape of the schedule after warm-up",
        choices=("constant", "linear", "cosine", "exponential", "plateau", "wsd"),
    )
    lr_decay_iters: int | None = flag(
        None, "Steps the schedule is stretched over", unit="steps", shown="the run's", must=AT_LEAST_1
    )
    warmup: float = flag(
        0.0032, "Linear warm-up: a fraction of lr_decay_iters below 1, a number of steps from 1 on",
        must=share_or("whole steps"),
    )
    plateau: float = flag(
        0.0, "Time at the peak before the decay, counted like warmup; wsd without it decays over the last fifth",
        must=SHARE,
    )
    weight_decay: float = flag(0.2, "Decay of matrices; biases and norms are not decayed", must=AT_LEAST_0)
    beta1: float = flag(0.9, "AdamW: decay of the first moment", must=BELOW_1, aka={TRAINER: "adam_beta1"})
    beta2: float = flag(0.95, "AdamW: decay of the second moment", must=BELOW_1, aka={TRAINER: "adam_beta2"})
    adam_epsilon: float = flag(1e-8, "AdamW: term that keeps the denominator from zero", must=ABOVE_0)
    grad_clip: float = flag(
        1.0, "Largest norm of the whole gradient; 0: no clipping", must=AT_LEAST_0, aka={TRAINER: "max_grad_norm"}
    )
    seed: int = flag(12345, "Fixes initial weights, order of the data, and dropout", must=AT_LEAST_0)
    same_seed: bool = flag(False, "Draw the same dropout on every data-parallel rank")


@dataclass
class DataArguments:
    """Data: what is read, in which order, and what is validated on."""

    training_dir: list[str] | None = flag(
        None, "Folder of the training shards; several, as a:0.7 b:0.3, are blended by weight",
        variable="SM_CHANNEL_TRAIN", aka={FSDP: "dataset_path", PROFILING: "data_path", MINIMAL: "train_data"},
    )
    test_dir: str | None = flag(
        None, "Folder of the validation shards", variable="SM_CHANNEL_TEST",
        aka={MINIMAL: "val_data", TRAINER: "validation_file"},
    )
    use_synthetic_data: bool = flag(False, "Train on random tokens that depend on the seed and position alone")
    dataset_type: str = flag(
        "gpt_jsonl", "Kind of the data: found out; hf insists on a Hugging Face data set on disk",
        choices=("gpt_jsonl", "hf"),
    )
    data_type: str = flag(
        "gpt", "Kind of model the data is for", choices=("gpt", "bert"),
        only=Only(("gpt",), "only decoder-only models are trained"),
    )
    zipped_data: bool | None = flag(None, "Insist on .gz shards (1) or on plain ones (0)", shown="found out")
    data_num_workers: int | None = flag(
        None, "Processes per rank that convert shards, once", unit="processes", shown="the cores over the ranks",
        must=AT_LEAST_0,
    )
    shuffle: str = flag(
        "global",
        "Order of each epoch: global (a permutation of the whole), none (as stored), or window:K (K shards at a time, "
        "with two windows on disk)",
    )
    long: str | None = flag(
        None, "Of a row longer than the context: its beginning, all its pieces, a random window, or an error",
        choices=("truncate", "split", "crop", "error"), shown="truncate; split with --short concat or pack",
    )
    short: str = flag(
        "pad", "A row shorter than the context is padded, joined end to end with others, or packed whole beside others",
        choices=("pad", "concat", "pack"),
    )
    bad_rows: str = flag(
        "stop", "A malformed row, or one with nothing to learn, stops the run or is left out", choices=("stop", "skip")
    )
    max_bad: float = flag(0.001, "Fraction of all rows that may be left out by --bad_rows skip, as 0.1%", must=SHARE)
    allow_data_change: bool = flag(False, "Resume although the training data is not what it was")
    data_cache_dir: str | None = flag(
        None, "Folder for the index of the shards", shown="beside the data", must=A_FOLDER
    )
    data_audit: bool = flag(False, "Write every consumed sample's identity to data_audit-rank<r>.jsonl")
    dataset: str | None = flag(
        None,
        "Text to tokenise on the fly: a file or folder of jsonl, parquet or text, s3://, or a name on the Hugging "
        "Face hub, such as allenai/c4", aka={TRAINER: "dataset_name train_file"},
    )
    dataset_config_name: str | None = flag(None, "Its configuration on the hub, such as en", needs="dataset")
    tokenizer: str | None = flag(
        None, "Tokenizer of that text: tokenizer.json, a folder, or a name on the hub", shown="the model's own",
        aka={TRAINER: "tokenizer_name"},
    )
    text_column: str = flag("text", "Field or column of that text", idle_without="dataset")
    validation_freq: int | None = flag(
        None, "Steps between validations", unit="steps", shown="never", must=AT_LEAST_1, aka={TRAINER: "eval_steps"}
    )
    validation_batches: int = flag(10, "Batches of one validation", unit="batches", must=AT_LEAST_1)
    val_batch_size: int = flag(
        4, "Sequences per data-parallel rank and validation batch", unit="sequences", must=AT_LEAST_1,
        aka={TRAINER: "per_device_eval_batch_size"},
    )
    fast_validation: bool = flag(True, "Validate on the last shard only")
    evaluate_only: bool = flag(False, "Validate once and train nothing")


@dataclass
class CheckpointArguments:
    """Checkpoints: where, how often, how many are kept. Lists of equal length make one policy per folder."""

    checkpoint_dir: list[str] = flag(
        [], "Folders checkpoints are written to, or s3://bucket/prefix; local:DIR is each node's own disk",
        shown="checkpoints/<run_name>; on SageMaker /opt/ml/checkpoints", aka={PROFILING: "ckpt_save_path"},
    )
    checkpoint_freq: list[int] = flag(
        [1000], "Steps between checkpoints, per folder", unit="steps", must=AT_LEAST_1,
        aka={PROFILING: "checkpoint_interval", FSDP2: "checkpoint_interval", TRAINER: "save_steps"},
    )
    num_kept_checkpoints: list[int] = flag(
        [2], "Newest checkpoints of the run kept, per folder; 0: all", aka={TRAINER: "save_total_limit"}
    )
    checkpoint_type: str | None = flag(
        None,
        "How checkpoints are written: in the background from a copy in host memory (where there is no room for one, "
        "as sharded), while training waits (sharded), or so and with the model in Hugging Face format in hf/ beside "
        "it (full). All resume",
        choices=("sharded", "full", "local", "use_pg_with_util", "async_sharded", "async_local"),
        shown="async_sharded; sharded on SMP",
        only=Only(
            (None, "sharded", "async_sharded", "full"),
            "it is SMP's; sharded, async_sharded and full checkpoints load on any mesh",
        ),
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "A checkpoint, or a folder or s3:// prefix of them, of which the run's newest complete one is taken; without "
        "--run_name that of the run that saved last, which then goes on",
        aka={PROFILING: "ckpt_load_path", MINIMAL: "restart_checkpoint_file"},
    )
    allow_model_change: bool = flag(False, "Resume although the checkpoint's model computes something else")
    strict_resume: bool = flag(
        False, "Stop when the newest checkpoint is damaged, rather than set it aside and take the next older one"
    )
    break_checkpoint_lock: bool = flag(
        False, "Save though another job seems to be saving this run there; that one then saves no more"
    )
    save_final_model: bool = flag(False, "Write the model in Hugging Face format at the end")
    model_dir: str | None = flag(None, "Folder, or s3://, the final model is written to", variable="SM_MODEL_DIR")
