"""Discovery and reading of checkpoints that the SMP v2 sample scripts wrote. They are never written to.

Contents of a folder ``<model type>-<step>steps`` (facts: the sample's scripts and SMP's documentation):

- sharded: a DCP tree, or one for each tensor and expert rank, in ``tp<rank>_ep<rank>/``, earlier
  ``tp<degree>-<rank>/`` and ``ep<degree>-<rank>/``, with ``model``, ``optimizer``, ``scheduler`` and counters;
- async_local: a tree for each shard rank too, ``tp<rank>_ep<rank>_fsdp<rank>/``, of what FSDP1 holds on it, or of
  sharded tensors;
- local: ``<rank>.pt``, what FSDP1 holds on each rank (`smp_train.checkpoints.aws.flat`);
- full: ``pytorch_model.bin`` and ``config.json``, no optimizer state.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import posixpath
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smp_train.checkpoints.aws import flat, local
from smp_train.checkpoints.aws.names import MODEL_PREFIXES, MOMENTS, TensorReader, Tree
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.commit import CheckpointFolder, absent, open_folder, parent_of
from smp_train.checkpoints.dcp import Reader, load_state, plain_values, saved_entries
from smp_train.checkpoints.discovery import TORCHS, Checkpoint
from smp_train.checkpoints.manifest import COMMITTED, META, METADATA, Committed
from smp_train.checkpoints.saver import HUGGING_FACE, SMP_NAMES, Saver
from smp_train.checkpoints.state import State
from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError
from smp_train.models.hub_names import canonical_name
from smp_train.models.smp_names import Ranks, is_transformed
from smp_train.models.weight_files import WeightFiles
from smp_train.storage import is_s3, normal
from smp_train.storage.paths import place

logger = logging.getLogger(__name__)

FULL, CONFIG = "pytorch_model.bin", "config.json"
_NAME = re.compile(r"(?:.*\D)?(?P<step>\d+)steps")
_RANK_FILE = re.compile(r"(\d+)\.pt")


@dataclass(frozen=True)
class AwsCheckpoint(Checkpoint):
    """A checkpoint that the SMP v2 sample wrote, as one of ours: under the hub's names, on any mesh.

    ``meta["imported"]`` is what it records of itself: counters, schedule, the sample's own settings.
    """

    folders: tuple[str, ...]
    """Sub-folders of its trees; empty where there are none but files."""
    rank_files: int
    """How many files ``<rank>.pt`` there are."""
    local_trees: bool
    """Whether its trees hold what FSDP1 holds on each rank, rather than sharded tensors."""
    config: Any = field(repr=False, compare=False)
    transformed: bool
    has_moments: bool

    @property
    def durable(self) -> bool:
        """False: it is another program's, so that this run's own first checkpoint is still to be written."""
        return False

    @property
    def parts(self) -> list[str]:
        """Sub-folders of its trees."""
        return list(self.folders)

    @property
    def names(self) -> str:
        """See `Checkpoint.names`."""
        return SMP_NAMES if self.transformed else HUGGING_FACE

    def reader(self, part: str = "") -> Reader:
        """Return the reader of one of its trees, as it was written."""
        return _reader(self._storage, self._name, part, self._storage.sizes(self._name))

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """See `Checkpoint.load`. Without moments there, the optimizer's state is left as it is."""
        what = f"cannot load {self.path}"
        with ExitStack() as opened:
            found: list[list[Tree]] = []
            gather(what, lambda: found.append(self._trees(state, saver, opened)))
            (trees,) = found
            if isinstance(state, State):  # a DCP tree of another program may have the names of today's transformers
                saved = on_main(what, lambda: list(saved_entries(trees[0].reader)))
                named = (state.named_as(saved, prefix) for prefix in MODEL_PREFIXES)
                state = next((each for each in named if each is not state), state)
            if not self.has_moments and "optim" in state:
                logger.info("%s holds no optimizer state: AdamW's moments begin at zero", self.path)
                state = {"model": state["model"]}
            load_state(state, self._translated(trees, state, saver), self.path, load=saver.load)

    def model_config(self) -> Any:
        """See `Checkpoint.model_config`: the run's."""
        return self.config

    def _trees(self, state: dict[str, Any], saver: Saver, opened: ExitStack) -> list[Tree]:
        if self.rank_files or self.local_trees:
            if self.local_trees:
                read = [local.rank_contents_of_tree(self.reader(part)) for part in sorted(self.folders, key=_shard)]
            else:
                read = [local.read_rank_file(place(self.path) / f"{rank}.pt") for rank in range(self.rank_files)]
            if isinstance(state, State):
                state = state.named_as([f"model.{canonical_name(name)}" for name in read[0]["model"]])
            if len(set(Ranks.of_folders(self.folders).values())) > 1:
                raise CheckpointError(flat.SMP_SLICES)
            shapes = saver.hub.shapes if saver.hub else {n: tuple(value.shape) for n, value in state["model"].items()}
            return [Tree(Ranks(), TensorReader(flat.joined_tensors(read, self.config.model_type, shapes)))]
        if self.folders:
            return self._readers()
        files = WeightFiles(place(self.path) / FULL, opened)
        return [Tree(Ranks(), TensorReader({f"model.{n}": files.tensor(n)[...] for n in files.files}))]


def find_checkpoint(location: str, config: Any, *, strict: bool = False) -> AwsCheckpoint | None:
    """Return the newest checkpoint of the sample's at ``location``, for a model of ``config``. Collective.

    One of which something is missing is passed over with a warning; ``strict``, or asked for by its own name, it is an
    error, as it is where none is whole (`CheckpointError`). None where there are none at all.
    """
    folder, names = on_main("cannot resume", lambda: _candidates(normal(location)))
    storage = open_folder(folder)
    for name in names:
        label = os.path.join(folder, name)
        facts = on_main(f"cannot read {label}", partial(_look, storage, name, config))
        if not isinstance(facts, str):
            return AwsCheckpoint(path=label, _storage=storage, _name=name, config=config, **facts)
        if strict or label == normal(location):  # asked for by its own name
            raise CheckpointError(f"{label}, of SMP's sample scripts, is not whole: {facts}")
        logger.warning(
            "%s, of SMP's sample scripts, is not whole: %s; trying the next older one", label, facts, extra=ALL_RANKS
        )
    if names:
        raise CheckpointError(f"no checkpoint of SMP's sample scripts in {folder} is whole; {label}: {facts}")
    return None


def has_trees(location: str) -> bool:
    """Return whether ``location`` is one or more DCP trees of another program, rather than files of weights."""
    folder, name = parent_of(normal(location))
    return is_checkpoint(location) and FULL not in open_folder(folder).sizes(name)


def checkpoint_names(folder: str) -> list[str]:
    """Return the names of the sample's checkpoints in a folder, newest first."""
    return _candidates(normal(folder))[1]


def is_checkpoint(location: str) -> bool:
    """Return whether ``location`` is itself a checkpoint of the sample's, whole or not. Not collective."""
    folder, name = parent_of(normal(location))
    return bool(name) and absent(normal(location)) is None and _is_aws_checkpoint(open_folder(folder), name)


def _candidates(location: str) -> tuple[str, list[str]]:
    """Return a folder and the sample's checkpoints in it, newest first, or the one that ``location`` is."""
    if is_checkpoint(location):
        folder, name = parent_of(location)
        return folder, [name]
    if absent(location) is not None:
        return location, []
    storage = open_folder(location)
    found = [(int(match["step"]), name) for name in storage.names() if (match := _NAME.fullmatch(name)) is not None]
    return location, [name for _, name in sorted(found, reverse=True) if _is_aws_checkpoint(storage, name)]


def _is_aws_checkpoint(storage: CheckpointFolder, name: str) -> bool:
    if storage.has(name, COMMITTED) or storage.has(name, META):
        return False
    files = storage.sizes(name)
    if FULL in files or any(map(_RANK_FILE.fullmatch, files)):
        return True
    return any(Ranks.of_folder(posixpath.dirname(file)) for file in files if _of_tree(file))


def _reader(storage: CheckpointFolder, name: str, part: str, files: Mapping[str, int]) -> Reader:
    """Return the reader of a tree; of shard ranks' own trees each has a part of tensors that are in all together."""
    return storage.reader(posixpath.join(name, part), {posixpath.relpath(f, part or "."): n for f, n in files.items()})


def _of_tree(file: str) -> bool:
    return posixpath.basename(file) == METADATA or file.endswith(".distcp")


def _shard(folder: str) -> int:
    found = Ranks.of_folder(folder)
    return found[1] if found else 0


def _look(storage: CheckpointFolder, name: str, config: Any) -> dict[str, Any] | str:
    """Return the fields of a `AwsCheckpoint`, or the reason why the checkpoint is not whole."""
    match = _NAME.fullmatch(name)
    files = storage.sizes(name)
    recorded: dict[str, Any] = {}
    transformed = has_moments = local_trees = False
    of_ranks = sorted(int(found[1]) for found in map(_RANK_FILE.fullmatch, files) if found is not None)
    folders = sorted({posixpath.dirname(file) for file in files if _of_tree(file)})
    try:
        if folders:
            _check_trees(storage, name, folders, files)
            reader = _reader(storage, name, folders[0], files)
            recorded, saved = plain_values(reader), saved_entries(reader)
            has_moments, local_trees = any(map(MOMENTS.fullmatch, saved)), local.is_local(saved)
            of_model = (key for key in saved if key.startswith(MODEL_PREFIXES[:2]))
            names = [key.removeprefix("app.").removeprefix("model.") for key in of_model]
            transformed = is_transformed([each for each in names if not flat.is_flat(each)], config.model_type)
        elif of_ranks:
            if is_s3(storage.location):
                raise CheckpointError("files of single ranks are not read from S3: copy them to a folder")
            if of_ranks != list(range(len(of_ranks))):
                raise CheckpointError(f"files of ranks {of_ranks} are there, and not of those between")
            read = [local.read_rank_file(place(storage.location) / name / f"{rank}.pt") for rank in of_ranks]
            recorded, has_moments = local.plain_values(read[0]), True
    except CheckpointError as failure:
        return str(failure)
    by_name = int(match["step"]) if match else 0
    step = int(recorded.get("scheduler.num_iters", recorded.get("total_steps", recorded.get("step", by_name))))
    degrees = next(iter(Ranks.of_folders(folders).values()), Ranks())
    meta = {"imported": recorded, "mesh": {"tensor": degrees.tensors, "expert": degrees.experts}, "tokens": 0}
    if FULL in files and CONFIG in files:
        meta["model_config"] = json.loads(storage.read(name, CONFIG))
    return {
        "step": step, "meta": meta, "committed": Committed(step, config.model_type, {}), "folders": tuple(folders),
        "transformed": transformed, "has_moments": has_moments, "rank_files": len(of_ranks), "local_trees": local_trees,
    }  # fmt: skip


def _check_trees(storage: CheckpointFolder, name: str, folders: list[str], files: Mapping[str, int]) -> None:
    """Raise `CheckpointError` for a tree, index or file that is missing, or shorter than its index says."""
    for folder in folders:
        if Ranks.of_folder(folder) is None:
            raise CheckpointError(f"{folder} is of no tensor and expert rank")
        if posixpath.join(folder, METADATA) not in files:
            raise CheckpointError(f"{posixpath.join(folder, METADATA)} is missing")
        for info in _reader(storage, name, folder, files).read_metadata().storage_data.values():
            file = posixpath.join(folder, info.relative_path)
            if files.get(file, 0) < info.offset + info.length:
                raise CheckpointError(f"{file} is missing or cut short")
    writers = {(of[0].tensor, of[0].expert, of[1]) for of in map(Ranks.of_folder, folders) if of is not None}
    degrees = next(iter(Ranks.of_folders(folders).values()))
    shards = 1 + max(shard for _, _, shard in writers)
    for each in itertools.product(range(degrees.tensors), range(degrees.experts), range(shards)):
        if each not in writers:
            raise CheckpointError("there is no tree of tensor rank {}, expert rank {}, shard rank {}".format(*each))
