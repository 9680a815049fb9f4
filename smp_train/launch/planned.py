"""Plans a run (`smp-train plan`) before its launch: checks that it fits the GPUs, or shows what --auto will choose."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from smp_train.arguments import Arguments, Resolved
from smp_train.errors import ConfigError
from smp_train.launch.command import ask, say
from smp_train.launch.instances import Machines
from smp_train.models.resolve import names_model

SECONDS = 600
"""Time limit for a plan, which usually takes ten seconds, and longer if it looks for settings that lower memory."""


def _has_plan(args: Arguments, machines: Machines) -> bool:
    is_known = names_model(args) or args.resume_from_checkpoint is None
    planned = args.memory_check and not (args.evaluate_only or args.trust_remote_code)
    return bool(machines.instance and is_known and planned and machines.processes == machines.instance.gpus)


def note_unplanned(args: Arguments, machines: Machines) -> None:
    """Print that this dry run has made no plan, which takes too long for a dry run."""
    if _has_plan(args, machines):
        planned = (
            "whether the run fits was not planned" if args.auto == "off" else "settings were not searched (--auto)"
        )
        say(f"{planned} in this dry run; --check does it")


def check(resolved: Resolved, flags: Sequence[str], machines: Machines) -> list[str]:
    """Return a warning if the plan of the run with these ``flags`` exceeds the memory; no warning without a plan.

    With ``--auto`` the settings are searched as the run will search them, and printed. The plan is made in a separate
    process: launchers do not import torch, and this machine may have no torch.

    Raises:
        ConfigError: memory that no kernel can avoid exceeds the GPU, on the planned backend; or with ``--auto``,
            nothing fits.
    """
    args, instance = resolved.args, machines.instance
    if instance is None or not _has_plan(args, machines):
        return []
    search = ["--search"] if args.auto != "off" else []
    if search:
        say(f"searching settings for {machines.world_size} GPUs (--auto); a minute or more")
    plan = [sys.executable, "-m", "smp_train", "plan", "--json", "--instance_type", instance.name]
    code, output = ask(*plan, "--nodes", str(machines.nodes), *search, *flags, seconds=SECONDS)
    first, _, more = output.partition("\n")
    error = output.splitlines()[-1].partition("error: ")[2] if output else ""
    refused, has_json = code == ConfigError.exit_code, first.startswith("{")
    if search and code == 0:
        say(f"--auto would choose {json.loads(first)['best'][0]['words']}, by plan")
    elif search and refused:
        raise ConfigError(f"--auto: {'the plan ' * has_json}{error}")
    elif search and not has_json:
        return [f"--auto was not planned here ({error or f'exit code {code}'}); the run will plan when it starts"]
    if not (refused and has_json and more):
        return []
    if args.backend == "native" and json.loads(first)["least"] > instance.most_gpu_bytes:
        raise ConfigError(f"the plan {error}; --memory_check 0 launches all the same")
    return [f"the plan {error}"]
