"""`smp-train launch local`: train on this machine, or on several that are started by hand, without a cluster."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from smp_train.launch import node_agent, nsys, preflight
from smp_train.launch.options import LaunchParser, split
from smp_train.launch.spec import build, describe

VARIABLES = ("nnodes", "node_rank", "master_addr", "master_port")


def parser() -> LaunchParser:
    """Return the parser of the options."""
    options = LaunchParser("local", __doc__, "[--nproc N] [options]")
    options.share("dry_run", "check", "nproc", "spare_nodes", "preflight", "env", "profile")
    options.add("nnodes", "machines of the run; start this command on each ($NNODES)", int)
    options.add("node_rank", "number of this machine, from 0 ($NODE_RANK)")
    options.add("master_addr", "name or address of machine 0, the same on all ($MASTER_ADDR)")
    options.add("master_port", "a port that is free on machine 0, the same on all ($MASTER_PORT)", int)
    return options


def main(arguments: Sequence[str]) -> int:
    """Run ``smp-train launch local`` and return the exit code of the first process that failed, or 0."""
    options, training = split(arguments, parser())
    meeting = {name.upper(): str(value) for name in VARIABLES if (value := getattr(options, name)) is not None}
    processes = options.nproc = options.nproc or node_agent.count_gpus() or 1
    # Even inside a Slurm allocation, the run uses this machine only, or as many machines as the options name.
    environ = {name: value for name, value in (os.environ | meeting).items() if not name.startswith("SLURM_")}
    options.nodes = node_agent.find_node(environ, processes, options.spare_nodes or 0).nodes
    spec = build(training, options)
    names = ("nproc", "spare_nodes", "preflight", "profile")
    agent = [f"--{name}={value}" for name in names if (value := getattr(options, name))]
    agent += ["--", *spec.train_flags]
    if options.dry_run:
        describe(spec)
        for name, value in sorted((spec.environment | meeting).items()):
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join([sys.executable, "-m", "smp_train.launch.node_agent", *agent]))
        return 0
    preflight.check_host(spec.resolved, spec.machines.world_size, processes)
    preflight.check_data(spec.resolved.args)
    if options.profile == "nsys":
        nsys.command(Path(spec.run_dir) / "profile", [])  # refuses a machine without nsys
    describe(spec)
    if options.check:
        return 0
    os.environ.update(meeting | spec.environment)
    return node_agent.main(agent)
