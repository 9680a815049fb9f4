"""Saving during a run: checkpoints, and Hugging Face models with them or at the end."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from smp_train import distributed
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import locate, open_checkpoint, open_verified
from smp_train.checkpoints.format import BEST
from smp_train.checkpoints.hf.export import export
from smp_train.checkpoints.hf.model_folder import ENTRY_FILES
from smp_train.distributed import ALL_RANKS, heartbeat
from smp_train.errors import CheckpointError, SmpTrainError, redacted
from smp_train.progress import MOVED, Progress
from smp_train.run.resume import adapter_of
from smp_train.run.state import Run
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.run_folder import versions

log = get_logger()

MODEL_FOLDER = "hf"
"""Sub-folder of a checkpoint for the Hugging Face model of --checkpoint_type full."""


def save(run: Run, *, force: bool) -> None:
    """Save and commit a checkpoint of this step, unless it is saved already; collective."""
    progress = run.progress
    if run.saved_step == progress.step:
        return
    heartbeat.enter(heartbeat.SAVE)
    meta = {
        "run": {"name": run.start.name, "id": run.id},
        "tokens": progress.tokens,
        **run.losses,
        "best": run.best.to_json(),
        "spikes": run.spikes.state(run.train_data.global_batch),
        "lr": run.schedule(progress.step - 1),
        "data": run.train_data.state(progress.consumed),
        "model_type": run.spec.model_type,
        "model_config": run.spec.config.to_dict(),
        "arguments": json.loads(redacted(json.dumps(asdict(run.args)))),
        **({} if run.spec.lora is None else {"adapter": adapter_of(run.spec)}),
        **({} if run.spec.generation is None else {"generation_config": run.spec.generation}),
        "mesh": run.backend.topology.mesh,
        "versions": versions(),
    }
    with run.throughput.pause():
        report_saves(run)  # it waits for the save in progress
        best = run.best.step if run.args.keep_best else None
        MOVED.begin(0)
        with Progress(f"Saving step {progress.step}, rank 0's part", unit="B", shown=run.runtime.is_main, moved=MOVED):
            state = run.backend.state_dict(run.model, run.optimizer)
            run.checkpoints.save(progress.step, state, meta, force=force, saver=run.backend.saver, best=best)
        run.saved_step = progress.step
        if force or not run.checkpoints.asynchronous:
            report_saves(run)


def load(run: Run, checkpoint: Checkpoint) -> None:
    """Load weights and optimizer of a verified checkpoint; collective."""
    saver = run.backend.saver
    run.backend.load_state(run.model, run.optimizer, lambda state: checkpoint.load(state, saver))


def best_checkpoint(run: Run) -> str | None:
    """Return the path ``<run's checkpoints>/best`` if a checkpoint of that name is kept; collective."""

    def look() -> str | None:
        for parent in run.args.checkpoint_dir if run.best.step is not None else ():
            path = os.path.join(parent, run.start.name, BEST)
            with contextlib.suppress(CheckpointError):
                if locate(path).kind == "checkpoint":  # checkpoints on the nodes' own disks do not count
                    return path
        return None

    return distributed.on_main("looking for the best checkpoint", look)


def load_best(run: Run, path: str) -> None:
    """Load the best checkpoint, at ``path``, into the model; collective."""
    best = open_verified(path)
    if best.step != run.progress.step:
        load(run, best)
    run.saved_path = best.path
    log.info("The model is that of the best checkpoint, step %d: %s", best.step, best.path)


def report_saves(run: Run) -> None:
    """Wait for the save in progress, log the committed checkpoints and call the callback; collective."""
    heartbeat.enter(heartbeat.SAVE)
    step, run.saved_step = run.saved_step, 0  # until the save is reported: if a rank dies here, it is repeated
    task = f"Finishing the save of step {step}, rank 0's part"
    with Progress(task, unit="B", shown=run.runtime.is_main, moved=MOVED):
        finished = run.checkpoints.finish()
    for saved in finished:
        if saved.durable:
            run.saved_path = saved.path
        log.info("Saved %s in %.1f s", saved.path, saved.seconds)
        record = run.metrics.event("save", step=saved.step, checkpoint=saved.path, seconds=saved.seconds)
        if saved.durable and run.args.checkpoint_type == "full":
            write_model(run, saved.path, os.path.join(saved.path, MODEL_FOLDER))
        call_back(run, "on_save", record)
    run.saved_step = step


def call_back(run: Run, event: str, record: Mapping[str, Any]) -> None:
    """Call the program's callback of an ``event``, if it has one, on rank 0; collective.

    If it raises, the failure goes to ``run.callback_failure`` on every rank, and no callback is called any more. The
    loop then ends after the step in progress, the step is saved, and `train` raises the failure.
    """
    if getattr(run.inputs, event) is None or run.callback_failure is not None:
        return
    heartbeat.enter(heartbeat.CALLBACK)
    try:
        with distributed.together(f"calling {event}"):
            if run.runtime.is_main:
                run.inputs.call(event, record)
    except SmpTrainError as failure:
        run.callback_failure = failure


def end_saves(run: Run) -> None:
    """Finish the save in progress before the run raises another failure; collective."""
    try:
        report_saves(run)
    except SmpTrainError as failure:
        log.warning("%s", failure, extra=ALL_RANKS)


def save_last(run: Run) -> None:
    """Save the last completed step before the run raises a failure of its data or of a callback; collective."""
    try:
        save(run, force=True)
        report_saves(run)
    except SmpTrainError as failure:
        log.warning("%s", failure, extra=ALL_RANKS)


def complete_model(run: Run, checkpoint: Checkpoint) -> None:
    """Write the Hugging Face model of the run's newest checkpoint if an interrupted start did not; collective."""
    if not run.start.is_own or not checkpoint.durable:
        return

    def has_model() -> bool:
        storage, name = checkpoint.folder.storage, checkpoint.name
        return any(storage.exists(f"{name}/{MODEL_FOLDER}/{file}") for file in ENTRY_FILES)

    if not distributed.on_main(f"looking into {checkpoint.path}", has_model):
        write_model(run, checkpoint.path, os.path.join(checkpoint.path, MODEL_FOLDER))


def save_final_model(run: Run) -> None:
    """Write the model of the final checkpoint as a Hugging Face folder; collective."""
    assert run.args.model_dir is not None, "checked by arguments.validate"
    write_model(run, run.saved_path, run.args.model_dir)


def write_model(run: Run, checkpoint: str | None, folder: str) -> None:
    """Write the model of a checkpoint as a Hugging Face folder; collective.

    Rank 0 writes one tensor at a time while all other ranks wait: the folder may be local to its node. It writes the
    weights that the backend gathers if checkpoints do not have Hugging Face's parameter names.
    """
    task = f"writing the model to {folder}"
    with Progress(task, shown=run.runtime.is_main):
        weights = run.backend.full_weights(run.model)
        began = time.perf_counter()
        # Only weights that are read from the checkpoint have to be verified.
        opened = None if checkpoint is None else (open_verified if weights is None else open_checkpoint)(checkpoint)
    with distributed.together(task), Progress(task, unit="B", shown=run.runtime.is_main) as progress:
        if run.runtime.is_main and opened is not None:
            export(opened, folder, weights=weights, overwrite=True, on_progress=progress.set_count)
            log.info("Wrote the model to %s in %.1f s", folder, time.perf_counter() - began)
