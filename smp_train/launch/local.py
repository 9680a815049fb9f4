"""`smp-train launch local`: train on this machine, or on several that are started by hand, without a cluster."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from smp_train.launch import node_agent, nsys, preflight
from smp_train.launch.options import COMMON, Option, print_help, split
from smp_train.launch.spec import build, profile_flags, tell

USAGE = "smp-train launch local [--nproc N] [options] <training flags>"
OPTIONS = (
    *COMMON,
    Option("nproc", "processes on this machine; without it, one per GPU, or one", int),
    Option("nnodes", "machines of the run; start this command on each ($NNODES)", int),
    Option("node_rank", "number of this machine, from 0 ($NODE_RANK)"),
    Option("master_addr", "name or address of machine 0, the same on all ($MASTER_ADDR)"),
    Option("master_port", "a port that is free on machine 0, the same on all ($MASTER_PORT)", int),
    Option("preflight", "before training, all machines reach each other within so many seconds, or are named", int),
    Option("env", "further environment variables: NAME=VALUE", many=True),
    Option("profile", "torch: PyTorch profiler; nsys: Nsight Systems"),
)


def main(words: Sequence[str]) -> int:
    """Run ``smp-train launch local`` and return its exit code: that of the first process that failed, or 0."""
    if print_help(words, USAGE, __doc__, OPTIONS):
        return 0
    options, training = split(words, OPTIONS)
    given = {
        name.upper(): str(options[name])
        for name in ("nnodes", "node_rank", "master_addr", "master_port")
        if options[name] is not None
    }
    processes = options["nproc"] or node_agent.count_gpus() or 1
    place = node_agent.find_place(
        {k: v for k, v in (os.environ | given).items() if not k.startswith("SLURM_")}, processes
    )
    spec = build(
        [*training, *profile_flags(options["profile"])],
        nodes=place.nodes,
        processes=processes,
        instance_type=None,
        env=options["env"],
    )
    command = [
        sys.executable, "-m", "smp_train.launch.node_agent", "--nproc", str(processes),
        *(["--preflight", str(options["preflight"])] if options["preflight"] else []),
        *(["--nsys"] if options["profile"] == "nsys" else []), "--", *spec.train_flags,
    ]  # fmt: skip
    if options["dry_run"]:
        tell(spec)
        exported = {**spec.environment, **given}
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(exported.items())))
        print(shlex.join(command))
        return 0
    preflight.check_data(spec.resolved.args)
    if options["profile"] == "nsys":
        nsys.command(Path(spec.run_dir) / "profile", [])  # refuses where there is none
    tell(spec)
    if options["check"]:
        return 0
    os.environ.update(given | {name: spec.environment[name] for name in spec.added})
    for name, value in spec.environment.items():
        os.environ.setdefault(name, value)
    return node_agent.main(command[3:])
