"""A run's own model, built, sharded and stepped as rank 0 of any world, without its memory, its peers or a GPU."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # before torch 2.11, registers the collectives' Meta kernels
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp_train.arguments import Arguments
from smp_train.backends.native import NativeBackend
from smp_train.distributed import Runtime
from smp_train.distributed.device_profile import DeviceProfile
from smp_train.distributed.dtensor import local_tensor
from smp_train.distributed.host_copy import local_bytes
from smp_train.distributed.host_memory import pinned_bytes
from smp_train.errors import ConfigError, one_line
from smp_train.models.hub_state import gather_state, present
from smp_train.models.resolve import ModelSpec
from smp_train.planning import stepping
from smp_train.planning.stepping import UPDATE, Phase
from smp_train.planning.tracker import GRADIENTS, HOST, OPTIMIZER, PARAMETERS
from smp_train.planning.work import Work, WorkCounter

ON_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
ADDS_TO_FLOAT32 = torch.ops.aten.addmm.dtype_out
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


class FakeMode(FakeTensorMode):
    """Fake tensors, without the cache for operations on storages, whose keys would keep what offloading frees."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Run an operation."""
        if func is ADDS_TO_FLOAT32:  # torch 2.11 takes its type for a factor
            return (kwargs or {})["out"]
        if func is GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:  # torch's fake form takes bfloat16 alone
            return _grouped_product(*args, **(kwargs or {}))
        self.cache_enabled = func not in ON_STORAGES
        return super().dispatch(func, types, args, kwargs or {})


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **options: Any) -> Tensor:
    """Return a tensor with the shape of a grouped product."""
    offsets = options.get("offs", offsets)
    groups = (len(offsets),) if offsets is not None and left.dim() == right.dim() else ()
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


class FakeBackend(NativeBackend):
    """The native backend, whose parameters have a layout and no memory."""

    mode: FakeTensorMode

    def _allocate(self, model: nn.Module) -> None:
        with self.mode:
            super()._allocate(model)


@dataclass(frozen=True)
class Memory:
    """What a step takes on rank 0, in bytes, and does; other ranks' shards are no larger."""

    peaks: dict[Phase, Counter[str]]
    """By phase and use."""
    trained: int
    """Parameters with a gradient, of the whole model."""
    work: Work = field(default_factory=Work)
    """What it does meanwhile."""
    pinned: int = 0
    """Parameters and gradients in page-locked memory, each tensor by `pinned_bytes`."""
    saved: int = 0
    """The same of the copy that is saved: parameters and the optimizer's two moments, each as checkpoints name it."""

    def on_device(self, phase: Phase) -> dict[str, int]:
        """Return what is on the device in a phase, by use."""
        return {use: size for use, size in self.peaks[phase].items() if use != HOST}

    @property
    def state(self) -> dict[str, int]:
        """Weights, gradients and state of the optimizer, as the update has them."""
        return {use: self.peaks[UPDATE, 0][use] for use in (PARAMETERS, GRADIENTS, OPTIMIZER)}

    @property
    def host(self) -> int:
        """The most that offloaded activations take in host memory."""
        return max(peak[HOST] for peak in self.peaks.values())


@contextmanager
def world(devices: int, per_node: int) -> Iterator[Runtime]:
    """Act as rank 0 of a group that never communicates."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        nodes = -(-devices // per_node)
        yield Runtime("plan", 0, devices, 0, min(devices, per_node), 0, nodes, "localhost", 0, "localhost", False)
    finally:
        dist.destroy_process_group()


def balanced(per_rank: Tensor, rows: int) -> list[list[int]]:
    """Return the rows that ranks exchange where every expert is used as much as the others: those of a real router
    depend on values, and a rank with more of them takes more memory."""
    ranks = per_rank.shape[1]
    return [[rows // ranks + (rank < rows % ranks) for rank in range(ranks)]] * 2


def step(args: Arguments, spec: ModelSpec, ranks: Runtime, *, seq_len: int, gpu: bool) -> Memory:
    """Build the model of ``spec`` and take two steps, in a `world`."""
    counter = WorkCounter(ranks.local_world_size)
    profile = DeviceProfile(
        "cuda" if gpu else "cpu", adds_to_float32=lambda dtype: gpu, offloadable=(Tensor, nn.Parameter, FakeTensor),
        loss_chunks=counter.sampled_chunks, exchanged_rows=balanced,
    )  # fmt: skip
    # On the CPU: FSDP2 would ask a GPU's driver for streams.
    backend = FakeBackend(args, ranks, torch.device("cpu"), profile)
    backend.mode = FakeMode(allow_non_fake_inputs=True)
    backend.check(spec, seq_len=seq_len)
    model = backend.build(spec, seed=args.seed, seq_len=seq_len, initial=False)
    counter.dimensions = backend.mesh.dimensions()
    try:
        with backend.mode:
            peaks = stepping.peaks(args, backend, model, seq_len=seq_len, counter=counter)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as problem:
        raise ConfigError(
            f"no plan: what a {spec.config.model_type} computes depends on values, which are not there "
            f"({one_line(problem)})"
        ) from problem
    parameters = [(local_tensor(each), each.requires_grad) for each in model.parameters()]
    return Memory(
        peaks, sum(each.numel() for each in model.parameters() if each.requires_grad), counter.work,
        pinned=sum((1 + trained) * pinned_bytes(each.numel() * each.element_size()) for each, trained in parameters),
        saved=3 * local_bytes(present(gather_state(model)), pinned=True),
    )  # fmt: skip


def without_attention_dropout(spec: ModelSpec) -> ModelSpec:
    """Return the model as a GPU computes it: its kernels have dropout, and the CPU's way of it holds every score."""
    config: Any = copy.deepcopy(spec.config)
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    return replace(spec, config=config)


def of_depth(spec: ModelSpec, layers: int) -> ModelSpec:
    """Return the model with its first layers alone."""
    config: Any = copy.deepcopy(spec.config)
    depth = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return replace(spec, config=config)
