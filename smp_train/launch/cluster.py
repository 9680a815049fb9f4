"""A Slurm cluster's configuration, and what it means for a run: asked on the head node, or on a compute node."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch import timing
from smp_train.launch.command import ask
from smp_train.launch.spec import Spec

PROBE_SECONDS = 60
# Marks the probe's own lines; the shell of a compute node may print a greeting.
MISSING = "smp-train-missing "
PROBE = (
    f'for path in "$@"; do [ -e "$path" ] || echo "{MISSING}$path"; done; '
    f'[ -z "$IMAGE" ] || srun --help 2>&1 | grep -q -- --container-image || echo "{MISSING}pyxis"'
)


def configuration() -> dict[str, str]:
    """Return the cluster's settings by name."""
    return dict(re.findall(r"^(\S+)\s*=\s*(.*?)\s*$", ask("scontrol", "show", "config")[1], re.MULTILINE))


def partition(name: str | None) -> dict[str, str]:
    """Return the settings of a partition by name; of the default one without ``name``; {} where there is none."""
    shown = ask("scontrol", "show", "partition", *([name] if name else []), "--oneliner")[1].splitlines()
    found = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown]
    return next((one for one in found if name or one.get("Default") == "YES"), {})


def warnings(spec: Spec, options: Mapping[str, Any]) -> list[str]:
    """Return what is lost with this cluster's configuration.

    Raises:
        ConfigError: for what cannot work there.
    """
    if not shutil.which("scontrol"):
        return []
    config, place = configuration(), partition(options["partition"])
    usage = ask("srun", "--help")[1]
    if options["image"] and "--container-image" not in usage:
        raise ConfigError(
            "this cluster's srun knows no --container-image; install pyxis, or use --python instead of --image"
        )
    found = []
    if config.get("JobRequeue") == "0":
        found.append("JobRequeue=0: this cluster does not requeue jobs by itself; a lost node ends the run")
    if "--auto-resume" in usage:
        unprotected = auto_resume(config)
        if options["gpus_per_node"]:
            unprotected.append(("--gpus_per_node", "Slurm does not swap nodes of jobs with GRES"))
        found += [f"{setting}: {why}; after a lost node the job is requeued" for setting, why in unprotected]
    gres = ask("sinfo", "-h", "-o", "%G")[1]
    if "gpu" in gres and not options["gpus_per_node"]:
        found.append("this cluster has GRES: without --gpus_per_node the job may see no GPU")
    return [*found, *_time(spec, options, config, place)]


def auto_resume(config: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (setting, reason) for each setting with which HyperPod's plugin does not protect a step."""
    found = []
    if config.get("TaskPlugin") not in ("task/none", "(null)"):
        found.append((f"TaskPlugin={config.get('TaskPlugin')}", "HyperPod's auto-resume needs task/none"))
    if "Alloc" in config.get("PrologFlags", ""):
        found.append((f"PrologFlags={config['PrologFlags']}", "HyperPod's auto-resume does not work with Alloc"))
    return found


def _time(spec: Spec, options: Mapping[str, Any], config: Mapping[str, str], place: Mapping[str, str]) -> list[str]:
    margin, name = options["save_before"], f"partition {place.get('PartitionName')}"
    limit = timing.slurm_seconds(options["time"])
    if limit is None:
        default = place.get("DefaultTime", "NONE")
        limit = timing.slurm_seconds(place.get("MaxTime") if default == "NONE" else default)
        timing.check_limit(limit, margin, f"{name}: its time limit, without --time")
    found = timing.save_warnings(
        spec.resolved, limit=limit, margin=margin, instance=spec.instance, nodes=spec.nodes,
        processes=spec.processes, setting="--save_before",
    )  # fmt: skip
    preempted = place.get("PreemptMode", "OFF").partition(",")[0] in ("REQUEUE", "CANCEL")
    grace = int(place.get("GraceTime", "0") or 0)
    if preempted and config.get("PreemptType", "preempt/none") != "preempt/none" and grace < EXPECTED_SAVE:
        found.append(
            f"{name}: a preempted job is given {grace} s (GraceTime), which may not be enough to save: what was done "
            "since the last checkpoint is lost then; lower --checkpoint_freq"
        )
    return found


EXPECTED_SAVE = 60
"""Seconds for a step and a checkpoint of a large model."""


def probe(options: Mapping[str, Any], needed: Sequence[str]) -> list[str]:
    """Check pyxis, image, code and folders in one short step on a compute node.

    Returns why that was not possible, if so; raises `ConfigError` for what is missing there.
    """
    keys = ("partition", "account", "qos", "nodelist", "exclude")
    where = [f"--{key}={options[key]}" for key in keys if options[key]]
    code, output = ask(
        "srun", "--nodes=1", "--ntasks=1", "--time=2", f"--immediate={PROBE_SECONDS}", "--quiet", *where, "bash", "-c",
        f"hostname; IMAGE={'1' if options['image'] else ''}; {PROBE}", "probe", *needed, seconds=PROBE_SECONDS + 120,
    )  # fmt: skip
    lines = output.splitlines()
    if code or not lines:
        return [f"--probe: no compute node could be asked: {' '.join(output.split())[:200] or 'no answer'}"]
    missing = [line.removeprefix(MISSING) for line in lines if line.startswith(MISSING)]
    if "pyxis" in missing:
        raise ConfigError(
            f"{lines[0]}: its srun knows no --container-image, though the head node's does: commands would run on the "
            "bare host; install pyxis on the compute nodes, or use --python instead of --image"
        )
    if missing:
        raise ConfigError(
            f"{lines[0]}: has no {', '.join(missing)}; all nodes must mount what the run reads and writes"
        )
    return []
