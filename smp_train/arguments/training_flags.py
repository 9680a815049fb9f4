"""The flags of the training: optimizer and schedule, data, and checkpoints."""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from smp_train.arguments.flag import Only, flag
from smp_train.arguments.run_name import CHECKPOINTS

NODE_LOCAL = "local:"
"""Prefix of a checkpoint folder that is on each node's own disk."""


@dataclass(frozen=True)
class OptimizerArguments:
    """Training: batch, length, optimizer and schedule."""

    train_batch_size: int = flag(
        2, "Sequences per data-parallel rank and micro-step", must=">=1", profiling="batch_size", minimal="batch_size",
        fsdp2="batch_size", trainer="per_device_train_batch_size")
    gradient_accumulation_steps: int = flag(1, "Micro-steps per step", must=">=1", fsdp2="grad_accum_steps")
    max_steps: int = flag(
        5000, "Optimizer steps of the run", shown="5000; no limit with --epochs", must=">=1", smp="max_training_steps")
    epochs: int | None = flag(
        None, "Passes over the data, each row once in each; a given --max_steps may end the run before", must=">=1",
        fsdp2="num_epochs", trainer="num_train_epochs")
    steps_per_epoch: int | None = flag(
        None, "End the run after --epochs times so many steps", shown="the data's", must=">=1")
    lr: float = flag(1e-4, "Peak learning rate", must=">=0", fsdp2="max_lr", trainer="learning_rate")
    min_lr: float = flag(1e-5, "Learning rate at the end of the decay", must=">=0")
    lr_decay_style: str = flag(
        "cosine", "Schedule after warm-up", choices=("constant", "linear", "cosine", "exponential", "plateau", "wsd"))
    lr_decay_iters: int | None = flag(None, "Steps the schedule is stretched over", shown="the run's", must=">=1")
    warmup: float = flag(
        0.0032, "Linear warm-up: below 1 a fraction of lr_decay_iters, else a number of steps", must="share or count")
    plateau: float = flag(
        0.0, "Fraction at the peak before the decay; wsd without it decays over the last fifth", must=">=0 <=1")
    weight_decay: float = flag(0.2, "Decay of matrices, not of biases and norms", must=">=0")
    beta1: float = flag(0.9, "AdamW's decay of the first moment", must=">=0 <1", trainer="adam_beta1")
    beta2: float = flag(0.95, "AdamW's decay of the second moment", must=">=0 <1", trainer="adam_beta2")
    adam_epsilon: float = flag(1e-8, "AdamW's term in the denominator", must=">0")
    grad_clip: float = flag(1.0, "Largest norm of the gradient; 0: no clipping", must=">=0", trainer="max_grad_norm")
    on_spike: str = flag(
        "warn", "At a loss or gradient norm far above those before: warn, skip the update, or go back to the last "
        "checkpoint of --checkpoint_freq (rollback). One that is not finite ends the run with warn",
        choices=("warn", "skip", "rollback"))
    spike_threshold: float = flag(
        10.0, "Deviations above the median of the last steps from which on it is a spike", must=">0")
    spike_window: int = flag(100, "These last steps", must=">=2")
    seed: int = flag(12345, "Fixes initial weights, order of the data, and dropout", must=">=0")
    same_seed: bool = flag(False, "Draw the same dropout on every data-parallel rank")


@dataclass(frozen=True)
class DataArguments:
    """Data: what is read, in which order, and what is validated on."""

    training_dir: list[str] | None = flag(
        None, "Training data: files, folders, s3:// prefixes or names on the hub, of token rows, text, chats, or "
        "prompts with completions; several, as a:0.7 b:0.3, are blended by weight",
        variable="SM_CHANNEL_TRAIN", fsdp="dataset_path", profiling="data_path", minimal="train_data")
    dataset: list[str] | None = flag(
        None, "The same: its sources are added to those of --training_dir", trainer="dataset_name train_file")
    streaming: bool | None = flag(
        None, "Read the data as it comes, with nothing on disk (1), or convert all of it to a token cache first (0)",
        shown="1 for names on the hub, else 0")
    test_dir: str | None = flag(
        None, "Validation data, as --training_dir", variable="SM_CHANNEL_TEST",
        minimal="val_data", trainer="validation_file")
    use_synthetic_data: bool = flag(False, "Train on random tokens that depend on seed and position alone")
    dataset_type: str = flag(
        "gpt_jsonl", "Found out; hf insists on a Hugging Face data set on disk", choices=("gpt_jsonl", "hf"))
    data_type: str = flag(
        "gpt", "Kind of model the data is for", choices=("gpt", "bert"),
        only=Only(("gpt",), "only decoder-only models are trained"))
    zipped_data: bool | None = flag(None, "Insist on .gz shards (1) or on plain ones (0)", shown="found out")
    data_num_workers: int | None = flag(
        None, "Processes per rank that convert shards, once", shown="the cores over the ranks", must=">=0")
    shuffle: str = flag(
        "global", "Order of an epoch: global (a permutation; of streams, in blocks) or none (as stored)")
    long: str | None = flag(
        None, "Of a longer row: its beginning (truncate), all pieces (split), a random window (crop), or an error",
        choices=("truncate", "split", "crop", "error"), shown="truncate; split with --short concat or pack")
    short: str | None = flag(
        None, "A shorter row is padded, joined end to end with others (concat), or packed whole beside others",
        choices=("pad", "concat", "pack"), shown="concat for text, else pad")
    bad_rows: str = flag(
        "stop", "A malformed row, or one with nothing to learn: stop, or skip it", choices=("stop", "skip"))
    max_bad: float = flag(0.001, "Fraction of all rows that --bad_rows skip may skip, as 0.1%", must=">=0 <=1")
    allow_data_change: bool = flag(False, "Resume although the training data has changed")
    data_cache_dir: str | None = flag(
        None, "Folder of the token cache", shown="in the data's folder, else ~/.cache", must="folder")
    data_audit: bool = flag(False, "Write every consumed sample's identity to data_audit-rank<r>.jsonl")
    dataset_config_name: str | None = flag(None, "Configuration of data sets on the hub, such as en")
    tokenizer: str | None = flag(
        None, "Tokenizer of text, chats and completions: tokenizer.json, a folder, or a name on the hub",
        shown="the model's own", trainer="tokenizer_name")
    text_column: str | None = flag(
        None, "Field of text or of chats; or two, PROMPT,COMPLETION", shown="text, messages or prompt,completion")
    chat_template: str | None = flag(None, "File with a chat template, for the tokenizer's own")
    validation_freq: int | None = flag(
        None, "Steps between validations", shown="never", must=">=1", trainer="eval_steps")
    validation_batches: int = flag(10, "Batches of one validation", must=">=1")
    val_batch_size: int = flag(
        4, "Sequences per data-parallel rank and validation batch", must=">=1", trainer="per_device_eval_batch_size")
    fast_validation: bool = flag(True, "Validate on the last shard only")
    evaluate_first: bool = flag(
        False, "Validate before the first step, too", needs="validation_freq", trainer="eval_on_start"
    )
    early_stopping: int | None = flag(
        None, "End the run after so many validations without a lower loss", must=">=1", needs="validation_freq"
    )
    evaluate_only: bool = flag(False, "Validate once and train nothing")


@dataclass(frozen=True)
class CheckpointArguments:
    """Checkpoints: where, how often, how many are kept. Lists of equal length make one policy per folder."""

    checkpoint_dir: list[str] = flag(
        [CHECKPOINTS], "Folders, or s3://bucket/prefix, that hold a folder <run_name> of checkpoints for each run; "
        "local:DIR is each node's own disk",
        shown="checkpoints; on SageMaker /opt/ml/checkpoints", profiling="ckpt_save_path")
    checkpoint_freq: list[int] = flag(
        [1000], "Steps between checkpoints", must=">=1",
        profiling="checkpoint_interval", fsdp2="checkpoint_interval", trainer="save_steps")
    num_kept_checkpoints: list[int] = flag(
        [2], "Newest checkpoints of the run kept; 0: all", trainer="save_total_limit")
    checkpoint_type: str | None = flag(
        None, "async_sharded: written in the background from a copy in host memory, if it has room; sharded: training "
        "waits; full: also the model in Hugging Face format, in hf/. All resume",
        choices=("sharded", "full", "local", "use_pg_with_util", "async_sharded", "async_local"),
        shown="async_sharded; sharded on SMP",
        only=Only((None, "sharded", "async_sharded", "full"),
                  "it is SMP's; sharded, async_sharded and full checkpoints load on any mesh"))
    resume_from_checkpoint: str | None = flag(
        None, "Folder or s3:// prefix of --checkpoint_dir: go on with the run of this name in it. One run's folder or "
        "one checkpoint: begin from that, or go on where the run has checkpoints of its own",
        profiling="ckpt_load_path", minimal="restart_checkpoint_file")
    keep_best: bool = flag(
        False, "Save and keep the checkpoint of the lowest validation loss, too", needs="validation_freq")
    load_best_model_at_end: bool = flag(
        False, "End with the best model, for --save_final_model, --prompt and Python; implies --keep_best 1",
        needs="validation_freq")
    allow_model_change: bool = flag(False, "Resume although the checkpoint's model computes something else")
    strict_resume: bool = flag(False, "Stop at a damaged newest checkpoint; without it, the next older one is taken")
    break_checkpoint_lock: bool = flag(
        False, "Save though another job seems to save this run there; that one then saves no more")
    save_final_model: bool = flag(False, "Write the model in Hugging Face format at the end")
    model_dir: str | None = flag(None, "Folder or s3:// for the final model", variable="SM_MODEL_DIR")
