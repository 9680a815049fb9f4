"""What a node does once it knows its place and before its processes train: say what it lacks, meet the other nodes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved
from smp_train.distributed import expand_hostlist
from smp_train.launch import preflight, timing
from smp_train.launch.environment import lint
from smp_train.launch.instances import Instance
from smp_train.launch.network_check import BAD_NODE, HOSTS, UNREACHABLE
from smp_train.launch.supervisor import Failure, Place, supervise

USR1_SECONDS = 300
"""How long before the time limit the batch scripts have Slurm say so."""


def warn(resolved: Resolved, instance: Instance | None, place: Place, left: float | None) -> None:
    """Say what this node lacks, and what speaks against this start having saved when the job's time is up."""
    told = timing.doubts(
        resolved, limit=left, margin=USR1_SECONDS, instance=instance, nodes=place.nodes, processes=place.processes,
        setting="--signal=B:USR1@SECONDS (sbatch)",
    )  # fmt: skip
    told = [*lint(os.environ), *(told if left is not None else []), *preflight.lacks(resolved, os.environ)]
    if instance and instance.efa and place.nodes > 1 and resolved.args.distributed_backend != "gloo":
        told += preflight.lacks_plugin(instance)
    for line in told:
        print(f"smp-train: warning: {line}", file=sys.stderr, flush=True)


def meet(
    place: Place, seconds: float, resolved: Resolved, instance: Instance | None, environ: Mapping[str, str], logs: Path
) -> tuple[int, Failure | None]:
    """Have all ranks reach each other within ``seconds``; return (exit code, failure that names the node at fault).

    Rank 0 speaks for all: on the other nodes there is a failure only when it could not be reached.
    """
    file = logs / "preflight.json"
    command = [
        sys.executable,
        "-m",
        "smp_train.launch.network_check",
        "--seconds",
        str(seconds),
        "--verdict",
        str(file),
    ]
    command += ["--backend", resolved.args.distributed_backend, "--efa", str(instance.efa if instance else 0)]
    hosts = environ.get("SLURM_STEP_NODELIST")
    known = {HOSTS: ",".join(expand_hostlist(hosts))} if hosts else {}
    # A port of its own: the training's may be asked for while rank 0 still serves this one.
    here = replace(place, master_port=place.master_port - 1)
    code, failure = supervise(command, here, environ={**environ, **known}, log_dir=logs, say=lambda line: None)
    if failure is None or (failure.code == BAD_NODE and place.node_rank > 0):
        return code, None
    if failure.code in (BAD_NODE, UNREACHABLE):
        verdict = _written(file)
        # Nodes are left out of the next start for a fault of their own only; links and groups are nobody's.
        cause = "node" if verdict.get("at_fault") else "network"
        failure = Failure(-1, ",".join(verdict.get("nodes", [])) or failure.node, BAD_NODE, cause)
    print(f"smp-train: {failure.line()}", file=sys.stderr, flush=True)
    return failure.code, failure


def _written(file: Path) -> dict[str, Any]:
    """Return what rank 0 found; nothing where it could not write that: a disk that is full leaves an empty file."""
    try:
        verdict: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return verdict
