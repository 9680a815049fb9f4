"""Save and load a tree that all ranks share. State and checkpoint must have exactly the same entries."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, set_element
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from smp_train.checkpoints.collective import gather, root_cause
from smp_train.checkpoints.dcp.index import TensorEntry
from smp_train.checkpoints.dcp.planner import SavePlanner
from smp_train.checkpoints.dcp.storage import Reader, TreeWriter
from smp_train.distributed.agree import ALL_RANKS, group, is_alone, unless
from smp_train.distributed.dtensor import DTensor
from smp_train.errors import CheckpointError, first_few
from smp_train.models.hub_state import present
from smp_train.models.weight_files import load_plain

logger = logging.getLogger(__name__)


class PlainLoadPlanner(dcp.DefaultLoadPlanner):
    """Unpickles no arbitrary objects. Sends no plan to rank 0, because rank 0 would return each plan unchanged."""

    unpickle = staticmethod(load_plain)

    def create_local_plan(self) -> dcp.LoadPlan:
        """Make this rank's plan from the chunks that it needs, and return an empty plan to send.

        torch would compare all chunks with this rank's shards in Python: that takes half a minute for a million chunks.
        """
        assert self.metadata is not None
        entries = dict(self.metadata.state_dict_metadata)
        for name, value in self.state_dict.items():
            entry: Any = entries.get(name)
            without_part = isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None
            if isinstance(entry, TensorEntry) and isinstance(value, torch.Tensor) and not without_part:
                entries[name] = entry.overlapping(_create_chunk_list(value), name)
        self.metadata = replace(self.metadata, state_dict_metadata=entries)
        self.plan = super().create_local_plan()
        return dcp.LoadPlan([])

    def finish_plan(self, new_plan: dcp.LoadPlan) -> dcp.LoadPlan:
        """Return this rank's plan."""
        return self.plan

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor: a number, a string, or a container of these."""
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], self.unpickle(value))


class StrictLoadPlanner(PlainLoadPlanner):
    """Refuses a checkpoint whose entries are not exactly those of the state."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Compare the state with the saved entries. Raises `CheckpointError`."""
        assert metadata is not None
        saved: Any = metadata.state_dict_metadata
        state, _ = flatten_state_dict(state_dict)
        resumes = any(key.startswith("optim.") for key in state)
        if resumes and all(key.startswith("model.") for key in saved):
            raise CheckpointError("it holds weights only; start from it with --finetune 1 --pretrained_checkpoint_file")
        if problems := compare(state, saved):
            raise CheckpointError(
                f"{'; '.join(problems)} "
                "(saved from another model, or with another --num_layers, --hidden_width or --vocab_size?)"
            )
        for key, value in state.items() if resumes else ():
            if isinstance(value, torch.Tensor) and value.dtype != (dtype := saved[key].properties.dtype):
                message = "%s was saved as %s and is %s here: values are converted, the run does not continue exactly"
                logger.warning(message, key, dtype, value.dtype, extra=ALL_RANKS)
                break
        super().set_up_planner(present(state_dict), metadata, is_coordinator)
        self.original_state_dict = state_dict  # `load_bytes` puts values into this dict


def compare(state: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return up to three phrases about the differences between a flat state and the ``saved`` entries.

    The state may lack a top-level name, such as ``optim``, with all its entries.
    """
    kinds = {key.split(".")[0] for key in state}
    missing = [key for key in state if key not in saved]
    surplus = sorted(key for key in saved.keys() - state.keys() if key.split(".")[0] in kinds)
    # torch's own state dicts have hyper-parameters in `param_groups`; here the run's arguments set them.
    unexpected = [key for key in surplus if not key.startswith("optim.param_groups")]
    unlike = []
    for key, value in state.items():
        entry, is_tensor = saved.get(key), isinstance(value, torch.Tensor)
        if entry is not None and isinstance(entry, dcp.TensorStorageMetadata) != is_tensor:
            unlike.append(f"{key} is a tensor on one side only")
        elif entry is not None and is_tensor and entry.size != value.size():
            unlike.append(f"{key} is {list(entry.size)} there and {list(value.size())} here")
    problems = (("it lacks ", missing), ("it has unexpected entries ", unexpected), ("", unlike))
    return [label + first_few(keys) for label, keys in problems if keys]


def load_together(state: dict[str, Any], *, storage_reader: Reader, planner: Any) -> None:
    """Fill ``state`` from one tree, which all ranks read; collective."""
    _load_state_dict(state, storage_reader, process_group=group(), planner=planner, no_dist=is_alone())


def save_state(state: dict[str, Any], writer: TreeWriter) -> None:
    """Write ``state`` (nested dicts of tensors, DTensors and plain values); collective.

    Raises `CheckpointError` on every rank if any rank failed.
    """
    planner = dcp.DefaultSavePlanner() if is_alone() else SavePlanner()
    try:
        # Not `dcp.save`, which communicates in torch 2.5 whenever there is a process group, even if this rank is alone.
        _save_state_dict(state, writer, process_group=group(), no_dist=is_alone(), planner=planner)
    except dcp.CheckpointException as error:
        raise CheckpointError(root_cause(error)) from error


def load_state(
    state: dict[str, Any], reader: Reader, label: str, load: Callable[..., None] = load_together
) -> None:
    """Fill ``state`` in place, using ``load``, on any mesh; collective.

    Raises `CheckpointError` on every rank if any rank failed, or if state and checkpoint do not match; the message
    names ``label``.
    """
    gather(f"cannot load {label}", reader.preload)
    failure: Exception | None = None
    try:
        load(state, storage_reader=reader, planner=StrictLoadPlanner())
    except dcp.CheckpointException as error:
        failure = CheckpointError(root_cause(error))
    gather(f"cannot load {label}", partial(unless, failure, None))  # ranks may load different trees: share failures


def saved_entries(reader: Reader) -> Mapping[str, Any]:
    """Return DCP's description of every entry by flat name. Raises `CheckpointError`. Not collective."""
    return dict(reader.read_metadata().state_dict_metadata)


def plain_values(reader: Reader) -> dict[str, Any]:
    """Return the numbers and strings outside the model and the optimizer, by flat name. Not collective."""
    values: dict[str, Any] = {}
    for key, entry in saved_entries(reader).items():
        if isinstance(entry, dcp.BytesStorageMetadata) and not key.startswith(("optim", "model")):
            with suppress(CheckpointError):  # an object that needs a class to unpickle
                values[key] = plain_value(reader, key)
    return {key: value for key, value in values.items() if isinstance(value, int | float | str)}


def plain_value(reader: Reader, key: str, planner: type[PlainLoadPlanner] = PlainLoadPlanner, empty: Any = None) -> Any:
    """Return one entry, read into ``empty`` if it is a tensor. Raises `CheckpointError`. Not collective."""
    state = {key: empty}
    try:
        _load_state_dict(state, reader, planner=planner(), no_dist=True)
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{key} cannot be read: {root_cause(error)}") from error
    return state[key]


def read_tensor(reader: Reader, key: str) -> torch.Tensor:
    """Return one tensor as a whole. Raises `CheckpointError` if it cannot be read. Not collective."""
    entry = saved_entries(reader)[key]
    empty = torch.empty(entry.size, dtype=entry.properties.dtype)
    value: torch.Tensor = plain_value(reader, key, empty=empty)
    return value
