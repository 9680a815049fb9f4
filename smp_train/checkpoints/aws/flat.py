"""What each rank of FSDP1 holds of model and optimizer, put together again.

On a rank a parameter is a one-dimensional slice, or with ``--use_orig_params 0`` a part of its unit's flat parameter
(each decoder layer is a unit, and the rest of the model another). The parts of a shard group, in the order of its
ranks, are the whole, padded at the end. The optimizer's state goes by number: parameters in the model's order, first
those with weight decay, then the others; of flat parameters all decay.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smp_train.checkpoints.aws.local import FlatPart, InertLoadPlanner
from smp_train.checkpoints.dcp import Reader, plain_value, read_tensor, saved_entries
from smp_train.errors import CheckpointError
from smp_train.models.hub_names import canonical_name
from smp_train.models.layouts import flat_order
from smp_train.models.smp_names import is_transformed

_FLAT = re.compile(r"(?P<unit>(?:.+\.)?)_flat_param")
_LAYER = re.compile(r"\w+\.(?:layers|h)\.\d+\.")
_NORM = re.compile(r"(?:norm\w*|ln_\w+)\.weight$")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NUMBERED = re.compile(r"optimizer\.state\.(?P<number>\d+)\.(?P<what>\w+)")
_GROUP = re.compile(r"optimizer\.param_groups\.(\d+)\.params")
_CONFIG = "model_config"
OWN = (
    "it holds slices of SMP's own implementation (--use_smp_implementation, tensor or expert parallelism) without "
    "their shapes and order: have the sample write a sharded checkpoint"
)


class Stored:
    """A tensor of a DCP tree, read when it is asked for."""

    def __init__(self, reader: Reader, key: str) -> None:
        self._reader, self._key = reader, key
        entry = saved_entries(reader)[key]
        self._size: torch.Size = entry.size
        self.dtype = entry.properties.dtype

    def size(self) -> torch.Size:
        """Return its shape."""
        return self._size

    def numel(self) -> int:
        """Return how many numbers it has."""
        return self._size.numel()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return read_tensor(self._reader, self._key)[index]


class Joined:
    """A tensor that lies in slices, one after another, from ``start`` on; they are put together when it is read."""

    def __init__(self, slices: Sequence[Any], shape: Sequence[int], start: int = 0) -> None:
        self._slices, self._shape, self._start = slices, torch.Size(shape), start
        self.dtype = slices[0].dtype

    def size(self) -> torch.Size:
        """Return its shape."""
        return self._shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block. Of the slices, what lies between its first number and its last is read."""
        strides = torch.empty(self._shape, device="meta").stride()
        lengths = [dim.stop - dim.start for dim in index]
        if 0 in lengths:
            return torch.empty(lengths, dtype=self.dtype)
        start = self._start + sum(dim.start * stride for dim, stride in zip(index, strides, strict=True))
        end = start + 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        parts, at = [], 0
        for piece in self._slices:
            first, last = max(start - at, 0), min(end - at, piece.numel())
            if first < last:
                parts.append(piece[...].flatten()[first:last])
            at += piece.numel()
        return torch.cat(parts).as_strided(lengths, strides)


def is_local(keys: Iterable[str]) -> bool:
    """Tell whether the entries of a DCP tree are those that one rank holds: its optimizer's state goes by number."""
    return any(map(_NUMBERED.fullmatch, keys))


def is_flat(name: str) -> bool:
    """Tell whether a name is of a flat parameter."""
    return _FLAT.fullmatch(canonical_name(name)) is not None


def of_tree(reader: Reader) -> dict[str, Any]:
    """Return model and optimizer of a rank's own DCP tree, as `tensors` takes them; tensors are read later."""
    model: dict[str, Any] = {}
    state: dict[int, dict[str, Any]] = {}
    groups: dict[int, list[int]] = {}
    config = None
    for key, entry in saved_entries(reader).items():
        numbered, group = _NUMBERED.fullmatch(key), _GROUP.fullmatch(key)
        if numbered:
            value = Stored(reader, key) if isinstance(entry, TensorStorageMetadata) else plain_value(reader, key)
            state.setdefault(int(numbered["number"]), {})[numbered["what"]] = value
        elif key == "optimizer.param_groups":  # as torch before 2.4 stores it
            groups = {index: each["params"] for index, each in enumerate(plain_value(reader, key))}
        elif group:
            groups[int(group[1])] = plain_value(reader, key)
        elif key.startswith("model.") and isinstance(entry, TensorStorageMetadata):
            model[key.removeprefix("model.")] = Stored(reader, key)
        elif key == _CONFIG:
            with suppress(CheckpointError):  # only needed for flat experts
                config = plain_value(reader, key, InertLoadPlanner)
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": [{"params": groups[index]} for index in sorted(groups)]},
        _CONFIG: config,
    }


def tensors(ranks: Sequence[dict[str, Any]], kind: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the tensors of all ranks, as a sharded checkpoint would name them.

    Args:
        ranks: what each rank holds.
        kind: transformers' name of the model family.
        shapes: whole shapes by parameter name.

    Raises `CheckpointError` where they are not those of one model.
    """
    model = _Model(ranks, kind, shapes)
    first = model.parts[0]
    named = [name for name in first if not is_flat(name)]
    if is_transformed(named, kind):
        raise CheckpointError(OWN)
    # The others are for the reader to refuse, unless they are buffers or a tied weight.
    others = {f"model.{name}": first[name] for name in named if name not in shapes and _is_tensor(first[name])}
    if not any(name in shapes for name in named):
        return others | model.of_flat()
    holders = {name: model.holders(name) for name in first if name in shapes}
    slices = {f"model.{name}": Joined(model.held(name)[:number], shapes[name]) for name, number in holders.items()}
    by_slices = sum(map(len, model.groups)) == len(slices) or len(named) < len(first)
    return others | slices | (model.moments_of_slices(holders) if by_slices else model.of_flat())


class _Model:
    """What the ranks hold of one model (``parts``) and of its optimizer (``states``, by number)."""

    def __init__(self, ranks: Sequence[dict[str, Any]], kind: str, shapes: Mapping[str, Sequence[int]]) -> None:
        self.kind, self.shapes = kind, shapes
        self.parts = [{canonical_name(name): value for name, value in rank["model"].items()} for rank in ranks]
        self.states: list[dict[int, dict[str, Any]]] = [rank["optimizer"]["state"] for rank in ranks]
        self.config = getattr(ranks[0].get(_CONFIG), "state", ())
        self.groups = [list(group["params"]) for group in ranks[0]["optimizer"]["param_groups"]]

    def held(self, name: str) -> list[Any]:
        """Return each rank's part of a parameter."""
        return [each.get(name) for each in self.parts]

    def holders(self, name: str) -> int:
        """Return how many ranks hold one whole: a shard group's, of which there may be several after one another."""
        lengths = [part.numel() for part in self.held(name)]
        whole, so_far = math.prod(self.shapes[name]), 0
        for number, length in enumerate(lengths, 1):
            so_far += length
            if so_far == whole and (number == len(lengths) or lengths[number] == lengths[0]):
                return number
        raise CheckpointError(f"{name} has {whole} numbers here, and {sum(lengths)} on {len(lengths)} ranks there")

    def moments_of_slices(self, holders: Mapping[str, int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, number in self._numbers(list(holders)).items():
            states = [state.get(number, {}) for state in self.states[: holders[name]]]
            for what in _MOMENTS:
                parts = [state[what] for state in states if what in state]
                if sum(part.numel() for part in parts) == math.prod(self.shapes[name]):
                    found[f"optimizer.state.{name}.{what}"] = Joined(parts, self.shapes[name])
            # A rank with an empty slice takes no steps with it.
            step = next((state["step"] for state in states if "step" in state and state["exp_avg"].numel()), None)
            if step is not None:
                found[f"optimizer.state.{name}.step"] = _step(step)
        return found

    def _numbers(self, names: list[str]) -> dict[str, int]:
        """Return the optimizer's number of each parameter."""
        state, sizes = self.states[0], {name: self.parts[0][name].numel() for name in names}
        for norms in (True, False) if self.kind in ("llama", "gpt_neox") else (False, True):
            decay = [name for name in names if not name.endswith(".bias") and not (norms and _NORM.search(name))]
            order = [decay, [name for name in names if name not in decay]] if len(self.groups) > 1 else [names]
            if list(map(len, order)) == list(map(len, self.groups)):
                found = dict(zip(itertools.chain(*order), itertools.chain(*self.groups), strict=True))
                if all(n not in state or state[n]["exp_avg"].numel() == sizes[name] for name, n in found.items()):
                    return found
        raise CheckpointError("the optimizer's groups are not those of the sample: which moment is whose is not known")

    def of_flat(self) -> dict[str, Any]:
        """Return what flat parameters hold.

        FSDP1 that shards nothing stores parameters whole, by their names, and the state of flat ones: of these the
        moments.
        """
        found: dict[str, Any] = {}
        order = flat_order(self.kind, self.shapes)
        flats = [name for name in self.parts[0] if is_flat(name)]
        # Until 4.55, or until 4.57. Not transformers_version: that is of the file that the configuration was read from.
        of_4 = "torch_dtype" in self.config or ("rope_theta" in self.config and "rope_parameters" not in self.config)
        if flats and any(".experts." in name for name in order) and not of_4:
            known = "is of transformers 5" if "rope_parameters" in self.config else "does not show transformers 4"
            raise CheckpointError(
                f"its model_config {known}, and transformers 5 stores experts in another order, which flat parameters "
                "do not show; have that program save a sharded checkpoint"
            )
        layers = dict.fromkeys(f"{layer[0]}_flat_param" for name in order if (layer := _LAYER.match(name)))
        units = _units(flats or ["_flat_param", *layers], order)
        numbers = list(itertools.chain(*self.groups))
        if len(numbers) != len(units):
            raise CheckpointError(
                f"its optimizer has {len(numbers)} parameters where {len(units)} flat ones are expected: which moment "
                "is whose is not known (another --num_layers or --tie_word_embeddings?)"
            )
        for number, (flat, names) in zip(numbers, units.items(), strict=True):
            whole = sum(math.prod(self.shapes[name]) for name in names)
            parts = _parts(flat, self.held(flat), whole) if flats else {0: None}
            states = [self.states[rank].get(number, {}) for rank in parts]
            values = {"model.{}": list(parts.values())} if flats else {}
            for what in _MOMENTS:
                values[f"optimizer.state.{{}}.{what}"] = moments = [state[what] for state in states if what in state]
                lengths = [part.numel() for part in moments]
                if moments and (len(set(lengths)) > 1 or len(moments) < len(parts) or sum(lengths) < whole):
                    raise CheckpointError(f"{flat} has {whole} numbers, and {what} parts of {lengths}")
            start = 0
            for name in names:
                shape = self.shapes[name]
                found |= {key.format(name): Joined(pieces, shape, start) for key, pieces in values.items() if pieces}
                if "step" in states[0]:
                    found[f"optimizer.state.{name}.step"] = _step(states[0]["step"])
                start += math.prod(shape)
        return found


def _units(flats: Sequence[str], order: Sequence[str]) -> dict[str, list[str]]:
    """Return the parameters in each flat one, both in the model's order: a unit has what no unit inside it has."""
    prefixes = {flat: flat.removesuffix("_flat_param") for flat in flats}
    within = {flat: [name for name in order if name.startswith(prefix)] for flat, prefix in prefixes.items()}
    units: dict[str, list[str]] = {flat: [] for flat in flats}
    for name in order:
        around = [flat for flat in flats if name.startswith(prefixes[flat])]
        if not around:
            raise CheckpointError(f"it lacks the flat parameter that {name} is in")
        units[max(around, key=len)].append(name)
    first = {flat: order.index(names[0]) if names else len(order) for flat, names in within.items()}
    return {flat: units[flat] for flat in sorted(flats, key=lambda flat: (first[flat], len(flat)))}


def _parts(flat: str, values: Sequence[Any], whole: int) -> dict[int, Any]:
    """Return a flat parameter's parts in order, each by the rank that holds it; replicas once."""
    length = -(-whole // len(values))
    if all(_is_tensor(value) and value.numel() == length for value in values):  # with its padding
        return {rank: value for rank, value in enumerate(values) if rank * length < whole}
    first: dict[int, tuple[int, Any]] = {}
    for rank, value in enumerate(values):
        if isinstance(value, FlatPart) and value.tensor.numel():
            first.setdefault(value.offset, (rank, value.tensor))
    at, parts = 0, sorted(first.items())
    for offset, (_, tensor) in parts:
        at += tensor.numel() if offset == at else whole + 1  # no part begins where the one before ends
    if at != whole:
        lengths = sorted({getattr(value, "tensor", value).numel() for value in values if value is not None})
        raise CheckpointError(
            f"{flat} has {whole} numbers here, and parts of {lengths} on {len(values)} ranks there (those of some "
            "ranks are missing, or it is of another model: --num_layers, --hidden_width, --vocab_size)"
        )
    return {rank: tensor for _, (rank, tensor) in parts}


def _step(value: Any) -> Any:
    return value if _is_tensor(value) else torch.tensor(float(value))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | Stored)
