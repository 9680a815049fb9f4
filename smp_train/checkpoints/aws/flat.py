"""Join the pieces of parameters and moments that FSDP1 stores on each rank.

A rank holds a one-dimensional slice of each parameter or, with ``--use_orig_params 0``, a part of each FSDP unit's flat
parameter. Each decoder layer is a unit, and all remaining modules form one more unit. The pieces of a shard group, in
the order of its ranks, are the whole tensor with padding at the end. The optimizer's state is numbered in the model's
order: first the parameters with weight decay, then those without; flat parameters all have decay.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smp_train.checkpoints.dcp.storage import Reader
from smp_train.checkpoints.dcp.trees import read_tensor, saved_entries
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
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class FlatPart:
    """A rank's part of a flat parameter, without padding, and its offset in that parameter."""

    offset: int
    tensor: Any


class StoredTensor:
    """A tensor of a DCP tree that is read on access."""

    def __init__(self, reader: Reader, key: str) -> None:
        self._reader, self._key, entry = reader, key, saved_entries(reader)[key]
        self._size: torch.Size = entry.size
        self.dtype = entry.properties.dtype

    def size(self) -> torch.Size:
        """Return the shape."""
        return self._size

    def numel(self) -> int:
        """Return the number of elements."""
        return self._size.numel()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return read_tensor(self._reader, self._key)[index]


class JoinedTensor:
    """A tensor whose elements lie in consecutive slices, from element ``start`` on; the slices are joined on access."""

    def __init__(self, slices: Sequence[Any], shape: Sequence[int], start: int = 0) -> None:
        self._slices, self._shape, self._start = slices, torch.Size(shape), start
        self.dtype = slices[0].dtype

    def size(self) -> torch.Size:
        """Return the shape."""
        return self._shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block. Only slices between the block's first and last element are read."""
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
    """Return model and optimizer of all ranks under the names of a sharded checkpoint.

    Args:
        contents: the model and optimizer that each rank holds.
        kind: transformers' name of the model family.
        shapes: full shapes by parameter name.

    Raises `CheckpointError` if the contents do not fit one model of these shapes.
    """
    model = _RankContents(contents, kind, shapes)
    first = model.parameters[0]
    names = [name for name in first if not is_flat(name)]
    if is_transformed(names, kind):
        raise CheckpointError(SMP_SLICES)
    # `HubReader` refuses tensors of unknown names, except buffers and tied weights.
    unknown = {f"model.{name}": first[name] for name in names if name not in shapes and _is_tensor(first[name])}
    group_sizes = {name: model.shard_group_size(name) for name in names if name in shapes}
    slices = {
        f"model.{name}": JoinedTensor(model.pieces(name)[:size], shapes[name]) for name, size in group_sizes.items()
    }
    # FSDP1 that shards nothing stores parameters by name, but the optimizer's state of flat parameters.
    per_parameter = sum(map(len, model.groups)) == len(slices) or len(names) < len(first)
    if slices and per_parameter:
        return unknown | slices | model.moments_of_slices(group_sizes)
    return unknown | slices | model.flat_tensors()


class _RankContents:
    """Parameters by name and optimizer states by number of each rank."""

    def __init__(self, contents: Sequence[dict[str, Any]], kind: str, shapes: Mapping[str, Sequence[int]]) -> None:
        self.kind, self.shapes = kind, shapes
        self.parameters = [{canonical_name(name): value for name, value in rank["model"].items()} for rank in contents]
        self.states: list[dict[int, dict[str, Any]]] = [rank["optimizer"]["state"] for rank in contents]
        self.groups = [list(group["params"]) for group in contents[0]["optimizer"]["param_groups"]]
        self.config = getattr(contents[0].get(MODEL_CONFIG), "state", ())

    def pieces(self, name: str) -> list[Any]:
        """Return each rank's piece of a parameter."""
        return [parameters.get(name) for parameters in self.parameters]

    def shard_group_size(self, name: str) -> int:
        """Return how many ranks together hold a parameter once; further ranks hold replicas."""
        lengths = [piece.numel() for piece in self.pieces(name)]
        whole = math.prod(self.shapes[name])
        for number, length in enumerate(itertools.accumulate(lengths), 1):
            if length == whole and (number == len(lengths) or lengths[number] == lengths[0]):
                return number
        raise CheckpointError(f"{name} has {whole} numbers here, and {sum(lengths)} on {len(lengths)} ranks there")

    def moments_of_slices(self, group_sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the moments and steps of parameters that are stored by name."""
        tensors: dict[str, Any] = {}
        for name, number in self._optimizer_numbers(list(group_sizes)).items():
            states = [state.get(number, {}) for state in self.states[: group_sizes[name]]]
            for moment in _MOMENTS:
                pieces = [state[moment] for state in states if moment in state]
                if sum(piece.numel() for piece in pieces) == math.prod(self.shapes[name]):
                    tensors[f"optimizer.state.{name}.{moment}"] = JoinedTensor(pieces, self.shapes[name])
            # A rank with an empty slice does not count steps.
            step = next((state["step"] for state in states if "step" in state and state["exp_avg"].numel()), None)
            if step is not None:
                tensors[f"optimizer.state.{name}.step"] = _step(step)
        return tensors

    def _optimizer_numbers(self, names: list[str]) -> dict[str, int]:
        """Return the optimizer's number of each parameter, from the sample's two rules for weight decay of norms."""
        state, sizes = self.states[0], {name: self.parameters[0][name].numel() for name in names}
        for norms in (True, False) if self.kind in ("llama", "gpt_neox") else (False, True):
            decay = [name for name in names if not name.endswith(".bias") and not (norms and _NORM.search(name))]
            order = [decay, [name for name in names if name not in decay]] if len(self.groups) > 1 else [names]
            if list(map(len, order)) == list(map(len, self.groups)):
                numbers = dict(zip(itertools.chain(*order), itertools.chain(*self.groups), strict=True))
                if all(n not in state or state[n]["exp_avg"].numel() == sizes[name] for name, n in numbers.items()):
                    return numbers
        raise CheckpointError("the optimizer's groups are not those of the sample: which moment is whose is not known")

    def flat_tensors(self) -> dict[str, Any]:
        """Return the parameters, moments and steps in flat parameters; without flat parameters, moments and steps."""
        order = flat_order(self.kind, self.shapes)
        flats = [name for name in self.parameters[0] if is_flat(name)]
        if flats and any(".experts." in name for name in order):
            self._check_expert_order()
        layers = dict.fromkeys(f"{layer[0]}_flat_param" for name in order if (layer := _LAYER.match(name)))
        units = _names_in_units(flats or ["_flat_param", *layers], order)
        numbers = list(itertools.chain(*self.groups))
        if len(numbers) != len(units):
            raise CheckpointError(
                f"its optimizer has {len(numbers)} parameters where {len(units)} flat ones are expected: which moment "
                "is whose is not known (another --num_layers or --tie_word_embeddings?)"
            )
        tensors: dict[str, Any] = {}
        for number, (flat, names) in zip(numbers, units.items(), strict=True):
            whole = sum(math.prod(self.shapes[name]) for name in names)
            parts = _ordered_parts(flat, self.pieces(flat), whole) if flats else {0: None}
            states = [self.states[rank].get(number, {}) for rank in parts]
            pieces = {"model.{}": list(parts.values())} if flats else {}
            for moment in _MOMENTS:
                moments = [state[moment] for state in states if moment in state]
                lengths = [part.numel() for part in moments]
                if moments and (len(set(lengths)) > 1 or len(moments) < len(parts) or sum(lengths) < whole):
                    raise CheckpointError(f"{flat} has {whole} numbers, and {moment} parts of {lengths}")
                pieces |= {f"optimizer.state.{{}}.{moment}": moments} if moments else {}
            start = 0
            for name in names:
                shape = self.shapes[name]
                tensors |= {form.format(name): JoinedTensor(slices, shape, start) for form, slices in pieces.items()}
                if "step" in states[0]:
                    tensors[f"optimizer.state.{name}.step"] = _step(states[0]["step"])
                start += math.prod(shape)
        return tensors

    def _check_expert_order(self) -> None:
        """Raise `CheckpointError` unless transformers 4 wrote the experts: transformers 5 stacks them by kind."""
        # `transformers_version` does not help: it names the version that wrote config.json.
        has_4 = "torch_dtype" in self.config or ("rope_theta" in self.config and "rope_parameters" not in self.config)
        if not has_4:
            version = "is of transformers 5" if "rope_parameters" in self.config else "does not show transformers 4"
            raise CheckpointError(
                f"its model_config {version}, and transformers 5 stores experts in another order, which flat "
                "parameters do not show; have that program save a sharded checkpoint"
            )


def _names_in_units(flats: Iterable[str], order: Sequence[str]) -> dict[str, list[str]]:
    """Return the parameters in each flat parameter, both in the model's order; the innermost unit has a parameter."""
    prefixes = {flat: flat.removesuffix("_flat_param") for flat in flats}
    first = {
        flat: next((index for index, name in enumerate(order) if name.startswith(prefix)), len(order))
        for flat, prefix in prefixes.items()
    }
    units: dict[str, list[str]] = {flat: [] for flat in sorted(first, key=lambda flat: (first[flat], len(flat)))}
    for name in order:
        enclosing = [flat for flat, prefix in prefixes.items() if name.startswith(prefix)]
        if not enclosing:
            raise CheckpointError(f"it lacks the flat parameter that {name} is in")
        units[max(enclosing, key=len)].append(name)
    return units


def _ordered_parts(flat: str, pieces: Sequence[Any], whole: int) -> dict[int, Any]:
    """Return the parts of a flat parameter in order, each by the first rank that holds it."""
    length = -(-whole // len(pieces))
    if all(_is_tensor(piece) and piece.numel() == length for piece in pieces):  # pieces with padding
        return {rank: piece for rank, piece in enumerate(pieces) if rank * length < whole}
    by_offset: dict[int, tuple[int, Any]] = {}
    for rank, piece in enumerate(pieces):
        if isinstance(piece, FlatPart) and piece.tensor.numel():
            by_offset.setdefault(piece.offset, (rank, piece.tensor))
    end, contiguous = 0, True
    for offset, (_, tensor) in sorted(by_offset.items()):
        contiguous = contiguous and offset == end
        end += tensor.numel()
    if end != whole or not contiguous:
        lengths = sorted({getattr(piece, "tensor", piece).numel() for piece in pieces if piece is not None})
        raise CheckpointError(
            f"{flat} has {whole} numbers here, and parts of {lengths} on {len(pieces)} ranks there (those of some "
            "ranks are missing, or it is of another model: --num_layers, --hidden_width, --vocab_size)"
        )
    return {rank: tensor for _, (rank, tensor) in sorted(by_offset.items())}


def _step(value: Any) -> Any:
    return value if _is_tensor(value) else torch.tensor(float(value))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | StoredTensor)
