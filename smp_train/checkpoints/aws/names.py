"""Readers that translate between the hub's parameter names and the names of SMP or another program.

These readers build a DCP index under other names. The index has one chunk for each block that a saved chunk and a
renamed tensor have in common (see `smp_train.models.smp_names`). A request for such a chunk becomes a request for a
slice of the saved chunk, so tensors load on any mesh without a converted copy on disk.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from smp_train.checkpoints.dcp.storage import Reader
from smp_train.errors import CheckpointError, first_few
from smp_train.models.hf_weights import NOT_WEIGHTS
from smp_train.models.hub_names import canonical_name
from smp_train.models.layouts import SMP_LAYERS
from smp_train.models.smp_names import Block, HubModel, Ranks, blocks, plain

MODEL_PREFIXES = ("model.", "app.model.", "state_dict.", "module.", "")
"""Prefixes that programs put before parameter names; this program uses the first."""
MOMENTS = re.compile(r"(?:app\.)?optim(?:izer)?\.state\.(?P<name>.+)\.(?P<what>exp_avg|exp_avg_sq|max_exp_avg_sq|step)")
_NOT_MODEL = re.compile(r"(?:app\.)?(?:optim(?:izer)?|scheduler|lr_scheduler|cli_args|model_config)\b")
_WEIGHT = "model.{}"
_TIED = re.compile(r"(?:^|\.)(?:lm_head|embed_out|embed_tokens|embed_in)\.weight$")


class Tree(NamedTuple):
    """A DCP tree's reader, and the tensor and expert rank that wrote the tree."""

    ranks: Ranks
    reader: Reader


class TensorReader(Reader):
    """Reads from tensors that are in memory or mapped from a file, as if they were a DCP tree."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__("")
        self._tensors = tensors

    def preload(self) -> None:
        """Describe each tensor as one chunk."""
        entries: dict[str, Any] = {}
        for name, value in self._tensors.items():
            whole = dcp.ChunkStorageMetadata(torch.Size([0] * len(value.size())), value.size())
            entries[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=value.dtype), value.size(), [whole])
        self._metadata = dcp.Metadata(entries, storage_data={}, storage_meta=dcp.StorageMeta())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Copy the requested slices into the planner's tensors."""
        for item in plan.items:
            index = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._tensors[item.storage_index.fqn][index])
            planner.commit_tensor(item, target)
        return torch.futures.collect_all([])


class _RenamedReader(Reader):
    """Reads tensors under new names; each tensor is put together from parts of chunks that other readers read."""

    def __init__(self, model: HubModel) -> None:
        super().__init__("")
        self.model = model
        self._sources: dict[dcp.MetadataIndex, tuple[Reader, dcp.MetadataIndex, list[int]]] = {}
        """For each chunk: the reader to ask, the saved chunk to request from it, and the offset in the saved chunk."""
        entries: dict[str, Any] = {}
        self._index = dcp.Metadata(entries, storage_data={}, storage_meta=dcp.StorageMeta())

    def _add_block(
        self, key: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int],
        reader: Reader, source_key: str, source_offset: Sequence[int],
    ) -> None:  # fmt: skip
        """Add to the tensor ``key`` (of ``shape``) the parts of one block that ``reader``'s chunks hold.

        ``offset`` or ``source_offset`` may have extra leading dimensions; in these dimensions the block has size 1.
        """
        source: Any = reader.read_metadata().state_dict_metadata[source_key]
        entry: Any = dcp.TensorStorageMetadata(source.properties, torch.Size(shape), [])
        entry = self._index.state_dict_metadata.setdefault(key, entry)
        end = np.add(source_offset, _with_dims(size, len(source_offset), 1))
        for chunk in source.chunks:
            low = np.maximum(source_offset, chunk.offsets)
            common = np.minimum(end, np.add(chunk.offsets, chunk.sizes)) - low
            shift = _with_dims((low - source_offset).tolist(), len(offset), 0)
            target = torch.Size(np.add(offset, shift).tolist())
            index = dcp.MetadataIndex(key, target)
            if (common > 0).all() and index not in self._sources:  # the chunk overlaps and is not a second replica
                start = (low - chunk.offsets).tolist()
                self._sources[index] = (reader, dcp.MetadataIndex(source_key, chunk.offsets), start)
                sizes = torch.Size(_with_dims(common.tolist(), len(offset), 1))
                entry.chunks.append(dcp.ChunkStorageMetadata(target, sizes))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        planners: dict[Reader, _ChunkPlanner] = {}
        for item in plan.items:
            reader, index, start = self._sources[item.storage_index]
            offset = np.add(start, _with_dims(item.storage_offsets, len(start), 0))
            chunk_planner = planners.setdefault(reader, _ChunkPlanner(planner))
            slices = chunk_planner.slices.setdefault(index, [])
            slices.append((item, offset, offset + _with_dims(item.lengths, len(start), 1)))
        reads = [reader.read_data(chunks.requests(), chunks) for reader, chunks in planners.items()]
        return torch.futures.collect_all(reads)


def _with_dims(values: Sequence[int], dims: int, fill: int) -> list[int]:
    """Return the last ``dims`` values, with ``fill`` for missing leading dimensions."""
    return [*[fill] * dims, *values][len(values) :]


class _ChunkPlanner(DefaultLoadPlanner):
    """Requests each saved chunk once, because a reader loads the whole chunk for every request.

    ``slices`` maps each saved chunk to the original requests, each with the begin and end of its slice in the chunk.
    """

    def __init__(self, planner: LoadPlanner) -> None:
        super().__init__()
        self._planner = planner
        self.slices: dict[dcp.MetadataIndex, list[tuple[ReadItem, Any, Any]]] = {}

    def requests(self) -> LoadPlan:
        """Return one request per saved chunk, for the smallest block that covers all slices needed from the chunk."""
        items = []
        for index, slices in self.slices.items():
            (first, *_), begins, ends = zip(*slices, strict=True)
            low = np.min(begins, axis=0)
            sizes = torch.Size((np.max(ends, axis=0) - low).tolist())
            items.append(replace(first, storage_index=index, storage_offsets=torch.Size(low.tolist()), lengths=sizes))
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        original = self.slices[read_item.storage_index][0][0]
        return torch.empty(read_item.lengths, dtype=self._planner.resolve_tensor(original).dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        low = read_item.storage_offsets
        for item, begin, end in self.slices[read_item.storage_index]:
            block = tensor[tuple(map(slice, begin - low, end - low))]
            target = self._planner.resolve_tensor(item).detach()
            target.copy_(block.view(target.shape))
            self._planner.commit_tensor(item, target)


class HubReader(_RenamedReader):
    """Reads ``model.<name>`` and ``optim.state.<name>.<moment>`` under the hub's names from a checkpoint's trees."""

    def __init__(self, trees: Sequence[Tree], model: HubModel) -> None:
        super().__init__(model)
        self.trees = trees

    def preload(self) -> None:
        """Build the index from all trees' indexes. Raises `CheckpointError` if part of the model is missing."""
        unknown = [key for tree in self.trees for key in self._add_tree(tree)]
        if unknown:
            raise CheckpointError(
                f"it has unexpected entries {first_few(unknown)}: no name of the hub's or SMP's for this "
                f"{self.model.kind} (another --num_layers? Else have SMP write a full checkpoint, and start from that)"
            )
        entries: Mapping[str, Any] = self._index.state_dict_metadata
        for key, entry in entries.items():
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != entry.size.numel():
                raise CheckpointError(f"it does not hold all of {key}: trees of some ranks are missing")
        self._metadata = self._index

    def _add_tree(self, tree: Tree) -> list[str]:
        """Add the chunks of a tree's weights and moments; return the keys whose names are unknown."""
        metadata = tree.reader.read_metadata()
        tree.reader.set_up_storage_reader(metadata, False)
        saved: Mapping[str, Any] = metadata.state_dict_metadata
        prefix = model_prefix(saved, self.model)
        names: dict[str, tuple[str, str]] = {}
        for key, entry in saved.items():
            moment = MOMENTS.fullmatch(key)
            if isinstance(entry, dcp.TensorStorageMetadata) and moment:
                names[key] = moment["name"], "optim.state.{}." + moment["what"]
            elif isinstance(entry, dcp.TensorStorageMetadata) and key.startswith(prefix) and not _NOT_MODEL.match(key):
                names[key] = key.removeprefix(prefix), _WEIGHT
        shapes = {plain(name): saved[key].size for key, (name, form) in names.items() if form == _WEIGHT}
        unknown = []
        for key, (name, form) in names.items():
            size = saved[key].size
            # AdamW's step has no shape, so the shape of its parameter selects the hub's tensors.
            parts = blocks(name, tuple(size or shapes.get(plain(name), size)), tree.ranks, self.model)
            tied = self.model.tied and _TIED.search(name)
            if parts is None and tied and form != _WEIGHT:  # a tied parameter has moments under its first name only
                raise CheckpointError(f"it has {key}, but embedding and head are tied here (--tie_word_embeddings)")
            if parts is None and not (tied or NOT_WEIGHTS.search(name) or name.endswith("_extra_state")):
                unknown.append(key)
            if not size:  # AdamW's step applies to every hub tensor that the parameter holds
                parts = [Block(hub, (), (), ()) for hub in dict.fromkeys(block.name for block in parts or ())]
            for block in parts or ():
                shape = self.model.shapes[block.name] if size else ()
                self._add_block(form.format(block.name), shape, block.offset, block.size, tree.reader, key, block.start)
        return unknown


class RankReader(_RenamedReader):
    """Reads what one tensor and expert rank holds in SMP's own implementation. Gets it from a reader of hub names."""

    def __init__(self, hub: Reader, state: Mapping[str, Any], ranks: Ranks, model: HubModel) -> None:
        """``state`` is the rank's state under SMP's names, in the layout of `gather_state`."""
        super().__init__(model)
        self.hub, self.ranks, self._state = hub, ranks, state

    def preload(self) -> None:
        """Build the index. Raises `CheckpointError` for a parameter without a known name on the hub."""
        saved = self.hub.read_metadata().state_dict_metadata
        moments = self._state.get("optim", {}).get("state", {})
        for name, value in self._state["model"].items():
            parts = blocks(name, tuple(value.shape), self.ranks, self.model)
            if parts is None:
                raise CheckpointError(f"{name}, of SMP's own {self.model.kind} here, has no known name on the hub")
            for form in (_WEIGHT, *(f"optim.state.{{}}.{moment}" for moment in moments.get(name, ()))):
                step = form.endswith(".step")  # a step is one number; take that of the first hub tensor
                shape, of_hub = ((), [Block(parts[0].name, (), (), ())]) if step else (value.shape, parts)
                keys = [form.format(block.name) for block in of_hub]
                for key, block in zip(keys, of_hub, strict=True) if saved.keys() >= set(keys) else ():
                    self._add_block(form.format(name), shape, block.start, block.size, self.hub, key, block.offset)
        self._metadata = self._index


def model_prefix(saved: Iterable[str], model: HubModel) -> str:
    """Return the prefix of parameter names in a tree. Raises `CheckpointError` if the tree holds no parameters."""
    keys = [key for key in saved if not _NOT_MODEL.match(key)]
    for prefix in MODEL_PREFIXES:
        names = (key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        if any(canonical_name(name) in model.shapes or plain(name) in model.shapes for name in names):
            return prefix
    for prefix in MODEL_PREFIXES[:2]:  # perhaps a tree under SMP's own names
        if model.kind in SMP_LAYERS and any(key.startswith(prefix) for key in keys):
            return prefix
    known, first = ", ".join(keys[:3]), next(iter(model.shapes))
    raise CheckpointError(f"it holds no {first} under any of the usual names; its entries begin with {known}")
