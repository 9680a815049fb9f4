"""`smp-train launch slurm`: render a batch script, check it, submit it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import cluster, planned, preflight, timing
from smp_train.launch.command import ask, call
from smp_train.launch.flags import paths_of, shared_folders
from smp_train.launch.images import check_image
from smp_train.launch.options import LaunchParser, split
from smp_train.launch.spec import CHECKOUT, CODE_DIR, Spec, build, describe
from smp_train.launch.srun_step import Job, check_start, make_folders, mounts

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
PYTHONPATH=$code${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m smp_train.launch.batch_job "$asked" <<'JOB'
@JOB@
JOB
"""
HEADER = {
    "partition": "Slurm partition", "account": "Slurm account", "qos": "Slurm quality of service",
    "time": "time limit, such as 2-00:00:00; before it, the run saves and goes back into the queue",
    "nodelist": "only on these nodes", "exclude": "not on these nodes",
    "dependency": "Slurm dependency, such as singleton",
}  # fmt: skip
"""Options that are handed to Slurm as they are."""
AGENT_OPTIONS = ("nproc", "instance_type", "preflight", "profile", "spare_nodes")
ADVICE = (
    ("generic resource", "leave --gpus_per_node out: this cluster has no GRES"),
    ("Invalid partition", "`sinfo` lists the partitions"),
    ("node configuration is not available", "fewer --nodes, or another --partition; `sinfo -N` lists the nodes"),
    ("Invalid account", "`sacctmgr show assoc user=$USER` lists accounts"),
)


def parser() -> LaunchParser:
    """Return the parser of the options."""
    options = LaunchParser("slurm", __doc__, "--nodes N --instance_type T [options]")
    options.share("dry_run", "check", "nodes", "instance_type", "nproc", "preflight", "max_attempts", "env", "profile")
    options.share("spare_nodes")
    options.add("image", "container image: an Enroot .sqsh file, or REGISTRY#IMAGE:TAG; without it, --python")
    options.add("python", "interpreter of a virtual or conda environment; in a container, the image's")
    options.add("mounts", "further folders for the container: SOURCE or SOURCE:TARGET[:FLAGS]", many=True)
    options.add("container_env", "variables of this shell that win over the image's, separated by commas")
    for name, about in HEADER.items():
        options.add(name, about)
    options.share("job_name")
    options.add("gpus_per_node", "ask Slurm for GPUs; needed with GRES, an error on a cluster without GRES", int)
    options.add("save_before", "seconds before the time limit at which to stop and save", int, 300)
    options.add("probe", "ask a compute node too, in one short step: pyxis, image, code and folders", bool)
    options.add("sbatch", "a further option of sbatch, such as --comment=x; may be repeated", many=True)
    return options


def read(arguments: Sequence[str]) -> tuple[argparse.Namespace, Spec, Job]:
    """Check a command line as far as that needs none of this machine's files; return (options, run, job).

    Raises:
        ConfigError: the training would stop at its start, or pyxis cannot mount a folder.
    """
    options, training = split(arguments, parser())
    image, agent = options.image or "", {name: getattr(options, name) for name in AGENT_OPTIONS}
    spec = build(training, options)
    args, instance, shared = spec.resolved.args, spec.machines.instance, shared_folders(spec.resolved.args)
    timing.check_limit(timing.slurm_seconds(options.time), options.save_before, f"--time {options.time}")
    if image:
        check_image(instance, image, args.backend)
    agent["instance_type"] = instance.name if instance else None
    container_env = {*spec.environment, *filter(None, (options.container_env or "").split(","))}
    read_paths = [path for path in paths_of(args, "read") if os.path.exists(path)]
    written = [*shared, *(path for path in paths_of(args, "written") if "://" not in path)]
    job = Job(
        flags=spec.train_flags,
        code_dir=str(CODE_DIR if CHECKOUT else Path(spec.run_dir, "code")),  # every node has it
        run_dir=spec.run_dir,
        python=options.python or ("python3" if image else sys.executable),
        agent=[f"--{name}={value}" for name, value in agent.items() if value],
        in_place=args.recovery == "in_place",
        max_attempts=options.max_attempts,
        image=image,
        mounts=options.mounts if image else [],
        container_env=sorted(container_env) if image else [],
        read=list(map(os.path.abspath, [*(folder for _, folder in preflight.data_folders(args)), *read_paths])),
        written=[os.path.abspath(path.replace("{run_dir}", spec.run_dir)) for path in written],
        checkpoints=[os.path.abspath(f"{folder}/{args.run_name}") for folder in shared],
        checkpoints_in_s3=any("://" in folder for folder in args.checkpoint_dir),
    )
    if image:
        mounts(job)
    return options, spec, job


def render(spec: Spec, options: argparse.Namespace, job: Job) -> str:
    """Return the whole batch script: it needs nothing but the package's folder at run time.

    Raises:
        ConfigError: a batch script cannot express a value.
    """
    header = {
        "job-name": options.job_name or re.sub(r"\s+", "-", spec.name),
        "nodes": str(spec.machines.nodes + (options.spare_nodes or 0)),
        "ntasks-per-node": "1",
        "output": f"{spec.run_dir.replace('%', '%%')}/logs/slurm-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{options.save_before}",
        **{key: value for key in HEADER if (value := getattr(options, key))},
    }
    if options.gpus_per_node:
        header["gpus-per-node"] = str(options.gpus_per_node)
    for name, value in spec.environment.items():
        if re.search(r"[\n\r]", value):  # Slurm could take the next line for an option
            raise ConfigError(f"--env {name}={value!r}: a line break cannot stand in a batch script")
    body = BODY.replace("@CODE@", shlex.quote(job.code_dir)).replace("@PYTHON@", shlex.quote(sys.executable))
    lines = [
        "#!/bin/bash", "#SBATCH --exclusive", "#SBATCH --requeue", *["#SBATCH --no-kill"] * job.in_place,
        *(f"#SBATCH --{key}={_header_value(key, value)}" for key, value in header.items()),
        *(f"#SBATCH {_header_value('sbatch', option)}" for option in options.sbatch),
        "", f"# To hand this to sbatch yourself, first: mkdir -p {shlex.quote(spec.run_dir + '/logs')}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())),
    ]  # fmt: skip
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(job).items() if value]
    return "\n".join(lines) + body.replace("@JOB@", "{\n  " + ",\n  ".join(fields) + "\n}")


def _header_value(key: str, value: str) -> str:
    if key == "output" and " " in value and not re.search(r'["\\\n\r]', value):
        return f'"{value}"'
    if re.search(r"[\n\r]", value) or (key != "sbatch" and re.search(r"\s", value)):
        raise ConfigError(f"{key} {value!r}: a space or a line break cannot stand in an #SBATCH line")
    return value


def prepare(job: Job) -> None:
    """Make the folders of the run, and copy the package there unless this is a checkout."""
    make_folders(job)
    if CHECKOUT:
        return
    old, new = Path(job.code_dir), Path(f"{job.code_dir}.{os.getpid()}")
    try:
        shutil.copytree(CODE_DIR / "smp_train", new / "smp_train", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)
    except OSError as problem:
        raise ConfigError(f"{problem.filename}: {problem.strerror}; the run could not write there") from None


def check_files(spec: Spec, job: Job) -> list[str]:
    """Refuse missing files on this machine, which shares its file systems with the nodes; return warnings."""
    check_start(job)
    preflight.check_data(spec.resolved.args)
    for mount in job.mounts:
        if not os.path.exists(mount.partition(":")[0]):
            raise ConfigError(f"--mounts {mount}: {mount.partition(':')[0]} does not exist")
    for folder in (f"{job.run_dir}/logs", *job.written):
        parent = preflight.existing(Path(folder, spec.name))  # checkpoints have a folder for each run
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: {parent} is no folder that you may write to; the run could not either")
    # The interpreter may be built for the nodes' processors, and not run on this machine.
    has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if not job.image and ask(job.python, "-c", has_torch)[0] == 1:
        raise ConfigError(
            f"--python {job.python}: has no torch; give an environment that has it (setup_conda_env.sh makes one), or "
            "--image"
        )
    warnings = preflight.disk_warnings(spec.resolved, spec.machines.nodes, _needed_by_nodes(job))
    recipe = CODE_DIR / "Dockerfile"
    if os.path.isfile(job.image) and recipe.exists() and recipe.stat().st_mtime > os.stat(job.image).st_mtime:
        warnings.append(f"--image {job.image}: is older than {recipe}; make it again with docker_build.sh")
    return warnings


def _needed_by_nodes(job: Job) -> list[str]:
    """Return the paths that every node reads: code, image or interpreter, data, and mounts."""
    image = job.image if job.image.startswith((".", "/")) else ""
    start = image if job.image else shutil.which(job.python) or job.python
    sources = [mount.partition(":")[0] for mount in job.mounts]
    return [*([job.code_dir] if CHECKOUT else []), *map(os.path.abspath, filter(None, [start, *job.read])), *sources]


def check(spec: Spec, options: argparse.Namespace, job: Job) -> None:
    """Refuse a run if this machine or the cluster lacks something; print the run and its warnings."""
    warnings = [*check_files(spec, job), *cluster.warnings(spec, options)]
    if options.probe:
        warnings += cluster.probe(options, _needed_by_nodes(job))
    describe(spec, [*warnings, *planned.check(spec.resolved, spec.train_flags, spec.machines)])


def show(spec: Spec) -> None:
    """Print the description of a dry run's run; a dry run makes no plan."""
    describe(spec)
    planned.note_unplanned(spec.resolved.args, spec.machines)


def sbatch(script: str, *options: str) -> str:
    """Hand a script to sbatch and return its answer, with `--test-only` its messages as well."""
    absent = "run this on a node of the cluster, or add --dry_run to see the script"
    done = call("sbatch", *options, text=script, absent=absent, advice=ADVICE)
    # Plugins of the cluster may write to stderr too.
    return (done.stdout + (done.stderr if "--test-only" in options else "")).strip()


def main(arguments: Sequence[str]) -> int:
    """Run ``smp-train launch slurm`` and return its exit code."""
    options, spec, job = read(arguments)
    script = render(spec, options, job)
    if options.dry_run:
        show(spec)
        print(script, end="")
        return 0
    check(spec, options, job)
    print(sbatch(script, "--test-only"), file=sys.stderr)
    if options.check:
        return 0
    prepare(job)
    number = sbatch(script, "--parsable").partition(";")[0]
    if not number.isdigit():
        raise SmpTrainError(f"sbatch answered {number!r}, which is not a job id")
    log = shlex.quote(f"{spec.run_dir}/logs/slurm-{number}.out")
    print(f"submitted job {number}\nlog:    {spec.run_dir}/logs/slurm-{number}.out")
    print(f"follow: tail -F {log}; squeue -j {number}")
    print(f"stop:   touch {shlex.quote(f'{spec.run_dir}/STOP')}    (saves first)\ncancel: scancel {number}")
    return 0
