"""The shortest FSDP2 loop: fully_shard, a fused AdamW, rows that are on the device already."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.peers.job import GRAD_CLIP, Clock, Job
from smp_train.models.build import decoder_layers


def drive(job: Job, clock: Clock) -> None:
    """Train by hand."""
    job.start_group()
    model = job.load()
    shard(model, bf16=job.bf16, compiled=job.compiled)
    optimizer = job.optimizer(model)
    rows = job.all_rows()
    for step in range(job.steps):
        clock.step(update(model, optimizer, job.batch_of(rows, step), GRAD_CLIP))
    clock.write("FSDP2" + ", layers compiled" * job.compiled)
    dist.destroy_process_group()


def shard(model: nn.Module, *, bf16: bool, compiled: bool = False) -> None:
    """Shard every decoder layer by itself, and the rest."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for _, layer in decoder_layers(model):
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, clip: float) -> Tensor:
    """Make one update from a batch of full rows and return this rank's loss."""
    optimizer.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss
