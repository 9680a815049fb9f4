"""The program of the scripts in launchers/: it turns environment variables into options and flags of `launch`.

``python -m smp_train.launch.script KIND SCRIPT [flags]``. A flag, under any of its names, and a --config file win over
a variable. ``enroot``, ``conda`` and ``slurm`` make the checks of `smp-train launch slurm`, then submit the script, or,
in a Slurm job, run it. Standard library only: this runs on head nodes.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_train.arguments import parse
from smp_train.arguments.values import read_bool
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import k8s, local
from smp_train.launch import slurm as launch_slurm
from smp_train.launch.batch_job import run
from smp_train.launch.command import say
from smp_train.launch.options import LaunchParser, split
from smp_train.launch.spec import CODE_DIR, warn

Table = dict[str, tuple[str, str]]
"""Variable names with their default and help text. An empty help text means: the launch option's help."""
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
FSDP2 = {
    "max_steps": "100000", "lr": "3e-4", "min_lr": "3e-5", "warmup": "2000", "weight_decay": "0.1",
    "logging_freq": "10",
}  # fmt: skip
"""Defaults of FSDP2 LLM Training's scripts, under the scripts' names, where training's defaults differ."""
UNLESS = {"max_steps": ("epochs",), "min_lr": ("lr",)}
RUN: Table = {
    "TRAINING_DIR": ("", "folder of .json or .json.gz shards (data/README.md)"),
    "TEST_DIR": ("", "folder of the shards to validate on"),
    "use_synthetic_data": ("", "random tokens; 1 unless TRAINING_DIR is set"),
    "RUN_DIR": ("", "run.json, metrics, logs, DONE; runs/<model> below the folder you submit from"),
    "CHECKPOINT_DIR": ("", "has a folder of checkpoints for each run; checkpoints below the folder you submit from"),
    "shard_degree": ("", "processes that share one copy of the model; all of them when empty"),
    "NPROC": ("auto", ""),
    "PREFLIGHT": ("", ""),
    "PROFILE": ("", ""),
    "DRY_RUN": ("", "1: as --dry_run after the script's name"),
}
SLURM: Table = {
    "IMAGE": ("", "Enroot file, or REGISTRY#IMAGE:TAG; launch_training_enroot.sh takes the checkout's .sqsh file"),
    "PYTHON": ("", "interpreter that trains; the checkout's .venv, in a container its python"),
    "INSTANCE_TYPE": ("", "such as p5.48xlarge: each node is checked against the table"),
    "MAX_ATTEMPTS": ("3", ""),
    "SPARE_NODES": ("", "so many of the job's nodes take the place of lost ones; with --recovery in_place"),
    "CONTAINER_ENV": ("", "further variables whose values here beat the image's, separated by commas; those of AWS, "
                      "EFA, NCCL, torch and Hugging Face do anyway"),
    "FSX_MOUNT": ("/fsx", "mounted into the container; several are separated by commas; the default where it exists"),
    "HYPERPOD_PATH": ("", "the checkout, if the script is not in it"),
    "HOST_PYTHON": ("", "a Python of this host that reads the flags, 3.10 or newer"),
}  # fmt: skip
EKS: Table = {
    "IMAGE": ("", "image with this package (docker_build.sh makes and pushes it)"),
    "CLAIM": ("", "NAME:/path of the persistent volume claim that all pods share"),
    "NODES": ("8", ""),
    "INSTANCE_TYPE": ("ml.p5.48xlarge", ""),
    **dict.fromkeys(("OPERATOR", "NAMESPACE"), ("kubeflow", "")),
    **dict.fromkeys(("JOB_NAME", "QUEUE", "SERVICE_ACCOUNT"), ("", "")),
    "HF_SECRET": ("", "SECRET:KEY that holds the Hugging Face token"),
}
KINDS: dict[str, Table] = {
    "enroot": PRESET | RUN | SLURM,
    "conda": PRESET | RUN | SLURM,
    "slurm": CHOICE | RUN | SLURM,
    "local": CHOICE
    | {
        "USE_HF_MODEL": ("", "true: HF_MODEL with its weights, unless MODEL_SIZE is set; false: from scratch"),
        "GRAD_ACCUM_STEPS": ("2", ""),
    }
    | RUN,
    "k8s": PRESET | EKS | {name: row for name, row in RUN.items() if name != "PREFLIGHT"},
}
MODEL = ("hf_pretrained_model_name_or_dir", "pretrained_model_name", "from_scratch", "model_type")
DATA = ("training_dir", "dataset", "use_synthetic_data")
OPTION_NAMES = {"CLAIM": "claims", "HF_SECRET": "secrets", "FSX_MOUNT": "mounts"}
"""Launch options of variables with another name."""


def variables(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of one kind of script; an empty variable has its default."""
    values = {name: environ.get(name) or default for name, (default, _) in KINDS[kind].items()}
    if kind == "local" and not values["USE_HF_MODEL"]:
        values["USE_HF_MODEL"] = "false" if environ.get("MODEL_SIZE") else "true"
    return values


def script_flags(user_flags: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the training flags that the variables choose and the user has not given."""
    is_given = parse(user_flags, {}).given
    choices: list[tuple[str, str, Sequence[str]]] = []  # flag, value, flags of the user that exclude it
    if "BATCH_SIZE" in values:
        choices += [("train_batch_size", values["BATCH_SIZE"], ())]
        choices += [("gradient_accumulation_steps", values["GRAD_ACCUM_STEPS"], ())]
        choices += [(flag, value, UNLESS.get(flag, ())) for flag, value in FSDP2.items()]
        if read_bool(values["USE_HF_MODEL"]) and not is_given("model_size"):
            choices += [("hf_pretrained_model_name_or_dir", values["HF_MODEL"], MODEL)]
        else:
            choices += [("from_scratch", "1", MODEL), ("model_size", values["MODEL_SIZE"], MODEL)]
    else:
        choices += [("model_type", values["model_type"], MODEL), ("model_size", values["model_size"], MODEL)]
    folder = values["TRAINING_DIR"]
    choices += [
        ("use_synthetic_data", values["use_synthetic_data"] or ("" if folder else "1"), DATA),
        ("training_dir", folder, DATA), ("test_dir", values["TEST_DIR"], ()), ("run_dir", values["RUN_DIR"], ()),
        ("checkpoint_dir", values["CHECKPOINT_DIR"], ()), ("hybrid_shard_degree", values["shard_degree"], ()),
    ]  # fmt: skip
    chosen = [(flag, value) for flag, value, unless in choices if value and not any(map(is_given, (flag, *unless)))]
    return [word for flag, value in chosen for word in (f"--{flag}", value)]


def options_of(kind: str) -> tuple[LaunchParser, dict[str, str]]:
    """Return the parser of a kind's launch options, and the options that variables give, by variable."""
    parser = {"local": local, "k8s": k8s}.get(kind, launch_slurm).parser()
    names = {name: OPTION_NAMES.get(name, name.lower()) for name in KINDS[kind]}
    return parser, {name: option for name, option in names.items() if option in parser.names}


def option_words(kind: str, values: Mapping[str, str]) -> list[str]:
    """Return the launch options that variables give, as words of a command line."""
    options = {option: [values[name]] for name, option in options_of(kind)[1].items()}
    options["nproc"] = [] if values["NPROC"] == "auto" else [values["NPROC"]]
    if "mounts" in options:
        mounts, is_default = values["FSX_MOUNT"].split(","), not os.environ.get("FSX_MOUNT")
        options["mounts"] = [mount for mount in mounts if os.path.exists(mount) or not is_default]
    if values.get("HF_SECRET"):
        options["secrets"] = [f"HF_TOKEN={values['HF_SECRET']}"]
    return [f"--{option}={value}" for option, several in options.items() for value in several if value]


def header(script: str) -> list[str]:
    """Return those #SBATCH options of a script that `launch slurm` also has, as words of a command line."""
    text = Path(script).read_text(encoding="utf-8") if os.path.isfile(script) else ""
    options = re.findall(rf"^#SBATCH --(nodes|{'|'.join(launch_slurm.HEADER)})[= ](\S+)", text, re.MULTILINE)
    return [f"--{name}={value}" for name, value in options]


def without_spares(word: str, spares: str) -> str:
    """Return sbatch's ``--nodes=N`` without the spare nodes, and any other option as it is."""
    name, _, nodes = word.partition("=")
    if name != "--nodes" or not (nodes.isdigit() and spares.isdigit()):
        return word
    if int(spares) >= int(nodes):
        raise ConfigError(f"--spare_nodes {spares}: the job has {nodes} nodes; give fewer, or more nodes")
    return f"{name}={int(nodes) - int(spares)}"


def slurm(kind: str, script: str, arguments: Sequence[str], asked: str = "") -> int:
    """Check the run as `launch slurm` does; then submit the script, run its job, or print the command."""
    values, in_job = variables(kind, os.environ), bool(os.environ.get("SLURM_JOB_ID"))
    common, user_flags = split(arguments, LaunchParser("slurm", "").share("dry_run", "check"))
    if kind == "conda":
        values["IMAGE"] = ""
    elif kind == "enroot" and not values["IMAGE"]:  # docker_build.sh builds these two images
        images = [f"{CODE_DIR}/{name}.sqsh" for name in ("smpv2", "smp-train")]
        values["IMAGE"] = next(filter(os.path.exists, images), images[0])
    if not values["IMAGE"]:
        values["PYTHON"] = values["PYTHON"] or f"{CODE_DIR}/.venv/bin/python"
    sbatch_words = [f"--nodes={os.environ.get('SLURM_JOB_NUM_NODES', 1)}"] if in_job else header(script)
    sbatch_words = [without_spares(word, values["SPARE_NODES"]) for word in sbatch_words]
    flags = [*script_flags(user_flags, values), *user_flags]
    options, spec, job = launch_slurm.read([*sbatch_words, *option_words(kind, values), *flags])
    dry_run = common.dry_run or options.dry_run
    if dry_run:
        launch_slurm.show(spec)
    elif not in_job:
        launch_slurm.check(spec, options, job)
        words = [*["--no-kill"] * job.in_place, *["--test-only"] * common.check, script, *arguments]
        os.execvp("sbatch", ["sbatch", *words])
    elif os.environ.get("SLURM_RESTART_COUNT", "0") == "0":  # after a restart, a file system may be missing for a while
        try:
            warn(launch_slurm.check_files(spec, job))
        except ConfigError as missing:
            raise ConfigError(f"{socket.gethostname()}: {missing}") from None
    return 0 if common.check else run(job, asked=asked, dry_run=dry_run)


def launch(kind: str, arguments: Sequence[str]) -> int:
    """Launch on this machine, or on Kubernetes."""
    values = variables(kind, os.environ)
    for name in ("PREFLIGHT", "MAX_ATTEMPTS", "CONTAINER_ENV", "FSX_MOUNT") if kind == "k8s" else ():
        if os.environ.get(name):
            say(f"warning: {name}={os.environ[name]} is for Slurm, and without effect here")
    launcher = k8s if kind == "k8s" else local
    _, user_flags = split(arguments, launcher.parser())
    return launcher.main([*option_words(kind, values), *script_flags(user_flags, values), *arguments])


def help_text(kind: str, script: str) -> str:
    """Return the comment at the head of a script, and its variables."""
    lines = Path(script).read_text(encoding="utf-8").splitlines()[1:]
    head = lines[: next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    head = [re.sub("^# ?", "", line) for line in head if not line.startswith(("#SBATCH", "# shellcheck"))]
    parser, options = options_of(kind)
    rows = [
        f"  {f'{name}={default}':<26} {about or (parser.names[options[name]].help if name in options else '')}".rstrip()
        for name, (default, about) in KINDS[kind].items()
    ]
    return "\n".join([*head, "", "variables:", *rows, "", "training flags: smp-train train --help"])


def main(argv: Sequence[str], asked: str = "") -> int:
    """Run one kind of script; return the exit code. ``asked``: the signal by which Slurm has asked to stop already."""
    kind, script, *arguments = argv
    if {"-h", "--help"} & set(arguments):
        print(help_text(kind, script))
        return 0
    try:
        return launch(kind, arguments) if kind in ("local", "k8s") else slurm(kind, script, arguments, asked)
    except SmpTrainError as problem:
        variable = {option: name for name, option in options_of(kind)[1].items() if name != "DRY_RUN"}
        message = re.sub(r"--(\w+)", lambda flag: variable.get(flag[1], flag[0]), " ".join(str(problem).split()))
        say(f"error: {message}")
        return problem.exit_code
    except ModuleNotFoundError as missing:  # a --config file without PyYAML
        say(f"error: {sys.executable} has no {missing.name}; set HOST_PYTHON to one that has it")
        return ConfigError.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
