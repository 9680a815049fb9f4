"""`smp-train launch slurm`: render a batch script, check it, submit it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import cluster, planned, preflight, timing
from smp_train.launch.command import ask, call
from smp_train.launch.images import check_image
from smp_train.launch.options import COMMON, Option, print_help, split
from smp_train.launch.spec import CHECKOUT, CODE_DIR, Spec, build, profile_flags, tell
from smp_train.launch.srun_step import Job, command_line, make_folders, mounts

# $asked: a signal that Slurm sent before the batch job has its handlers.
BODY = """

asked= && trap 'asked=USR1' USR1
code=@CODE@
refuse() { echo "smp-train: error: $*" >&2; exit 2; }
[ -d "$code/smp_train/launch" ] || refuse "no smp_train in $code on $(hostname); all nodes must mount its file system"
for python in "${HOST_PYTHON:-}" @PYTHON@ python3 ''; do
  ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null || break
done
[ -n "$python" ] || refuse "no Python 3.8 or newer on $(hostname); set HOST_PYTHON"
trap '' USR1
PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m smp_train.launch.batch_job --asked "$asked" \\
  @OPTIONS@
"""
USAGE = "smp-train launch slurm --nodes N --instance_type T [options] <training flags>"
OPTIONS = (
    *COMMON,
    Option("nodes", "number of nodes", int, 1),
    Option("instance_type", "EC2 instance type of the nodes, such as p5.48xlarge: how many GPUs, which variables"),
    Option("nproc", "processes on each node; without it, one per GPU", int),
    Option("image", "container image: an Enroot .sqsh file, or REGISTRY#IMAGE:TAG; without it, --python"),
    Option("python", "interpreter of a virtual or conda environment; in a container, the image's", default=None),
    Option("mounts", "further folders for the container: SOURCE or SOURCE:TARGET[:FLAGS]", many=True),
    Option("env", "further environment variables: NAME=VALUE", many=True),
    Option("container_env", "variables of this shell that win over the image's, separated by commas"),
    Option("partition", "Slurm partition"),
    Option("account", "Slurm account"),
    Option("qos", "Slurm quality of service"),
    Option("time", "time limit, such as 2-00:00:00; before it, the run saves and goes back into the queue"),
    Option("job_name", "Slurm job name; without it, the run's name"),
    Option("gpus_per_node", "ask Slurm for GPUs; needed where the cluster has GRES, an error where it has not", int),
    Option("nodelist", "only on these nodes"),
    Option("exclude", "not on these nodes"),
    Option("dependency", "Slurm dependency, such as singleton"),
    Option("save_before", "seconds before the time limit at which to stop and save", int, 300),
    Option("probe", "ask a compute node too, in one short step: pyxis, image, code and folders", bool, False),
    Option(
        "preflight", "before training, all-reduce over all nodes; name those that do not within so many seconds", int
    ),
    Option("max_attempts", "starts without a new checkpoint before giving up", int, 3),
    Option("profile", "torch: PyTorch profiler; nsys: Nsight Systems"),
    Option("sbatch", "a further option of sbatch, such as --comment=x; may be repeated", many=True, dashes=True),
)
HEADER = ("partition", "account", "qos", "time", "nodelist", "exclude", "dependency")
READ = (
    "config", "smp_config", "resume_from_checkpoint", "hf_pretrained_model_name_or_dir", "pretrained_model_name",
    "pretrained_checkpoint_file", "finetune_checkpoint_load_dir", "tokenizer", "chat_template",
)  # fmt: skip
WRITTEN = ("checkpoint_dir", "data_cache_dir", "tensorboard_dir", "model_dir")


def read(arguments: Sequence[str]) -> tuple[dict[str, Any], Spec, Job]:
    """Make the checks of a command line that need no file of this machine; return (options, run, job).

    Raises:
        ConfigError: the training would stop at its start, or pyxis cannot mount a folder.
    """
    options, training = split(arguments, OPTIONS)
    image = options["image"] or ""
    spec = build(
        [*training, *profile_flags(options["profile"])],
        nodes=options["nodes"],
        processes=options["nproc"],
        instance_type=options["instance_type"],
        env=options["env"],
        image=image,
    )
    timing.check_limit(timing.slurm_seconds(options["time"]), options["save_before"], f"--time {options['time']}")
    if image:
        check_image(spec.instance, image, spec.resolved.args.backend)
    further = (options["container_env"] or "").split(",")
    job = Job(
        flags=list(spec.train_flags),
        code_dir=str(code_dir(spec)),
        run_dir=spec.run_dir,
        python=options["python"] or ("python3" if image else sys.executable),
        image=image,
        mounts=options["mounts"] if image else [],
        container_env=",".join(sorted({*spec.environment, *filter(None, further)})) if image else "",
        nproc=str(options["nproc"] or "auto"),
        instance_type=spec.instance.name if spec.instance else "",
        preflight=str(options["preflight"] or ""),
        nsys=options["profile"] == "nsys",
        max_attempts=options["max_attempts"],
        **places(spec.resolved, spec.run_dir),
    )
    if image:
        mounts(job)
    return options, spec, job


def render(spec: Spec, options: dict[str, Any], job: Job) -> str:
    """Return the whole batch script: it needs nothing but the package's own folder at run time.

    Raises:
        ConfigError: for what a batch script cannot express.
    """
    header = {
        "job-name": options["job_name"] or re.sub(r"\s+", "-", spec.name),
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "output": f"{spec.run_dir.replace('%', '%%')}/logs/slurm-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{options['save_before']}",
        **{key: options[key] for key in HEADER if options[key]},
    }
    if options["gpus_per_node"]:
        header["gpus-per-node"] = str(options["gpus_per_node"])
    arguments = [argument for group in command_line(job) for argument in group]
    for text in (*arguments, *(f"{name}={value}" for name, value in spec.environment.items())):
        if re.search(r"[\n\r]", text):  # the next line could be one that Slurm reads
            raise ConfigError(f"{text!r}: a line break cannot stand in a batch script")
    body = BODY.replace("@CODE@", shlex.quote(job.code_dir)).replace("@PYTHON@", shlex.quote(sys.executable))
    lines = [
        "#!/bin/bash", "#SBATCH --exclusive", "#SBATCH --requeue",
        *(f"#SBATCH --{key}={_header(key, value)}" for key, value in header.items()),
        *(f"#SBATCH {_header('sbatch', word)}" for word in options["sbatch"]),
        "", f"# To hand this to sbatch yourself, first: mkdir -p {shlex.quote(spec.run_dir + '/logs')}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())),
    ]  # fmt: skip
    return "\n".join(lines) + body.replace("@OPTIONS@", " \\\n  ".join(map(shlex.join, command_line(job))))


def _header(key: str, value: str) -> str:
    if key == "output" and " " in value and not re.search(r'["\\\n\r]', value):
        return f'"{value}"'
    if re.search(r"[\n\r]", value) or (key != "sbatch" and re.search(r"\s", value)):
        raise ConfigError(f"{key} {value!r}: a space or a line break cannot stand in an #SBATCH line")
    return value


def places(resolved: Resolved, run_dir: str) -> dict[str, Any]:
    """Return the fields of a job that follow from the files and folders its flags name."""
    args = resolved.args
    read = [getattr(args, name) for name in READ]
    read = [*(folder for _, folder in preflight.data(args)), *(one for one in read if one and os.path.exists(one))]
    named = [getattr(args, name) for name in WRITTEN if resolved.given(name)]
    written = [place for one in named for place in (one if isinstance(one, list) else [one]) if place]
    written = [os.path.abspath(place.replace("{run_dir}", run_dir)) for place in filter(_is_shared, written)]
    return {
        "folders": [os.path.abspath(place) for place in read],
        "written": written,
        "checkpoints": [os.path.abspath(f"{one}/{args.run_name}") for one in args.checkpoint_dir if _is_shared(one)],
        "checkpoints_in_s3": any("://" in place for place in args.checkpoint_dir),
    }


def _is_shared(place: str) -> bool:
    """Return whether a place is a folder of a file system that the nodes share."""
    return "://" not in place and not place.startswith(NODE_LOCAL)


def code_dir(spec: Spec) -> Path:
    """Return the folder that has the package on every node: the checkout, or a copy beside the run."""
    return CODE_DIR if CHECKOUT else Path(spec.run_dir, "code")


def prepare(spec: Spec, job: Job) -> None:
    """Make the folders of the run, and copy the package there unless this is a checkout."""
    make_folders(job)
    if CHECKOUT:
        return
    try:
        new, old = Path(f"{code_dir(spec)}.{os.getpid()}"), code_dir(spec)
        shutil.copytree(CODE_DIR / "smp_train", new / "smp_train", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)
    except OSError as problem:
        raise ConfigError(f"{problem.filename}: {problem.strerror}; the run could not write there") from None


def check_files(spec: Spec, job: Job) -> list[str]:
    """Refuse missing files on this machine, which shares its file systems with the nodes; return warnings."""
    image = job.image
    if image.startswith((".", "/")) and not os.path.exists(image):
        raise ConfigError(f"--image {image}: no such file; make it with docker_build.sh")
    if not image and not shutil.which(job.python):
        raise ConfigError(f"--python {job.python}: no such interpreter; make it with setup_conda_env.sh")
    preflight.check_data(spec.resolved.args)
    for mount in job.mounts:
        if not os.path.exists(mount.partition(":")[0]):
            raise ConfigError(f"--mounts {mount}: {mount.partition(':')[0]} does not exist")
    for folder in (f"{job.run_dir}/logs", *job.written):
        parent = preflight.existing(Path(folder, spec.name))  # checkpoints have a folder for each run
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: {parent} is no folder that you may write to; the run could not either")
    # An interpreter may be for the nodes' processors, and not run on this machine.
    has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if not image and ask(job.python, "-c", has_torch)[0] == 1:
        raise ConfigError(
            f"--python {job.python}: has no torch; give an environment that has it (setup_conda_env.sh makes one), or "
            "--image"
        )
    warnings = preflight.places(spec.resolved, spec.nodes, _read_by_nodes(job))
    recipe = CODE_DIR / "Dockerfile"
    if os.path.isfile(image) and recipe.exists() and recipe.stat().st_mtime > os.stat(image).st_mtime:
        warnings.append(f"--image {image}: is older than {recipe}; make it again with docker_build.sh")
    return warnings


def _read_by_nodes(job: Job) -> list[str]:
    """Return what every node reads: code, image or interpreter, data, and mounts."""
    start = shutil.which(job.python) or job.python
    if job.image:
        start = job.image if job.image.startswith((".", "/")) else ""
    sources = [mount.partition(":")[0] for mount in job.mounts]
    return [*([job.code_dir] if CHECKOUT else []), *map(os.path.abspath, filter(None, [start, *job.folders])), *sources]


def check(spec: Spec, options: dict[str, Any], job: Job) -> None:
    """Refuse what this machine or the cluster lacks, and print the run and its warnings."""
    warnings = [*check_files(spec, job), *cluster.warnings(spec, options)]
    if options["probe"]:
        warnings += cluster.probe(options, _read_by_nodes(job))
    warnings += planned.check(spec.resolved, spec.train_flags, spec.instance, spec.nodes, spec.processes)
    tell(spec, warnings)


def show(spec: Spec) -> None:
    """Print the run of a dry run, for which nothing is planned."""
    tell(spec)
    planned.tell_unplanned(spec.resolved.args, spec.instance, spec.processes)


def sbatch(script: str, *options: str) -> str:
    """Hand a script to sbatch and return its answer, with `--test-only` its messages as well."""
    absent = "run this on a node of the cluster, or add --dry_run to see the script"
    done = call("sbatch", *options, text=script, absent=absent, advice=ADVICE)
    # Plugins of the cluster may write to stderr beside the answer.
    return (done.stdout + (done.stderr if "--test-only" in options else "")).strip()


ADVICE = (
    ("generic resource", "leave --gpus_per_node out: this cluster has no GRES"),
    ("Invalid partition", "`sinfo` lists the partitions"),
    ("node configuration is not available", "fewer --nodes, or another --partition; `sinfo -N` lists the nodes"),
    ("Invalid account", "`sacctmgr show assoc user=$USER` lists accounts"),
)


def main(arguments: Sequence[str]) -> int:
    """Run ``smp-train launch slurm`` and return its exit code."""
    if print_help(arguments, USAGE, __doc__, OPTIONS):
        return 0
    options, spec, job = read(arguments)
    script = render(spec, options, job)
    if options["dry_run"]:
        show(spec)
        print(script, end="")
        return 0
    check(spec, options, job)
    print(sbatch(script, "--test-only"), file=sys.stderr)
    if options["check"]:
        return 0
    prepare(spec, job)
    number = sbatch(script, "--parsable").partition(";")[0]
    if not number.isdigit():
        raise SmpTrainError(f"sbatch answered {number!r}, which is not a job id")
    log = shlex.quote(f"{spec.run_dir}/logs/slurm-{number}.out")
    print(f"submitted job {number}\nlog:    {spec.run_dir}/logs/slurm-{number}.out")
    print(f"follow: tail -F {log}; squeue -j {number}")
    print(f"stop:   touch {shlex.quote(f'{spec.run_dir}/STOP')}    (saves first)\ncancel: scancel {number}")
    return 0
