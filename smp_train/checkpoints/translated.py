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
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from smp_train.checkpoints.dcp import Reader
from smp_train.errors import CheckpointError
from smp_train.models.hf_weights import NOT_WEIGHTS
from smp_train.models.smp_names import ROOTS, Block, HubModel, Ranks, blocks, is_known, plain

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


@dataclass(frozen=True)
class _Source:
    tree: Tree
    index: MetadataIndex
    start: tuple[int, ...]


_Requests = dict[ReadItem, list[tuple[ReadItem, tuple[Any, ...], tuple[Any, ...]]]]
"""Requests to a reader, each with those that it answers: the original one, the index in its tensor of what is filled,
and the index of that in what is read."""


class _WholeReader(Reader):
    """What readers need not do that have read their metadata ahead, and read all that a plan asks for."""

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
        """Nothing to do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return metadata of one chunk for each tensor."""
        entries: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=value.dtype),
                value.size(),
                [ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())],
            )
            for name, value in self._tensors.items()
        }
        return Metadata(entries, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            index = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._tensors[item.storage_index.fqn][index])
            planner.commit_tensor(item, target)
        return _done()


class TranslatedReader(_WholeReader):
    """Reads ``model.<name>`` and ``optim.state.<name>.<moment>``, by the hub's names, from trees of a checkpoint."""

    def __init__(self, trees: Sequence[Tree], model: HubModel) -> None:
        self.trees, self.model = trees, model
        self._metadata: Metadata | None = None
        self._sources: dict[MetadataIndex, _Source] = {}
        self._found: dict[str, tuple[TensorProperties, list[ChunkStorageMetadata]]] = {}

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
            shapes = {}
            for key, entry in saved.items():
                if isinstance(entry, TensorStorageMetadata) and key.startswith(prefix) and not _OTHERS.match(key):
                    name = key.removeprefix(prefix)
                    shapes[plain(name)] = entry.size
                    self._take(tree, key, name, _WEIGHT, entry, entry.size, unknown)
            for key, entry in saved.items():
                moment = MOMENTS.fullmatch(key)
                if moment is not None and isinstance(entry, TensorStorageMetadata):
                    to = "optim.state.{}." + moment["what"]
                    shape = shapes.get(plain(moment["name"]), entry.size)
                    self._take(tree, key, moment["name"], to, entry, shape, unknown)
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise CheckpointError(
                f"it has, unasked for, {unknown[0]}{more}: no name of the hub's or SMP's for this {self.model.kind} "
                "(another --num_layers? Else have SMP write a full checkpoint, and start from that)"
            )
        self._metadata = self._checked()

    def _take(
        self, tree: Tree, key: str, name: str, to: str, entry: TensorStorageMetadata, shape: Sequence[int],
        unknown: list[str],
    ) -> None:  # fmt: skip
        """Add a saved tensor's chunks, each under the names of the hub's tensors that it holds a block of."""
        found = blocks(name, tuple(shape), tree.ranks, self.model)
        if found is None:
            if self.model.tied and _TIED.search(name):
                if to != _WEIGHT:  # optimizers have no moments of a parameter under its second name
                    raise CheckpointError(f"it has {key}: embedding and head are not one there (--tie_word_embeddings)")
            elif not NOT_WEIGHTS.search(name) and not _NO_PARAMETER.search(name):
                unknown.append(key)
            return
        if not entry.size:  # AdamW's step, one for each tensor
            found = [Block(hub, (), (), ()) for hub in dict.fromkeys(block.name for block in found)]
        for block, chunk in itertools.product(found, entry.chunks):
            inside = _intersection(block, chunk)
            if inside is None:
                continue
            at, start, size = inside
            new = to.format(block.name)
            index = MetadataIndex(new, torch.Size(at))
            if index in self._sources:  # the same on several tensor ranks, or replicas
                continue
            self._sources[index] = _Source(tree, MetadataIndex(key, chunk.offsets), start)
            chunks = self._found.setdefault(new, (entry.properties, []))[1]
            chunks.append(ChunkStorageMetadata(torch.Size(at), torch.Size(size)))

    def _checked(self) -> Metadata:
        entries: dict[str, Any] = {}
        for key, (properties, chunks) in self._found.items():
            moment = MOMENTS.fullmatch(key)
            name = moment["name"] if moment else key.removeprefix("model.")
            size = () if moment and moment["what"] == "step" else tuple(self.model.shapes[name])
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
                raise CheckpointError(f"it does not hold all of {key}: trees of some ranks are missing")
            entries[key] = TensorStorageMetadata(properties, torch.Size(size), chunks)
        return Metadata(entries, storage_meta=StorageMeta())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata under the hub's names."""
        if self._metadata is None:
            self.preload()
        assert self._metadata is not None
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read from each tree what lies there, each saved chunk once: readers load a chunk whole for every request."""
        of_tree: dict[int, dict[MetadataIndex, list[tuple[ReadItem, tuple[int, ...], tuple[int, ...]]]]] = {}
        for item in plan.items:
            source = self._sources[item.storage_index]
            lead = len(source.start) - len(item.lengths)
            inner = [start + at for start, at in zip(source.start[lead:], item.storage_offsets, strict=True)]
            wanted = (item, (*source.start[:lead], *inner), (*[1] * lead, *item.lengths))
            of_tree.setdefault(self.trees.index(source.tree), {}).setdefault(source.index, []).append(wanted)
        for number, chunks in of_tree.items():
            requests = dict(_request(index, wanted) for index, wanted in chunks.items())
            self.trees[number].reader.read_data(LoadPlan(list(requests)), _Targets(planner, requests)).wait()
        return _done()


def _request(index: MetadataIndex, wanted: Sequence[tuple[ReadItem, tuple[int, ...], tuple[int, ...]]]) -> Any:
    """Return one request to a saved chunk for all that is ``wanted`` of it (request, where, size), and its answers."""
    low = [min(at) for at in zip(*(at for _, at, _ in wanted), strict=True)]
    high = [max(ends) for ends in zip(*(map(sum, zip(at, size, strict=True)) for _, at, size in wanted), strict=True)]
    there = replace(
        wanted[0][0],
        storage_index=index,
        storage_offsets=torch.Size(low),
        lengths=torch.Size(end - begin for begin, end in zip(low, high, strict=True)),
    )
    return there, [
        (
            item,
            (None,) * (len(at) - len(item.lengths)),
            tuple(slice(a - begin, a - begin + n) for a, n, begin in zip(at, size, low, strict=True)),
        )
        for item, at, size in wanted
    ]


class RankReader(_WholeReader):
    """Reads what one tensor and expert rank of SMP's own implementation holds, from a reader of the hub's names."""

    def __init__(self, hub: Reader, state: Mapping[str, Any], ranks: Ranks, model: HubModel) -> None:
        """``state``: what the rank holds under SMP's names, laid out as `gather_state` does."""
        self.hub, self.ranks, self.model = hub, ranks, model
        self._shapes = {name: tuple(value.shape) for name, value in state["model"].items()}
        optim = state.get("optim", {}).get("state", {})
        self._moments = {name: list(optim.get(name, ())) for name in self._shapes}
        self._entries: dict[str, Any] = {}
        self._sources: dict[MetadataIndex, tuple[str, Block]] = {}

    def preload(self) -> None:
        """Read the metadata. Raises `CheckpointError` for a parameter that is not in the table."""
        self.hub.preload()
        saved = self.hub.read_metadata().state_dict_metadata
        self._entries, self._sources = {}, {}
        for name, shape in self._shapes.items():
            found = blocks(name, shape, self.ranks, self.model)
            if found is None:
                raise CheckpointError(f"{name}, of SMP's own {self.model.kind} here, has no known name on the hub")
            self._give(f"model.{name}", "model.{}", shape, found, saved)
            for what in self._moments[name]:
                to = f"optim.state.{{}}.{what}"
                if what == "step":  # one for each tensor
                    self._give(f"optim.state.{name}.{what}", to, (), [Block(found[0].name, (), (), ())], saved)
                else:
                    self._give(f"optim.state.{name}.{what}", to, shape, found, saved)

    def _give(
        self, key: str, to: str, shape: Sequence[int], found: Sequence[Block], saved: Mapping[str, Any]
    ) -> None:
        """Add a tensor of the rank, one chunk for each block, if all of the hub's tensors are there."""
        theirs = [to.format(block.name) for block in found]
        if not all(each in saved for each in theirs):
            return
        chunks = []
        for block, each in zip(found, theirs, strict=True):
            size = (*[1] * (len(block.start) - len(block.size)), *block.size)
            chunks.append(ChunkStorageMetadata(torch.Size(block.start), torch.Size(size)))
            self._sources[MetadataIndex(key, torch.Size(block.start))] = (each, block)
        self._entries[key] = TensorStorageMetadata(saved[theirs[0]].properties, torch.Size(shape), chunks)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata under SMP's names."""
        if not self._entries:
            self.preload()
        return Metadata(self._entries, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each slice from the chunks of the hub's tensor in which it lies."""
        saved = self.hub.read_metadata().state_dict_metadata
        requests: _Requests = {}
        for item in plan.items:
            key, block = self._sources[item.storage_index]
            lead = len(block.start) - len(block.size)
            at = [begin + inner for begin, inner in zip(block.at, item.storage_offsets[lead:], strict=True)]
            wanted = ChunkStorageMetadata(torch.Size(at), torch.Size(item.lengths[lead:]))
            entry = saved[key]
            assert isinstance(entry, TensorStorageMetadata)
            for part in create_read_items_for_chunk_list(key, entry, [wanted]):
                inside = (slice(a, a + n) for a, n in zip(part.dest_offsets, part.lengths, strict=True))
                # Several parameters may have their step from one tensor; where it goes tells their requests apart.
                requests[replace(part, dest_index=item.dest_index)] = [(item, (*[0] * lead, *inside), ())]
        return self.hub.read_data(LoadPlan(list(requests)), _Targets(planner, requests))


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


class _Targets(LoadPlanner):
    """Stands between a reader and the planner: what is asked of the reader fills part of the original request."""

    def __init__(self, planner: LoadPlanner, requests: _Requests) -> None:
        self._planner, self._requests = planner, requests

    def resolve_tensor(self, there: ReadItem) -> torch.Tensor:
        """Return the memory that is to be filled, with the dimensions of the saved tensor."""
        (item, index, _), *others = self._requests[there]
        target = self._planner.resolve_tensor(item)
        return torch.empty(there.lengths, dtype=target.dtype) if others else target[index]

    def commit_tensor(self, there: ReadItem, tensor: torch.Tensor) -> None:
        """Hand on what was read for several; otherwise it is in the model's or the optimizer's own tensor."""
        answered = self._requests[there]
        if len(answered) > 1:
            for item, index, within in answered:
                self._planner.resolve_tensor(item).detach()[index].copy_(tensor[within])

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Not called: the plan is made."""

    def create_local_plan(self) -> LoadPlan:
        """Not called."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Not called."""
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Not called."""
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Not called: tensors are all that is asked for."""
        raise NotImplementedError


def _intersection(
    block: Block, chunk: ChunkStorageMetadata
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return where a chunk's part of a block begins in the hub's tensor and in the chunk, and its size there."""
    lead = len(block.start) - len(block.size)
    start = [begin - offset for begin, offset in zip(block.start, chunk.offsets, strict=True)]
    if any(not 0 <= start[dim] < chunk.sizes[dim] for dim in range(lead)):
        return None
    at, size = [], []
    for dim, (place, length) in enumerate(zip(block.at, block.size, strict=True), lead):
        low, high = max(0, start[dim]), min(chunk.sizes[dim], start[dim] + length)
        if low >= high:
            return None
        at.append(place + low - start[dim])
        size.append(high - low)
        start[dim] = low
    return tuple(at), tuple(start), tuple(size)


def model_prefix(saved: Iterable[str], model: HubModel) -> str:
    """Return what stands before the parameters' names in a tree. Raises `CheckpointError` where there are none."""
    keys = [key for key in saved if not _OTHERS.match(key)]
    for prefix in MODEL_PREFIXES:
        if any(key.startswith(prefix) and is_known(key.removeprefix(prefix), model.shapes) for key in keys):
            return prefix
    for prefix in MODEL_PREFIXES[:2]:  # under SMP's own names
        if model.kind in ROOTS and any(key.startswith(prefix) for key in keys):
            return prefix
    known, first = ", ".join(keys[:3]), next(iter(model.shapes))
    raise CheckpointError(f"it holds no {first} under any of the usual names; its entries begin with {known}")
