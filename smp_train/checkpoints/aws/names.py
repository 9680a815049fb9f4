"""Readers that translate between the hub's parameter names and the names of SMP or another program.

A DCP index maps each tensor to saved chunks. The readers here build an index under other names: it has one chunk for
each block that a saved chunk and a renamed tensor have in common (`smp_train.models.smp_names`). A load request for
such a chunk becomes a request for a slice of the saved chunk, so tensors load on any mesh without a copy on disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
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

from smp_train.checkpoints.dcp.storage import Reader
from smp_train.errors import CheckpointError, first_few
from smp_train.models.hf_weights import NOT_WEIGHTS
from smp_train.models.hub_names import canonical_name
from smp_train.models.layouts import SMP_LAYERS
from smp_train.models.smp_names import Block, HubModel, Ranks, blocks, plain

MODEL_PREFIXES = ("model.", "app.model.", "state_dict.", "module.", "")
"""Prefixes that programs put before parameter names; ours is the first."""
MOMENTS = re.compile(r"(?:app\.)?optim(?:izer)?\.state\.(?P<name>.+)\.(?P<what>exp_avg|exp_avg_sq|max_exp_avg_sq|step)")
_NOT_MODEL = re.compile(r"(?:app\.)?(?:optim(?:izer)?|scheduler|lr_scheduler|cli_args|model_config)\b")
_EXTRA_STATE = re.compile(r"_extra_state$")
_WEIGHT = "model.{}"
_TIED = re.compile(r"(?:^|\.)(?:lm_head|embed_out|embed_tokens|embed_in)\.weight$")


class Tree(NamedTuple):
    """One DCP tree: the tensor and expert rank that wrote it, and its reader."""

    ranks: Ranks
    reader: Reader


class _MetadataFirstReader(Reader):
    """A reader whose index is complete after `preload`; DCP's other set-up steps do nothing."""

    def _unchanged(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None

    set_up_storage_reader = prepare_local_plan = prepare_global_plan = reset = _unchanged

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class TensorReader(_MetadataFirstReader):
    """Reads tensors in memory, or mapped from a file, as if they were a DCP tree."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def preload(self) -> None:
        """Describe each tensor as one chunk."""
        entries: dict[str, Any] = {}
        for name, value in self._tensors.items():
            size = value.size()
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [chunk])
        self._metadata = Metadata(entries, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the requested slices into the planner's tensors."""
        for item in plan.items:
            index = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._tensors[item.storage_index.fqn][index])
            planner.commit_tensor(item, target)
        return _completed()


class _RenamedReader(_MetadataFirstReader):
    """Reads tensors that consist of parts of other readers' chunks."""

    def __init__(self) -> None:
        self._sources: dict[MetadataIndex, tuple[Reader, MetadataIndex, tuple[int, ...]]] = {}
        """By chunk: another reader, a chunk that it has saved, and the offset in that chunk."""
        self._chunks: dict[str, tuple[TensorProperties, list[ChunkStorageMetadata]]] = {}

    def _add_block(
        self, key: str, offset: Sequence[int], size: Sequence[int],
        reader: Reader, source_key: str, source_offset: Sequence[int], entry: Any,
    ) -> None:  # fmt: skip
        """Add a block of the tensor ``key``, restricted to the chunks of ``entry``, which ``reader`` has saved.

        Either offset may have additional leading dimensions, in which the block has size 1.
        """
        source_size, dims = _with_dims(size, len(source_offset), 1), len(offset)
        for chunk in entry.chunks:
            low = [max(a, b) for a, b in zip(source_offset, chunk.offsets, strict=True)]
            ends = zip(source_offset, source_size, chunk.offsets, chunk.sizes, strict=True)
            common = [min(a + n, b + m) - begin for (a, n, b, m), begin in zip(ends, low, strict=True)]
            shift = _with_dims([a - b for a, b in zip(low, source_offset, strict=True)], dims, 0)
            target = torch.Size(a + b for a, b in zip(offset, shift, strict=True))
            index = MetadataIndex(key, target)
            if any(length <= 0 for length in common) or index in self._sources:  # apart, or another rank's replica
                continue
            start = tuple(a - b for a, b in zip(low, chunk.offsets, strict=True))
            self._sources[index] = (reader, MetadataIndex(source_key, chunk.offsets), start)
            chunks = self._chunks.setdefault(key, (entry.properties, []))[1]
            chunks.append(ChunkStorageMetadata(target, torch.Size(_with_dims(common, dims, 1))))

    def _set_metadata(self, sizes: Mapping[str, Sequence[int]]) -> None:
        """Build the index of the added chunks from the size of each tensor."""
        entries: dict[str, Any] = {
            key: TensorStorageMetadata(self._chunks[key][0], torch.Size(size), self._chunks[key][1])
            for key, size in sizes.items()
        }
        self._metadata = Metadata(entries, storage_meta=StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        planners: dict[Reader, _ChunkPlanner] = {}
        for item in plan.items:
            reader, index, start = self._sources[item.storage_index]
            offsets, size = _with_dims(item.storage_offsets, len(start), 0), _with_dims(item.lengths, len(start), 1)
            offset = [a + b for a, b in zip(start, offsets, strict=True)]
            chunk_planner = planners.setdefault(reader, _ChunkPlanner(planner))
            chunk_planner.slices.setdefault(index, []).append((item, offset, size))
        for reader, chunk_planner in planners.items():
            reader.read_data(chunk_planner.requests(), chunk_planner).wait()
        return _completed()


def _with_dims(values: Sequence[int], dims: int, fill: int) -> list[int]:
    """Return the last ``dims`` values, with ``fill`` for missing leading dimensions."""
    return [*[fill] * dims, *values][len(values) :]


class _ChunkPlanner(DefaultLoadPlanner):
    """Requests each saved chunk once, because a reader loads the whole chunk for every request.

    ``slices`` has by saved chunk the original requests, each with offset and size of its slice of the chunk.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        super().__init__()
        self._planner = planner
        self.slices: dict[MetadataIndex, list[tuple[ReadItem, list[int], list[int]]]] = {}

    def requests(self) -> LoadPlan:
        """Return a request per saved chunk, for the smallest block with all slices."""
        items = []
        for index, slices in self.slices.items():
            low = [min(offsets) for offsets in zip(*(offset for _, offset, _ in slices), strict=True)]
            ends = ([a + n for a, n in zip(offset, size, strict=True)] for _, offset, size in slices)
            lengths = torch.Size(max(last) - begin for last, begin in zip(zip(*ends, strict=True), low, strict=True))
            first = slices[0][0]
            items.append(replace(first, storage_index=index, storage_offsets=torch.Size(low), lengths=lengths))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        original = self.slices[read_item.storage_index][0][0]
        return torch.empty(read_item.lengths, dtype=self._planner.resolve_tensor(original).dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        for item, offset, size in self.slices[read_item.storage_index]:
            starts = [a - begin for a, begin in zip(offset, read_item.storage_offsets, strict=True)]
            block = tensor[tuple(slice(a, a + n) for a, n in zip(starts, size, strict=True))]
            target = self._planner.resolve_tensor(item).detach()
            target.copy_(block.view(target.shape))
            self._planner.commit_tensor(item, target)


class HubReader(_RenamedReader):
    """Reads ``model.<name>`` and ``optim.state.<name>.<moment>`` under the hub's names from a checkpoint's trees."""

    def __init__(self, trees: Sequence[Tree], model: HubModel) -> None:
        super().__init__()
        self.trees, self.model = trees, model

    def preload(self) -> None:
        """Build the index from the indexes of all trees. Raises `CheckpointError` if part of the model is missing."""
        self._sources, self._chunks = {}, {}
        unknown = [key for tree in self.trees for key in self._add_tree(tree)]
        if unknown:
            raise CheckpointError(
                f"it has unexpected entries {first_few(unknown)}: no name of the hub's or SMP's for this "
                f"{self.model.kind} (another --num_layers? Else have SMP write a full checkpoint, and start from that)"
            )
        sizes: dict[str, tuple[int, ...]] = {}
        for key, (_, chunks) in self._chunks.items():
            moment = MOMENTS.fullmatch(key)
            name = moment["name"] if moment else key.removeprefix("model.")
            sizes[key] = () if moment and moment["what"] == "step" else tuple(self.model.shapes[name])
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(sizes[key]):
                raise CheckpointError(f"it does not hold all of {key}: trees of some ranks are missing")
        self._set_metadata(sizes)

    def _add_tree(self, tree: Tree) -> list[str]:
        """Add the chunks of a tree's weights and moments; return the keys whose names are unknown."""
        tree.reader.preload()
        metadata = tree.reader.read_metadata()
        tree.reader.set_up_storage_reader(metadata, False)
        saved = metadata.state_dict_metadata
        prefix = model_prefix(saved, self.model)
        tensors = {key: entry for key, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
        shapes: dict[str, Sequence[int]] = {}
        unknown: list[str] = []
        for key, entry in tensors.items():
            if key.startswith(prefix) and not _NOT_MODEL.match(key):
                name = key.removeprefix(prefix)
                shapes[plain(name)] = entry.size
                unknown += self._add_entry(tree, key, name, _WEIGHT, entry, entry.size)
        for key, entry in tensors.items():
            moment = MOMENTS.fullmatch(key)
            if moment is not None:
                # A step has no shape: its parameter's shape selects the hub's tensors.
                shape = shapes.get(plain(moment["name"]), entry.size)
                form = "optim.state.{}." + moment["what"]
                unknown += self._add_entry(tree, key, moment["name"], form, entry, shape)
        return unknown

    def _add_entry(
        self, tree: Tree, key: str, name: str, form: str, entry: TensorStorageMetadata, shape: Sequence[int]
    ) -> list[str]:
        """Add the chunks of the entry ``key`` under the names of the hub's tensors in it; return an unknown key."""
        parts = blocks(name, tuple(shape), tree.ranks, self.model)
        if parts is None:
            if self.model.tied and _TIED.search(name):
                if form != _WEIGHT:  # a tied parameter has moments under its first name only
                    raise CheckpointError(f"it has {key}, but embedding and head are tied here (--tie_word_embeddings)")
                return []
            return [] if NOT_WEIGHTS.search(name) or _EXTRA_STATE.search(name) else [key]
        if not entry.size:  # AdamW's step applies to every tensor of the hub in the parameter
            parts = [Block(hub, (), (), ()) for hub in dict.fromkeys(block.name for block in parts)]
        for block in parts:
            self._add_block(form.format(block.name), block.at, block.size, tree.reader, key, block.start, entry)
        return []


class RankReader(_RenamedReader):
    """Reads the tensors of one tensor and expert rank of SMP's own implementation from a reader of the hub's names."""

    def __init__(self, hub: Reader, state: Mapping[str, Any], ranks: Ranks, model: HubModel) -> None:
        """``state`` is the rank's state under SMP's names, in the layout of `gather_state`."""
        super().__init__()
        self.hub, self.ranks, self.model, self._state = hub, ranks, model, state

    def preload(self) -> None:
        """Build the index. Raises `CheckpointError` for a parameter without a known name on the hub."""
        self.hub.preload()
        self._sources, self._chunks = {}, {}
        saved = self.hub.read_metadata().state_dict_metadata
        moments = self._state.get("optim", {}).get("state", {})
        sizes: dict[str, tuple[int, ...]] = {}
        for name, value in self._state["model"].items():
            shape = tuple(value.shape)
            parts = blocks(name, shape, self.ranks, self.model)
            if parts is None:
                raise CheckpointError(f"{name}, of SMP's own {self.model.kind} here, has no known name on the hub")
            forms = {_WEIGHT: (shape, parts)}
            for moment in moments.get(name, ()):
                step = moment == "step"  # one number: the first hub tensor's step
                form = f"optim.state.{{}}.{moment}"
                forms[form] = ((), [Block(parts[0].name, (), (), ())]) if step else (shape, parts)
            for form, (size, of_hub) in forms.items():
                if all(form.format(block.name) in saved for block in of_hub):
                    key = form.format(name)
                    sizes[key] = size
                    for block in of_hub:
                        hub_key = form.format(block.name)
                        self._add_block(key, block.start, block.size, self.hub, hub_key, block.at, saved[hub_key])
        self._set_metadata(sizes)


def _completed() -> Future[None]:
    completed: Future[None] = Future()
    completed.set_result(None)
    return completed


def model_prefix(saved: Iterable[str], model: HubModel) -> str:
    """Return the prefix of parameter names in a tree. Raises `CheckpointError` if the tree holds no parameters."""
    keys = [key for key in saved if not _NOT_MODEL.match(key)]
    for prefix in MODEL_PREFIXES:
        names = (key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        if any(canonical_name(name) in model.shapes or plain(name) in model.shapes for name in names):
            return prefix
    for prefix in MODEL_PREFIXES[:2]:  # a tree under SMP's own names
        if model.kind in SMP_LAYERS and any(key.startswith(prefix) for key in keys):
            return prefix
    known, first = ", ".join(keys[:3]), next(iter(model.shapes))
    raise CheckpointError(f"it holds no {first} under any of the usual names; its entries begin with {known}")
