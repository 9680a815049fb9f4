"""FSDP2: each decoder layer and an untied head are units of communication; the root unit has all other modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from smp_train.distributed import heartbeat
from smp_train.distributed.dtensor import Shard, local_tensor

STACKED = 3
"""Dimensions of a parameter that stacks one matrix per expert."""


def shard(
    model: nn.Module, layers: list[nn.Module], mesh: DeviceMesh, *, param_dtype: torch.dtype | None,
    reshard_after_forward: bool, forward_prefetch: bool = False, cpu_offload: bool = False,
    experts: Mapping[nn.Module, list[nn.Module]] = MappingProxyType({}), experts_mesh: DeviceMesh | None = None,
) -> None:  # fmt: skip
    """Shard ``model`` in place over ``mesh``, 1-D, or 2-D as (replicate, shard).

    Gradients are *summed* over ranks, in float32: the loss is already divided by the number of counted tokens of the
    global batch, so an average here would be wrong by the number of ranks.

    Args:
        model: The whole model; its parameters may be on the meta device.
        layers: Its decoder layers, in order.
        mesh: The ranks that hold the parameters.
        param_dtype: Dtype of the parameters in computation; None for their own dtype.
        reshard_after_forward: Free a layer's gathered parameters after its forward pass, and gather them again for its
            backward pass (ZeRO-3); False keeps them in between (ZeRO-2).
        forward_prefetch: Request the next layer's parameters before a layer computes: with a slow host, the all-gather
            starts earlier, for the memory of one more layer. (The backward pass always gathers one layer ahead.)
        cpu_offload: Keep parameters, gradients and optimizer state in host memory, page-locked for CUDA; only gathered
            parameters are on the device.
        experts: By layer, the modules that are separate units on ``experts_mesh``.
        experts_mesh: The ranks that hold the experts' parameters.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        "shard_placement_fn": _dimension(mesh),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    # Expert inputs already have the compute dtype; routing weights stay in float32.
    expert_policy = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
    expert_options = {
        **options, "mesh": experts_mesh, "mp_policy": expert_policy, "shard_placement_fn": _dimension(experts_mesh),
    }  # fmt: skip
    for layer in layers:
        # The last layer's backward pass follows its forward pass at once: freeing it would cost a second all-gather.
        frees = reshard_after_forward and layer is not layers[-1]
        for module in experts.get(layer, ()):
            fully_shard(module, **expert_options, reshard_after_forward=frees)
        fully_shard(layer, **options, reshard_after_forward=frees)
    units = list(layers)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if isinstance(head, nn.Linear) and embedding is not None and head.weight is not embedding.weight:
        # The head stays gathered: its backward pass follows its forward pass at once.
        fully_shard(head, **options, reshard_after_forward=False)
        units.append(head)
    fully_shard(model, **options, reshard_after_forward=False)
    if forward_prefetch:
        for module, following in zip([model, *units[:-1]], units, strict=True):
            assert isinstance(module, FSDPModule)
            module.set_modules_to_forward_prefetch([following, *experts.get(following, ())])  # type: ignore[list-item]
    measure(module for module in model.modules() if isinstance(module, FSDPModule))
    apart = {module for modules in experts.values() for module in modules}
    for module in model.modules():
        own_mesh = experts_mesh if module in apart else mesh
        # With one rank there is nothing to sum, and setting a factor would make FSDP2 copy each gradient.
        if isinstance(module, FSDPModule) and own_mesh is not None and own_mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)
            # A divide factor makes FSDP2 ask for a pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def measure(units: Iterable[FSDPModule]) -> None:
    """Time all-gathers and reduce-scatters through `heartbeat.collective`, with torch 2.9 or newer."""
    with suppress(ImportError, AttributeError):
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

        gather, scatter = _timed(DefaultAllGather), _timed(DefaultReduceScatter)
        for unit in units:
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)


def _timed(kind: type) -> Any:
    class Timed(kind):
        def __call__(self, *args: Any, **options: Any) -> Any:
            with heartbeat.collective():
                return super().__call__(*args, **options)

    return Timed()


def _dimension(mesh: DeviceMesh | None) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP2's ``shard_placement_fn``: shard stacked experts by columns if the ranks do not divide their number.

    Sharded by whole experts, some ranks would hold no expert, and FSDP2 would pad each gathered tensor.
    """
    ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)

    def choose(parameter: nn.Parameter) -> Shard | None:
        shape = local_tensor(parameter).shape
        uneven = len(shape) == STACKED and shape[0] % ranks
        return Shard(STACKED - 1) if uneven and shape[-1] % ranks == 0 else None

    return choose


def accumulate(model: nn.Module, *, last: bool) -> None:
    """Prepare the backward pass of one micro-batch.

    Every micro-batch reduces its gradient to this rank's shard, so that no rank holds a whole gradient; the sum over
    replicas waits for the last micro-batch.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(last)
    model.set_is_last_backward(last)
