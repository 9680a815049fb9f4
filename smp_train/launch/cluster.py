"""A Slurm cluster's configuration, and its consequences for a run: asked on the head node, or on a compute node."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Mapping, Sequence

from smp_train.errors import ConfigError
from smp_train.launch import timing
from smp_train.launch.command import ask
from smp_train.launch.spec import Spec
from smp_train.launch.srun_step import check_pyxis

SAVE_SECONDS = 60
"""Expected time of a step and a checkpoint of a large model."""
PROBE_SECONDS = 60
# Marks the probe's lines; the shell of a compute node may print a greeting.
MISSING = "smp-train-missing "
PROBE = (
    f'for path in "$@"; do [ -e "$path" ] || echo "{MISSING}$path"; done; '
    f'[ -z "$IMAGE" ] || srun --help 2>&1 | grep -q -- --container-image || echo "{MISSING}pyxis"'
)


def configuration() -> dict[str, str]:
    """Return the cluster's settings by name."""
    return dict(re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", ask("scontrol", "show", "config")[1], re.MULTILINE))


def partition(name: str | None) -> dict[str, str]:
    """Return the settings of a partition, or of the default partition without ``name``; {} if it does not exist."""
    lines = ask("scontrol", "show", "partition", *([name] if name else []), "--oneliner")[1].splitlines()
    partitions = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]
    return next((settings for settings in partitions if name or settings.get("Default") == "YES"), {})


def restart_warnings(config: Mapping[str, str], srun_help: str, *, has_gres: bool = False) -> list[tuple[str, str]]:
    """Return (setting, consequence) for settings with which a lost node ends the run, or requeues the whole job."""
    hyperpod, requeued = "--auto-resume" in srun_help, "; after a lost node the job is requeued"
    plugin, prolog = config.get("TaskPlugin"), config.get("PrologFlags", "")
    rows = (
        (config.get("JobRequeue") == "0", "JobRequeue=0",
         "this cluster does not requeue jobs by itself; a lost node ends the run"),
        (hyperpod and plugin not in ("task/none", "(null)"), f"TaskPlugin={plugin}",
         f"HyperPod's auto-resume needs task/none{requeued}"),
        (hyperpod and "Alloc" in prolog, f"PrologFlags={prolog}",
         f"HyperPod's auto-resume does not work with Alloc{requeued}"),
        (hyperpod and has_gres, "--gpus_per_node", f"Slurm does not swap nodes of jobs with GRES{requeued}"),
    )  # fmt: skip
    return [(setting, consequence) for is_set, setting, consequence in rows if is_set]


def warnings(spec: Spec, options: argparse.Namespace) -> list[str]:
    """Return warnings about this cluster's configuration.

    Raises:
        ConfigError: the run cannot work on this cluster.
    """
    if not shutil.which("scontrol"):
        return []
    config, srun_help = configuration(), ask("srun", "--help")[1]
    if options.image:
        check_pyxis(srun_help)
    restarts = restart_warnings(config, srun_help, has_gres=bool(options.gpus_per_node))
    lines = [f"{setting}: {consequence}" for setting, consequence in restarts]
    if "gpu" in ask("sinfo", "-h", "-o", "%G")[1] and not options.gpus_per_node:
        lines.append("this cluster has GRES: without --gpus_per_node the job may see no GPU")
    return [*lines, *_time_warnings(spec, options, config, partition(options.partition))]


def _time_warnings(
    spec: Spec, options: argparse.Namespace, config: Mapping[str, str], settings: Mapping[str, str]
) -> list[str]:
    """Return warnings about the partition's ``settings`` of time limits and preemption."""
    margin, name = options.save_before, f"partition {settings.get('PartitionName')}"
    limit = timing.slurm_seconds(options.time)
    if limit is None:
        default = settings.get("DefaultTime", "NONE")
        limit = timing.slurm_seconds(settings.get("MaxTime") if default == "NONE" else default)
        timing.check_limit(limit, margin, f"{name}: its time limit, without --time")
    lines = timing.save_warnings(spec.resolved, spec.machines, limit, margin, "--save_before")
    preempted = settings.get("PreemptMode", "OFF").partition(",")[0] in ("REQUEUE", "CANCEL")
    grace = int(settings.get("GraceTime", "0") or 0)
    if preempted and config.get("PreemptType", "preempt/none") != "preempt/none" and grace < SAVE_SECONDS:
        lines.append(
            f"{name}: a preempted job is given {grace} s (GraceTime), which may not be enough to save: what was done "
            "since the last checkpoint is lost then; lower --checkpoint_freq"
        )
    return lines


def probe(options: argparse.Namespace, needed: Sequence[str]) -> list[str]:
    """Check pyxis, image, code and folders in one short step on a compute node; return why that was not possible.

    Raises:
        ConfigError: something is missing there.
    """
    keys = ("partition", "account", "qos", "nodelist", "exclude")
    selection = [f"--{key}={value}" for key in keys if (value := getattr(options, key))]
    code, output = ask(
        "srun", "--nodes=1", "--ntasks=1", "--time=2", f"--immediate={PROBE_SECONDS}", "--quiet", *selection,
        "bash", "-c", f"hostname; IMAGE={'1' if options.image else ''}; {PROBE}", "probe", *needed,
        seconds=PROBE_SECONDS + 120,
    )  # fmt: skip
    lines = output.splitlines()
    if code or not lines:
        return [f"--probe: no compute node could be asked: {' '.join(output.split())[:200] or 'no answer'}"]
    missing = [line.removeprefix(MISSING) for line in lines if line.startswith(MISSING)]
    if "pyxis" in missing:  # without pyxis, commands would run outside the container
        check_pyxis("", f"{lines[0]}: the srun of this compute node")
    if missing:
        raise ConfigError(
            f"{lines[0]}: has no {', '.join(missing)}; all nodes must mount what the run reads and writes"
        )
    return []
