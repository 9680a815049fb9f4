"""Reads Hugging Face weights straight into the parts of the parameters that a rank holds."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.errors import CheckpointError
from smp_train.models.hugging_face import model_of
from smp_train.models.initialization import canonical_name, part_of
from smp_train.models.weight_files import Block, WeightFiles
from smp_train.runtime.dtensor import local_tensor
from smp_train.runtime.places import place

# Experts as transformers 5 holds them; files have them one by one.
FUSED = re.compile(r"^(?P<prefix>.*)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)$")
GATE_UP = (("w1", "w3"), ("gate_proj", "up_proj"))  # Mixtral's and others' names.
DOWN = (("w2",), ("down_proj",))
# Buffers that former versions of transformers stored among the weights.
NOT_WEIGHTS = re.compile(r"(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$")


@dataclass(frozen=True)
class Piece:
    """A stored tensor and where in a parameter it belongs.

    Attributes:
        stored: its name.
        expert: index along the parameter's first dimension, which the stored tensor lacks; None if it has
        all. row: where its own first dimension starts in the parameter.
    """

    stored: str
    expert: int | None = None
    row: int = 0


Copy = tuple[Tensor, Block, Any]
"""Where to, what of, and which of it."""


def load_pretrained(
    model: nn.Module,
    location: str | os.PathLike[str],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Fill every parameter of a materialised model from the weights at ``location``, cast to its own dtype.

    ``location`` is a folder with safetensors or pickled weights (``.bin``), or one such file, also in S3. Each rank
    reads only the rows and columns it holds: host memory for its part and one block more. No collective is entered,
    so a failure on one rank must be made known to the others by the caller. Names are those of the Hugging
    Face state dict, with or without the base model's prefix; experts that this transformers fuses and the
    files store one by one are put together. ``on_progress`` is called with the bytes of parameters done and in all.

    Raises:
        CheckpointError: files missing or unreadable; parameters that the files do not have, or stored
            tensors that the model does not have (the first few are named); shapes that differ.
    """
    source = place(location)
    params = {canonical_name(name): param for name, param in model.named_parameters()}
    with ExitStack() as stack, torch.no_grad():
        stored = WeightFiles(source, stack)
        plan, missing, left = _plan(model, params, _current_names(model, list(stored.files)))
        if missing or left:
            raise CheckpointError(f"{location} does not fit the model: {_names('lacks', missing, left)}")
        copies = (_copies(name, params[name], pieces, stored) for name, pieces in plan.items())
        stored.copy(_counted(itertools.chain.from_iterable(copies), params.values(), on_progress))


def _counted(
    copies: Iterable[Copy], params: Iterable[Tensor], on_progress: Callable[[int, int], None]
) -> Iterator[Copy]:
    parts = [local_tensor(param) for param in params]
    done, total = 0, sum(tensor.nbytes for tensor in parts)
    for copy in copies:
        yield copy
        done += copy[0].nbytes
        on_progress(done, total)


def _names(verb: str, missing: list[str], left: list[str]) -> str:
    def few(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    said = [f"it {verb} {few(missing)}"] if missing else []
    said += [f"it has {few(left)}, which the model does not"] if left else []
    return "; ".join(said)


def _current_names(model: nn.Module, stored: list[str]) -> dict[str, str]:
    """Return the stored names by the names that this version of transformers has for them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # transformers 4 has the names of the files.
        return {canonical_name(name): name for name in stored}
    # Asked of a model that nothing is wrapped around: the answer depends on the class.
    with torch.device("meta"):
        plain = model_of(model.config)
    renamings = [rule for rule in get_model_conversion_mapping(plain) if isinstance(rule, WeightRenaming)]
    names = {}
    for name in stored:
        current = canonical_name(name)
        for rule in renamings:
            current, _ = rule.rename_source_key(current)
        names[current] = name
    return names


def _plan(
    model: nn.Module, params: Mapping[str, Tensor], stored: Mapping[str, str]
) -> tuple[dict[str, list[Piece]], list[str], list[str]]:
    """Return (pieces by parameter, parameters without a source, stored tensors without a use)."""
    base = getattr(model, "base_model_prefix", "")
    aliases = _tied_names(model)
    plan: dict[str, list[Piece]] = {}
    missing: list[str] = []
    used: set[str] = set()
    for name, param in params.items():
        names = [name, *aliases.get(name, [])]
        spellings = [*names, *(n.removeprefix(f"{base}.") for n in names)]
        # A tied weight may be stored under all its names.
        found = [stored[spelling] for spelling in dict.fromkeys(spellings) if spelling in stored]
        pieces = [Piece(found[0])] if found else _expert_pieces(name, param, stored)
        if pieces:
            plan[name] = pieces
            used.update(found, (piece.stored for piece in pieces))
        else:
            missing.append(name)
    left = sorted(name for name in set(stored.values()) - used if not NOT_WEIGHTS.search(name))
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


def _expert_pieces(name: str, param: Tensor, stored: Mapping[str, str]) -> list[Piece]:
    """Return where a fused parameter lies in a folder that stores experts one by one ([] if it does not).

    ``gate_up_proj`` [experts, 2 I, hidden] has the gate above the up projection, ``down_proj`` is
    [experts, hidden, I].
    """
    match = FUSED.match(name)
    if not match:
        return []
    for parts in GATE_UP if match["kind"] == "gate_up_proj" else DOWN:
        height = param.shape[1] // len(parts)
        pieces = [
            Piece(stored.get(f"{match['prefix']}.mlp.experts.{expert}.{part}.weight", ""), expert, k * height)
            for expert in range(param.shape[0])
            for k, part in enumerate(parts)
        ]
        if all(piece.stored for piece in pieces):
            return pieces
    return []


def _copies(name: str, param: Tensor, pieces: list[Piece], stored: WeightFiles) -> Iterator[Copy]:
    """Yield what this rank is to copy into a parameter."""
    part = part_of(param)
    whole = local_tensor(param)
    if whole.is_meta:
        raise CheckpointError(f"parameter {name} is still on the meta device; materialise the model first")
    for piece in pieces:
        source = stored.tensor(piece.stored)
        shape = tuple(source.get_shape())
        local, indices, room = whole, list(part.indices), part.shape
        if piece.expert is not None:
            held = (indices[0] == piece.expert).nonzero()
            if not len(held):
                continue
            local, indices, room = local[int(held[0])], indices[1:], room[1:]
        fits = shape[1:] == room[1:] and (shape == room or piece.expert is not None)
        if not fits:
            raise CheckpointError(
                f"{piece.stored} is {list(shape)} there, {name} is {list(part.shape)} here"
            )
        yield from _held(local, source, indices, shape, piece.row)


def _held(
    local: Tensor, source: Block, indices: list[Tensor], shape: tuple[int, ...], row: int
) -> Iterator[Copy]:
    """Yield what of ``source`` (whose rows start at ``row`` of the parameter) lies at the held ``indices``."""
    starts = [row, *[0] * (len(shape) - 1)][: len(shape)]
    blocks = [
        _intervals(index, start, start + size)
        for index, start, size in zip(indices, starts, shape, strict=True)
    ]
    for block in itertools.product(*blocks):
        target = tuple(slice(at, at + length) for at, _, length in block)
        wanted = tuple(
            slice(first - start, first - start + length)
            for (_, first, length), start in zip(block, starts, strict=True)
        )
        yield local[target], source, wanted or ...


def _intervals(index: Tensor, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return the runs of indices within [start, stop) as (position in ``index``, first index, length)."""
    if not len(index):
        return []
    breaks = (index[1:] - index[:-1] != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), len(index)]
    runs = []
    for left, right in itertools.pairwise(edges):
        first, last = int(index[left]), int(index[right - 1]) + 1
        low, high = max(first, start), min(last, stop)
        if low < high:
            runs.append((left + low - first, low, high - low))
    return runs
