"""A checked description of a run and its nodes, from which every launcher renders."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from smp_train.arguments import Resolved, ineffective, validate
from smp_train.distributed.degrees import fewest_ranks
from smp_train.errors import ConfigError
from smp_train.launch import flags as launch_flags
from smp_train.launch import preflight
from smp_train.launch.environment import lint, variables
from smp_train.launch.images import backends
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
    """Processes on each node; 0: one for each GPU, which are counted when the run starts."""
    instance: Instance | None
    environment: dict[str, str] = field(default_factory=dict)
    """What the launcher exports: variables of --env; on Kubernetes, which has no node agent, its defaults too."""
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
        """Processes of the whole run; 0: not known yet."""
        return self.nodes * self.processes


def build(
    words: Sequence[str], *, nodes: int, processes: int | None, instance_type: str | None, env: Sequence[str] = (),
    image: str | None = None, base: str | None = None, kubernetes: bool = False,
    environ: Mapping[str, str] | None = None,
) -> Spec:  # fmt: skip
    """Check a run and return it, its training flags completed.

    ``processes`` is per node; None takes the number of GPUs of ``instance_type``. ``env`` holds NAME=VALUE. A
    relative run folder and the default folder of checkpoints are placed below ``base`` (default: the current folder).
    ``environ`` (default ``os.environ``) is the rest of the processes' environment, for `lint`; in a container, which
    ``image`` is for, they have no home folder.

    Raises:
        ConfigError: for everything known here that would stop the training at its start.
    """
    instance = find(instance_type) if instance_type else None
    if instance is not None and (processes or 0) > instance.gpus:
        raise ConfigError(f"--nproc {processes}: {instance.name} has {instance.gpus} GPUs; give at most that")
    processes = processes or (instance.gpus if instance else 0)
    # Absolute: batch script, task and training may each start in another folder.
    completed, resolved = launch_flags.complete(words, base=base or os.getcwd())
    backend = check_run(resolved, image, instance, nodes, processes)
    added = read_env(env)
    found = {**(os.environ if environ is None else environ), **added}
    defaults = variables(instance, kubernetes=True) if kubernetes else {}
    token = preflight.missing_token(resolved, found, home=not image)
    return Spec(
        train_flags=tuple(completed), resolved=resolved, nodes=nodes, processes=processes, instance=instance,
        environment=defaults | added,
        warnings=(*lint(found), *ineffective(resolved, backend), *token),
    )  # fmt: skip


def check_run(
    resolved: Resolved, image: str | None, instance: Instance | None, nodes: int, processes: int
) -> str:  # fmt: skip
    """Check a run on each backend that may be in its image, and return the first one that can run it.

    Raises:
        ConfigError: no backend can.
    """
    world_size = nodes * processes or fewest_ranks(resolved.args)
    possible = backends(resolved.args.backend, image)
    for backend in possible:
        on_backend = replace(resolved, args=replace(resolved.args, backend=backend))
        try:
            validate(on_backend.args, world_size, processes or world_size)
            preflight.check(on_backend, instance, nodes, processes)
        except ConfigError:
            if backend == possible[-1]:
                raise
        else:
            break
    return backend


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
    processes = f"{spec.processes} process{plural} each, {spec.world_size} in all"
    args = spec.resolved.args
    checkpoints = ", ".join(f"{parent}/{spec.name}" for parent in args.checkpoint_dir)
    for line in (
        f"{spec.name}: {where}, {processes if spec.processes else 'a process for each GPU'}",
        f"run folder {args.run_dir}; checkpoints {checkpoints}",
        launch_flags.start_line(args),
        *preflight.memory(spec.resolved, spec.instance, spec.nodes, spec.processes),
        *(f"warning: {line}" for line in [*spec.warnings, *further]),
    ):
        print(f"smp-train: {line}", file=sys.stderr)
