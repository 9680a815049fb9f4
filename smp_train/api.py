"""Training, evaluation and generation from Python: `train`, `evaluate`, `generate`, `load_model`.

Settings are the flags of the command, by name. Failures are `smp_train.errors.SmpTrainError`; ``exit_code`` is the
command's exit code. Each function works in one process, such as a notebook's, and on every rank of a launcher.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ParamSpec, TypeVar

from smp_train import distributed, train_lib
from smp_train.arguments import Arguments, validate
from smp_train.arguments.parse import from_keywords
from smp_train.arguments.program_inputs import ProgramInputs
from smp_train.arguments.validation import prompts_only
from smp_train.distributed.agree import is_alone
from smp_train.errors import ConfigError
from smp_train.failure_report import FailureReporter, report_uncaught
from smp_train.inference import evaluation, generation
from smp_train.inference.open_model import load_model
from smp_train.models.resolve import settled_flags
from smp_train.telemetry.metrics import history, read_metrics

__all__ = ["evaluate", "generate", "load_model", "train"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings(ProgramInputs, Arguments):
    """Every keyword of `train`: a program's own data, loss and callbacks, and all flags of ``smp-train train``."""


@dataclass(frozen=True)
class Trained:
    """How a run ended.

    Attributes:
        run_name: its name, given or derived from the model.
        run_dir: its folder, with ``metrics.jsonl``, ``run.json`` and logs.
        step: number of updates, in all starts.
        stopped: whether it ended on request, before its last step.
        checkpoint: location of its newest checkpoint, or of its best with ``load_best_model_at_end``; None without
            checkpoints.
        loss: loss of the last logged step, in nats per counted token; None if no step was logged.
        validation_loss: loss of the last validation; None without validation.
        best_step: step of the lowest validation loss; None without validation.
    """

    run_name: str
    run_dir: str
    step: int
    stopped: bool
    checkpoint: str | None
    loss: float | None
    validation_loss: float | None
    best_step: int | None

    def history(self) -> list[dict[str, Any]]:
        """Return the records of ``metrics.jsonl`` that no resume superseded; records of steps have no ``event``."""
        return history(read_metrics(self.run_dir))


def _with_keywords_of(settings: Callable[P, Any]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the keywords of a dataclass, for type checkers, ``help`` and completion."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        fields = inspect.signature(settings).parameters.values()
        keywords = [field.replace(kind=field.KEYWORD_ONLY) for field in fields]
        function.__signature__ = inspect.signature(function).replace(parameters=keywords)  # type: ignore[attr-defined]
        return function

    return decorate


def _for_programs(function: Callable[P, T]) -> Callable[P, T]:
    """On several ranks, let a failure that the program does not catch end each rank as it would end the command."""

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        if not is_alone():
            raise ConfigError(
                "a process group is there already, of this program's own or of a call that failed; call smp_train "
                "before torch.distributed.init_process_group, or after destroy_process_group"
            )
        ranks = distributed.detect()
        try:
            return function(*arguments, **keywords)
        except Exception:
            if ranks.world_size > 1:
                report_uncaught(FailureReporter(bool(keywords.get("debug")), ranks))
            raise

    return call


@_with_keywords_of(Settings)
@_for_programs
def train(**settings: Any) -> Trained:
    """Train as ``smp-train train`` does, and return how the run ended.

    The keywords are the fields of `Settings`: every flag by name, as docs/flags.md lists them, under the same rules,
    and ``training_data``, ``validation_data``, ``loss``, ``on_step``, ``on_validation`` and ``on_save`` (see
    `ProgramInputs`). ``SM_HP_*`` are not read. Collective under a launcher. Call it in the main thread, which handles
    requests to stop.

    Raises:
        SmpTrainError: where the command would fail. If a callback raises an exception, the message names the callback
            and the step, and the exception is the cause.
    """
    names = [field.name for field in fields(ProgramInputs) if field.name in settings]
    inputs = ProgramInputs(**{name: settings.pop(name) for name in names})
    resolved = from_keywords(settings, inputs)
    args, ranks = resolved.args, distributed.detect()
    if args.print_config:
        raise ConfigError("--print_config is for the command; the settings of a run are in its run.json")
    if prompts_only(args) and inputs.validation_data is None:
        raise ConfigError("--prompt with --evaluate_only 1: call smp_train.generate")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("train runs in the main thread, which takes requests to stop; call it there")
    validate(args, ranks.world_size, ranks.local_world_size, inputs)
    settled_flags(args)
    run = train_lib.train(resolved, ranks)
    return Trained(
        run_name=run.args.run_name, run_dir=run.args.run_dir, step=run.progress.step, stopped=run.stopped,
        checkpoint=run.saved_path, loss=run.losses.get("loss"), validation_loss=run.losses.get("validation_loss"),
        best_step=run.best.step,
    )  # fmt: skip


evaluate = _for_programs(evaluation.evaluate)
generate = _for_programs(generation.generate)
