"""Loading of Hugging Face weights: each rank reads the blocks of the files that its shards hold."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.distributed.dtensor import local_tensor, part_of
from smp_train.errors import CheckpointError, first_few
from smp_train.models.hub_names import HubTensor, canonical_name, hub_names
from smp_train.models.lora import is_adapter
from smp_train.models.weight_files import Block, WeightFiles, shape_of
from smp_train.storage.paths import place

NOT_WEIGHTS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")
"""Buffers that older versions of transformers stored among the weights."""

Copy = tuple[Tensor, Block, Any]
"""Target, source, and the index in the source."""
Planned = tuple[str, Tensor, list[tuple[str, HubTensor]]]
"""A parameter's name, the parameter, and each of its stored tensors: its name in the files and its block."""


def load_pretrained(
    model: nn.Module,
    location: str | os.PathLike[str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill every parameter of a materialised model from the weights at ``location``, cast to its own dtype.

    ``location`` is a folder with safetensors or pickled weights (``.bin``), or one such file, also in S3. Each rank
    reads only the rows and columns of its shards, and needs additional host memory for one block. Not collective: the
    caller reports a failure to other ranks. The files use the Hugging Face state dict's names, with or without the base
    model's prefix. Experts stored one by one are stacked if transformers stacks them in memory.
    ``on_progress`` is called with the bytes of parameters done and in all.

    Raises:
        CheckpointError: missing or unreadable files; parameters that the files lack, or stored tensors that the model
            lacks (the first few are named); different shapes.
    """
    with ExitStack() as stack, torch.no_grad():
        stored = WeightFiles(place(location), stack)
        stored.copy(_copies(_plan(model, stored.files, location), stored, on_progress))


def _plan(model: nn.Module, stored: Iterable[str], location: object) -> list[Planned]:
    """Return the sources of each parameter. Raises `CheckpointError` for missing and unused tensors."""
    table = hub_names(model)
    by_name = {table.current(name): name for name in stored}
    base = f"{getattr(model, 'base_model_prefix', '')}."
    aliases: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(canonical_name(name))
    plan: list[Planned] = []
    missing: list[str] = []

    def stored_names(names: Iterable[str]) -> list[str]:
        spellings = (spelling for name in names for spelling in (name, name.removeprefix(base)))
        return [by_name[spelling] for spelling in dict.fromkeys(spellings) if spelling in by_name]

    used: set[str] = set()
    for param in model.parameters():
        names = aliases[id(param)]  # the files may have a tied weight under all of its names
        if is_adapter(names[0]):
            continue
        whole = stored_names(names)
        if whole:
            sources = [(whole[0], HubTensor(names[0], tuple(param.shape)))]
        else:
            blocks = table.tensors_of(names[0], param.shape)
            sources = [(name, block) for block in blocks for name in stored_names([table.current(block.name)])[:1]]
            if len(sources) < len(blocks):
                missing.append(names[0])
        plan.append((names[0], param, sources))
        used.update(whole, (name for name, _ in sources))
    unused = sorted(name for name in set(by_name.values()) - used if not NOT_WEIGHTS.search(name))
    problems = [f"it lacks {first_few(missing)}"] if missing else []
    problems += [f"it has {first_few(unused)}, which the model does not"] if unused else []
    if problems:
        raise CheckpointError(f"{location} does not fit the model: {'; '.join(problems)}")
    return plan


def _copies(plan: list[Planned], stored: WeightFiles, on_progress: Callable[[int, int], None]) -> Iterator[Copy]:
    """Yield the copies that fill this rank's shards, one per block of consecutive indices."""
    done, total = 0, sum(local_tensor(param).nbytes for _, param, _ in plan)
    for name, param, sources in plan:
        if param.is_meta:
            raise CheckpointError(f"parameter {name} is still on the meta device; materialise the model first")
        local, part = local_tensor(param), part_of(param)
        for source, tensor in sources:
            block = stored.tensor(source)
            if shape_of(block) != tensor.shape:
                raise CheckpointError(f"{source} is {list(shape_of(block))} there, {name} is {list(param.shape)} here")
            common = tensor.within(part)
            if common is None:
                continue
            for runs in itertools.product(*map(_runs, common[1].indices)):
                target = local[common[0]][tuple(slice(start, start + length) for start, _, length in runs)]
                yield target, block, tuple(slice(first, first + length) for _, first, length in runs) or ...
                done += target.nbytes
                on_progress(done, total)


def _runs(index: Tensor) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive indices as (position in ``index``, first index, length)."""
    if not len(index):
        return []
    breaks = (index[1:] - index[:-1] != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(index)]
    return [(left, int(index[left]), right - left) for left, right in itertools.pairwise(edges)]
