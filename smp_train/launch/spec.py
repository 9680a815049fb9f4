"""A checked description of a run and its nodes, from which every launcher renders."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smp_train.arguments import Resolved, ineffective, validate
from smp_train.distributed.degrees import fewest_ranks
from smp_train.errors import ConfigError
from smp_train.launch import flags as launch_flags
from smp_train.launch import preflight
from smp_train.launch.command import say
from smp_train.launch.environment import lint, variables
from smp_train.launch.images import backends
from smp_train.launch.instances import Machines, find

CODE_DIR = Path(__file__).resolve().parents[2]
"""The folder that contains the package: a checkout, or site-packages."""
CHECKOUT = (CODE_DIR / "launchers").is_dir()
"""Whether `CODE_DIR` is a checkout, which holds no other packages that could be imported by mistake."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
PROFILE_FLAGS = {None: [], "torch": ["--use_profiler=1"], "nsys": ["--profile_nsys=1"]}


@dataclass(frozen=True)
class Spec:
    """One run: its completed training flags, and its machines."""

    train_flags: list[str]
    resolved: Resolved
    machines: Machines
    environment: dict[str, str]
    """Variables that the launcher exports: those of --env, and on Kubernetes, which has no node agent, the defaults."""
    warnings: list[str]

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.resolved.args.run_name

    @property
    def run_dir(self) -> str:
        """The run folder, as the training flags have it."""
        return self.resolved.args.run_dir


def build(
    training: Sequence[str], options: argparse.Namespace, *, base: str | None = None, kubernetes: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Spec:  # fmt: skip
    """Check a run and return it.

    Args:
        training: Training flags.
        options: Launch options; nodes, nproc, env and profile are read, and others if they exist.
        base: Folder below which a relative run folder and the default folder of checkpoints are placed; by default the
            current folder.
        kubernetes: The processes have no node agent.
        environ: The rest of the processes' environment, for `lint`; by default ``os.environ``.

    Raises:
        ConfigError: the training would stop at its start.
    """
    instance_type, image = getattr(options, "instance_type", None), getattr(options, "image", None)
    instance, processes = find(instance_type) if instance_type else None, options.nproc or 0
    if instance is not None and processes > instance.gpus:
        raise ConfigError(f"--nproc {processes}: {instance.name} has {instance.gpus} GPUs; give at most that")
    machines = Machines(instance, options.nodes, processes or (instance.gpus if instance else 0))
    if options.profile not in PROFILE_FLAGS:
        raise ConfigError(f"--profile {options.profile}: is not torch or nsys")
    # Absolute: batch script, task and training may each start in another folder.
    flags = [*training, *PROFILE_FLAGS[options.profile]]
    completed, resolved = launch_flags.complete(flags, base=base or os.getcwd())
    if getattr(options, "spare_nodes", None) and resolved.args.recovery == "off":
        raise ConfigError(f"--spare_nodes {options.spare_nodes}: needs --recovery in_place, which replaces lost nodes")
    backend = check_run(resolved, image, machines)
    added = read_env(options.env)
    seen = {**(os.environ if environ is None else environ), **added}
    return Spec(
        completed, resolved, machines, (variables(instance, kubernetes=True) if kubernetes else {}) | added,
        [*lint(seen), *ineffective(resolved, backend), *preflight.missing_token(resolved, seen, home=not image)],
    )  # fmt: skip


def check_run(resolved: Resolved, image: str | None, machines: Machines) -> str:
    """Check a run on each backend that its image may have; return the first backend that can run it.

    Raises:
        ConfigError: no backend can.
    """
    world_size = machines.world_size or fewest_ranks(resolved.args)
    possible = backends(resolved.args.backend, image)
    for backend in possible:
        on_backend = replace(resolved, args=replace(resolved.args, backend=backend))
        try:
            validate(on_backend.args, world_size, machines.processes or world_size)
            preflight.check(on_backend, machines)
            break
        except ConfigError:
            if backend == possible[-1]:
                raise
    return backend


def refuse_recovery(resolved: Resolved, launcher: str) -> None:
    """Raise `ConfigError` if dead processes are to be replaced, as only our launcher does."""
    if resolved.args.recovery != "off":
        raise ConfigError(
            f"--recovery {resolved.args.recovery}: the processes are started by {launcher}, which replaces none that "
            "dies; use --recovery off, or launch slurm, k8s (without --operator) or local"
        )


def read_env(pairs: Sequence[str]) -> dict[str, str]:
    """Return the variables of NAME=VALUE words."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {pair!r}: is not NAME=VALUE")
        values[name] = value
    return values


def describe(spec: Spec, more_warnings: Sequence[str] = ()) -> None:
    """Print a description of the run and its warnings on stderr."""
    instance, nodes, processes = spec.machines.instance, spec.machines.nodes, spec.machines.processes
    machines = f"{nodes} x {instance.name}" if instance else f"{nodes} node{'s' * (nodes > 1)}"
    per_node = f"{processes} process{'es' * (processes > 1)} each, {spec.machines.world_size} in all"
    args = spec.resolved.args
    checkpoints = ", ".join(f"{folder}/{spec.name}" for folder in args.checkpoint_dir)
    for line in (
        f"{spec.name}: {machines}, {per_node if processes else 'a process for each GPU'}",
        f"run folder {args.run_dir}; checkpoints {checkpoints}", launch_flags.start_line(args),
        *preflight.memory(spec.resolved, spec.machines),
    ):  # fmt: skip
        say(line)
    warn([*spec.warnings, *more_warnings])


def warn(lines: Sequence[str]) -> None:
    """Print warnings on stderr."""
    for line in lines:
        say(f"warning: {line}")
