"""The flags of the run itself: logs, configuration files, communication; and those without effect."""

# ruff: noqa: RUF009 - flag() makes a dataclasses.field, lists included
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

from smp_train.arguments.flag import flag


@dataclass(frozen=True)
class LoggingArguments:
    """Logging and profiling: what a run writes, and where."""

    run_name: str = flag(
        "", "Name of the run, and of its folders below runs and --checkpoint_dir; with "
        "--resume_from_checkpoint it goes on with the run of that name",
        shown="model type and number of parameters, such as llama_v2-6.7b")
    run_dir: str = flag(
        "", "Folder for run.json, metrics.jsonl, logs and report", shown="runs/<run_name>; SM_OUTPUT_DATA_DIR",
        must="folder", variable="SM_OUTPUT_DATA_DIR")
    logging_freq: int = flag(
        1, "Steps between log lines", must=">=1",
        profiling="report_interval", fsdp2="log_interval", trainer="logging_steps")
    logging_freq_for_avg: int = flag(
        50, "Steps that speeds are averaged over", must=">=1",
        no_effect="speeds are averaged from one log line to the next")
    report_to: list[str] | None = flag(
        None, "Trackers that get the numbers of rank 0", shown="tensorboard with --tensorboard_dir",
        choices=("tensorboard", "wandb", "mlflow", "all", "none"))
    tensorboard_dir: list[str] | None = flag(
        None, "Folders for TensorBoard; {run_dir} in them is the run folder", shown="{run_dir}/tensorboard",
        must="folder", trainer="logging_dir")
    wandb_project: str | None = flag(
        None, "Project of Weights & Biases", shown="WANDB_PROJECT; smp-train", idle_without="report_to")
    mlflow_tracking_uri: str | None = flag(
        None, "Server of MLflow", shown="MLFLOW_TRACKING_URI", idle_without="report_to")
    mlflow_experiment_name: str | None = flag(
        None, "Experiment of MLflow", shown="MLFLOW_EXPERIMENT_NAME; smp-train", idle_without="report_to")
    progress_bar: bool = flag(True, "Show a progress line where stderr is a terminal")
    telemetry: str = flag(
        "full", "minimal: no times of phases, no slowest rank, and nobody watches for a rank that hangs",
        choices=("full", "minimal"))
    enable_memory_profiling: bool = flag(
        False, "Log memory at every stage of set-up, of the first steps and of saves; on a GPU also write a snapshot"
    )
    use_profiler: bool = flag(False, "Record the PyTorch profiler, and say what bounds a step")
    profile_nsys: bool = flag(False, "Mark steps for Nsight Systems")
    profile_start: int = flag(6, "First step to profile, counted from each start", must=">=1")
    profile_steps: int = flag(3, "Steps to profile", must=">=1")


@dataclass(frozen=True)
class RuntimeArguments:
    """Running: configuration files, communication and debugging."""

    config: str | None = flag(None, "YAML or JSON file of flags")
    smp_config: str | None = flag(None, "JSON file of SMP v2's configuration keys")
    print_config: bool = flag(False, "Print every setting with where its value came from, and exit")
    debug: bool = flag(False, "Print tracebacks")
    distributed_backend: str = flag(
        "auto", "Communication; auto: nccl on GPUs, else gloo. gloo trains on the CPU",
        choices=("auto", "nccl", "smddp", "gloo"), trainer="ddp_backend")
    distributed_timeout_minutes: float = flag(
        30.0, "Longest wait inside a collective, as at the start or in a save", must=">0")
    train_timeout_seconds: float = flag(
        300.0, "End the run when a step stands still for so long, and ten times its usual time; 0: never", must=">=0")
    hang_report_seconds: float = flag(
        30.0, "Name the missing rank when a step stands still for so long, and ten times its usual time", must=">0")
    prompt: str | None = flag(None, "Text that the model continues when the run ends")
    num_tokens: int = flag(64, "Tokens of the continuation, at most", must=">=1", idle_without="prompt")


@dataclass(frozen=True)
class LegacyArguments:
    """Accepted for old command lines: without effect here, and a run that is given one says so."""

    delayed_param: bool = flag(
        True, "Create parameters only once sharded", no_effect_natively="parameters are always created after sharding",
        profiling="low_cpu_fsdp", minimal="meta_init")
    use_orig_params: bool = flag(
        False, "FSDP1: keep original parameters", no_effect="FSDP2 always keeps the original parameters")
    auto_wrap_policy: str = flag(
        "transformer_auto_wrap_policy", "FSDP1: which modules are wrapped",
        no_effect="every decoder layer is sharded by itself")
    patch_neox_rope: bool = flag(True, "Patch an old transformers", no_effect="current transformers needs no patch")
    framework: str = flag("fsdp", "Training framework", no_effect="there is one")
    use_smp_flash_attn: bool = flag(
        True, "SMP's flash attention", no_effect="the attention kernel is chosen by --attn_implementation")
    use_smp_implementation: bool = flag(False, "SMP's own model", no_effect_natively="the model is transformers' own")
    log_reduced_training_loss: bool = flag(
        False, "Log the loss averaged over ranks", no_effect="the logged loss is always that of the global batch")
    preserve_np_state: bool = flag(
        False, "Restore numpy's random state after validation", no_effect="numpy's random state is not used")
    clean_cache: bool = flag(False, "Empty the CUDA cache every step", no_effect="the allocator needs no emptying")
    summary_first_pdrop: float = flag(
        0.1, "Dropout of GPT-2's classification head", must=">=0 <1",
        no_effect="a language model has no classification head")
    nccl_test_log: str = flag("", "Output of an NCCL test", shown="none", no_effect="it is not read")
    environment: str | None = flag(
        None, "Kind of machine", choices=("pbs", "local"), no_effect="the launcher is found out")
    fsdp_cache_flush_warnings: bool = flag(
        True, "SMP: warn when the CUDA cache is flushed", no_effect_natively="it is SMP's", smp_key=True)
    allow_empty_shards: bool = flag(
        False, "SMP: allow shards without elements", no_effect_natively="uneven shards are always allowed", smp_key=True
    )
    random_seed: int | None = flag(
        None, "SMP: seed of tensor-parallel modules", no_effect_natively="initial weights depend on --seed alone",
        smp_key=True)
