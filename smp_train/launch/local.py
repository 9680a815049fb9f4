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
    names = ("nnodes", "node_rank", "master_addr", "master_port")
    given = {name.upper(): str(options[name]) for name in names if options[name] is not None}
    processes = options["nproc"] or node_agent.count_gpus() or 1
    # In an allocation of Slurm too, this machine alone, or as many as the options name.
    environ = {name: value for name, value in (os.environ | given).items() if not name.startswith("SLURM_")}
    spec = build(
        [*training, *profile_flags(options["profile"])],
        nodes=node_agent.find_place(environ, processes).nodes,
        processes=processes,
        instance_type=None,
        env=options["env"],
    )
    agent = [
        "--nproc", str(processes), *(["--preflight", str(options["preflight"])] if options["preflight"] else []),
        *(["--nsys"] if options["profile"] == "nsys" else []), "--", *spec.train_flags,
    ]  # fmt: skip
    if not options["dry_run"]:
        preflight.check_host(spec.resolved, spec.world_size, processes)
        preflight.check_data(spec.resolved.args)
        if options["profile"] == "nsys":
            nsys.command(Path(spec.run_dir) / "profile", [])  # refuses where there is none
    tell(spec)
    if options["dry_run"]:
        for name, value in sorted((spec.environment | given).items()):
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join([sys.executable, "-m", "smp_train.launch.node_agent", *agent]))
    if options["dry_run"] or options["check"]:
        return 0
    os.environ.update(given | spec.environment)
    return node_agent.main(agent)
