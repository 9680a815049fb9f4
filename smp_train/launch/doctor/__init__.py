"""`smp-train doctor`: problems of this machine for training and launching, and their remedies.

Imports no torch: a separate process, which may hang or crash, examines it.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from smp_train.arguments.verb_parser import VerbParser, positive
from smp_train.distributed import detect
from smp_train.errors import ConfigError
from smp_train.failure_report import exit_immediately
from smp_train.launch import network_check
from smp_train.launch.doctor import machine, packages, services
from smp_train.launch.doctor.finding import FAIL, WARN, Finding, fail


def examine(folder: Path) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that raises an exception gives a finding too."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        packages.python, packages.torch, packages.compilation, packages.transformers, packages.smp, packages.extras,
        machine.gpus, machine.adapters, partial(machine.folder, folder), machine.shared_memory, machine.limits,
        machine.host_name, services.variables, services.slurm, services.containers, services.kubernetes, services.aws,
        services.hugging_face,
    ]  # fmt: skip
    for check in checks:
        name = getattr(check, "__name__", "folder")
        try:
            yield from check()
        except Exception as problem:  # the next checks go on after any exception
            yield fail(name, f"the check itself failed: {type(problem).__name__}: {problem}", "look at this yourself")


def _read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (options, flags of train for --smp)."""
    parser = VerbParser(prog="smp-train doctor", description=str(__doc__), allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    parser.add_argument("--folder", type=Path, default=Path(), help="where runs are to be written (default: here)")
    parser.add_argument(
        "--network", type=positive, metavar="SECONDS",
        help="under srun, torchrun, mpiexec: do all ranks reach each other?",
    )  # fmt: skip
    parser.add_argument(
        "--smp", action="store_true",
        help="under torchrun in SMP's container: train two layers and compare; any other --flag=value is train's",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("smp-doctor.json"), help="report of --smp")
    options, flags = parser.parse_known_args(list(arguments))
    if flags and not options.smp:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    if malformed := [flag for flag in flags if not (flag.startswith("--") and "=" in flag)]:
        parser.error(f"{' '.join(malformed)}: write flags of train as --name=value")
    return options, flags


def main(arguments: Sequence[str]) -> int:
    """Run ``smp-train doctor``; return 0, or 2 if a check fails."""
    options, flags = _read(arguments)
    if options.network:
        if detect().world_size == 1:
            raise ConfigError("doctor --network: start it on all ranks, with srun, torchrun or mpiexec")
        exit_immediately(network_check.main(["--seconds", str(options.network)]))
    if options.smp:
        from smp_train.launch.doctor import smp

        exit_immediately(smp.main(options.folder.resolve(), options.out, flags))
    findings: list[Finding] = []
    if not options.json:
        print(f"smp-train doctor on {socket.gethostname()}")
    for finding in examine(options.folder):
        findings.append(finding)
        if not options.json:
            print(finding.line(), flush=True)
    levels = [finding.level for finding in findings]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(f"{levels.count(FAIL)} to mend, {levels.count(WARN)} to know, {len(findings)} looked at")
    return 2 if FAIL in levels else 0
