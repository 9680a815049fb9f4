"""A run's own model, built, sharded and stepped as rank 0 of any world, without its memory, its peers or a GPU."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
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

from smp_train import losses
from smp_train.arguments import Arguments
from smp_train.backends.native import NativeBackend
from smp_train.distributed import Runtime
from smp_train.distributed.dtensor import local_tensor
from smp_train.distributed.host_copy import local_bytes
from smp_train.distributed.host_memory import pinned_bytes
from smp_train.errors import ConfigError, one_line
from smp_train.models.hub_state import gather_state, present
from smp_train.models.resolve import ModelSpec
from smp_train.parallel import activation_offloading, expert_parallel, grad_norm
from smp_train.planning import stepping
from smp_train.planning.stepping import UPDATE, Phase
from smp_train.planning.tracker import GRADIENTS, HOST, OPTIMIZER, PARAMETERS
from smp_train.planning.work import Work, WorkCounter

try:
    from transformers.integrations import moe
except ImportError:  # transformers 4, which stacks no experts
    moe: Any = SimpleNamespace()  # type: ignore[no-redef]

ON_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
ADDS_WIDE = torch.ops.aten.addmm.dtype_out


class FakeMode(FakeTensorMode):
    """Fake tensors, without the cache for operations on storages, whose keys would keep what offloading frees."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Run an operation."""
        if func is ADDS_WIDE:  # torch 2.11 takes its type for a factor
            return (kwargs or {})["out"]
        self.cache_enabled = func not in ON_STORAGES
        return super().dispatch(func, types, args, kwargs or {})


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
def world(devices: int, per_node: int, *, gpu: bool) -> Iterator[Runtime]:
    """Act as rank 0 of a group that never communicates; with ``gpu``, the loss takes chunks as on a GPU.

    Tensors stay on the CPU, as FSDP2 would ask a GPU's driver for streams. What depends on the device is replaced here.
    """
    packable, chunk_tokens, adds_wide = activation_offloading.PACKABLE, losses.chunk_tokens, losses._adds_wide
    read, squares = expert_parallel.read, grad_norm._sum_of_squares
    grouped: Any = getattr(moe, "_grouped_mm", None)  # from transformers 5.3 on
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        activation_offloading.PACKABLE = (*packable, FakeTensor)  # type: ignore[assignment]
        expert_parallel.read = balanced
        # Whose fake form takes bfloat16 alone; one expert's product has the shapes, and the work, of that of all.
        moe._grouped_mm = lambda input, weight, offs: (
            grouped(input, weight, offs) if weight.dtype == torch.bfloat16 else input @ weight[0]
        )
        if gpu:
            losses.chunk_tokens = lambda vocab_size, device_type: chunk_tokens(vocab_size, "cuda")
            losses._adds_wide = lambda dtype, device: True  # type: ignore[assignment]
            grad_norm._sum_of_squares = lambda parts: nn.utils.get_total_norm(parts).double().square()
        nodes = -(-devices // per_node)
        yield Runtime("plan", 0, devices, 0, min(devices, per_node), 0, nodes, "localhost", 0, "localhost", False)
    finally:
        activation_offloading.PACKABLE = packable
        expert_parallel.read, moe._grouped_mm = read, grouped
        losses.chunk_tokens, losses._adds_wide = chunk_tokens, adds_wide
        grad_norm._sum_of_squares = squares
        dist.destroy_process_group()


def balanced(per_rank: Tensor, rows: int) -> list[list[int]]:
    """Return the rows that ranks exchange where every expert is used as much as the others: those of a real router
    depend on values, and a rank with more of them takes more memory."""
    ranks = per_rank.shape[1]
    return [[rows // ranks + (rank < rows % ranks) for rank in range(ranks)]] * 2


@contextmanager
def some_chunks(counter: WorkCounter) -> Iterator[None]:
    """Let the head's loss compute at most three chunks: the second stands for all but the first and the last."""
    starts = losses.chunk_starts

    def some(tokens: int, chunk: int) -> Iterator[int]:
        every, times = list(starts(tokens, chunk)), counter.times
        yield from every[:1]
        if len(every) > 2:
            counter.times = times * (len(every) - 2)
            yield every[1]
            counter.times = times
        yield from every[1:][-1:]

    losses.chunk_starts = some
    try:
        yield
    finally:
        losses.chunk_starts = starts


def step(args: Arguments, spec: ModelSpec, ranks: Runtime, *, seq_len: int) -> Memory:
    """Build the model of ``spec`` and take two steps, in a `world`."""
    backend = FakeBackend(args, ranks, torch.device("cpu"))
    backend.mode = FakeMode(allow_non_fake_inputs=True)
    backend.check(spec, seq_len=seq_len)
    model = backend.build(spec, seed=args.seed, seq_len=seq_len, initial=False)
    counter = WorkCounter(backend.mesh.dimensions(), ranks.local_world_size)
    try:
        with backend.mode, some_chunks(counter):
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
