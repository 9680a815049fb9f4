"""Read the contents that FSDP1 stores on each rank: files ``<rank>.pt`` and trees of local tensors.

The files are pickles of unknown origin. Reading them imports and calls nothing but a few known functions.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from smp_train.checkpoints.aws.flat import MODEL_CONFIG, FlatPart, StoredTensor
from smp_train.checkpoints.dcp import pickled
from smp_train.checkpoints.dcp.storage import Reader
from smp_train.checkpoints.dcp.trees import PlainLoadPlanner, plain_value, saved_entries
from smp_train.errors import CheckpointError, first_line
from smp_train.models.weight_files import refuse_compressed

_NUMBERED = re.compile(r"optimizer\.state\.(?P<number>\d+)\.(?P<what>\w+)")
_GROUP = re.compile(r"optimizer\.param_groups\.(\d+)\.params")


class _Inert:
    """Placeholder for a pickled object that is not a tensor or plain value; keeps the object's state."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any) -> _Inert:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    append = extend


class _ShardedTensor(_Inert):
    """Placeholder for torch's ShardedTensor, which holds a flat parameter in FSDP1's local state dict."""


def _rebuild(function: Callable[..., Any], kind: Any, args: tuple[Any, ...], state: Any) -> Any:
    """Rebuild a tensor from its arguments, or a ShardedTensor as a `FlatPart`, the part that one rank holds."""
    if kind is not _ShardedTensor:
        return function(*args)
    if not state[0]:  # the rank holds padding only
        return FlatPart(0, torch.empty(0))
    ((_, shard),) = (shard.state for shard in state[0])
    (offset,) = shard["metadata"].state[1]["shard_offsets"]
    return FlatPart(offset, shard["tensor"])


class _Unpickler(pickled.Unpickler):
    """Builds tensors and plain values; replaces every other object by a placeholder.

    torch's ``weights_only`` refuses these files, because they hold FSDP1's ShardedTensors and a configuration object.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickled.Unpickler.dispatch)
    KNOWN: Mapping[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuild,
        ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"): _ShardedTensor,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return self.KNOWN.get((module, name), _Inert)

    def load_build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], _Inert):
            self.stack[-1].state = state

    def load_newobj(self, operands: int = 2) -> None:
        self.stack[-operands:] = [_Inert()]

    dispatch |= {pickle.BUILD[0]: load_build, pickle.NEWOBJ[0]: load_newobj}
    dispatch[pickle.NEWOBJ_EX[0]] = partial(load_newobj, operands=3)


class InertLoadPlanner(PlainLoadPlanner):
    """Unpickles tensors and plain values, and puts a placeholder in place of every other object."""

    _PICKLE_MODULE = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle")
    unpickle = staticmethod(partial(torch.load, map_location="cpu", weights_only=False, pickle_module=_PICKLE_MODULE))


def read_rank_file(path: Any) -> dict[str, Any]:
    """Return the contents of a ``torch.save`` file, with its tensors mapped from disk. Raises `CheckpointError`."""
    try:
        with open(path, "rb") as file:
            refuse_compressed(file)
        with zipfile.ZipFile(path) as members:
            if any(name.endswith("constants.pkl") for name in members.namelist()):
                raise ValueError("it is TorchScript")  # torch.load would hand it to torch.jit.load
        content = InertLoadPlanner.unpickle(path, mmap=True)
    except Exception as failure:
        raise CheckpointError(f"{path} cannot be read: {first_line(failure)}") from failure
    if not (isinstance(content, dict) and all(isinstance(content.get(key), dict) for key in ("model", "optimizer"))):
        raise CheckpointError(f"{path} is not a local checkpoint of SMP's sample: it lacks model or optimizer")
    optimizer = content["optimizer"]
    if not (isinstance(optimizer.get("state"), dict) and isinstance(optimizer.get("param_groups"), list)):
        raise CheckpointError(
            f"{path}: its optimizer lacks state or param_groups, so AdamW's moments are not in it; "
            "give a file of optimizer.state_dict(), or the weights to --pretrained_checkpoint_file"
        )
    return content


def plain_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank file's numbers and strings outside its model and optimizer, by flat name."""
    values, _ = flatten_state_dict({key: content[key] for key in content.keys() - {"model", "optimizer"}})
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def is_local(keys: Iterable[str]) -> bool:
    """Return whether a DCP tree holds one rank's local tensors: its optimizer state is keyed by number, not by name."""
    return any(map(_NUMBERED.fullmatch, keys))


def rank_contents_of_tree(reader: Reader) -> dict[str, Any]:
    """Return the model and optimizer in one rank's tree, in the form of a rank file; tensors are read on access."""
    model: dict[str, Any] = {}
    state: dict[int, dict[str, Any]] = {}
    groups: dict[int, list[int]] = {}
    config = None
    for key, entry in saved_entries(reader).items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if key.startswith("model.") and is_tensor:
            model[key.removeprefix("model.")] = StoredTensor(reader, key, entry)
        elif numbered := _NUMBERED.fullmatch(key):
            value = StoredTensor(reader, key, entry) if is_tensor else plain_value(reader, key)
            state.setdefault(int(numbered["number"]), {})[numbered["what"]] = value
        elif key == "optimizer.param_groups":  # torch before 2.4 stores all groups in this one entry
            groups = {index: values["params"] for index, values in enumerate(plain_value(reader, key))}
        elif group := _GROUP.fullmatch(key):
            groups[int(group[1])] = plain_value(reader, key)
        elif key == MODEL_CONFIG:
            with suppress(CheckpointError):  # the configuration is needed for flat experts only
                config = plain_value(reader, key, InertLoadPlanner)
    param_groups = [{"params": groups[index]} for index in sorted(groups)]
    return {"model": model, "optimizer": {"state": state, "param_groups": param_groups}, MODEL_CONFIG: config}
