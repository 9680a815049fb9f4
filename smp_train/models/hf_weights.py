"""Reading of Hugging Face weights: each rank reads the blocks that it holds."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.distributed.dtensor import local_tensor, part_of
from smp_train.errors import CheckpointError, first_few
from smp_train.models.hub_names import HubTensor, canonical_name, hub_names
from smp_train.models.lora import is_adapter
from smp_train.models.weight_files import Block, WeightFiles
from smp_train.storage.paths import place

# Buffers that older versions of transformers stored among the weights.
NOT_WEIGHTS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")


Copy = tuple[Tensor, Block, Any]
"""Target, source, and the index into the source."""
Planned = tuple[str, Tensor, list[tuple[str, HubTensor]]]
"""A parameter's name, the parameter, and its stored tensors: name in the files, and the block of the parameter."""


def load_pretrained(
    model: nn.Module,
    location: str | os.PathLike[str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill every parameter of a materialised model from the weights at ``location``, cast to its own dtype.

    ``location`` is a folder with safetensors or pickled weights (``.bin``), or one such file, also in S3. Each rank
    reads only the rows and columns it holds; host memory is its part and one block more. Not collective: the caller
    reports a failure to the other ranks. Names are those of the Hugging Face state dict, with or without the base
    model's prefix; experts that the files store one by one are stacked where transformers stacks them. ``on_progress``
    is called with the bytes of parameters done and the total.

    Raises:
        CheckpointError: files missing or unreadable; parameters that the files do not have, or stored
            tensors that the model does not have (the first few are named); shapes that differ.
    """
    source = place(location)
    with ExitStack() as stack, torch.no_grad():
        stored = WeightFiles(source, stack)
        plan, missing, left = _plan(model, stored.files)
        if missing or left:
            raise CheckpointError(f"{location} does not fit the model: {_problems(missing, left)}")
        copies = (_copies(name, param, sources, stored) for name, param, sources in plan)
        params = [param for _, param, _ in plan]
        stored.copy(_counted(itertools.chain.from_iterable(copies), params, on_progress))


def _counted(
    copies: Iterable[Copy], params: Iterable[Tensor], on_progress: Callable[[int, int], None]
) -> Iterator[Copy]:
    parts = [local_tensor(param) for param in params]
    done, total = 0, sum(tensor.nbytes for tensor in parts)
    for copy in copies:
        yield copy
        done += copy[0].nbytes
        on_progress(done, total)


def _problems(missing: list[str], left: list[str]) -> str:
    problems = [f"it lacks {first_few(missing)}"] if missing else []
    problems += [f"it has {first_few(left)}, which the model does not"] if left else []
    return "; ".join(problems)


def _plan(model: nn.Module, stored: Iterable[str]) -> tuple[list[Planned], list[str], list[str]]:
    """Return (sources of each parameter, parameters without sources, stored tensors that are not used)."""
    table = hub_names(model)
    by_name = {table.current(name): name for name in stored}
    base = getattr(model, "base_model_prefix", "")
    aliases = _tied_names(model)
    plan: list[Planned] = []
    missing: list[str] = []
    used: set[str] = set()

    def find(*names: str) -> list[str]:
        spellings = [*names, *(name.removeprefix(f"{base}.") for name in names)]
        return [by_name[spelling] for spelling in dict.fromkeys(spellings) if spelling in by_name]

    for name, param in model.named_parameters():
        name = canonical_name(name)
        if is_adapter(name):
            continue
        # A tied weight may be stored under all its names.
        found = find(name, *aliases.get(name, []))
        if found:
            sources = [(found[0], HubTensor(name, tuple(param.shape)))]
        else:
            tensors = table.of(name, param.shape)
            sources = [(each, tensor) for tensor in tensors for each in find(table.current(tensor.name))[:1]]
            if len(sources) < len(tensors):
                missing.append(name)
                continue
        plan.append((name, param, sources))
        used.update(found, (source for source, _ in sources))
    left = sorted(name for name in set(by_name.values()) - used if not NOT_WEIGHTS.search(name))
    return plan, missing, left


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        name = canonical_name(name)
        known = first.setdefault(id(param), name)
        if known != name:
            others.setdefault(known, []).append(name)
    return others


def _copies(
    name: str, param: Tensor, sources: list[tuple[str, HubTensor]], stored: WeightFiles
) -> Iterator[Copy]:
    """Yield this rank's copies into a parameter."""
    if param.is_meta:
        raise CheckpointError(f"parameter {name} is still on the meta device; materialise the model first")
    local, part = local_tensor(param), part_of(param)
    for source, tensor in sources:
        block = stored.tensor(source)
        shape = tuple(block.get_shape())
        if shape != tensor.shape:
            raise CheckpointError(f"{source} is {list(shape)} there, {name} is {list(param.shape)} here")
        held = tensor.within(part)
        if held is not None:
            yield from _held(local[held[0]], block, held[1].indices)


def _held(local: Tensor, source: Block, indices: Sequence[Tensor]) -> Iterator[Copy]:
    """Yield the copies of the elements of ``source`` at ``indices``, one per block of consecutive indices."""
    for block in itertools.product(*map(_runs, indices)):
        target = tuple(slice(at, at + length) for at, _, length in block)
        wanted = tuple(slice(first, first + length) for _, first, length in block)
        yield local[target], source, wanted or ...


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive indices as (position in ``index``, first index, length)."""
    if not len(index):
        return []
    breaks = (index[1:] - index[:-1] != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(index)]
    return [(left, int(index[left]), right - left) for left, right in itertools.pairwise(edges)]
