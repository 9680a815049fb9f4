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
from smp_train.launch.srun_step import Job, command_line, mounts

# $asked: a signal that Slurm sent before the batch job has its handlers.
BODY = """

asked= && trap 'asked=USR1' USR1
[ -n "${SLURM_JOB_GPUS:-}${SLURM_GPUS_ON_NODE:-}" ] || unset CUDA_VISIBLE_DEVICES # of the submitting shell
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
    Option("nproc", "processes on each node; without it, one per GPU of --instance_type", int),
    Option("image", "container image: an Enroot .sqsh file, or REGISTRY#IMAGE:TAG; without it, --python"),
    Option("python", "interpreter of a virtual or conda environment; in a container, the image's", default=None),
    Option("mounts", "further folders for the container: SOURCE or SOURCE:TARGET[:FLAGS]", many=True),
    Option("env", "further environment variables: NAME=VALUE", many=True),
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


def render(spec: Spec, options: dict[str, Any]) -> str:
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
    code = str(code_dir(spec))
    image = options["image"] or ""
    job = Job(
        flags=list(spec.train_flags),
        code_dir=code,
        run_dir=spec.run_dir,
        python=options["python"] or ("python3" if image else sys.executable),
        image=image,
        mounts=options["mounts"] if image else [],
        container_env=",".join(sorted(spec.environment)) if image else "",
        nproc=str(spec.processes),
        instance_type=spec.instance.name if spec.instance else "",
        preflight=str(options["preflight"] or ""),
        nsys=options["profile"] == "nsys",
        max_attempts=options["max_attempts"],
        **places(spec.resolved, spec.run_dir),
    )
    if image:
        mounts(job, dry_run=True)  # refuses what pyxis cannot mount
    body = BODY.replace("@CODE@", shlex.quote(code)).replace("@PYTHON@", shlex.quote(sys.executable))
    lines = [
        "#!/bin/bash", "#SBATCH --exclusive", "#SBATCH --requeue",
        *(f"#SBATCH --{key}={_header(key, value)}" for key, value in header.items()),
        *(f"#SBATCH {_header('sbatch', word)}" for word in options["sbatch"]),
        "", f"# To hand this to sbatch yourself, first: mkdir -p {shlex.quote(spec.run_dir + '/logs')}",
        *(_export(spec, name) for name in sorted(spec.environment)),
    ]  # fmt: skip
    return "\n".join(lines) + body.replace("@OPTIONS@", " \\\n  ".join(map(shlex.join, command_line(job))))


def _header(key: str, value: str) -> str:
    if key == "output" and " " in value and not re.search(r'["\\\n\r]', value):
        return f'"{value}"'
    if re.search(r"[\n\r]", value) or (key != "sbatch" and re.search(r"\s", value)):
        raise ConfigError(f"{key} {value!r}: a space or a line break cannot stand in an #SBATCH line")
    return value


def _export(spec: Spec, name: str) -> str:
    """Return the line that sets a variable; only the user's own overrides that of the submitting shell."""
    value = shlex.quote(spec.environment[name])
    return f"export {name}={value}" if name in spec.added else f'[ -n "${{{name}+set}}" ] || export {name}={value}'


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


def prepare(spec: Spec) -> None:
    """Make the folders of the run, and copy the package there unless this is a checkout."""
    try:
        for folder in _written(spec):
            os.makedirs(folder, exist_ok=True)
        if not CHECKOUT:
            new, old = Path(f"{code_dir(spec)}.{os.getpid()}"), code_dir(spec)
            shutil.copytree(CODE_DIR / "smp_train", new / "smp_train", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.rmtree(old, ignore_errors=True)
            new.rename(old)
    except OSError as problem:
        raise ConfigError(f"{problem.filename}: {problem.strerror}; the run could not write there") from None


def _written(spec: Spec) -> list[str]:
    """Return the folders that the run writes to on a file system."""
    return [f"{spec.run_dir}/logs", *places(spec.resolved, spec.run_dir)["written"]]


def check_places(spec: Spec, options: dict[str, Any], needed: Sequence[str]) -> list[str]:
    """Refuse what is missing on this machine, which shares its file systems with the nodes; return warnings.

    ``needed`` are files and folders that every node reads.
    """
    image = options["image"]
    if image and image.startswith((".", "/")) and not Path(image).exists():
        raise ConfigError(f"--image {image}: no such file; make it with docker_build.sh")
    if options["python"] and not image and not shutil.which(options["python"]):
        raise ConfigError(f"--python {options['python']}: no such interpreter; make it with setup_conda_env.sh")
    preflight.check_data(spec.resolved.args)
    for mount in options["mounts"]:
        if not Path(mount.partition(":")[0]).exists():
            raise ConfigError(f"--mounts {mount}: {mount.partition(':')[0]} does not exist")
    for folder in _written(spec):
        there = Path(folder, spec.name)  # the run's own folder of checkpoints, where it exists
        while not there.exists():
            there = there.parent
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: {there} is no folder that you may write to; the run could not either")
    # An interpreter may be for the nodes' processors, and not run on this machine.
    python = options["python"] or sys.executable
    has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if not image and ask(python, "-c", has_torch)[0] == 1:
        raise ConfigError(
            f"{python} has no torch: give --python of an environment that has it (setup_conda_env.sh makes one), or "
            "--image"
        )
    found = preflight.places(spec.resolved, spec.nodes, needed)
    recipe = CODE_DIR / "Dockerfile"
    if image and os.path.isfile(image) and recipe.exists() and recipe.stat().st_mtime > os.stat(image).st_mtime:
        found.append(f"--image {image}: is older than {recipe}; make it again with docker_build.sh")
    return found


def _seen_by_nodes(spec: Spec, options: dict[str, Any]) -> list[str]:
    """Return what every node reads: code, image or interpreter, data, and mounts."""
    image = options["image"] or ""
    start = image if image.startswith((".", "/")) else ""
    if not image:
        start = (shutil.which(options["python"]) or "") if options["python"] else sys.executable
    named = [start, *(folder for _, folder in preflight.data(spec.resolved.args))]
    sources = [mount.partition(":")[0] for mount in options["mounts"]]
    return [*([str(CODE_DIR)] if CHECKOUT else []), *(os.path.abspath(one) for one in named if one), *sources]


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


def main(words: Sequence[str]) -> int:
    """Run ``smp-train launch slurm`` and return its exit code."""
    if print_help(words, USAGE, __doc__, OPTIONS):
        return 0
    options, training = split(words, OPTIONS)
    spec = build(
        [*training, *profile_flags(options["profile"])],
        nodes=options["nodes"],
        processes=options["nproc"],
        instance_type=options["instance_type"],
        env=options["env"],
        container=bool(options["image"]),
    )
    timing.check_limit(timing.slurm_seconds(options["time"]), options["save_before"], f"--time {options['time']}")
    if options["image"]:
        check_image(spec.instance, options["image"], spec.resolved.args.backend)
    script = render(spec, options)
    if options["dry_run"]:
        tell(spec)
        planned.tell_unplanned(spec.resolved.args, spec.instance, spec.processes)
        print(script, end="")
        return 0
    needed = _seen_by_nodes(spec, options)
    found = [*cluster.warnings(spec, options), *check_places(spec, options, needed)]
    if options["probe"]:
        found += cluster.probe(options, needed)
    found += planned.check(spec.resolved, spec.train_flags, spec.instance, spec.nodes, spec.processes)
    tell(spec, found)
    print(sbatch(script, "--test-only"), file=sys.stderr)
    if options["check"]:
        return 0
    prepare(spec)
    job = sbatch(script, "--parsable").partition(";")[0]
    if not job.isdigit():
        raise SmpTrainError(f"sbatch answered {job!r}, which is not a job id")
    log = shlex.quote(f"{spec.run_dir}/logs/slurm-{job}.out")
    print(f"submitted job {job}\nlog:    {spec.run_dir}/logs/slurm-{job}.out")
    print(f"follow: tail -F {log}; squeue -j {job}")
    print(f"stop:   touch {shlex.quote(f'{spec.run_dir}/STOP')}    (saves first)\ncancel: scancel {job}")
    return 0
