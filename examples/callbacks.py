"""Follow a run: a table of its steps, the newest checkpoint, and an end once the validation loss is good enough.

    python examples/callbacks.py
    torchrun --nproc_per_node 2 examples/callbacks.py

Started again, the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from smp_train import train

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
RUN = Path("runs/callbacks")
GOOD_ENOUGH = 6.0
COLUMNS = ["step", "loss", "grad_norm", "tokens_per_sec"]


def to_table(record: dict[str, Any]) -> None:
    """Add a line to steps.csv. Callbacks run in the process of rank 0 alone; other ranks wait for it."""
    new = not (RUN / "steps.csv").exists()
    with (RUN / "steps.csv").open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if new:
            table.writeheader()
        table.writerow(record)


def stop_when_good(record: dict[str, Any]) -> None:
    """Ask the run to finish its step, save and end, as `touch STOP` does; to raise would fail it instead."""
    if record["loss"] < GOOD_ENOUGH:
        (RUN / "STOP").touch()


def newest(record: dict[str, Any]) -> None:
    """Tell other programs which checkpoint is complete."""
    (RUN / "newest").write_text(record["checkpoint"])


def main() -> None:
    run = train(
        on_step=to_table, on_validation=stop_when_good, on_save=newest,
        training_dir=[str(SAMPLE / "train")], test_dir=str(SAMPLE / "test"), validation_freq=10,
        model_type="llama_v2", vocab_size=1024, max_context_width=128, hidden_width=64, num_layers=2, num_heads=4,
        intermediate_size=128, activation_checkpointing="none", lr_decay_style="constant",
        train_batch_size=4, max_steps=400, lr=5e-3, warmup=5, logging_freq=5, run_name="callbacks",
        resume_from_checkpoint="checkpoints",
    )  # fmt: skip
    how = "stopped" if run.stopped else "finished"
    print(f"{how} at step {run.step}, validation loss {run.validation_loss:.3f}, {(RUN / 'newest').read_text()}")


if __name__ == "__main__":
    main()
