"""A run: its parts, made by `build_run`, and its position."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from smp_train import distributed, train_utils
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.program_inputs import ProgramInputs
from smp_train.backends.base import Backend
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.save import CheckpointManager
from smp_train.data.batch import Batch
from smp_train.data.indexed import ValidationData
from smp_train.data.loader import Loader
from smp_train.distributed import Runtime, heartbeat
from smp_train.errors import SmpTrainError
from smp_train.learning_rates import Schedule
from smp_train.models.hugging_face import ModelSpec
from smp_train.run.best import Best
from smp_train.run.spikes import Spikes
from smp_train.run.start import Start
from smp_train.run.stop import StopRequest
from smp_train.telemetry.audit import DataAudit
from smp_train.telemetry.metrics import MetricsWriter, Throughput
from smp_train.telemetry.run_folder import RunFolder
from smp_train.telemetry.screen import Screen
from smp_train.telemetry.step_times import StepTimes

NO_LIMIT = 10**9
"""Steps of a run that ends when its data ends."""


@dataclass
class Position:
    """Position of the run; with weights and optimizer state, all that a resume needs."""

    step: int = 0
    consumed: int = 0
    """Samples of the global order used in updates."""
    tokens: int = 0
    """Counted tokens used in updates."""


@dataclass(kw_only=True)
class Shared:
    """State of a run besides weights and optimizer; a rank that replaces another takes all of it from a living rank."""

    progress: Position = field(default_factory=Position)
    best: Best = field(default_factory=Best)
    callback_failure: SmpTrainError | None = None
    """The failure of a callback, which ends the run after the step in progress; the same on all ranks."""
    losses: dict[str, float] = field(default_factory=dict)
    """The last ``loss`` and ``validation_loss`` that were logged, for checkpoints."""
    spikes: Spikes = field(default_factory=Spikes)
    stopped: bool = False
    """Whether the run ended on request, before its last step."""
    unfinished: bool = False
    """Whether the validation or the save after the last update is still to be done."""
    validated: int = 0
    """Step of the last validation."""
    record: dict[str, Any] | None = None
    """The last record of a step, for the log."""
    outcome: list[float] = field(default_factory=list)
    """The sums of `recovery.commit` in the last step."""
    data_ended: bool = False
    """Whether no rank has a sample after the last completed step: all epochs of streamed data have ended."""
    truncated: int = 0
    """Number of rows that were truncated since this start (--long truncate)."""
    truncated_targets: int = 0
    """Number of tokens with loss that were cut off truncated rows."""
    saved_step: int = 0
    """Step of the newest checkpoint that this run wrote or resumed from; step 0 is never saved."""
    saved_path: str | None = None


@dataclass(kw_only=True)
class Run(Shared):
    """All parts of a run, made by `build_run`."""

    resolved: Resolved
    start: Start
    runtime: Runtime
    backend: Backend
    spec: ModelSpec
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    train_data: Loader
    validation: ValidationData | None
    schedule: Schedule
    total_steps: int
    checkpoints: CheckpointManager
    folder: RunFolder
    metrics: MetricsWriter
    throughput: Throughput
    stop: StopRequest
    audit: DataAudit | None
    resumed: Checkpoint | None
    """The checkpoint to resume from; None for a fresh start."""
    generation: int = 0
    """The generation of ranks that it was built for, if dead ranks are replaced."""
    inputs: ProgramInputs = field(default_factory=ProgramInputs)
    """The program's inputs besides flags."""
    pending_step: train_utils.PendingStep | None = None
    screen: Screen = field(default_factory=Screen)
    times: StepTimes | None = None
    id: str = ""
    """Id by which trackers tell apart runs of the same name; a resumed run keeps its id."""
    choice: dict[str, Any] | None = None
    """The record of --auto's choice for run.json; None without --auto."""
    batches: Generator[list[Batch], None, None] = field(default_factory=lambda: (_ for _ in ()))
    """This rank's micro-batches of one step after another, from the position of the run."""
    batch: list[Batch] | None = None
    """The micro-batches of the next step, if they have been read."""
    has_met: bool = False
    """Whether the ranks have met again since a rank's death, and their state is still to be made equal."""

    @property
    def args(self) -> Arguments:
        """The settings."""
        return self.resolved.args

    def read_from_here(self) -> None:
        """Begin to read batches at the position of the run."""
        self.batches.close()
        self.batches, self.batch = self.train_data.batches(self.progress.consumed), None

    def close(self) -> None:
        """Close files, leave the process group, and restore signal handlers."""
        self.screen.close()
        heartbeat.end()
        self.metrics.close()
        if self.audit is not None:
            self.audit.close()
        self.checkpoints.close()
        distributed.stop()
        self.stop.close()  # last: a late request to stop must not kill a run that has finished
