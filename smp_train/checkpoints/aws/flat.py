"""Join the pieces of parameters and moments that FSDP1 stores on each rank.

A rank holds a one-dimensional slice of each parameter or, with ``--use_orig_params 0``, a part of each FSDP unit's flat
parameter. There is one unit per decoder layer, and one for the remaining modules. The pieces of a shard group, joined
by rank, give the whole tensor, with padding at the end. The optimizer first numbers the parameters with weight decay,
then all others, each group in the model's order; all flat parameters have weight decay.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from smp_train.checkpoints.dcp.storage import Reader
from smp_train.checkpoints.dcp.trees import read_tensor
from smp_train.errors import CheckpointError
from smp_train.models.hub_names import canonical_name
from smp_train.models.layouts import flat_order
from smp_train.models.smp_names import is_transformed

MODEL_CONFIG = "model_config"
SMP_SLICES = (
    "it holds slices of SMP's own implementation (--use_smp_implementation, tensor or expert parallelism) without "
    "their shapes and order: have the sample write a sharded checkpoint"
)
_LAYER = re.compile(r"\w+\.(?:layers|h)\.\d+\.")
_NORM = re.compile(r"(?:norm\w*|ln_\w+)\.weight$")


class FlatPart(NamedTuple):
    """A rank's part of a flat parameter, without padding, and its offset in that parameter."""

    offset: int
    tensor: Any


class StoredTensor:
    """A tensor of a DCP tree that is read on access."""

    def __init__(self, reader: Reader, key: str, entry: Any) -> None:
        self.size, self.numel, self.dtype = (lambda: entry.size), entry.size.numel, entry.properties.dtype
        self._read = partial(read_tensor, reader, key)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read()[index]


_Tensor = torch.Tensor | StoredTensor


class JoinedTensor:
    """A tensor stored in consecutive slices, joined on access. It begins at element ``start`` of the joined slices."""

    def __init__(self, slices: Sequence[Any], shape: Sequence[int], start: int = 0) -> None:
        self._slices, self._shape, self._start = slices, torch.Size(shape), start
        self.dtype = slices[0].dtype

    def size(self) -> torch.Size:
        """Return the shape."""
        return self._shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block. Only the slices from the block's first element to its last are read."""
        strides = torch.empty(self._shape, device="meta").stride()
        lengths = [dim.stop - dim.start for dim in index]
        if 0 in lengths:
            return torch.empty(lengths, dtype=self.dtype)
        start = self._start + sum(dim.start * stride for dim, stride in zip(index, strides, strict=True))
        end = start + 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        parts, offset = [], 0
        for piece in self._slices:
            first, last = max(start - offset, 0), min(end - offset, piece.numel())
            if first < last:
                parts.append(piece[...].flatten()[first:last])
            offset += piece.numel()
        return torch.cat(parts).as_strided(lengths, strides)


def is_flat(name: str) -> bool:
    """Return whether a name belongs to a flat parameter."""
    return canonical_name(name).rpartition(".")[2] == "_flat_param"


def joined_tensors(
    contents: Sequence[dict[str, Any]], kind: str, shapes: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Return the joined model and optimizer tensors of all ranks, under the names of a sharded checkpoint.

    ``contents`` has an item for each rank, ``shapes`` has the full shape of each parameter by name, and ``kind`` is
    transformers' name of the model family. Raises `CheckpointError` if ``contents`` do not fit a model of ``shapes``.
    """
    parameters = [{canonical_name(name): value for name, value in rank["model"].items()} for rank in contents]
    states = [rank["optimizer"]["state"] for rank in contents]
    groups = [list(group["params"]) for group in contents[0]["optimizer"]["param_groups"]]
    names = [name for name in parameters[0] if not is_flat(name)]
    if is_transformed(names, kind):
        raise CheckpointError(SMP_SLICES)
    # Pass on other tensors too: `HubReader` refuses unknown names, except those of buffers and tied weights.
    surplus = {f"model.{name}": parameters[0][name] for name in names if name not in shapes}
    tensors: dict[str, Any] = {key: value for key, value in surplus.items() if isinstance(value, _Tensor)}
    # For each parameter of the optimizer: the names of the model's parameters that it holds, and its parts by rank.
    units = {}
    for name in (name for name in names if name in shapes):
        pieces = _shard_group(name, [rank.get(name) for rank in parameters], math.prod(shapes[name]))
        units[name] = [name], pieces
        tensors[f"model.{name}"] = JoinedTensor(list(pieces.values()), shapes[name])
    if units and (sum(map(len, groups)) == len(units) or len(names) < len(parameters[0])):
        numbers = _optimizer_numbers({name: parameters[0][name].numel() for name in units}, groups, states[0], kind)
    else:  # flat parameters; if FSDP1 does not shard, it stores weights by name, and only the optimizer state is flat
        units = _flat_units(parameters, kind, shapes, getattr(contents[0].get(MODEL_CONFIG), "state", None) or ())
        numbers = list(itertools.chain(*groups))
        if len(numbers) != len(units):
            raise CheckpointError(
                f"its optimizer has {len(numbers)} parameters where {len(units)} flat ones are expected: which moment "
                "is whose is not known (another --num_layers or --tie_word_embeddings?)"
            )
    for number, (unit, (names, parts)) in zip(numbers, units.items(), strict=True):
        unit_states = [states[rank].get(number, {}) for rank in parts]
        tensors |= _unit_tensors(unit, {name: shapes[name] for name in names}, list(parts.values()), unit_states)
    return tensors


def _unit_tensors(
    unit: str, shapes: Mapping[str, Sequence[int]], parts: Sequence[Any], states: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the weights, moments and steps that one parameter of the optimizer holds, by tensor name."""
    flat, whole = is_flat(unit), sum(map(math.prod, shapes.values()))
    slices = {"model.{}": parts} if None not in parts else {}
    for moment in ("exp_avg", "exp_avg_sq"):
        moments = [state[moment] for state in states if moment in state]
        lengths = [part.numel() for part in moments]
        # Moments of flat parameters are padded to equal lengths.
        if flat and moments and (len(set(lengths)) > 1 or len(moments) < len(parts) or sum(lengths) < whole):
            raise CheckpointError(f"{unit} has {whole} numbers, and {moment} parts of {lengths}")
        if moments and (flat or sum(lengths) == whole):
            slices[f"optimizer.state.{{}}.{moment}"] = moments
    # A rank with an empty part does not count steps.
    step = next((state["step"] for state in states if "step" in state and state["exp_avg"].numel()), None)
    tensors: dict[str, Any] = {}
    start = 0
    for name, shape in shapes.items():
        tensors |= {form.format(name): JoinedTensor(slices[form], shape, start) for form in slices}
        if step is not None:
            tensors[f"optimizer.state.{name}.step"] = step if isinstance(step, _Tensor) else torch.tensor(float(step))
        start += math.prod(shape)
    return tensors


def _shard_group(name: str, pieces: Sequence[Any], whole: int) -> dict[int, Any]:
    """Map rank to piece for the first shard group: one full copy of the parameter. Later ranks hold replicas."""
    lengths = [piece.numel() for piece in pieces]
    for count, length in enumerate(itertools.accumulate(lengths), 1):
        if length == whole and (count == len(lengths) or lengths[count] == lengths[0]):
            return dict(enumerate(pieces[:count]))
    raise CheckpointError(f"{name} has {whole} numbers here, and {sum(lengths)} on {len(lengths)} ranks there")


def _optimizer_numbers(
    sizes: Mapping[str, int], groups: Sequence[list[int]], state: Mapping[int, dict[str, Any]], kind: str
) -> list[int]:
    """Return each parameter's number in the optimizer. The sample's norms have weight decay or not; both are tried.

    ``sizes`` and ``state`` are those of rank 0.
    """
    for norms in (True, False) if kind in ("llama", "gpt_neox") else (False, True):
        decay = [name for name in sizes if not name.endswith(".bias") and not (norms and _NORM.search(name))]
        order = [decay, [name for name in sizes if name not in decay]] if len(groups) > 1 else [list(sizes)]
        if list(map(len, order)) == list(map(len, groups)):
            numbers = dict(zip(itertools.chain(*order), itertools.chain(*groups), strict=True))
            if all(n not in state or state[n]["exp_avg"].numel() == sizes[name] for name, n in numbers.items()):
                return [numbers[name] for name in sizes]
    raise CheckpointError("the optimizer's groups are not those of the sample: which moment is whose is not known")


def _flat_units(
    parameters: Sequence[dict[str, Any]], kind: str, shapes: Mapping[str, Sequence[int]], config: Any
) -> dict[str, tuple[list[str], dict[int, Any]]]:
    """Map each flat parameter to its parameters' names and to its parts by rank (``{0: None}`` if none is stored).

    Units, and the names in each unit, are in the model's order; a parameter belongs to its innermost unit.
    """
    order = flat_order(kind, shapes)
    stored = [name for name in parameters[0] if is_flat(name)]
    # `transformers_version` does not help: it names the version that wrote config.json.
    transformers_4 = "torch_dtype" in config or ("rope_theta" in config and "rope_parameters" not in config)
    if stored and not transformers_4 and any(".experts." in name for name in order):
        version = "is of transformers 5" if "rope_parameters" in config else "does not show transformers 4"
        raise CheckpointError(
            f"its model_config {version}, and transformers 5 stores experts in another order, which flat parameters do "
            "not show; have that program save a sharded checkpoint"
        )
    layers = dict.fromkeys(f"{layer[0]}_flat_param" for name in order if (layer := _LAYER.match(name)))
    flats = stored or ["_flat_param", *layers]
    units: dict[str, list[str]] = {}
    for name in order:
        enclosing = sorted((flat for flat in flats if name.startswith(flat.removesuffix("_flat_param"))), key=len)
        if not enclosing:
            raise CheckpointError(f"it lacks the flat parameter that {name} is in")
        units |= {flat: [] for flat in enclosing if flat not in units}
        units[enclosing[-1]].append(name)
    units |= {flat: [] for flat in stored if flat not in units}
    if not stored:
        return {flat: (names, {0: None}) for flat, names in units.items()}
    whole = {flat: sum(math.prod(shapes[name]) for name in names) for flat, names in units.items()}
    parts = {flat: _ordered_parts(flat, [rank.get(flat) for rank in parameters], whole[flat]) for flat in units}
    return {flat: (names, parts[flat]) for flat, names in units.items()}


def _ordered_parts(flat: str, pieces: Sequence[Any], whole: int) -> dict[int, Any]:
    """Return a flat parameter's parts in order, keyed by rank. Of several replicas, the first rank's part is taken."""
    length = -(-whole // len(pieces))
    if all(isinstance(piece, _Tensor) and piece.numel() == length for piece in pieces):  # equal sizes, end padded
        return {rank: piece for rank, piece in enumerate(pieces) if rank * length < whole}
    by_offset: dict[int, tuple[int, Any]] = {}
    for rank, piece in enumerate(pieces):
        if isinstance(piece, FlatPart) and piece.tensor.numel():
            by_offset.setdefault(piece.offset, (rank, piece.tensor))
    parts = {rank: tensor for _, (rank, tensor) in sorted(by_offset.items())}
    ends = itertools.accumulate((tensor.numel() for tensor in parts.values()), initial=0)
    if [*sorted(by_offset), whole] != list(ends):
        lengths = sorted({getattr(piece, "tensor", piece).numel() for piece in pieces if piece is not None})
        raise CheckpointError(
            f"{flat} has {whole} numbers here, and parts of {lengths} on {len(pieces)} ranks there (those of some "
            "ranks are missing, or it is of another model: --num_layers, --hidden_width, --vocab_size)"
        )
    return parts
