"""A loop under Hugging Face's accelerate."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from benchmarks.peers.job import GRAD_CLIP, Clock, Job


def drive(job: Job, clock: Clock) -> None:
    """Train by a prepared model, optimizer and loader; several processes as for `trainer`."""
    sharded = job.cuda and job.world > 1
    accelerator = Accelerator(
        mixed_precision="bf16" if job.bf16 else "no", cpu=not job.cuda,
        fsdp_plugin=FullyShardedDataParallelPlugin(2, auto_wrap_policy="transformer_based_wrap") if sharded else None,
    )  # fmt: skip
    model = job.load()
    if job.compiled:
        model.compile()
    loader: Any = DataLoader(list(job.all_rows()), batch_size=job.batch, pin_memory=job.cuda)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, job.optimizer(model), loader)
    for step, ids in enumerate(loader):
        if step == job.steps:
            break
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step(loss)
    clock.write(("FSDP2" if sharded else "DDP" if job.world > 1 else "one device") + ", compiled" * job.compiled)
