"""`smp-train bench`: runs the measurements of the checkout's ``benchmarks/``, which are not installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from smp_train.errors import ConfigError

BENCHMARKS = {
    "scale": "control costs at thousands of ranks, simulated",
    "start": "from the command to the first step, against a bare FSDP2 loop",
    "step": "the train step against a bare FSDP2 loop",
    "checkpoint": "a save in the background against synchronous DCP and against one gathered file",
    "attention": "masks and kernels against transformers' own",
    "gpu": "what only a GPU can tell, in parts; also the same training by other programs",
    "finetune": "memory of a finetune with adapters against one of all parameters",
    "data": "loading, converting and fetching data against the original's way and datasets",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first argument names."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: smp-train bench NAME [options]\n")
        for name, about in BENCHMARKS.items():
            print(f"  {name:<12}{about}")
        return 0
    if argv[0] not in BENCHMARKS:
        raise ConfigError(f"bench {argv[0]}: no such benchmark; choose from {', '.join(BENCHMARKS)}")
    checkout = Path(__file__).parents[1]
    if not (checkout / "benchmarks" / f"{argv[0]}.py").is_file():
        raise ConfigError(f"bench {argv[0]}: the benchmarks are not installed: use a checkout (pip install -e .)")
    sys.path.insert(0, str(checkout))
    module = importlib.import_module(f"benchmarks.{argv[0]}")
    return int(module.main(argv[1:]))
