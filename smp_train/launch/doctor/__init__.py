"""`smp-train doctor`: what is missing on this machine for training and launching, and how to fix it.

Imports no torch: it is examined in a process of its own, which may hang or crash.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from smp_train.arguments.verb_parser import positive
from smp_train.distributed import detect
from smp_train.errors import ConfigError
from smp_train.launch import network_check
from smp_train.launch.doctor import machine, packages, services
from smp_train.launch.doctor.finding import FAIL, WARN, Finding, fail


def examine(folder: Path) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that raises is a finding too."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        packages.python, packages.torch, packages.compilation, packages.transformers, packages.smp, packages.extras,
        machine.gpus, machine.adapters, lambda: machine.folder(folder), machine.shared_memory, machine.limits,
        machine.host_name, services.variables, services.slurm, services.containers, services.kubernetes, services.aws,
        services.hugging_face,
    ]  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as problem:  # of any kind: the other checks continue
            name = getattr(check, "__name__", "folder").replace("<lambda>", "folder")
            yield fail(name, f"the check itself failed: {type(problem).__name__}: {problem}", "look at this yourself")


def main(words: Sequence[str]) -> int:
    """Run ``smp-train doctor``; return 0, or 2 when something fails."""
    options = argparse.ArgumentParser(prog="smp-train doctor", description=str(__doc__), allow_abbrev=False)
    options.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    options.add_argument("--folder", type=Path, default=Path(), help="where runs are to be written (default: here)")
    options.add_argument(
        "--network", type=positive, metavar="SECONDS",
        help="under srun, torchrun, mpiexec: do all ranks reach each other?",
    )  # fmt: skip
    options.add_argument(
        "--smp", action="store_true",
        help="under torchrun in SMP's container: train two layers and compare; any other --flag=value is train's",
    )  # fmt: skip
    options.add_argument("--out", type=Path, default=Path("smp-doctor.json"), help="report of --smp")
    try:
        given, flags = options.parse_known_args(list(words))
        if flags and not given.smp:
            options.error(f"unrecognized arguments: {' '.join(flags)}")
        if malformed := [flag for flag in flags if not (flag.startswith("--") and "=" in flag)]:
            options.error(f"{' '.join(malformed)}: write flags of train as --name=value")
    except SystemExit as leaving:
        return int(leaving.code or 0)
    if given.network:
        if detect().world_size == 1:
            raise ConfigError("doctor --network: start it on all ranks, with srun, torchrun or mpiexec")
        network_check.leave_now(network_check.main(["--seconds", str(given.network)]))
    if given.smp:
        from smp_train.launch.doctor import smp

        network_check.leave_now(smp.main(given.folder.resolve(), given.out, flags))
    found: list[Finding] = []
    if not given.json:
        print(f"smp-train doctor on {socket.gethostname()}")
    for finding in examine(given.folder):
        found.append(finding)
        if not given.json:
            print(finding.line(), flush=True)
    levels = [finding.level for finding in found]
    if given.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        print(f"{levels.count(FAIL)} to mend, {levels.count(WARN)} to know, {len(found)} looked at")
    return 2 if FAIL in levels else 0
