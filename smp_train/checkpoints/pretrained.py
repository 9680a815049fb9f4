"""Starting from weights: a Hugging Face folder, one file, or a checkpoint of this program or of another's DCP."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from smp_train.checkpoints.collective import exchange, on_main
from smp_train.checkpoints.dcp import DCP_METADATA, Reader, load_state, saved_entries
from smp_train.checkpoints.finding import find, is_checkpoint_folder
from smp_train.checkpoints.state import gather_state
from smp_train.checkpoints.storage import open_storage, parent_of, place_of
from smp_train.errors import CheckpointError
from smp_train.models.hf_weights import NOT_WEIGHTS, load_pretrained
from smp_train.models.hub_names import canonical_name, hub_names
from smp_train.runtime.places import Place, place

# What programs call the model in the tree they save; ours is first.
PREFIXES = ("model.", "", "state_dict.", "app.model.", "module.")


def load_weights(
    model: nn.Module, location: str, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Fill a materialised model with the weights at ``location``, each rank reading its own part. Collective.

    ``location`` is a Hugging Face folder or a weight file (see `load_pretrained`), a checkpoint of ours or a folder
    of them (the newest committed one, which must be intact), or a folder that `torch.distributed.checkpoint` wrote, all
    also in S3. Optimizer state that lies beside the weights is not read. ``on_progress`` is called with the bytes done
    and in all, where they are weight files. Raises `CheckpointError` on every rank when any rank failed.
    """
    path = place(location)
    what = f"cannot read weights from {path}"
    kind = on_main(what, lambda: _kind(path))
    if kind == "ours":
        found = find(path, strict=True)
        if found is None:
            raise CheckpointError(f"{path} holds no committed checkpoint to start from")
        found.load(gather_state(model))
    elif kind == "foreign":
        _load_foreign(model, str(path))
    else:
        exchange(what, lambda: load_pretrained(model, path, on_progress))


def _kind(path: Place) -> str:
    if is_checkpoint_folder(path):
        return "ours"
    return "foreign" if (path / DCP_METADATA).is_file() else "files"


def _load_foreign(model: nn.Module, path: str) -> None:
    """Fill the model from a DCP tree of another program, whatever it calls the model there. Collective."""
    state = gather_state(model)
    saved: dict[str, Any] = {}
    exchange(f"cannot read {path}", lambda: saved.update(saved_entries(open_tree(path))))
    prefix = prefix_of_model(saved, state["model"], path)
    # Others store a tied weight under each of its names, and buffers that are computed.
    known = {canonical_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    table = hub_names(model)
    ignored = {key for key in saved if table.current(key.removeprefix(prefix)) in known or NOT_WEIGHTS.search(key)}
    load_state(_nested(state.named_as(saved, prefix)["model"], prefix), open_tree(path), path, ignored)


def open_tree(location: str | os.PathLike[str]) -> Reader:
    """Return the reader of another program's tree."""
    folder, name = parent_of(place_of(location))
    return open_storage(folder).reader(name)


def _nested(tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
    for word in reversed(prefix.split(".")[:-1]):
        tensors = {word: tensors}
    return tensors


def prefix_of_model(saved: Mapping[str, Any], wanted: Mapping[str, Any], label: str) -> str:
    """Return what stands before the parameters' names in the tree. Raises `CheckpointError` where nothing fits."""
    first = next(iter(wanted))
    for prefix in PREFIXES:
        if prefix + first in saved:
            return prefix
    known = ", ".join(list(saved)[:3])
    raise CheckpointError(f"{label} holds no {first} under any of the usual names; its entries begin with {known}")
