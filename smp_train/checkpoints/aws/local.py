"""Files ``<rank>.pt`` of the SMP v2 sample (``--checkpoint_type local``): what FSDP1 holds on each rank."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from smp_train.checkpoints.dcp import PlainLoadPlanner
from smp_train.errors import CheckpointError, first_line
from smp_train.models.weight_files import refuse_compressed


@dataclass(frozen=True)
class FlatPart:
    """A rank's slice of a flat parameter, without padding: its offset in the parameter, and its numbers."""

    offset: int
    tensor: Any


class _Inert:
    """Inert placeholder for a pickled object that is not a tensor or plain value; keeps the state it would be given."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        """Ignore the arguments."""

    append = extend


class _ShardedTensor(_Inert):
    """Stands for torch's class, which holds a flat parameter in FSDP1's local state dict."""


def _rebuilt(rebuild: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    if kind is not _ShardedTensor:
        return rebuild(*args)
    shards = [shard.state[1] for shard in state[0]]  # none where the rank holds padding alone, otherwise one
    if not shards:
        return FlatPart(0, torch.empty(0))
    (shard,) = shards
    (offset,) = shard["metadata"].state[1]["shard_offsets"]
    return FlatPart(offset, shard["tensor"])


class _Unpickler(pickle._Unpickler):
    """Builds tensors and plain values; of everything else nothing is imported or called.

    ``weights_only`` refuses such files whole: beside the tensors they hold FSDP1's ShardedTensors and a configuration.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    KNOWN: Mapping[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): _ShardedTensor,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few known functions, a dtype, or an inert class."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return self.KNOWN.get((module, name), _Inert)

    def load_build(self) -> None:
        """Give an inert object its state; leave any other as it is."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], _Inert):
            self.stack[-1].state = state

    def load_newobj(self) -> None:
        """Put an inert object in place of one whose class is called without its constructor."""
        del self.stack[-2:]
        self.stack.append(_Inert())

    def load_newobj_ex(self) -> None:
        """See `load_newobj`."""
        del self.stack[-3:]
        self.stack.append(_Inert())

    del dispatch[pickle.BYTEARRAY8[0]]  # it allocates whatever length it is given; torch.save writes none
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex


class _Pickle:
    """What `torch.load` takes for the pickle module."""

    Unpickler = _Unpickler
    __name__ = "pickle"


class InertLoadPlanner(PlainLoadPlanner):
    """Unpickles any object that is not a tensor or plain value as an inert placeholder."""

    unpickle = staticmethod(partial(torch.load, map_location="cpu", weights_only=False, pickle_module=_Pickle))


def read(path: Any) -> dict[str, Any]:
    """Return what is in a file of ``torch.save``, tensors mapped from it. Raises `CheckpointError`."""
    try:
        with open(path, "rb") as file:
            refuse_compressed(file)
        with zipfile.ZipFile(path) as members:
            if any(name.endswith("constants.pkl") for name in members.namelist()):
                raise ValueError("it is TorchScript")  # which torch.load would open as such
        found = InertLoadPlanner.unpickle(path, mmap=True)
    except Exception as failure:
        raise CheckpointError(f"{path} cannot be read: {first_line(failure)}") from failure
    if not (isinstance(found, dict) and all(isinstance(found.get(part), dict) for part in ("model", "optimizer"))):
        raise CheckpointError(f"{path} is not a local checkpoint of SMP's sample: it lacks model or optimizer")
    return found


def plain_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and strings beside model and optimizer, by flat name."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        values = {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
        if key not in ("model", "optimizer"):
            found |= {name: each for name, each in values.items() if isinstance(each, int | float | str)}
    return found
