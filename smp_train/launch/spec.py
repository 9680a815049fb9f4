"""A checked description of a run and its nodes, from which every launcher renders."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from smp_train.arguments import Resolved, ineffective, validate
from smp_train.errors import ConfigError
from smp_train.launch import flags as launch_flags
from smp_train.launch import preflight
from smp_train.launch.environment import lint, variables
from smp_train.launch.instances import Instance, find

CODE_DIR = Path(__file__).resolve().parents[2]
"""The folder that contains the package: a checkout, or site-packages."""
CHECKOUT = (CODE_DIR / "launchers").is_dir()
"""Whether it is a checkout, with no other packages beside ours that could be imported by mistake."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Spec:
    """One run: its training flags as they will be given, on how many nodes with how many processes each."""

    train_flags: tuple[str, ...]
    resolved: Resolved
    nodes: int
    processes: int
    instance: Instance | None
    environment: dict[str, str] = field(default_factory=dict)
    """What the launcher exports: by instance type, and what the user added with --env."""
    added: frozenset[str] = frozenset()
    """Names of those that the user added; the others are defaults, which the submitting shell overrides."""
    warnings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.resolved.args.run_name

    @property
    def run_dir(self) -> str:
        """The run folder, as the training flags have it."""
        return self.resolved.args.run_dir

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.nodes * self.processes


def build(
    words: Sequence[str], *, nodes: int, processes: int | None, instance_type: str | None, env: Sequence[str] = (),
    base: str | None = None, kubernetes: bool = False, container: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Spec:  # fmt: skip
    """Check a run and return it, its training flags completed.

    ``processes`` is per node; None takes the number of GPUs of ``instance_type``. ``env`` holds NAME=VALUE. A
    relative run folder and the default folder of checkpoints are placed below ``base`` (default: the current folder).
    ``environ`` (default ``os.environ``) is the rest of the processes' environment, for `lint`; in a ``container`` they
    have no home folder.

    Raises:
        ConfigError: for everything known here that would stop the training at its start.
    """
    instance = find(instance_type) if instance_type else None
    if instance is not None and (processes or 0) > instance.gpus:
        raise ConfigError(f"--nproc {processes}: {instance.name} has {instance.gpus} GPUs; give at most that")
    processes = processes or (instance.gpus if instance else 0)
    if not processes:
        raise ConfigError("give --instance_type, or --nproc for the number of processes on each node")
    # Absolute: batch script, task and training may each start in another folder.
    completed, resolved = launch_flags.complete(words, base=base or os.getcwd())
    validate(resolved.args, nodes * processes, processes)
    preflight.check(resolved, instance, nodes, processes)
    added = read_env(env)
    found = {**(os.environ if environ is None else environ), **added}
    defaults = variables(instance, kubernetes=kubernetes)
    token = preflight.missing_token(resolved, found, home=not container)
    return Spec(
        train_flags=tuple(completed), resolved=resolved, nodes=nodes, processes=processes, instance=instance,
        environment=defaults | added, added=frozenset(added), warnings=(*lint(found), *ineffective(resolved), *token),
    )  # fmt: skip


def read_env(pairs: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE words."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {pair!r}: is not NAME=VALUE")
        found[name] = value
    return found


def profile_flags(kind: str | None) -> list[str]:
    """Return the training flags of ``--profile``."""
    known = {None: [], "torch": ["--use_profiler=1"], "nsys": ["--profile_nsys=1"]}
    if kind not in known:
        raise ConfigError(f"--profile {kind}: is not torch or nsys")
    return known[kind]


def tell(spec: Spec, further: Sequence[str] = ()) -> None:
    """Print a description of the run on stderr, its warnings, and ``further`` ones."""
    where = f"{spec.nodes} x {spec.instance.name}" if spec.instance else f"{spec.nodes} node" + "s" * (spec.nodes > 1)
    plural = "es" if spec.processes > 1 else ""
    args = spec.resolved.args
    checkpoints = ", ".join(f"{parent}/{spec.name}" for parent in args.checkpoint_dir)
    reached = launch_flags.newest_step(args, in_s3=False)
    for line in (
        f"{spec.name}: {where}, {spec.processes} process{plural} each, {spec.world_size} in all",
        f"run folder {args.run_dir}; checkpoints {checkpoints}; resumes from {args.resume_from_checkpoint}"
        + f"; the run's newest checkpoint is of step {reached}" * bool(reached),
        *preflight.memory(spec.resolved, spec.instance, spec.nodes, spec.processes),
        *(f"warning: {line}" for line in [*spec.warnings, *further]),
    ):
        print(f"smp-train: {line}", file=sys.stderr)
