"""Find and read checkpoints that AWS's SMP v2 sample scripts wrote. This package never writes to them.

A folder ``<model type>-<step>steps`` has one of four forms:

- sharded: one DCP tree, or one per tensor and expert rank in ``tp<rank>_ep<rank>/`` (in earlier releases
  ``tp<degree>-<rank>/`` and ``ep<degree>-<rank>/``), with ``model``, ``optimizer``, ``scheduler`` and counters;
- async_local: trees of local or sharded tensors, one for each ``tp<rank>_ep<rank>_fsdp<rank>`` (fsdp: shard rank);
- local: files ``<rank>.pt``, each with the tensors that FSDP1 holds on that rank (`smp_train.checkpoints.aws.flat`);
- full: ``pytorch_model.bin`` and ``config.json`` without optimizer state.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from smp_train.checkpoints.aws import flat, local
from smp_train.checkpoints.aws.names import MODEL_PREFIXES, MOMENTS, TensorReader, Tree
from smp_train.checkpoints.checkpoint import TORCHS, Checkpoint
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.dcp.storage import Reader, TreeReader
from smp_train.checkpoints.dcp.trees import load_state, plain_values, saved_entries
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.format import BEGUN, COMMITTED, META, METADATA, Marker
from smp_train.checkpoints.saver import SMP_NAMES, Saver
from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError
from smp_train.models.smp_names import Ranks, is_transformed
from smp_train.models.weight_files import WeightFiles
from smp_train.storage import is_s3, normal, parent_of
from smp_train.storage.checksum import FileRecord
from smp_train.storage.paths import place

logger = logging.getLogger(__name__)

FULL, CONFIG = "pytorch_model.bin", "config.json"
_NAME = re.compile(r"(?:.*\D)?(?P<step>\d+)steps")
_RANK_FILE = re.compile(r"(\d+)\.pt")


@dataclass(frozen=True)
class AwsCheckpoint(Checkpoint):
    """A checkpoint of AWS's sample, readable under the hub's names on any mesh.

    ``meta["imported"]`` holds the checkpoint's plain values: counters, learning-rate schedule, the sample's settings.
    ``marker`` lists the checkpoint's files without checksums.
    """

    has_moments: bool = False
    is_local: bool = False
    """Whether the checkpoint has FSDP1's local tensors, in trees or files ``<rank>.pt``, and not sharded tensors."""
    config: Any = field(default=None, repr=False, compare=False)

    @property
    def durable(self) -> bool:
        """Return False, so that the run saves this step in its own folder too."""
        return False

    def reader(self, part: str = "") -> Reader:
        """Return the reader of the tree in a sub-folder."""
        # A shard rank's tree may refer to tensors in other shard ranks' trees, so the reader gets all trees' files.
        files = {posixpath.relpath(file, part or "."): record.size for file, record in self.marker.files.items()}
        return TreeReader(self.folder.storage, posixpath.normpath(posixpath.join(self.name, part)), files)

    def model_config(self) -> Any:
        """Return the configuration of the run's model."""
        return self.config

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """Fill ``state`` as `Checkpoint.load` does. If the checkpoint has no AdamW moments, ``state`` keeps its own."""
        with ExitStack() as open_files:
            opened: list[list[Tree]] = []
            gather(f"cannot load {self.path}", lambda: opened.append(self._trees(state, saver, open_files)))
            if not self.has_moments and "optim" in state:
                logger.info("%s holds no optimizer state: AdamW's moments begin at zero", self.path)
                state = {"model": state["model"]}
            load_state(state, self._translated(opened[0], state, saver), self.path, load=saver.load)

    def _trees(self, state: dict[str, Any], saver: Saver, files: ExitStack) -> list[Tree]:
        """Return the checkpoint's trees. Not collective."""
        if self.is_local:
            if len(set(self.trees.values())) > 1:
                raise CheckpointError(flat.SMP_SLICES)
            shapes = saver.hub.shapes if saver.hub else {n: tuple(value.shape) for n, value in state["model"].items()}
            tensors = flat.joined_tensors(self._rank_contents(), self.config.model_type, shapes)
            return [Tree(Ranks(), TensorReader(tensors))]
        if self.parts:
            return self._readers()
        weights = WeightFiles(place(self.path) / FULL, files)
        return [Tree(Ranks(), TensorReader({f"model.{name}": weights.tensor(name)[...] for name in weights.files}))]

    def _rank_contents(self) -> list[dict[str, Any]]:
        if self.parts:
            return [local.rank_contents_of_tree(self.reader(part)) for part in sorted(self.parts, key=_shard)]
        return [local.read_rank_file(place(self.path) / f"{rank}.pt") for rank in _rank_files(self.marker.files)]


def find_checkpoint(location: str, config: Any, *, strict: bool = False) -> AwsCheckpoint | None:
    """Return the newest complete checkpoint of AWS's sample at a location, for a model of ``config``; collective.

    An incomplete checkpoint is skipped with a warning, or raises `CheckpointError` if ``strict`` is set or ``location``
    names it. Raises `CheckpointError` if none is complete. Returns None if the location holds no checkpoint.
    """
    paths = on_main("cannot resume", lambda: _paths(normal(location)))
    for path in paths:
        checkpoint = on_main(f"cannot read {path}", partial(_inspect, path, config.model_type))
        if isinstance(checkpoint, AwsCheckpoint):
            return replace(checkpoint, config=config)
        problem = f"{path}, of SMP's sample scripts, is not whole: {checkpoint}"
        if strict or path == normal(location):
            raise CheckpointError(problem)
        logger.warning("%s; trying the next older one", problem, extra=ALL_RANKS)
    if paths:
        raise CheckpointError(f"no checkpoint of SMP's sample scripts in {location} is whole; {path}: {checkpoint}")
    return None


def checkpoint_paths(location: str) -> list[str]:
    """Return the paths of AWS's checkpoints, newest first: the location itself, or folders in it. Not collective.

    A pytorch_model.bin counts only in a folder of the location: in the location itself it may be any other model's.
    """
    paths = _paths(normal(location))
    if paths == [normal(location)] and open_folder(location).storage.exists(FULL):
        return []
    return paths


def _paths(location: str) -> list[str]:
    parent, name = parent_of(location)
    if name and _is_sample(open_folder(parent), name):
        return [location]
    folder = open_folder(location)
    matches = [(_NAME.fullmatch(name), name) for name in folder.storage.level()[1]]
    steps = [(int(match["step"]), name) for match, name in matches if match is not None]
    return [os.path.join(location, name) for _, name in sorted(steps, reverse=True) if _is_sample(folder, name)]


def _is_sample(folder: RunFolder, name: str) -> bool:
    """Return whether a folder holds files of AWS's sample's checkpoints, and no files of this program's checkpoints."""
    files = folder.sizes(name)
    known = FULL in files or _rank_files(files) or any(map(Ranks.of_folder, _tree_folders(files)))
    return bool(known) and not {COMMITTED, BEGUN, META} & set(files)


def _tree_folders(files: Iterable[str]) -> list[str]:
    """Return the sub-folders of the DCP trees among files."""
    of_trees = (file for file in files if posixpath.basename(file) == METADATA or file.endswith(".distcp"))
    return sorted(set(map(posixpath.dirname, of_trees)))


def _rank_files(files: Iterable[str]) -> list[int]:
    """Return the ranks that have a file ``<rank>.pt``, in order."""
    return sorted(int(match[1]) for match in map(_RANK_FILE.fullmatch, files) if match is not None)


def _shard(folder: str) -> int:
    return (Ranks.of_folder(folder) or (Ranks(), 0))[1]


def _inspect(path: str, kind: str) -> AwsCheckpoint | str:
    """Return a checkpoint of a model of transformers' type ``kind``, or the reason why it is incomplete."""
    parent, name = parent_of(path)
    folder = open_folder(parent)
    files = {file: FileRecord(size, "") for file, size in folder.sizes(name).items()}
    checkpoint = AwsCheckpoint(path, {}, Marker(0, kind, 0, files), folder, name)
    parts, ranks = _tree_folders(files), _rank_files(files)
    recorded: dict[str, Any] = {}
    saved: Mapping[str, Any] = {}
    try:
        if parts:
            _check_trees(checkpoint, parts)
            reader = checkpoint.reader(parts[0])
            recorded, saved = plain_values(reader), saved_entries(reader)
        elif ranks:
            if is_s3(path):
                raise CheckpointError("files of single ranks are not read from S3: copy them to a folder")
            if ranks != list(range(len(ranks))):
                raise CheckpointError(f"files of ranks {ranks} are there, and not of those between")
            recorded = local.plain_values(checkpoint._rank_contents()[0])
    except CheckpointError as failure:
        return str(failure)
    match = _NAME.fullmatch(name)
    counters = ("scheduler.num_iters", "total_steps", "step")
    step = int(next((recorded[key] for key in counters if key in recorded), match["step"] if match else 0))
    degrees = next(iter(checkpoint.trees.values()))
    mesh = {"tensor": degrees.tensors, "expert": degrees.experts}
    meta: dict[str, Any] = {"imported": recorded, "mesh": mesh, "tokens": 0}
    names = [key.removeprefix("app.").removeprefix("model.") for key in saved if key.startswith(MODEL_PREFIXES[:2])]
    if is_transformed([name for name in names if not flat.is_flat(name)], kind):
        meta["names"] = SMP_NAMES
    if FULL in files and CONFIG in files:
        meta["model_config"] = json.loads(folder.read(name, CONFIG))
    is_local = local.is_local(saved) if parts else bool(ranks)
    has_moments = is_local or any(map(MOMENTS.fullmatch, saved))
    return replace(checkpoint, meta=meta, marker=Marker(step, kind, 0, files), has_moments=has_moments,
                   is_local=is_local)  # fmt: skip


def _check_trees(checkpoint: AwsCheckpoint, parts: list[str]) -> None:
    """Raise `CheckpointError` if a tree, index or file is missing, or a file is shorter than its index requires."""
    ranks = Ranks.of_folders(parts)
    for part in parts:
        if part not in ranks:
            raise CheckpointError(f"{part} is of no tensor and expert rank")
        checkpoint.reader(part).preload()
    writers = {(writer.tensor, writer.expert, _shard(part)) for part, writer in ranks.items()}
    shards, degrees = 1 + max(map(_shard, parts)), ranks[parts[0]]
    for writer in itertools.product(range(degrees.tensors), range(degrees.experts), range(shards)):
        if writer not in writers:
            raise CheckpointError("there is no tree of tensor rank {}, expert rank {}, shard rank {}".format(*writer))
