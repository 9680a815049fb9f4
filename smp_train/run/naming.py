"""The name of a run: given by flags, taken from the resumed run, or derived from the model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from smp_train.arguments import Arguments, Resolved
from smp_train.checkpoints.find import Location, open_checkpoint
from smp_train.checkpoints.folder import folder_of_run
from smp_train.checkpoints.owner import look_at_owner, owner_of
from smp_train.distributed.job import Job
from smp_train.errors import ConfigError, first_few
from smp_train.models.flops import count_parameters
from smp_train.models.resolve import names_model, resolve
from smp_train.telemetry.run_folder import RunFolder as OutputFolder


def base_name(resolved: Resolved, args: Arguments, resumed: Location | None) -> tuple[str, bool]:
    """Return the run's name, before `new_run_name` numbers it, and whether the user gave it; not collective.

    A name that a launcher derives (`Arguments.label`) is not the user's. ``resumed`` is the location of
    --resume_from_checkpoint.
    """
    if args.run_name:
        return args.run_name, args.run_name != args.label
    if resolved.given("run_dir") and (name := OutputFolder(args.run_dir).run_name()):
        return name, False
    if resumed is not None and not names_model(args):
        runs = resumed.runs
        if len(runs) > 1:
            raise ConfigError(
                f"--resume_from_checkpoint {args.resume_from_checkpoint}: holds {len(runs)} runs, and no flag names "
                f"the run or its model; give --run_name, one of {first_few(runs, most=8)}"
            )
        if runs:
            return runs[0], False
        if resumed.kind in ("run", "checkpoint"):
            checkpoint = open_checkpoint(resumed.path)
            return f"{checkpoint.marker.model_type}-{rounded(count_parameters(checkpoint.model_config()))}", False
    spec = resolve(args)
    return f"{spec.model_type}-{rounded(count_parameters(spec.config))}", False


def rounded(parameters: int) -> str:
    """Return a number of parameters as names of models have it: 6.7b, 124.4m, 31.9k."""
    for unit, size in (("b", 10**9), ("m", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}".removesuffix(".0") + unit
    return str(parameters)


def new_run_name(args: Arguments, base: str, parents: Sequence[str], job: Job, *, is_given: bool) -> str:
    """Return the name of a run that resumes from nothing: ``base``, or ``base-2`` and so on if that is taken.

    A name is taken if a run of that name is running, or has a committed checkpoint in any tier. A restarted job may
    reuse the name of its earlier start. Raises `ConfigError` if the user gave a name that is taken.
    """
    free = None
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        folders = [folder_of_run(parent, name) for parent in parents]
        owner = owner_of(folders)
        if owner is not None and job.is_restart_of(owner.job):
            return name
        tiers = [folder_of_run(parent, name) for parent in args.checkpoint_dir]
        holder = next((folder for folder in tiers if folder.has_committed()), None)
        if is_given:
            if holder is not None:
                raise ConfigError(
                    f"--run_name {name}: is taken by a run at step {holder.committed()[0].step} in {holder.location}; "
                    f"to go on with it, add --resume_from_checkpoint {parents[0]}; for a new run give another "
                    "--run_name"
                )
            return base
        in_use = any(look_at_owner(folder, job)[1] is not False for folder in folders)
        if free is None and holder is None and not in_use:
            free = name
        if free is not None and owner is None and holder is None:
            return free  # no run with a higher number belongs to this job
    raise AssertionError("unreachable")
