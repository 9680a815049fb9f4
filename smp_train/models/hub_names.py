"""The translation between a model's parameters in memory and its tensors on the Hugging Face hub.

transformers 5 renames some parameters (``lm_head`` for GPT-NeoX's ``embed_out``) and stacks the experts of a mixture in
one parameter. Published weights, and all that this package writes, keep the hub's names and layouts, which are also
those of transformers 4 in memory. `build_meta` notes the table on the model; without a note the names are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.distributed.dtensor import DTensor, Part

WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
HUB_NAMES = "_smp_train_hub_names"
"""Where a model keeps its table."""


def canonical_name(name: str) -> str:
    """Return a parameter's or module's name without what torch.compile, checkpointing and FSDP1 put into it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


@dataclass(frozen=True)
class HubTensor:
    """A tensor on the hub, and the block of a parameter that it is.

    Attributes:
        name: its name on the hub.
        shape: its shape there.
        expert: index along the parameter's first dimension, which the hub's tensor lacks; None if it has all.
        row: where its first dimension starts in the parameter's.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    row: int = 0

    def within(self, part: Part) -> tuple[Any, Part] | None:
        """Return where this block is in a rank's ``part`` of the parameter, and which elements of the hub's tensor.

        The first is an index for the rank's local tensor. None: the rank has nothing of it.
        """
        index: tuple[Any, ...] = ()
        indices = part.indices
        if self.expert is not None:
            at = (indices[0] == self.expert).nonzero()
            if not len(at):
                return None
            index, indices = (int(at[0]),), indices[1:]
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
    """The table of one model.

    Attributes:
        tensors: the hub's tensors by canonical parameter name, where they are not that parameter under that name.
        renamings: rules of transformers by which it reads files whose names are neither.
    """

    tensors: Mapping[str, tuple[HubTensor, ...]] = field(default_factory=dict)
    renamings: Sequence[Any] = ()

    def of(self, name: str, shape: Sequence[int]) -> tuple[HubTensor, ...]:
        """Return the tensors on the hub that a parameter holds."""
        return self.tensors.get(name) or (HubTensor(name, tuple(shape)),)

    def current(self, name: str) -> str:
        """Return what transformers reads a stored name as; of an expert's own tensor, without its being stacked."""
        name = canonical_name(name)
        for rule in self.renamings:
            name, _ = rule.rename_source_key(name)
        return name


class _View(Tensor):
    """A tensor that stays a view where transformers would copy it to make it contiguous: its offset is asked for."""

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor itself."""
        return self


def note(model: Any) -> None:
    """Note the table on a Hugging Face model that nothing is wrapped around: transformers goes by the class."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # transformers 4 has the hub's names in memory
        return
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    first: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        first.setdefault(id(value), (name, value))  # a tied weight has its first name
    meta = {name: torch.empty(value.shape, device="meta").as_subclass(_View) for name, value in first.values()}
    owners = {value.untyped_storage()._cdata: name for name, value in meta.items()}
    found: dict[str, list[HubTensor | None]] = {}
    for hub_name, value in to_hub(model, meta).items():
        owner = owners.get(value.untyped_storage()._cdata)
        if owner is not None:  # else computed of several: no block of any
            found.setdefault(owner, []).append(_block(hub_name, value, meta[owner]))
    tensors = {
        name: tuple(each for each in blocks if each is not None)
        for name, blocks in found.items()
        if None not in blocks and blocks != [HubTensor(name, tuple(meta[name].shape))]
    }
    model.__dict__[HUB_NAMES] = HubNames(tensors, renamings)


def hub_names(model: nn.Module) -> HubNames:
    """Return the table that `note` left on the model, or on one that it is wrapped around."""
    for module in model.modules():
        if HUB_NAMES in module.__dict__:
            found: HubNames = module.__dict__[HUB_NAMES]
            return found
    return HubNames()


def to_hub(plain: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that have ``plain``'s names in memory as the installed transformers saves them."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4 saves what it holds
        return dict(tensors)
    reverted: dict[str, Tensor] = revert_weight_conversion(plain, dict(tensors))
    return reverted


def _block(name: str, view: Tensor, param: Tensor) -> HubTensor | None:
    """Return which block of ``param`` a view of it is, or None for one of another form."""
    shape, offset, stride = tuple(view.shape), int(view.storage_offset()), param.stride()
    if view.shape == param.shape and view.stride() == stride:
        return HubTensor(name, shape)
    expert = None
    rest = param.shape
    if view.dim() == param.dim() - 1:
        expert, offset = divmod(offset, stride[0])
        rest, stride = rest[1:], stride[1:]
    if len(shape) != len(rest) or shape[1:] != tuple(rest[1:]) or view.stride() != stride or offset % stride[0]:
        return None
    return HubTensor(name, shape, expert, offset // stride[0])


def is_split(param: Any, tensors: Sequence[HubTensor]) -> bool:
    """Tell whether a parameter is several of the hub's tensors, each of which is whole on a rank: same on all ranks."""
    if any(each.expert is None for each in tensors):
        return False
    placements = param.placements if isinstance(param, DTensor) else ()
    return all(not hasattr(placement, "dim") or placement.dim == 0 for placement in placements)
