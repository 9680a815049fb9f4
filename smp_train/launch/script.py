"""The programs behind the scripts of launchers/: environment variables and flags to training flags and options.

``python -m smp_train.launch.script KIND SCRIPT [flags]``. A variable gives way to a flag, under whichever of its names
that is given, and to a --config file. ``enroot``, ``conda`` and ``slurm`` submit the script that they are called from,
and run the job where it is one. Standard library only: it runs on head nodes.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_train.arguments import parse
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import flags as launch_flags
from smp_train.launch import k8s, local, preflight
from smp_train.launch.batch_job import run
from smp_train.launch.options import COMMON, split
from smp_train.launch.slurm import places
from smp_train.launch.spec import CODE_DIR, profile_flags
from smp_train.launch.srun_step import Job, mounts
from smp_train.models.resolve import settled_flags

Table = dict[str, tuple[str, str]]
"""Default and help by the name of a variable."""
PRESET: Table = {
    "model_type": ("llama_v2", "with model_size a preset (`smp-train train --help`)"),
    "model_size": ("70b", ""),
}
CHOICE: Table = {
    "USE_HF_MODEL": ("false", "true: HF_MODEL with its weights; false: MODEL_SIZE from scratch"),
    "HF_MODEL": ("meta-llama/Llama-2-7b-hf", "a model of Hugging Face"),
    "MODEL_SIZE": ("7B", "350M 1B 3B 7B 13B 30B 70B"),
    "BATCH_SIZE": ("4", "sequences per process"),
    "GRAD_ACCUM_STEPS": ("1", ""),
}
RUN: Table = {
    "TRAINING_DIR": ("", "folder of .json or .json.gz shards (data/README.md)"),
    "TEST_DIR": ("", "folder of the shards to validate on"),
    "use_synthetic_data": ("", "random tokens; 1 unless TRAINING_DIR is set"),
    "RUN_DIR": ("", "run.json, metrics, logs, DONE; runs/<model> below the folder you submit from"),
    "CHECKPOINT_DIR": ("", "has a folder of checkpoints for each run; checkpoints below the folder you submit from"),
    "shard_degree": ("", "processes that share one copy of the model; all of them when empty"),
    "NPROC": ("auto", "processes on each node: one per GPU, or one"),
    "PREFLIGHT": ("", "such as 180: before training, all nodes reach each other within so many seconds, or are named"),
    "PROFILE": ("", "torch or nsys"),
    "DRY_RUN": ("", "1: as --dry_run after the script's name"),
}
SLURM: Table = {
    "IMAGE": ("", "Enroot file, or REGISTRY#IMAGE:TAG; launch_training_enroot.sh takes the checkout's .sqsh file"),
    "PYTHON": ("", "interpreter that trains; the checkout's .venv, in a container its python"),
    "INSTANCE_TYPE": ("", "such as p5.48xlarge: each node is checked against the table"),
    "MAX_ATTEMPTS": ("3", "starts without a new checkpoint before giving up"),
    "CONTAINER_ENV": ("", "further variables whose values here beat the image's, separated by commas; those of AWS, "
                      "EFA, NCCL, torch and Hugging Face do anyway"),
    "FSX_MOUNT": ("/fsx", "mounted into the container; several are separated by commas; the default where it exists"),
    "HYPERPOD_PATH": ("", "the checkout, where it is not the one that the script is in"),
    "HOST_PYTHON": ("", "a Python of this host that reads the flags, 3.10 or newer"),
}  # fmt: skip
EKS: Table = {
    "IMAGE": ("", "image with this package (docker_build.sh makes and pushes it)"),
    "CLAIM": ("", "NAME:/path of the persistent volume claim that all pods share"),
    "NODES": ("8", ""),
    "INSTANCE_TYPE": ("ml.p5.48xlarge", ""),
    "OPERATOR": ("kubeflow", "or hyperpod, where HyperPod's training operator is installed"),
    "NAMESPACE": ("kubeflow", ""),
    "JOB_NAME": ("", ""),
    "QUEUE": ("", ""),
    "SERVICE_ACCOUNT": ("", ""),
    "HF_SECRET": ("", "SECRET:KEY that holds the Hugging Face token"),
}
KINDS: dict[str, Table] = {
    "enroot": PRESET | RUN | SLURM,
    "conda": PRESET | RUN | SLURM,
    "slurm": CHOICE | RUN | SLURM,
    "local": CHOICE | RUN,
    "k8s": PRESET | EKS | {name: row for name, row in RUN.items() if name != "PREFLIGHT"},
}
MODEL = ("hf_pretrained_model_name_or_dir", "pretrained_model_name", "from_scratch", "model_type")
DATA = ("training_dir", "dataset", "use_synthetic_data")


def variables(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one kind of script; an empty one has its default."""
    return {name: environ.get(name) or default for name, (default, _) in KINDS[kind].items()}


def on(value: str) -> bool:
    """Return whether a variable switches something on."""
    return value.lower() not in ("", "0", "false")


def training_flags(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the script's choices as flags, then ``words``, which win."""
    given = parse(words, {}).given
    own: list[str] = []

    def choose(flag: str, value: str, unless: Sequence[str] = ()) -> None:
        if value and not any(map(given, (flag, *unless))):
            own.extend((f"--{flag}", value))

    if "BATCH_SIZE" in values:
        choose("train_batch_size", values["BATCH_SIZE"])
        choose("gradient_accumulation_steps", values["GRAD_ACCUM_STEPS"])
        if on(values["USE_HF_MODEL"]):
            choose("hf_pretrained_model_name_or_dir", values["HF_MODEL"], MODEL)
        else:
            choose("from_scratch", "1", MODEL)
            choose("model_size", values["MODEL_SIZE"], MODEL)
    else:
        choose("model_type", values["model_type"], MODEL)
        choose("model_size", values["model_size"], MODEL)
    folder = values["TRAINING_DIR"]
    choose("use_synthetic_data", values["use_synthetic_data"] or ("" if folder else "1"), DATA)
    choose("training_dir", folder, DATA)
    choose("test_dir", values["TEST_DIR"])
    choose("run_dir", values["RUN_DIR"])
    choose("checkpoint_dir", values["CHECKPOINT_DIR"])
    choose("hybrid_shard_degree", values["shard_degree"])
    return [*own, *words]


def slurm(kind: str, script: str, words: Sequence[str], environ: Mapping[str, str], asked: str = "") -> int:
    """Check variables and flags, then submit the script, run the job that it is already, or print the job's command."""
    values = variables(kind, environ)
    options, training = split(words, COMMON[:1])
    dry_run = options["dry_run"] or on(values["DRY_RUN"])
    profile = values["PROFILE"] if values["PROFILE"] not in ("", "0", "none") else None
    flags = [*training_flags(training, values), *profile_flags(profile)]
    launch_flags.check(flags)
    flags, resolved = launch_flags.complete(flags, base=environ.get("PWD") or os.getcwd())
    preflight.divides(resolved, settled_flags(resolved.args))
    run_dir = resolved.args.run_dir
    image = "" if kind == "conda" else values["IMAGE"]
    if kind == "enroot" and not image:  # what docker_build.sh makes
        images = [f"{CODE_DIR}/{name}.sqsh" for name in ("smpv2", "smp-train")]
        image = next(filter(os.path.exists, images), images[0])
    if not values["MAX_ATTEMPTS"].isdigit():
        raise ConfigError(f"MAX_ATTEMPTS={values['MAX_ATTEMPTS']} is not a number")
    if not dry_run:
        try:
            preflight.check_data(resolved.args)
        except ConfigError as lacking:
            raise ConfigError(f"{socket.gethostname()}: {lacking}") from None
    given, fsx = bool(environ.get("FSX_MOUNT")), values["FSX_MOUNT"].split(",")
    job = Job(
        flags=flags,
        code_dir=str(CODE_DIR),
        run_dir=run_dir,
        python=values["PYTHON"] or ("python" if image else f"{CODE_DIR}/.venv/bin/python"),
        image=image,
        mounts=[mount for mount in fsx if mount and (given or os.path.exists(mount))] if image else [],
        container_env=values["CONTAINER_ENV"],
        max_attempts=int(values["MAX_ATTEMPTS"]),
        instance_type=values["INSTANCE_TYPE"],
        nproc=values["NPROC"],
        preflight=values["PREFLIGHT"],
        nsys=values["PROFILE"] == "nsys",
        **places(resolved, run_dir),
    )
    if not dry_run and not environ.get("SLURM_JOB_ID"):
        if job.image:
            mounts(job)
        os.execvp("sbatch", ["sbatch", script, *words])
    return run(job, asked=asked, dry_run=dry_run)


def launch(kind: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Launch on this machine, or on Kubernetes."""
    values = variables(kind, environ)
    place = k8s if kind == "k8s" else local
    _, training = split(words, place.OPTIONS)
    flags = training_flags(training, values)
    own = flags[: len(flags) - len(training)]
    options = {"profile": values["PROFILE"], "nproc": "" if values["NPROC"] == "auto" else values["NPROC"]}
    if kind == "k8s":
        for name in ("IMAGE", "CLAIM"):
            if not values[name]:
                raise ConfigError(f"set {name}; for example: IMAGE=REGISTRY/smp-train:1 CLAIM=fsx:/fsx launch_eks.sh")
        for name in ("PREFLIGHT", "MAX_ATTEMPTS", "CONTAINER_ENV", "FSX_MOUNT"):
            if environ.get(name):
                print(f"warning: {name}={environ[name]} is for Slurm, and without effect here", file=sys.stderr)
        secret = values["HF_SECRET"] and f"HF_TOKEN={values['HF_SECRET']}"
        names = ("nodes", "instance_type", "image", "operator", "namespace", "job_name", "queue", "service_account")
        options |= {name: values[name.upper()] for name in names} | {"claims": values["CLAIM"], "secrets": secret}
    else:
        options["preflight"] = values["PREFLIGHT"]
    chosen = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    return place.main([*chosen, *(["--dry_run"] if on(values["DRY_RUN"]) else []), *own, *words])


def help_text(kind: str, script: str) -> str:
    """Return the comment at the head of a script, and its variables."""
    lines = Path(script).read_text(encoding="utf-8").splitlines()[1:]
    head = lines[: next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    head = [re.sub("^# ?", "", line) for line in head if not line.startswith(("#SBATCH", "# shellcheck"))]
    table = [f"  {f'{name}={default}':<26} {about}".rstrip() for name, (default, about) in KINDS[kind].items()]
    return "\n".join([*head, "", "variables:", *table, "", "training flags: smp-train train --help"])


def main(argv: Sequence[str], asked: str = "") -> int:
    """Run one kind of script; return the exit code. ``asked``: the signal by which Slurm has asked to stop already."""
    kind, script, words = argv[0], argv[1], list(argv[2:])
    if {"-h", "--help"} & set(words):
        print(help_text(kind, script))
        return 0
    try:
        if kind in ("local", "k8s"):
            return launch(kind, words, os.environ)
        return slurm(kind, script, words, os.environ, asked)
    except SmpTrainError as problem:
        print(f"smp-train: error: {' '.join(str(problem).split())}", file=sys.stderr)
        return problem.exit_code
    except ModuleNotFoundError as missing:  # a --config file without PyYAML
        advice = f"{sys.executable} has no {missing.name}; set HOST_PYTHON to one that has it"
        print(f"smp-train: error: {advice}", file=sys.stderr)
        return ConfigError.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
