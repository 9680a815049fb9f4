"""Options of `smp-train launch <platform>`, which share a command line with the training flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from smp_train.arguments.aliases import NAMES
from smp_train.arguments.parse import canonical
from smp_train.arguments.values import is_bool, nearest, read_bool
from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.errors import ConfigError


def _switch(text: str) -> bool:
    if not is_bool(text):
        raise argparse.ArgumentTypeError(f"{text}: expects 0 or 1 (or true, false)")
    return read_bool(text)


class LaunchParser(VerbParser):
    """The parser of one platform's options. Values of the wrong kind are `ConfigError`."""

    def __init__(self, platform: str, about: str, usage: str = "[options]") -> None:
        super().__init__(
            prog=f"smp-train launch {platform}", usage=f"%(prog)s {usage} <training flags>", description=about,
            epilog="Every other flag is a training flag.", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.names: dict[str, argparse.Action] = {}

    def add(
        self, name: str, about: str, kind: type = str, default: Any = None, *, many: bool = False, metavar: str = "X"
    ) -> None:
        """Add an option: ``kind`` is str, int (from 1 on) or bool; ``many`` takes several values, also repeatedly."""
        if default is not None:
            about += f" (default {default})"
        settings: dict[str, Any] = {"type": str, "default": default, "metavar": metavar}
        if many:
            settings |= {"nargs": "+", "default": []}
        elif kind is bool:
            settings = {"type": _switch, "nargs": "?", "const": True, "default": False, "metavar": "0|1"}
        elif kind is int:
            settings |= {"type": at_least(1), "metavar": "N"}
        self.names[name] = self.add_argument(f"--{name}", help=about.replace("%", "%%"), **settings)

    def share(self, *names: str) -> LaunchParser:
        """Add options of `SHARED`; return the parser."""
        for name in names:
            self.add(name, **SHARED[name])
        return self


SHARED: dict[str, dict[str, Any]] = {
    "dry_run": {"about": "print exactly what would be done, and do nothing", "kind": bool},
    "check": {"about": "check everything that can be checked beforehand, and start nothing", "kind": bool},
    "nodes": {"about": "number of nodes", "kind": int, "default": 1},
    "instance_type": {"about": "EC2 instance type, such as p5.48xlarge (on HyperPod also ml.p5.48xlarge)"},
    "nproc": {"about": "processes on each node; without it, one per GPU, or one", "kind": int},
    "image": {"about": "container image that holds this package; docker_build.sh makes it"},
    "spare_nodes": {"about": "further nodes, to take the place of lost ones; with --recovery in_place", "kind": int},
    "preflight": {"about": "before training, all nodes reach each other in so many seconds, or are named", "kind": int},
    "max_attempts": {"about": "starts without a new checkpoint before giving up", "kind": int, "default": 3},
    "env": {"about": "further environment variables: NAME=VALUE", "many": True},
    "profile": {"about": "torch: PyTorch profiler; nsys: Nsight Systems, which must be in the image or in NSYS_DIR"},
    "job_name": {"about": "name of the job; without it, from the run's name"},
}  # fmt: skip
"""Options of several platforms."""


def split(arguments: Sequence[str], parser: LaunchParser) -> tuple[argparse.Namespace, list[str]]:
    """Return (launch options, training flags in their order).

    Raises:
        ConfigError: an option lacks its value, or a flag is neither a launch option nor a training flag.
    """
    options: list[str] = []
    training: list[str] = []
    group = training
    remaining = iter(map(str, arguments))
    for argument in remaining:
        if argument.startswith("--") or argument == "-h":
            written, equals, value = argument.partition("=")
            name = canonical(written[2:])
            is_option = name in parser.names or written in ("-h", "--help")
            if not is_option and name not in NAMES and name.removeprefix("no_") not in NAMES:
                hint = nearest(name, [*parser.names, *NAMES]).replace("mean ", "mean --")
                raise ConfigError(f"unknown flag {written}{hint or '; see --help'}")
            group = options if is_option else training
            if name == "sbatch" and not equals:  # its value is an option too, which argparse would not take
                equals, value = "=", next(remaining, "")
            if name in parser.names:
                argument = f"--{name}{equals}{value}"
        group.append(argument)
    values = parser.parse_args(options)
    if getattr(values, "dry_run", False) and values.check:
        raise ConfigError(
            "--dry_run and --check: give one of them; --dry_run prints what would be submitted and asks nobody, "
            "--check asks whether it would be accepted and prints no text"
        )
    return values, training
