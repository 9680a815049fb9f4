"""A tiny model on any mesh, trained a little, and a hash of its state: for tests of checkpoints on several ranks."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from smp_train.distributed.host_copy import leaves
from smp_train.models.hub_state import gather_state


@contextlib.contextmanager
def group():
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


class Small(nn.Module):
    """Sizes that do not divide evenly (some ranks hold nothing); two dtypes; a tied weight; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 3)
        self.third = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.embedding, self.head = nn.Embedding(9, 7), nn.Linear(7, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.embedding(tokens)
        return self.third(self.second(self.first(x)).bfloat16()).float().mean() + self.head(x).square().mean()


def prepare(layout: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on a mesh of all ranks (``plain``, ``fsdp`` or ``tensor``), and its optimizer."""
    torch.manual_seed(seed)
    model = Small()
    if layout != "plain":
        world = dist.get_world_size()
        if layout == "fsdp":
            mesh = init_device_mesh("cpu", (world,))
        else:
            both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shard", "tensor"))
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(model, both["tensor"], plan)
            mesh = both["shard"]
        for module in (model.first, model.third, model):
            fully_shard(module, mesh=mesh)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)  # as the training loop does: dropout depends on the step alone
        model(torch.randint(0, 9, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return a hash of every whole tensor of the state, by name."""
    found = {}
    for path, value in leaves(gather_state(model, optimizer)):
        name = ".".join(path)
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()}"
    return found


def same_on_all(results: list[Any]) -> Any:
    assert all(result == results[0] for result in results)
    return results[0]
