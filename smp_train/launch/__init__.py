"""`smp-train launch`: from one command to a run on a cluster or on this machine. Imports no torch.

A run is described once and rendered for its platform (`slurm`, `sagemaker`, `k8s`, `local`). `node_agent` runs on each
node of a Slurm job or of a run started by hand; `supervisor` starts the node's processes. `entry` is the program of
each process on SageMaker and Kubernetes, which have their own launchers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from smp_train.errors import ConfigError

PLATFORMS = {
    "slurm": "a Slurm cluster, with a container (Enroot, Pyxis) or an environment of Python",
    "sagemaker": "a SageMaker training job",
    "k8s": "a Kubernetes cluster, such as EKS or HyperPod on EKS",
    "local": "this machine, or several started by hand",
}


def main(argv: Sequence[str]) -> int:
    """Run ``smp-train launch <platform> ...`` and return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: smp-train launch WHERE [options] <training flags>\n")
        for name, about in PLATFORMS.items():
            print(f"  {name:<12}{about}")
        print("\n--dry_run prints what would be done; `smp-train launch WHERE --help` lists the options.")
        return 0
    if argv[0] not in PLATFORMS:
        raise ConfigError(f"launch {argv[0]}: no such place; choose from {', '.join(PLATFORMS)}")
    return int(importlib.import_module(f"smp_train.launch.{argv[0]}").main(argv[1:]))
