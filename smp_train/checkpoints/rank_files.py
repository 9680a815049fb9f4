"""Files ``<rank>.pt`` of the SMP v2 sample (``--checkpoint_type local``): what FSDP1 holds on each rank, flat.

A parameter is a one-dimensional slice on each rank, and the slices of a shard group, one after another, are all of it.
The optimizer's state goes by number: parameters in the model's order, first those with weight decay, then the others.
"""

from __future__ import annotations

import itertools
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from smp_train.errors import CheckpointError
from smp_train.models.hub_names import canonical_name
from smp_train.models.weight_files import refuse_compressed

_FLAT = re.compile(r"(?:^|\.)_flat_param$")
_MOMENTS = ("exp_avg", "exp_avg_sq")


class _Inert:
    """Stands for any object of a pickle that is no tensor or plain value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        """Take nothing in."""

    append = extend


def _rebuilt(rebuild: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    return rebuild(*args)


class _Unpickler(pickle._Unpickler):
    """Builds tensors and plain values; of everything else nothing is imported, called or filled in.

    ``weights_only`` refuses such files whole: beside the tensors they hold FSDP1's ShardedTensors and a configuration.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    KNOWN: Mapping[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few known functions, a dtype, or an inert class."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return self.KNOWN.get((module, name), _Inert)

    def load_build(self) -> None:
        """Leave the object as it is."""
        self.stack.pop()

    def load_newobj(self) -> None:
        """Put an inert object in place of one whose class is called without its constructor."""
        del self.stack[-2:]
        self.stack.append(_Inert())

    def load_newobj_ex(self) -> None:
        """See `load_newobj`."""
        del self.stack[-3:]
        self.stack.append(_Inert())

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex


class _Pickle:
    """What `torch.load` takes for the pickle module."""

    Unpickler = _Unpickler
    __name__ = "pickle"


def read(path: Any) -> dict[str, Any]:
    """Return what is in a file of ``torch.save``, tensors mapped from it. Raises `CheckpointError`."""
    try:
        with open(path, "rb") as file:
            refuse_compressed(file)
        with zipfile.ZipFile(path) as members:
            if any(name.endswith("constants.pkl") for name in members.namelist()):
                raise ValueError("it is TorchScript")  # which torch.load would open as such
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_Pickle)
    except Exception as failure:
        first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        raise CheckpointError(f"{path} cannot be read: {first}") from failure
    if not (isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in ("model", "optimizer"))):
        raise CheckpointError(f"{path} is not a local checkpoint of SMP's sample: it lacks model or optimizer")
    return found


class Joined:
    """A tensor whose slices lie in several files; they are put together when it is read."""

    def __init__(self, slices: Sequence[torch.Tensor], shape: Sequence[int]) -> None:
        self._slices, self._shape = slices, torch.Size(shape)
        self.dtype = slices[0].dtype

    def size(self) -> torch.Size:
        """Return its shape."""
        return self._shape

    def dim(self) -> int:
        """Return the number of its dimensions."""
        return len(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.cat(list(self._slices)).view(self._shape)[index]


def plain_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and strings beside model and optimizer, by flat name."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        values = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
        if key not in ("model", "optimizer"):
            found |= {name: each for name, each in values.items() if isinstance(each, int | float | str)}
    return found


def tensors(ranks: Sequence[dict[str, Any]], kind: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return the tensors in the files of all ranks, as a sharded checkpoint would name them.

    Args:
        ranks: what each rank's file holds.
        kind: transformers' name of the model family.
        shapes: whole shapes by parameter name.

    Raises `CheckpointError` where they are not those of one model.
    """
    slices = [_by_name(rank["model"]) for rank in ranks]
    if not slices[0]:
        raise CheckpointError(
            "its parameters are FSDP1's flat ones (--use_orig_params 0), which are not read: have the sample write a "
            "sharded checkpoint"
        )
    found: dict[str, Any] = {}
    group: dict[str, int] = {}
    for name in slices[0]:
        if name not in shapes:
            found[f"model.{name}"] = slices[0][name]  # for the reader to refuse, or a tied weight
            continue
        group[name] = _group(name, [each[name].numel() for each in slices], shapes[name])
        found[f"model.{name}"] = Joined([each[name] for each in slices[: group[name]]], shapes[name])
    numbers = _numbers(ranks[0]["optimizer"], list(group), kind, slices[0])
    for name, number in numbers.items():
        states = [rank["optimizer"]["state"].get(number, {}) for rank in ranks[: group[name]]]
        for what in _MOMENTS:
            parts = [state[what] for state in states if what in state]
            if sum(part.numel() for part in parts) == torch.Size(shapes[name]).numel():
                found[f"optimizer.state.{name}.{what}"] = Joined(parts, shapes[name])
        # A rank with an empty slice takes no steps with it.
        step = next((state["step"] for state in states if "step" in state and state["exp_avg"].numel()), None)
        if step is not None:
            found[f"optimizer.state.{name}.step"] = torch.as_tensor(step, dtype=torch.float32)
    return found


def _by_name(model: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    named = {canonical_name(name): value for name, value in model.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in named.items() if not _FLAT.search(name)}


def _group(name: str, lengths: Sequence[int], shape: Sequence[int]) -> int:
    """Return how many ranks hold one whole: a shard group's, of which there may be several after one another."""
    whole, so_far = torch.Size(shape).numel(), 0
    for number, length in enumerate(lengths, 1):
        so_far += length
        if so_far == whole and (number == len(lengths) or lengths[number] == lengths[0]):
            return number
    raise CheckpointError(f"{name} has {whole} numbers here, and {sum(lengths)} on {len(lengths)} ranks there")


def _numbers(
    optimizer: Mapping[str, Any], names: Iterable[str], kind: str, slices: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Return the optimizer's number of each parameter."""
    names = list(names)
    groups = [list(group["params"]) for group in optimizer["param_groups"]]
    for norms in (True, False) if kind in ("llama", "gpt_neox") else (False, True):
        decay = [name for name in names if not name.endswith(".bias") and not (norms and "norm" in name.split(".")[-2])]
        rest = [name for name in names if name not in set(decay)]
        order = [decay, rest] if len(groups) > 1 else [names]
        if [len(each) for each in order] == [len(each) for each in groups]:
            found = dict(zip(itertools.chain(*order), itertools.chain(*groups), strict=True))
            state = optimizer["state"]
            if all(n not in state or state[n]["exp_avg"].numel() == slices[name].numel() for name, n in found.items()):
                return found
    raise CheckpointError("the optimizer's groups are not those of the sample: which moment is whose is not known")
