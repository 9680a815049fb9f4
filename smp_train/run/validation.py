"""Validation during a run."""

from __future__ import annotations

from smp_train import distributed, train_utils
from smp_train.distributed import heartbeat
from smp_train.errors import ConfigError
from smp_train.progress import Progress
from smp_train.run.saving import call_back
from smp_train.run.state import Run
from smp_train.telemetry.logging_utils import get_logger, perplexity, validation_line

log = get_logger()


class AskedToStop(Exception):
    """Raised on every rank when a stop request interrupts a validation."""


def raise_if_asked_to_stop(run: Run) -> None:
    """Raise `AskedToStop` on all ranks if any rank was asked to stop; collective."""
    if distributed.any_rank(run.stop.is_requested(look_for_file=run.runtime.is_main)):
        raise AskedToStop


def validate(run: Run) -> bool:
    """Measure the loss on the validation data and write it; collective.

    Returns False when any rank was asked to stop meanwhile, and discards the partial result.
    """
    if run.validation is None:
        raise ConfigError("there is no validation data; give --test_dir")
    heartbeat.enter(heartbeat.VALIDATION)
    try:
        shown = Progress(f"Validation at step {run.progress.step}", len(run.validation), "batches", run.runtime.is_main)
        with run.throughput.pause(), shown:
            loss, _ = train_utils.evaluate(
                run.backend, run.model, shown.over(train_utils.read_together(
                    run.validation, "reading the validation data", lambda: raise_if_asked_to_stop(run)
                )),
            )  # fmt: skip
    except AskedToStop:
        log.info("Asked to stop: the validation at step %d is abandoned", run.progress.step)
        return False
    log.info(validation_line(run.progress.step, loss))
    record = run.metrics.event("evaluate", step=run.progress.step, loss=loss, perplexity=perplexity(loss))
    run.losses["validation_loss"], run.validated = loss, run.progress.step
    if run.progress.step > 0:
        run.best.see(run.progress.step, loss)
    call_back(run, "on_validation", record)
    return True


