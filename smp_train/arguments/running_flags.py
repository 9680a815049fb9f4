"""The flags of the run itself: logs, configuration files and communication."""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from smp_train.arguments.flag import flag


@dataclass(frozen=True)
class LoggingArguments:
    """Logging and profiling: what a run writes, and where."""

    run_name: str = flag(
        "", "Name of the run, and of its folders in runs and --checkpoint_dir; with --resume_from_checkpoint, the run "
        "to go on with", shown="model type and number of parameters, such as llama_v2-6.7b")
    run_dir: str = flag(
        "", "Folder for run.json, metrics.jsonl, logs and report", shown="runs/<run_name>; SM_OUTPUT_DATA_DIR",
        must="folder", variable="SM_OUTPUT_DATA_DIR")
    logging_freq: int = flag(
        1, "Steps between log lines", must=">=1", aliases="report_interval log_interval logging_steps")
    report_to: list[str] | None = flag(
        None, "Trackers for rank 0's numbers", shown="tensorboard with --tensorboard_dir",
        choices=("tensorboard", "wandb", "mlflow", "all", "none"))
    tensorboard_dir: list[str] | None = flag(
        None, "Folders for TensorBoard; {run_dir} in them is the run folder", shown="{run_dir}/tensorboard",
        must="folder", aliases="logging_dir", path="written")
    wandb_project: str | None = flag(
        None, "Project of Weights & Biases", shown="WANDB_PROJECT; smp-train", idle_without="report_to")
    mlflow_tracking_uri: str | None = flag(
        None, "Server of MLflow", shown="MLFLOW_TRACKING_URI", idle_without="report_to")
    mlflow_experiment_name: str | None = flag(
        None, "Experiment of MLflow", shown="MLFLOW_EXPERIMENT_NAME; smp-train", idle_without="report_to")
    progress_bar: bool = flag(True, "Show a progress line if stderr is a terminal")
    telemetry: str = flag(
        "full", "minimal: no phase times, no slowest rank, no watch for hung ranks", choices=("full", "minimal"))
    enable_memory_profiling: bool = flag(
        False, "Log memory at every stage of set-up, of the first steps and of saves; on a GPU also write a snapshot")
    use_profiler: bool = flag(False, "Record the PyTorch profiler, and log what limits the speed of a step")
    profile_nsys: bool = flag(False, "Mark steps for Nsight Systems")
    profile_start: int = flag(6, "First step to profile, counted from each start", must=">=1")
    profile_steps: int = flag(3, "Steps to profile", must=">=1")


@dataclass(frozen=True)
class RuntimeArguments:
    """Running: configuration files, communication and debugging."""

    config: str | None = flag(None, "YAML or JSON file of flags", path="read")
    smp_config: str | None = flag(None, "JSON file of SMP v2's configuration keys", path="read")
    print_config: bool = flag(False, "Print every setting and its source, and exit")
    debug: bool = flag(False, "Print tracebacks")
    distributed_backend: str = flag(
        "auto", "Communication; auto: nccl on GPUs, else gloo. gloo trains on the CPU",
        choices=("auto", "nccl", "smddp", "gloo"), aliases="ddp_backend")
    distributed_timeout_minutes: float = flag(
        30.0, "Longest wait in a collective, as at the start or in a save", must=">0")
    train_timeout_seconds: float = flag(
        300.0, "End the run if a step stands still for this time and ten times its usual time; 0: never", must=">=0")
    hang_report_seconds: float = flag(
        30.0, "Name the missing rank if a step stands still for this time and ten times its usual time", must=">0")
    recovery: str = flag(
        "off", "in_place: a rank that dies is replaced while all other ranks wait; its state comes from a replica, or "
        "all load the newest checkpoint. Needs `smp-train launch`", choices=("off", "in_place"))
    prompt: str | None = flag(None, "Text that the model continues when the run ends")
    num_tokens: int = flag(64, "Tokens of the continuation, at most", must=">=1", idle_without="prompt")
