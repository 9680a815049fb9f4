"""What `smp-train plan` says of a run that is about to be launched."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from smp_train.arguments import Arguments, Resolved
from smp_train.errors import ConfigError
from smp_train.launch.command import ask
from smp_train.launch.instances import Instance
from smp_train.models.resolve import names_model

SECONDS = 600
"""That a plan may take; it takes some ten, most of them imports, and more where it looks for what lowers it."""


def _has_plan(args: Arguments, instance: Instance, processes: int) -> bool:
    known = names_model(args) or args.resume_from_checkpoint is None
    planned = args.memory_check and not (args.evaluate_only or args.trust_remote_code)
    return bool(known and planned and processes == instance.gpus)


def tell_unplanned(args: Arguments, instance: Instance | None, processes: int) -> None:
    """Say on stderr, of a dry run, which has to be fast, that `check` was not called; arguments are its."""
    if instance is not None and _has_plan(args, instance, processes):
        what = "settings were not searched (--auto)" if args.auto != "off" else "whether the run fits was not planned"
        print(f"smp-train: {what} in this dry run; --check does it", file=sys.stderr)


def check(
    resolved: Resolved, words: Sequence[str], instance: Instance | None, nodes: int, processes: int
) -> list[str]:  # fmt: skip
    """Return a warning of a run that is planned to run out of memory; nothing where it fits, or there is no plan.

    With ``--auto`` the settings are searched as the run will search them, and printed.

    The plan is made by a process of its own: launchers do without torch, and this machine may have none.

    Args:
        resolved: The run.
        words: Its flags.
        instance: That it runs on; None: unknown.
        nodes: Number of them.
        processes: Of each.

    Raises:
        ConfigError: Even what no kernel can avoid exceeds the memory, and the backend is the one that is planned; with
            ``--auto``, nothing fits.
    """
    args = resolved.args
    if instance is None or not _has_plan(args, instance, processes):
        return []
    if args.auto != "off":
        gpus = nodes * processes
        print(f"smp-train: searching settings for {gpus} GPUs (--auto); a minute or more", file=sys.stderr, flush=True)
    plan = [sys.executable, "-m", "smp_train", "plan", "--json", "--instance_type", instance.name]
    search = ["--search"] * (args.auto != "off")
    code, output = ask(*plan, "--nodes", str(nodes), *search, *words, seconds=SECONDS)
    first, _, last = output.partition("\n")
    if search and code == 0:
        best = json.loads(first)["best"][0]
        print(f"smp-train: --auto would choose {best['words']}, by plan", file=sys.stderr)
    if search and code and not first.startswith("{"):
        said = output.splitlines()[-1].partition("error: ")[2] if output else ""
        if code == ConfigError.exit_code:
            raise ConfigError(f"--auto: {said}")
        return [f"--auto was not planned here ({said or f'exit code {code}'}); the run will plan when it starts"]
    if code != ConfigError.exit_code or not first.startswith("{"):
        return []
    found = f"the plan {last.splitlines()[-1].partition('error: ')[2]}"
    if search:
        raise ConfigError(f"--auto: {found}")
    if args.backend == "native" and json.loads(first)["least"] > instance.most_gpu_bytes:
        raise ConfigError(f"{found}; --memory_check 0 launches all the same")
    return [found]
