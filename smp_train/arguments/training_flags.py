"""The flags of the training: optimizer and schedule, data, and checkpoints."""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from smp_train.arguments.flag import flag
from smp_train.arguments.run_name import CHECKPOINTS

NODE_LOCAL = "local:"
"""Prefix of a checkpoint folder that is on each node's own disk."""


@dataclass(frozen=True)
class OptimizerArguments:
    """Training: batch, length, optimizer and schedule."""

    train_batch_size: int = flag(
        2, "Sequences per data rank and micro-step", must=">=1", aliases="batch_size per_device_train_batch_size")
    gradient_accumulation_steps: int = flag(1, "Micro-steps per step", must=">=1", aliases="grad_accum_steps")
    max_steps: int = flag(
        5000, "Optimizer steps", shown="5000; no limit with --epochs", must=">=1", aliases="max_training_steps")
    epochs: int | None = flag(
        None, "Passes over the data; --max_steps may end the run earlier", must=">=1",
        aliases="num_epochs num_train_epochs")
    steps_per_epoch: int | None = flag(
        None, "End the run after this number times --epochs steps", shown="the data's", must=">=1")
    lr: float = flag(1e-4, "Peak learning rate", must=">=0", aliases="max_lr learning_rate")
    min_lr: float = flag(1e-5, "Learning rate at the end of the decay", must=">=0")
    lr_decay_style: str = flag(
        "cosine", "Schedule after warm-up", choices=("constant", "linear", "cosine", "exponential", "plateau", "wsd"))
    lr_decay_iters: int | None = flag(None, "Length of the schedule in steps", shown="the run's", must=">=1")
    warmup: float = flag(
        0.0032, "Linear warm-up: below 1 a fraction of lr_decay_iters, else a number of steps", must="share or count")
    plateau: float = flag(
        0.0, "Fraction at the peak before the decay; wsd without it decays over the last fifth", must=">=0 <=1")
    weight_decay: float = flag(0.2, "Decay of matrices, not of biases and norms", must=">=0")
    beta1: float = flag(0.9, "AdamW's decay of the first moment", must=">=0 <1", aliases="adam_beta1")
    beta2: float = flag(0.95, "AdamW's decay of the second moment", must=">=0 <1", aliases="adam_beta2")
    adam_epsilon: float = flag(1e-8, "AdamW's term in the denominator", must=">0")
    grad_clip: float = flag(1.0, "Largest norm of the gradient; 0: no clipping", must=">=0", aliases="max_grad_norm")
    on_spike: str = flag(
        "warn", "At a loss or gradient norm far above the last ones: warn (and end the run if it is not finite), skip "
        "the update, or return to the last scheduled checkpoint (rollback)",
        choices=("warn", "skip", "rollback"))
    spike_threshold: float = flag(
        10.0, "A spike is this number of deviations above the median of the last steps", must=">0")
    spike_window: int = flag(100, "Number of these last steps", must=">=2")
    seed: int = flag(12345, "Determines initial weights, order of the data, and dropout", must=">=0")
    same_seed: bool = flag(False, "Draw the same dropout on every data-parallel rank")


@dataclass(frozen=True)
class DataArguments:
    """Data: what the run reads, in which order, and its validation."""

    training_dir: list[str] | None = flag(
        None, "Training data: files, folders, s3:// prefixes or names on the hub, of token rows, text, chats, or "
        "prompts with completions; several are joined, or blended by weights such as a:0.7 b:0.3",
        variable="SM_CHANNEL_TRAIN", aliases="dataset_path data_path train_data")
    dataset: list[str] | None = flag(
        None, "More training data, added to --training_dir", aliases="dataset_name train_file")
    streaming: bool | None = flag(
        None, "Read the data during training (1), or convert it to a token cache first (0)",
        shown="1 for names on the hub, else 0")
    test_dir: str | None = flag(
        None, "Validation data, as --training_dir", variable="SM_CHANNEL_TEST", aliases="val_data validation_file")
    use_synthetic_data: bool = flag(False, "Train on random tokens that depend on seed and position alone")
    zipped_data: bool | None = flag(None, "Require .gz shards (1) or plain shards (0)", shown="detected")
    data_num_workers: int | None = flag(
        None, "Processes per rank that convert shards, once", shown="the cores over the ranks", must=">=0")
    shuffle: str = flag(
        "global", "Order of an epoch: global (a permutation) or none (as stored)", choices=("global", "none"))
    long: str | None = flag(
        None, "Of a longer row, take the beginning (truncate), all pieces (split), a random window (crop), or error",
        choices=("truncate", "split", "crop", "error"), shown="truncate; split with --short concat or pack")
    short: str | None = flag(
        None, "A shorter row is padded (pad), joined end to end with others (concat), or packed with whole rows (pack)",
        choices=("pad", "concat", "pack"), shown="concat for text, else pad")
    bad_rows: str = flag(
        "stop", "At a malformed row, or a row with nothing to learn: stop, or skip it", choices=("stop", "skip"))
    max_bad: float = flag(0.001, "Fraction of all rows that --bad_rows skip may skip, as 0.1%", must=">=0 <=1")
    allow_data_change: bool = flag(False, "Resume although the training data has changed")
    data_cache_dir: str | None = flag(
        None, "Folder of the token cache", shown="in the data's folder, else ~/.cache", must="folder",
        path="written")
    data_audit: bool = flag(False, "Write the identity of every sample to data_audit-rank<r>.jsonl")
    dataset_config_name: str | None = flag(None, "Configuration of data sets on the hub, such as en")
    tokenizer: str | None = flag(
        None, "Tokenizer of text, chats and completions: tokenizer.json, a folder, or a name on the hub",
        shown="the model's own", aliases="tokenizer_name", path="read")
    text_column: str | None = flag(
        None, "Field with text or chats; or two fields, PROMPT,COMPLETION", shown="text, messages or prompt,completion")
    chat_template: str | None = flag(None, "File with a chat template that replaces the tokenizer's", path="read")
    validation_freq: int | None = flag(
        None, "Steps between validations", shown="never", must=">=1", aliases="eval_steps")
    validation_batches: int = flag(10, "Batches of one validation", must=">=1")
    val_batch_size: int = flag(
        4, "Sequences per data rank and validation batch", must=">=1", aliases="per_device_eval_batch_size")
    fast_validation: bool = flag(True, "Validate on the last shard only")
    evaluate_first: bool = flag(False, "Validate before step 1, too", needs="validation_freq", aliases="eval_on_start")
    early_stopping: int | None = flag(
        None, "Validations without a lower loss that end the run", must=">=1", needs="validation_freq")
    evaluate_only: bool = flag(False, "Validate once and train nothing")


@dataclass(frozen=True)
class CheckpointArguments:
    """Checkpoints: where, how often, how many are kept. Lists of equal length make one policy per folder."""

    checkpoint_dir: list[str] = flag(
        [CHECKPOINTS], "Folders, or s3://bucket/prefix, with a folder <run_name> of checkpoints for each run; "
        "local:DIR is each node's own disk",
        shown="checkpoints; on SageMaker /opt/ml/checkpoints", aliases="ckpt_save_path")
    checkpoint_freq: list[int] = flag(
        [1000], "Steps between checkpoints", must=">=1", aliases="checkpoint_interval save_steps")
    num_kept_checkpoints: list[int] = flag([2], "Newest checkpoints to keep; 0: all", aliases="save_total_limit")
    checkpoint_type: str | None = flag(
        None, "async_sharded: written in the background from a copy in host memory, if it has room; sharded: training "
        "waits; full: also the model in Hugging Face format, in hf/. All three resume on any mesh",
        choices=("sharded", "full", "async_sharded"), shown="async_sharded; sharded on SMP")
    resume_from_checkpoint: str | None = flag(
        None, "Folder or s3:// prefix of --checkpoint_dir: go on with the run of this name in it. Folder of one run or "
        "one checkpoint: begin from it, unless the run has checkpoints of its own", path="read",
        aliases="ckpt_load_path restart_checkpoint_file")
    keep_best: bool = flag(False, "Keep the checkpoint of the lowest validation loss, too", needs="validation_freq")
    load_best_model_at_end: bool = flag(
        False, "End with the best model; implies --keep_best 1", needs="validation_freq")
    allow_model_change: bool = flag(False, "Resume although the checkpoint's model computes something else")
    strict_resume: bool = flag(False, "Stop at a damaged newest checkpoint; by default the next older one is taken")
    break_checkpoint_lock: bool = flag(False, "Take over the checkpoints of another job that seems to save this run")
    save_final_model: bool = flag(False, "Write the model in Hugging Face format at the end")
    model_dir: str | None = flag(None, "Folder or s3:// for the final model", variable="SM_MODEL_DIR", path="written")
