"""Node-local checkpoints: each rank saves its part to its node's own disk, so that the same ranks can restart there.

A parent folder ``local:DIR`` is not shared between nodes. Rank R writes ``DIR/<run>/rank<R>/<name>/``, an ordinary
checkpoint with only this rank's part. Resuming needs every rank's part. On another mesh the run resumes from a durable
checkpoint.

With --recovery in_place on several nodes, a rank of the next node keeps a copy of each part, in
``DIR/<run>/rank<that rank>/copy-of-rank<R>/``. A rank that has lost its part gets it from there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from smp_train.arguments.training_flags import NODE_LOCAL as PREFIX
from smp_train.checkpoints.checkpoint import TORCHS, Checkpoint, verified
from smp_train.checkpoints.collective import gather
from smp_train.checkpoints.folder import RunFolder, folder_of_run, open_folder
from smp_train.checkpoints.format import COMMITTED, NODE_LOCAL, Marker
from smp_train.checkpoints.saver import HUGGING_FACE, Saver
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.agree import alone, group, rank, replays, world_size
from smp_train.distributed.dtensor import local_tensor
from smp_train.distributed.host_copy import leaves, put
from smp_train.errors import CheckpointError, ConfigError, first_line
from smp_train.models.hub_state import present
from smp_train.storage import Range, normal
from smp_train.storage.checksum import FileRecord
from smp_train.storage.s3 import parts

logger = logging.getLogger(__name__)

COPY = "copy-of-rank"
PIECE_TIMEOUT = timedelta(seconds=30)
"""Longest wait for a piece of a part: gloo may lose a send if a connection breaks, and would wait for hours."""
OTHER_RANKS = "it was saved by other ranks, or on another mesh"


def is_node_local(parent: str) -> bool:
    """Return whether a parent folder is on each node's own disk."""
    return parent.startswith(PREFIX)


def local_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with each DTensor replaced by this rank's local tensor, which shares its memory."""
    part: dict[str, Any] = {}
    for path, value in leaves(present(state)):
        put(part, path, local_tensor(value))
    return part


def check_saver(saver: Saver) -> None:
    """Raise `ConfigError` for a model that SMP has transformed: its ranks do not share one tree."""
    if saver != TORCHS:
        raise ConfigError(f"--checkpoint_dir {PREFIX}DIR is not available with SMP's own models; leave it out")


def facts_of_part(durable: Sequence[str], mesh: Any) -> dict[str, Any]:
    """Return what must be the same at saving and loading a part: ranks, mesh, durable parents and parameter names."""
    ranks = {"world_size": world_size(), "rank": rank(), "mesh": mesh}
    return {**ranks, "durable": sorted(map(normal, durable)), "names": HUGGING_FACE}


class NodeLocalCheckpoint(Checkpoint):
    """A checkpoint that consists of one node-local part per rank."""

    @property
    def durable(self) -> bool:
        """Whether the checkpoint outlives the loss of a node."""
        return False

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """Fill ``state`` in place; its layout must equal the saved one. Collective."""

        def load_part() -> None:
            with alone():
                Checkpoint.load(self, local_part(state), saver)

        gather(f"cannot load {self.path}", load_part)


Step = tuple[int, int]
"""Generation and step."""


def copies_of(folder: RunFolder, owner: int) -> RunFolder:
    """Return the folder with copies of the parts of ``owner``, below another rank's ``folder``."""
    return open_folder(f"{folder.location}/{COPY}{owner:05d}")


def copies_on_node(folder: RunFolder) -> dict[int, RunFolder]:
    """Return the folders with copies below a rank's ``folder``, by the rank whose parts were copied."""
    owners = [int(name.removeprefix(COPY)) for name in folder.storage.level()[1] if name.startswith(COPY)]
    return {owner: copies_of(folder, owner) for owner in owners}


def steps_on_nodes(parents: Sequence[str], run_name: str) -> list[tuple[Step, str]]:
    """Return (generation and step, parent) of each step with every rank's part or a copy, newest first. Collective."""

    def parts_in(parent: str) -> set[tuple[Step, int]]:
        folder = folder_of_run(parent, run_name)
        folders = {**copies_on_node(folder), rank(): folder}
        return {(each[:2], owner) for owner, folder in folders.items() for each in folder.committed()}

    by_rank = gather("cannot resume", lambda: [parts_in(parent) for parent in parents])
    steps = []
    for number, parent in enumerate(parents):
        saved = set[tuple[Step, int]]().union(*(parts[number] for parts in by_rank))
        for step, ranks in Counter(step for step, owner in saved if owner < world_size()).items():
            if ranks == world_size():
                steps.append((step, parent))
            else:
                logger.info("Step %d in %s is passed over: not every rank has its part", step[1], parent)
    return sorted(steps, reverse=True)


def open_parts(parent: str, run_name: str, step: Step, facts: dict[str, Any]) -> NodeLocalCheckpoint | None:
    """Return this rank's verified part of a step; None, with a warning, if any rank's part is unusable. Collective.

    Ranks whose parts are missing or damaged get copies first, if there are any.
    """
    folder = folder_of_run(parent, run_name)

    def open_part() -> tuple[str | None, NodeLocalCheckpoint | None]:
        try:
            name = next((checkpoint.name for checkpoint in folder.committed() if checkpoint[:2] == step), "")
            with alone():
                checkpoint = verified(folder, name)
        except (CheckpointError, OSError) as error:
            return str(error), None
        if checkpoint.meta.get(NODE_LOCAL) != facts:
            return OTHER_RANKS, None
        return None, NodeLocalCheckpoint(**{each.name: getattr(checkpoint, each.name) for each in fields(checkpoint)})

    def open_everywhere() -> tuple[dict[int, str], NodeLocalCheckpoint | None]:
        problem, part = open_part()
        results = gather("cannot resume", lambda: (problem, part if rank() == 0 else None))
        problems = {owner: problem for owner, (problem, _) in enumerate(results) if problem}
        return problems, results[0][1] if replays() else part  # a replacement's own part may be gone by now

    problems, part = open_everywhere()
    if problems and OTHER_RANKS not in problems.values() and fetch_copies(folder, step, [*problems]):
        problems, part = open_everywhere()
    if problems:
        reason = next(iter(problems.values()))
        logger.warning("Step %d in %s is passed over: %s", step[1], parent, reason, extra=ALL_RANKS)
        return None
    return part


def copy_part(folder: RunFolder, name: str, distance: int, peers: Any) -> tuple[RunFolder, str]:
    """Copy each rank's part ``name`` to the rank ``distance`` higher; return folder and name of the copy made here.

    Collective. Raises `CheckpointError` on every rank if a rank cannot read its part or write a copy, or a transfer
    stalls; ``peers``, a process group for the transfers alone, is then useless.
    """
    receiver, sender = ((rank() + step) % world_size() for step in (distance, -distance))
    copies = copies_of(folder, sender)

    def prepare() -> Marker:
        for interrupted in {*copies.names()} - {each.name for each in copies.committed()}:
            copies.delete(interrupted)
        return Marker.from_bytes(folder.read(name, COMMITTED))

    markers = gather("cannot copy the parts", prepare)
    return copies, transfer((folder, name, markers[rank()]), receiver, copies, markers[sender], sender, peers)


def fetch_copies(folder: RunFolder, step: Step, owners: Sequence[int]) -> bool:
    """Send ``owners`` the copies of their parts of a step; return whether every owner got its part. Collective."""

    def find_copies() -> dict[int, tuple[str, Marker]]:
        return {
            owner: (copy.name, copy.marker)
            for owner, copies in copies_on_node(folder).items()
            for copy in copies.committed() if copy[:2] == step and copy.marker is not None
        }  # fmt: skip

    by_rank = gather("cannot resume", find_copies)
    receivers = {sender: owner for sender, copies in enumerate(by_rank) for owner in owners if owner in copies}
    senders = {owner: sender for sender, owner in receivers.items()}
    if len(senders) < len(owners):
        return False
    sender, receiver = senders.get(rank(), -1), receivers.get(rank(), -1)
    sent = (copies_of(folder, receiver), *by_rank[rank()][receiver]) if senders.get(receiver) == rank() else None
    try:
        transfer(sent, receiver, folder, by_rank[sender][rank()][1] if sender >= 0 else None, sender)
    except CheckpointError as failure:
        logger.warning("%s", failure, extra=ALL_RANKS)
        return False
    logger.info("Step %d: ranks %s got copies of their parts from other nodes", step[1], ", ".join(map(str, owners)))
    return True


def transfer(
    sent: tuple[RunFolder, str, Marker] | None, receiver: int, folder: RunFolder, marker: Marker | None, sender: int,
    peers: Any = None,
) -> str:  # fmt: skip
    """Send a part, if any, to ``receiver``, while the files that ``marker`` lists, if any, arrive from ``sender``.

    Return the name of the committed part that arrived in ``folder``. Collective.
    """

    def work() -> str:
        if replays():
            return ""
        pieces = exchange(sent, receiver, marker, sender, peers or group())
        try:
            try:
                return "" if marker is None else store(folder, marker, pieces)
            finally:
                for _ in pieces:  # even if this rank's disk fails: other ranks wait
                    pass
        except RuntimeError as failure:  # gloo has closed the connections of this group
            raise CheckpointError(f"a transfer stalled: {first_line(failure)[:200]}") from failure

    return gather("cannot copy the parts", work)[rank()]


def store(folder: RunFolder, marker: Marker, pieces: Iterator[bytearray]) -> str:
    """Write a part from the ``pieces`` of its files, commit it, and return its name."""
    name = folder.begin(marker.model_type, marker.step, marker.generation)
    with ExitStack() as files:
        for file, record in sorted(marker.files.items()):
            stream, written = files.enter_context(folder.storage.writer(f"{name}/{file}", record.size)), FileRecord()
            for _ in parts(file, 0, record.size):
                stream.write(piece := next(pieces))
                written = written.extended(piece)
            if written != record:
                raise CheckpointError(f"{file} did not arrive as it was written")
        for _ in pieces:  # before the files are synced, as that may take long and other ranks wait
            pass
    folder.commit(name, marker)
    return name


def exchange(
    sent: tuple[RunFolder, str, Marker] | None, receiver: int, marker: Marker | None, sender: int, peers: Any
) -> Iterator[bytearray]:
    """Send a part's files in pieces, while the pieces of other files arrive; yield the latter."""

    def spans(name: str, marker: Marker) -> list[Range]:
        files = sorted(marker.files.items())
        return [span for file, record in files for span in parts(f"{name}/{file}", 0, record.size)]

    outgoing, incoming = spans(*sent[1:]) if sent else [], spans("", marker) if marker else []
    for read, write in zip_longest(outgoing, incoming):
        pending: list[Any] = []
        arrived = bytearray(write.length if write else 0)
        if sent and read:
            piece = b""
            with suppress(CheckpointError, OSError):  # the receiver will see that the checksum differs
                piece = next(sent[0].storage.ranges([read]))
            data = torch.frombuffer(bytearray(piece.ljust(read.length, b"\0")), dtype=torch.uint8)
            pending.append(dist.isend(data, receiver, group=peers))
        if write:
            pending.append(dist.irecv(torch.frombuffer(arrived, dtype=torch.uint8), sender, group=peers))
        for work in pending:
            work.wait(PIECE_TIMEOUT)
        if write:
            yield arrived
