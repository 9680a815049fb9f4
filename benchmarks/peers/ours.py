"""The package itself, with its data, its vote and its log."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.job import BETAS, EPSILON, GRAD_CLIP, WEIGHT_DECAY, Clock, Job
from benchmarks.program import STEADY, below, logged, opened, stepping, words


def drive(job: Job, clock: Clock) -> None:
    """Train by `train_lib`'s steps, of a run that is opened from flags."""
    folder = Path(job.out).parent
    flags = {
        **STEADY, **below(folder), "use_synthetic_data": None, "hf_pretrained_model_name_or_dir": job.model,
        "training_dir": job.rows, "shuffle": "none", "train_batch_size": job.batch, "max_context_width": job.seq_len,
        "bf16": int(job.bf16), "lr": job.lr, "beta1": BETAS[0], "beta2": BETAS[1], "adam_epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY, "grad_clip": GRAD_CLIP, "distributed_backend": "auto" if job.cuda else "gloo",
        **job.flags,
    }  # fmt: skip
    with opened(words(flags)) as run:
        with stepping(run) as one:
            for _ in range(job.steps):
                one()
                clock.step(0.0)
        clock.losses = [record["loss"] for record in logged(folder)] if job.rank == 0 else []
        clock.write(" ".join(words(job.flags)) or "defaults", mean=False)
