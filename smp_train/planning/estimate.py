"""The memory and the work of a run's step, as rank 0 of any number of devices, without peers and without a GPU."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
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

from smp_train.arguments import checkpointing
from smp_train.backends.native import NativeBackend
from smp_train.distributed import Runtime
from smp_train.distributed.device_profile import DeviceProfile
from smp_train.distributed.dtensor import local_tensor
from smp_train.distributed.host_copy import local_bytes
from smp_train.distributed.host_memory import pinned_bytes
from smp_train.errors import ConfigError, one_line
from smp_train.models.flops import count_parameters
from smp_train.models.hub_state import gather_state, present
from smp_train.models.hugging_face import ModelSpec
from smp_train.planning import step_memory
from smp_train.planning.memory import Memory, PlannedRun
from smp_train.planning.work import WorkCounter

ON_STORAGES = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)
ADDS_TO_FLOAT32 = torch.ops.aten.addmm.dtype_out
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


def estimate(run: PlannedRun) -> Memory:
    """Return the memory and the work of a step on rank 0, whose shards are the largest.

    Bytes and operations of a phase are linear in the number of layers once every kind of layer is present: the edges,
    and one repetition between them. So two shallow models are stepped and their difference is multiplied. The whole
    model is stepped if it is no deeper, or if the layers' parameters do not repeat.
    """
    spec, args = _without_attention_dropout(run.spec) if run.gpu else run.spec, run.args
    depth = spec.config.num_hidden_layers
    period = _period(args.activation_checkpointing, spec)
    fewest = 2 * step_memory.EDGE + 1 + (args.activation_loading_horizon + 1 if args.sm_activation_offloading else 0)
    small = fewest + (depth - fewest) % period
    large = small + period
    if large >= depth or not _repeats(spec, small, period):
        return _step(run, spec)
    shallow, deeper = (_step(run, _with_depth(spec, layers)) for layers in (small, large))
    return _extended(shallow, deeper, (depth - small) // period)


class FakeMode(FakeTensorMode):
    """Fake tensors: a shape and no memory. Completes torch's own fake kernels."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Run an operation."""
        if func is ADDS_TO_FLOAT32:  # torch 2.11 mistakes the dtype argument for a factor
            return (kwargs or {})["out"]
        if func is GROUPED_PRODUCT and args[0].dtype != torch.bfloat16:  # torch's fake kernel takes bfloat16 alone
            return _grouped_product(*args, **(kwargs or {}))
        # A cached operation on a storage would keep memory alive that offloading frees.
        self.cache_enabled = func not in ON_STORAGES
        return super().dispatch(func, types, args, kwargs or {})


def _grouped_product(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **_options: Any) -> Tensor:
    groups = (len(offs),) if offs is not None and left.dim() == right.dim() else ()
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])


class FakeBackend(NativeBackend):
    """The native backend with fake parameters."""

    mode: FakeMode

    def _allocate(self, model: nn.Module) -> None:
        with self.mode:
            super()._allocate(model)

    def _fill(self, model: nn.Module, spec: ModelSpec, seed: int, *, initial: bool) -> None:
        """Do nothing: fake weights and adapters have no values."""


def fake_ranks(devices: int, per_node: int) -> Runtime:
    """Return rank 0 of a process group that never communicates.

    The next call reuses the group, unless the number of ranks changes: torch's caches would then be wrong.
    """
    if dist.is_initialized() and dist.get_world_size() != devices:
        leave_fake_ranks()
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    nodes = -(-devices // per_node)
    return Runtime("plan", 0, devices, 0, min(devices, per_node), 0, nodes, "localhost", 0, "localhost", False)


def leave_fake_ranks() -> None:
    """Destroy the process group of `fake_ranks`, so that a caller's process can start its own."""
    if dist.is_initialized() and dist.get_backend() == "fake":
        dist.destroy_process_group()


def balanced_rows(counts: Tensor, rows: int) -> list[list[int]]:
    """Return the rows that expert ranks exchange if all experts are used equally.

    A real router's counts depend on values, and a rank with more rows takes more memory.
    """
    ranks = counts.shape[1]
    return [[rows // ranks + (rank < rows % ranks) for rank in range(ranks)]] * 2


def _step(run: PlannedRun, spec: ModelSpec) -> Memory:
    """Build a model with fake parameters and take two steps."""
    args, ranks = run.args, fake_ranks(run.devices, run.per_node)
    counter = WorkCounter(ranks.local_world_size)
    profile = DeviceProfile(
        "cuda" if run.gpu else "cpu", adds_to_float32=lambda dtype: run.gpu,
        offloadable=(Tensor, nn.Parameter, FakeTensor), loss_chunks=counter.sampled_chunks,
        exchanged_rows=balanced_rows,
    )  # fmt: skip
    # Use the CPU: for a GPU, FSDP2 would create CUDA streams, which needs a driver.
    backend = FakeBackend(args, ranks, torch.device("cpu"), profile)
    backend.mode = FakeMode(allow_non_fake_inputs=True)
    meta = backend.check(spec, seq_len=run.seq_len)
    model = backend.build(meta, seed=args.seed, initial=False)
    counter.dimensions = backend.mesh.dimensions()
    try:
        with backend.mode:
            peaks = step_memory.peaks(args, backend, model, seq_len=run.seq_len, counter=counter)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as problem:
        raise ConfigError(
            f"no plan: what a {spec.config.model_type} computes depends on values, which are not there "
            f"({one_line(problem)})"
        ) from problem
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Memory(
        peaks, sum(parameter.numel() for parameter in trained), counter.work,
        pinned=sum(pinned_bytes(local_tensor(parameter).nbytes) for parameter in (*model.parameters(), *trained)),
        saved=3 * local_bytes(present(gather_state(model)), pinned=True),
        gpu=run.gpu, state_on_host=args.cpu_offload and run.gpu,
    )  # fmt: skip


def _changed(spec: ModelSpec, values: Mapping[str, Any]) -> ModelSpec:
    """Return the model with other values in its configuration."""
    config: Any = copy.deepcopy(spec.config)
    for name, value in values.items():
        setattr(config, name, value)
    return replace(spec, config=config)


def _without_attention_dropout(spec: ModelSpec) -> ModelSpec:
    """Return the model as a GPU computes it: its attention kernels have dropout, while a CPU stores every score."""
    return _changed(spec, {name: 0.0 for name in ("attention_dropout", "attn_pdrop") if hasattr(spec.config, name)})


def _lists_of_layers(config: Any) -> dict[str, list[Any]]:
    """Return the entries of a configuration that have one value per layer."""
    depth = config.num_hidden_layers
    return {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == depth}


def _with_depth(spec: ModelSpec, layers: int) -> ModelSpec:
    """Return the model's first layers alone."""
    lists = {name: value[:layers] for name, value in _lists_of_layers(spec.config).items()}
    return _changed(spec, {**lists, "num_hidden_layers": layers})


def _period(activation_checkpointing: str, spec: ModelSpec) -> int:
    """Return the number of layers after which checkpointing and kinds of layers repeat."""
    period = checkpointing.read(activation_checkpointing)[0].denominator
    for value in _lists_of_layers(spec.config).values():
        repeats = next(n for n in range(1, len(value) + 1) if value[n:] == value[:-n])
        period = math.lcm(period, repeats)
    return period


def _repeats(spec: ModelSpec, small: int, period: int) -> bool:
    """Return whether the omitted layers have as many parameters as the stepped layers."""
    depth = spec.config.num_hidden_layers
    shallow, deeper = (count_parameters(_with_depth(spec, layers).config) for layers in (small, small + period))
    return count_parameters(spec.config) == shallow + (deeper - shallow) * ((depth - small) // period)


def _extended(shallow: Memory, deeper: Memory, times: int) -> Memory:
    """Return the shallow model's memory plus ``times`` its difference from the deeper model's."""

    def grown(first: int, second: int) -> int:
        return first + times * (second - first)

    peaks = {}
    for phase, peak in shallow.peaks.items():
        larger = deeper.peaks[phase]
        peaks[phase] = Counter({use: grown(peak[use], larger[use]) for use in {**peak, **larger}})
    return replace(
        shallow, peaks=peaks, work=shallow.work.grown(deeper.work, times),
        trained=grown(shallow.trained, deeper.trained), pinned=grown(shallow.pinned, deeper.pinned),
        saved=grown(shallow.saved, deeper.saved),
    )  # fmt: skip
