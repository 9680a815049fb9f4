"""Hugging Face's Trainer, at its best public settings: bf16, fused AdamW, sdpa, no log line while it is timed."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.job import BETAS, EPSILON, GRAD_CLIP, WEIGHT_DECAY, Clock, Job


class Rows(Dataset):
    """All rows, each its own labels."""

    def __init__(self, job: Job) -> None:
        self.rows = job.all_rows()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class InOrder(Trainer):
    """Reads rows as they are stored, and keeps the loss of each step on the device."""

    latest: torch.Tensor

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def compute_loss(self, *args: Any, **more: Any) -> Any:
        """See `Trainer.compute_loss`."""
        loss = super().compute_loss(*args, **more)
        self.latest = (loss[0] if isinstance(loss, tuple) else loss).detach()
        return loss


def drive(job: Job, clock: Clock) -> None:
    """Train by `Trainer`; several processes share the gradients (DDP) on a CPU, and are sharded (FSDP) on GPUs."""
    sharded = job.cuda and job.world > 1
    fsdp: Any = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}} if sharded else {}
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=job.steps, per_device_train_batch_size=job.batch, learning_rate=job.lr,
            lr_scheduler_type="constant", adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPSILON,
            weight_decay=WEIGHT_DECAY, max_grad_norm=GRAD_CLIP, optim="adamw_torch_fused", bf16=job.bf16,
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not job.cuda,
            torch_compile=job.compiled, ddp_backend="gloo" if job.world > 1 and not job.cuda else None, **fsdp,
        )  # fmt: skip
        trainer = InOrder(model=job.load(), args=settings, train_dataset=Rows(job))

        class Timed(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.step(trainer.latest)

        trainer.add_callback(Timed())
        trainer.train()
    clock.write(("FSDP2" if sharded else "DDP" if job.world > 1 else "one device") + ", compiled" * job.compiled)
