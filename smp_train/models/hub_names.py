"""Translation between a model's parameters in memory and its tensors on the Hugging Face hub.

transformers 5 renames some parameters (``lm_head`` for GPT-NeoX's ``embed_out``) and stacks the experts of a layer in
one parameter. Published weights, and everything this package writes, keep the hub's names and layouts, which
transformers 4 also has in memory. `build_meta` attaches the table to the model; without a table the names are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.distributed.dtensor import DTensor, Part

# peft adapts two parameters of stacked experts by a wrapper around a wrapper: only the outer adapters have no prefix.
_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.|base_layer\.(?!lora_)")
_ADAPTER = re.compile(r"(\.lora_[A-Z])\.default\.")
HUB_NAMES = "_smp_train_hub_names"
"""Attribute of a model that holds its table."""


def canonical_name(name: str) -> str:
    """Return a parameter's or module's name without the prefixes of torch.compile, checkpointing, FSDP1 and peft."""
    return _ADAPTER.sub(r"\1.", _WRAPPERS.sub("", name))


@dataclass(frozen=True)
class HubTensor:
    """A tensor on the hub, which is a block of a parameter in memory."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    """Index in the parameter's first dimension, if the hub has one tensor per expert."""
    row: int = 0
    """First row of the block: in the parameter, or in the expert's matrix if ``expert`` is set."""

    def within(self, part: Part) -> tuple[Any, Part] | None:
        """Return the block's elements in a rank's ``part`` of the parameter, None if they have no element in common.

        They are returned as an index in the rank's local tensor and as a part of the hub's tensor.
        """
        index: tuple[Any, ...] = ()
        indices = part.indices
        if self.expert is not None:
            position = (indices[0] == self.expert).nonzero()
            if not len(position):
                return None
            index, indices = (int(position[0]),), indices[1:]
        if not self.shape:
            return (..., Part((), ()))
        rows = indices[0] - self.row
        inside = ((rows >= 0) & (rows < self.shape[0])).nonzero().flatten()
        if not len(inside):
            return None
        first, last = int(inside[0]), int(inside[-1]) + 1  # indices ascend
        return (*index, slice(first, last)), Part(self.shape, (rows[first:last], *indices[1:]))


@dataclass(frozen=True)
class HubNames:
    """The table of one model."""

    tensors: Mapping[str, tuple[HubTensor, ...]] = field(default_factory=dict)
    """The hub's tensors of each parameter whose name or layout differs, by canonical name."""
    renamings: Sequence[Any] = ()
    """transformers' rules for reading files with older names."""

    def tensors_of(self, name: str, shape: Sequence[int]) -> tuple[HubTensor, ...]:
        """Return the hub's tensors that a parameter consists of."""
        return self.tensors.get(name) or (HubTensor(name, tuple(shape)),)

    def current(self, name: str) -> str:
        """Return the current name of a stored tensor by transformers' renamings, without the stacking of experts."""
        name = canonical_name(name)
        for rule in self.renamings:
            name, _ = rule.rename_source_key(name)
        return name


class _View(Tensor):
    """A tensor that transformers cannot make contiguous, because `_block` needs its offset in the parameter."""

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor itself."""
        return self


def attach_hub_names(model: Any) -> None:
    """Attach the table to a Hugging Face model; it must not be wrapped yet, as transformers' rules depend on its class.

    The table is found by having transformers convert empty tensors to the hub's layout: the results are views of them.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # transformers 4 uses the hub's names in memory
        return
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    meta = {name: torch.empty(value.shape, device="meta").as_subclass(_View)
            for name, value in named_once(model).items()}  # fmt: skip
    owners = {value.untyped_storage()._cdata: name for name, value in meta.items()}
    blocks: dict[str, list[HubTensor | None]] = {}
    for hub_name, view in to_hub(model, meta).items():
        owner = owners.get(view.untyped_storage()._cdata)
        if owner is not None:  # otherwise the tensor is computed from several parameters
            blocks.setdefault(owner, []).append(_block(hub_name, view, meta[owner]))
    tensors = {
        name: tuple(block for block in parts if block is not None)
        for name, parts in blocks.items()
        if None not in parts and parts != [HubTensor(name, tuple(meta[name].shape))]
    }
    model.__dict__[HUB_NAMES] = HubNames(tensors, renamings)


def _block(name: str, view: Tensor, param: Tensor) -> HubTensor | None:
    """Return the block of ``param`` that ``view`` shows, None unless it consists of rows of it, or of an expert."""
    shape, offset, stride = tuple(view.shape), int(view.storage_offset()), param.stride()
    if view.shape == param.shape and view.stride() == stride:
        return HubTensor(name, shape)
    expert, whole = None, param.shape
    if view.dim() == param.dim() - 1:
        expert, offset = divmod(offset, stride[0])
        whole, stride = whole[1:], stride[1:]
    if len(shape) != len(whole) or shape[1:] != tuple(whole[1:]) or view.stride() != stride or offset % stride[0]:
        return None
    return HubTensor(name, shape, expert, offset // stride[0])


def named_once(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in memory, tied parameters under their first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    # state_dict() rather than named_parameters(): its hooks make FSDP2 put the sharded parameters back.
    for name, value in model.state_dict(keep_vars=True).items():
        first.setdefault(id(value), (name, value))
    return dict(first.values())


def attached(model: nn.Module, attribute: str) -> Any:
    """Return an attribute of the model or, if the model is wrapped, of the module inside that has it; else None."""
    return next((module.__dict__[attribute] for module in model.modules() if attribute in module.__dict__), None)


def hub_names(model: nn.Module) -> HubNames:
    """Return the table that `attach_hub_names` attached to the model or to a module within it."""
    return attached(model, HUB_NAMES) or HubNames()


def to_hub(plain: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, named as ``plain``'s parameters in memory, as the installed transformers would save them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 saves its names in memory
        return dict(tensors)
    saved: dict[str, Tensor] = revert_weight_conversion(plain, dict(tensors))
    return saved


def is_split(param: Any, tensors: Sequence[HubTensor]) -> bool:
    """Return whether the hub has one tensor per expert, each whole on one rank or split by its last dimension only.

    The result is the same on all ranks.
    """
    if any(tensor.expert is None for tensor in tensors):
        return False
    placements = param.placements if isinstance(param, DTensor) else ()
    inner = [dim for dim in (getattr(placement, "dim", 0) for placement in placements) if dim]
    return inner in ([], [param.dim() - 1])
