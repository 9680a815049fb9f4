"""One DCP tree in the hub's names, made of the trees of SMP's ranks or of another program; and back. Nothing is copied.

Metadata has one chunk for every block of a saved chunk that lies in a tensor of the hub
(`smp_train.models.smp_names`), so that the ordinary loading path reads it on any mesh. A request for a chunk becomes
one for a slice of the saved one. `RankReader` does the same in the other direction, from the hub's names to those of
one tensor and expert rank of SMP; the two together read trees of other degrees.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from smp_train.checkpoints.dcp import Reader
from smp_train.errors import CheckpointError, first_few
from smp_train.models.hf_weights import NOT_WEIGHTS
from smp_train.models.hub_names import canonical_name
from smp_train.models.layouts import SMP_LAYERS
from smp_train.models.smp_names import Block, HubModel, Ranks, blocks, plain

# What programs call the model and the optimizer's state; ours is first.
MODEL_PREFIXES = ("model.", "app.model.", "state_dict.", "module.", "")
MOMENTS = re.compile(r"(?:app\.)?optim(?:izer)?\.state\.(?P<name>.+)\.(?P<what>exp_avg|exp_avg_sq|max_exp_avg_sq|step)")
_OTHERS = re.compile(r"(?:app\.)?(?:optim(?:izer)?|scheduler|lr_scheduler|cli_args|model_config)\b")
_NO_PARAMETER = re.compile(r"_extra_state$")
_WEIGHT = "model.{}"
_TIED = re.compile(r"(?:^|\.)(?:lm_head|embed_out|embed_tokens|embed_in)\.weight$")


@dataclass(frozen=True)
class Tree:
    """A tree of one tensor and expert rank, and how to read it."""

    ranks: Ranks
    reader: Reader


class _WholeReader(Reader):
    """The steps of a DCP reader that need no work where metadata is read ahead and plans are read whole."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to do: it reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True."""
        return True


class TensorReader(_WholeReader):
    """Reads tensors that are in memory, or mapped from a file, as if they were a DCP tree."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def preload(self) -> None:
        """Describe each tensor as one chunk."""
        entries: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=value.dtype),
                value.size(),
                [ChunkStorageMetadata(torch.Size([0] * len(value.size())), value.size())],
            )
            for name, value in self._tensors.items()
        }
        self._metadata = Metadata(entries, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            index = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._tensors[item.storage_index.fqn][index])
            planner.commit_tensor(item, target)
        return _done()


@dataclass(frozen=True)
class _Source:
    """Where a chunk begins: within a saved chunk, which ``reader`` has at ``index``."""

    reader: Reader
    index: MetadataIndex
    start: tuple[int, ...]


_Answers = list[tuple[ReadItem, tuple[slice, ...]]]
"""The original requests that one merged request to a reader answers, each with its slice of the result."""


class _Rearranged(_WholeReader):
    """Reads tensors each of which consists of parts of the chunks that other readers have."""

    def __init__(self) -> None:
        self._sources: dict[MetadataIndex, _Source] = {}
        self._found: dict[str, tuple[TensorProperties, list[ChunkStorageMetadata]]] = {}

    def _add(
        self, key: str, properties: TensorProperties, at: Sequence[int], size: Sequence[int], source: _Source
    ) -> None:
        """Add the chunk of ``size`` at ``at`` of the tensor ``key``, unless it is there: tensor ranks have replicas."""
        index = MetadataIndex(key, torch.Size(at))
        if index not in self._sources:
            self._sources[index] = source
            chunks = self._found.setdefault(key, (properties, []))[1]
            chunks.append(ChunkStorageMetadata(torch.Size(at), torch.Size(size)))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each saved chunk once: readers load a chunk whole for every request."""
        wanted: dict[Reader, dict[MetadataIndex, list[tuple[ReadItem, list[int], list[int]]]]] = {}
        for item in plan.items:
            source = self._sources[item.storage_index]
            dims = len(source.start)
            offsets, size = _last(dims, 0, item.storage_offsets), _last(dims, 1, item.lengths)
            at = [start + offset for start, offset in zip(source.start, offsets, strict=True)]
            wanted.setdefault(source.reader, {}).setdefault(source.index, []).append((item, at, size))
        for reader, chunks in wanted.items():
            requests = dict(itertools.starmap(_request, chunks.items()))
            reader.read_data(LoadPlan(list(requests)), _Targets(planner, requests)).wait()
        return _done()


def _last(dims: int, fill: int, values: Sequence[int]) -> list[int]:
    """Return the last ``dims`` values, with ``fill`` in front where there are fewer: extra dimensions have size 1."""
    return [*[fill] * dims, *values][len(values) :]


def _request(index: MetadataIndex, wanted: list[tuple[ReadItem, list[int], list[int]]]) -> tuple[ReadItem, _Answers]:
    """Return one request to a saved chunk for all that is ``wanted`` of it (request, offset, size), and its answers."""
    low = [min(at) for at in zip(*(at for _, at, _ in wanted), strict=True)]
    high = [max(ends) for ends in zip(*(map(sum, zip(at, size, strict=True)) for _, at, size in wanted), strict=True)]
    lengths = torch.Size(end - begin for begin, end in zip(low, high, strict=True))
    there = replace(wanted[0][0], storage_index=index, storage_offsets=torch.Size(low), lengths=lengths)
    return there, [
        (item, tuple(slice(a - begin, a - begin + n) for a, n, begin in zip(at, size, low, strict=True)))
        for item, at, size in wanted
    ]


def _overlap(
    at: Sequence[int], size: Sequence[int], chunk: ChunkStorageMetadata
) -> tuple[list[int], list[int], tuple[int, ...]] | None:
    """Return (offset, size, offset within the chunk) of what a block and a chunk have in common, None for nothing."""
    low = [max(a, b) for a, b in zip(at, chunk.offsets, strict=True)]
    ends = zip(at, size, chunk.offsets, chunk.sizes, strict=True)
    common = [min(a + n, b + m) - begin for (a, n, b, m), begin in zip(ends, low, strict=True)]
    start = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
    return None if any(length <= 0 for length in common) else (low, common, start)


class HubReader(_Rearranged):
    """Reads ``model.<name>`` and ``optim.state.<name>.<moment>``, by the hub's names, from trees of a checkpoint."""

    def __init__(self, trees: Sequence[Tree], model: HubModel) -> None:
        super().__init__()
        self.trees, self.model = trees, model

    def preload(self) -> None:
        """Read the metadata of all trees. Raises `CheckpointError` where they are not the whole model."""
        self._sources, self._found = {}, {}
        unknown: list[str] = []
        for tree in self.trees:
            tree.reader.preload()
            metadata = tree.reader.read_metadata()
            tree.reader.set_up_storage_reader(metadata, False)
            saved = metadata.state_dict_metadata
            prefix = model_prefix(saved, self.model)
            tensors = {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
            shapes = {}
            for key, entry in tensors.items():
                if key.startswith(prefix) and not _OTHERS.match(key):
                    name = key.removeprefix(prefix)
                    shapes[plain(name)] = entry.size
                    unknown += self._take(tree, key, name, _WEIGHT, entry, entry.size)
            for key, entry in tensors.items():
                moment = MOMENTS.fullmatch(key)
                if moment is not None:
                    to = "optim.state.{}." + moment["what"]
                    shape = shapes.get(plain(moment["name"]), entry.size)
                    unknown += self._take(tree, key, moment["name"], to, entry, shape)
        if unknown:
            raise CheckpointError(
                f"it has unexpected entries {first_few(unknown)}: no name of the hub's or SMP's for this "
                f"{self.model.kind} (another --num_layers? Else have SMP write a full checkpoint, and start from that)"
            )
        entries: dict[str, Any] = {}
        for key, (properties, chunks) in self._found.items():
            moment = MOMENTS.fullmatch(key)
            name = moment["name"] if moment else key.removeprefix("model.")
            size = () if moment and moment["what"] == "step" else tuple(self.model.shapes[name])
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
                raise CheckpointError(f"it does not hold all of {key}: trees of some ranks are missing")
            entries[key] = TensorStorageMetadata(properties, torch.Size(size), chunks)
        self._metadata = Metadata(entries, storage_meta=StorageMeta())

    def _take(
        self, tree: Tree, key: str, name: str, to: str, entry: TensorStorageMetadata, shape: Sequence[int]
    ) -> list[str]:
        """Add a saved tensor's chunks under the names of the hub's tensors in it; return the key if it is unknown."""
        found = blocks(name, tuple(shape), tree.ranks, self.model)
        if found is None:
            if self.model.tied and _TIED.search(name):
                if to != _WEIGHT:  # optimizers have no moments of a parameter under its second name
                    raise CheckpointError(f"it has {key}, but embedding and head are tied here (--tie_word_embeddings)")
                return []
            return [] if NOT_WEIGHTS.search(name) or _NO_PARAMETER.search(name) else [key]
        if not entry.size:  # AdamW's step, one for each tensor
            found = [Block(hub, (), (), ()) for hub in dict.fromkeys(block.name for block in found)]
        for block, chunk in itertools.product(found, entry.chunks):
            lead = len(block.start) - len(block.size)
            common = _overlap(block.start, (*[1] * lead, *block.size), chunk)
            if common is not None:
                low, size, start = common
                at = [a + b - c for a, b, c in zip(block.at, low[lead:], block.start[lead:], strict=True)]
                source = _Source(tree.reader, MetadataIndex(key, chunk.offsets), start)
                self._add(to.format(block.name), entry.properties, at, size[lead:], source)
        return []


class RankReader(_Rearranged):
    """Reads what one tensor and expert rank of SMP's own implementation holds, from a reader of the hub's names."""

    def __init__(self, hub: Reader, state: Mapping[str, Any], ranks: Ranks, model: HubModel) -> None:
        """``state``: what the rank holds under SMP's names, laid out as `gather_state` does."""
        super().__init__()
        self.hub, self.ranks, self.model, self._state = hub, ranks, model, state

    def preload(self) -> None:
        """Read the metadata. Raises `CheckpointError` for a parameter that is not in the table."""
        self.hub.preload()
        self._sources, self._found = {}, {}
        saved = self.hub.read_metadata().state_dict_metadata
        entries: dict[str, Any] = {}
        moments = self._state.get("optim", {}).get("state", {})
        for name, value in self._state["model"].items():
            shape = tuple(value.shape)
            found = blocks(name, shape, self.ranks, self.model)
            if found is None:
                raise CheckpointError(f"{name}, of SMP's own {self.model.kind} here, has no known name on the hub")
            step = [Block(found[0].name, (), (), ())]  # one for each tensor
            wanted = {f"model.{name}": (_WEIGHT, shape, found)}
            for what in moments.get(name, ()):
                to = f"optim.state.{{}}.{what}"
                wanted[f"optim.state.{name}.{what}"] = (to, (), step) if what == "step" else (to, shape, found)
            for key, (to, size, parts) in wanted.items():
                if all(to.format(block.name) in saved for block in parts):
                    for block in parts:
                        self._take(key, block, to.format(block.name), saved[to.format(block.name)])
                    entries[key] = TensorStorageMetadata(self._found[key][0], torch.Size(size), self._found[key][1])
        self._metadata = Metadata(entries, storage_meta=StorageMeta())

    def _take(self, key: str, block: Block, hub: str, entry: Any) -> None:
        """Add the chunks of a tensor of the hub that lie in a block of the rank's tensor ``key``."""
        lead = len(block.start) - len(block.size)
        for chunk in entry.chunks:
            common = _overlap(block.at, block.size, chunk)
            if common is not None:
                low, size, start = common
                at = [a + b - c for a, b, c in zip(block.start[lead:], low, block.at, strict=True)]
                source = _Source(self.hub, MetadataIndex(hub, chunk.offsets), start)
                self._add(key, entry.properties, (*block.start[:lead], *at), (*[1] * lead, *size), source)


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


class _Targets(LoadPlanner):
    """The planner that a reader sees: it fills the original requests from what the reader reads for the merged ones."""

    def __init__(self, planner: LoadPlanner, requests: dict[ReadItem, _Answers]) -> None:
        self._planner, self._requests = planner, requests

    def resolve_tensor(self, there: ReadItem) -> torch.Tensor:
        """Return the memory that is to be filled, with the dimensions of the saved tensor."""
        (item, _), *others = self._requests[there]
        target = self._planner.resolve_tensor(item)
        return torch.empty(there.lengths, dtype=target.dtype) if others else target.view(there.lengths)

    def commit_tensor(self, there: ReadItem, tensor: torch.Tensor) -> None:
        """Hand on what was read: it is in the memory of the original request, unless there are several."""
        (item, _), *others = answers = self._requests[there]
        if not others:
            self._planner.commit_tensor(item, tensor.view(item.lengths))
            return
        for item, within in answers:
            target = self._planner.resolve_tensor(item).detach()
            target.copy_(tensor[within].view(target.shape))
            self._planner.commit_tensor(item, target)

    def _not_called(self, *args: Any, **kwargs: Any) -> Any:
        """The plan is made, and tensors are all that is asked for."""
        raise NotImplementedError

    set_up_planner = create_local_plan = create_global_plan = finish_plan = load_bytes = _not_called


def model_prefix(saved: Iterable[str], model: HubModel) -> str:
    """Return what stands before the parameters' names in a tree. Raises `CheckpointError` where there are none."""
    keys = [key for key in saved if not _OTHERS.match(key)]
    for prefix in MODEL_PREFIXES:
        if any(key.startswith(prefix) and _known(key.removeprefix(prefix), model) for key in keys):
            return prefix
    for prefix in MODEL_PREFIXES[:2]:  # under SMP's own names
        if model.kind in SMP_LAYERS and any(key.startswith(prefix) for key in keys):
            return prefix
    known, first = ", ".join(keys[:3]), next(iter(model.shapes))
    raise CheckpointError(f"it holds no {first} under any of the usual names; its entries begin with {known}")


def _known(name: str, model: HubModel) -> bool:
    return canonical_name(name) in model.shapes or plain(name) in model.shapes
