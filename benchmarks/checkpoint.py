"""What a checkpoint costs: in the background against synchronous DCP and against one gathered file, in one run.

One AdamW training loop on a model of matrices, whose parameters are sharded over all ranks. Per kind of save: the time
that training stands still, and the time lost in all, which is the duration of the steps from asking for the save until
it is committed, less what as many steps take without one. Then the time and memory of loading, in fresh processes.
With ``--index SHARDS`` instead the CPU time of one rank for the index of a 70B model and AdamW in that many shards.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp_train import distributed
from smp_train.checkpoints.dcp import index
from smp_train.checkpoints.dcp.pickled import unpickle
from smp_train.checkpoints.dcp.trees import PlainLoadPlanner
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.distributed.host_copy import leaves
from smp_train.models.hub_state import gather_state

KINDS = ("synchronous DCP", "this package, async_sharded", "this package, sharded", "gathered, torch.save")
LOADED = ("torch's dcp.load", "this package")


@dataclass
class Cost:
    """Seconds of one save: training stood still, and lost in all."""

    blocked: float
    lost: float


class Bench:
    """A model, its optimizer, and a step that takes a given time."""

    def __init__(self, gigabytes: float, rows: int) -> None:
        width = 1024
        layers = max(1, round(gigabytes * 1e9 / (width * width * 4 * 3)))
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.rows = torch.randn(rows, width) / width
        self.before_update: Callable[[], None] = lambda: None
        self.optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def step(self) -> float:
        """Train one step and return its seconds; every rank takes part."""
        began = time.perf_counter()
        self.model(self.rows).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """Return the state to save."""
        return gather_state(self.model, self.optimizer)

    def cost(self, save: Callable[[], None], done: Callable[[], bool]) -> Cost:
        """Return what ``save`` costs that is over once ``done`` says so on every rank."""
        undisturbed = [self.step() for _ in range(5)]
        dist.barrier()
        began = time.perf_counter()
        save()
        blocked = time.perf_counter() - began
        steps = 0
        while True:
            finished = torch.tensor(float(done()))
            self.step()
            steps += 1
            dist.all_reduce(finished, op=dist.ReduceOp.MIN)
            if finished.item():
                break
        seconds = time.perf_counter() - began
        undisturbed += [self.step() for _ in range(5)]
        return Cost(blocked, seconds - steps * statistics.mean(undisturbed))


def main(argv: Sequence[str]) -> int:
    """Measure, and print the figures and ratios on rank 0; run it under torchrun for several processes."""
    parser = argparse.ArgumentParser(prog="smp-train bench checkpoint", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="parameters and optimizer state (default 1)")
    parser.add_argument("--folder", help="where to write (default: the system's folder for temporary files)")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind, alternating (default 3)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch: how long a step takes (default 64)")
    parser.add_argument("--index", type=int, metavar="SHARDS", help="measure the index of a checkpoint, nothing else")
    options = parser.parse_args(argv)
    if options.index:
        print("\n".join(index_costs(options.index)))
        return 0
    ranks = distributed.detect()
    distributed.start(ranks, distributed_backend="gloo", timeout_seconds=600)
    if options.folder:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
    shared = [tempfile.mkdtemp(dir=options.folder) if ranks.is_main else None]
    dist.broadcast_object_list(shared)
    folder = Path(str(shared[0]))
    try:
        lines = measure(Bench(options.gigabytes, options.rows), folder, options.rounds)
        lines += loading(folder, options)
    finally:
        dist.barrier()
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if ranks.is_main:
        print(f"bench checkpoint: {ranks.world_size} ranks, {options.gigabytes:g} GB, torch {torch.__version__}")
        print("\n".join(lines))
    distributed.stop()
    return 0


def measure(bench: Bench, folder: Path, rounds: int) -> list[str]:
    """Return the table."""
    for _ in range(3):
        bench.step()
    kinds = dict(zip(KINDS, (dcp_save, background_save, foreground_save, gathered_save), strict=True))
    managers = {
        name: CheckpointManager(
            [Policy(str(folder), 1, 1)], run_name=name, model_type="m", asynchronous=name == "background"
        )
        for name in ("background", "foreground")
    }
    costs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for step in range(1, rounds + 2):
        for kind, save in kinds.items():
            say(f"round {step} of {rounds + 1}: {kind}")
            cost = save(bench, managers, folder, step)
            if step > 1:  # the first pays for buffers and for imports
                costs[kind].append(cost)
    base = median(costs[KINDS[0]])
    lines = [f"{'':<30}{'blocked s':>10}{'lost s':>9}{'blocked, of DCP':>17}{'lost, of DCP':>14}"]
    for kind, found in costs.items():
        one = median(found)
        lines.append(
            f"{kind:<30}{one.blocked:>10.3f}{one.lost:>9.3f}"
            f"{one.blocked / base.blocked:>17.3f}{one.lost / base.lost:>14.3f}"
        )
    return lines


def say(what: str) -> None:
    """Print on rank 0 what is measured now: it may take minutes."""
    if dist.get_rank() == 0:
        print(f"bench checkpoint: {what}", file=sys.stderr, flush=True)


def median(costs: list[Cost]) -> Cost:
    """Return the medians."""
    return Cost(statistics.median(c.blocked for c in costs), statistics.median(c.lost for c in costs))


Managers = dict[str, CheckpointManager]


def dcp_save(bench: Bench, managers: Managers, folder: Path, step: int) -> Cost:
    """Save as a program does that calls torch.distributed.checkpoint itself."""
    return bench.cost(lambda: dcp.save(bench.state(), checkpoint_id=folder / f"dcp-{step}"), lambda: True)


def foreground_save(bench: Bench, managers: Managers, folder: Path, step: int) -> Cost:
    """Save with checksums and commit, while training waits."""
    return bench.cost(lambda: void(managers["foreground"].save(step, bench.state(), {})), lambda: True)


def background_save(bench: Bench, managers: Managers, folder: Path, step: int) -> Cost:
    """Save in the background; the wait for the copy before the next update counts as blocked."""
    manager = managers["background"]
    waited = [0.0]

    def wait() -> None:
        began = time.perf_counter()
        manager.staged()
        waited[0] += time.perf_counter() - began

    bench.before_update = wait
    cost = bench.cost(lambda: void(manager.save(step, bench.state(), {})), lambda: not manager.busy())
    bench.before_update = lambda: None
    manager.finish()
    return Cost(cost.blocked + waited[0], cost.lost)


def gathered_save(bench: Bench, managers: Managers, folder: Path, step: int) -> Cost:
    """Gather everything on rank 0 and write one file there."""

    def save() -> None:
        whole = {}
        for path, value in leaves(bench.state()):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                whole[".".join(path)] = full
        if dist.get_rank() == 0:
            torch.save(whole, folder / "gathered.pt")
        dist.barrier()

    return bench.cost(save, lambda: True)


def loading(folder: Path, options: argparse.Namespace) -> list[str]:
    """Return a line for each way to load, each measured in processes of its own; collective.

    Memory is that of rank 0: its model and optimizer before, and what loading took beyond them at its peak.
    """
    lines = [f"{'':<30}{'load s':>10}{'verify s':>10}{'holds MiB':>11}{'more MiB':>10}"]
    for way in LOADED:
        say(f"load: {way}")
        dist.barrier()
        told = [free_store(folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told)
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            place = (dist.get_rank(), dist.get_world_size(), str(told[0]))
            seconds, verified, held, more = fresh.apply(load, (way, str(folder), options, place))
        lines.append(f"{way:<30}{seconds:>10.2f}{verified:>10.2f}{held / 2**20:>11.0f}{more / 2**20:>10.1f}")
    return lines


def free_store(folder: Path) -> str:
    """Return a file by which processes find each other."""
    return tempfile.mktemp(dir=folder, prefix="store-")


def load(
    way: str, folder: str, options: argparse.Namespace, place: tuple[int, int, str]
) -> tuple[float, float, float, float]:
    """Load what was saved into a new model; return seconds, those of verifying, bytes held before, and more at peak."""
    rank, world, store = place
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    state = Bench(options.gigabytes, options.rows).state()
    dist.barrier()
    held = most_resident(from_now=True)
    began = time.perf_counter()
    verified = 0.0
    if way == LOADED[0]:
        dcp.load(state, checkpoint_id=max(Path(folder).glob("dcp-*"), key=lambda path: path.stat().st_mtime))
    else:
        found = open_verified(f"{folder}/foreground")
        verified = time.perf_counter() - began
        assert found is not None
        found.load(state)
    seconds = time.perf_counter() - began
    more = most_resident() - held
    dist.destroy_process_group()
    return seconds, verified, held, more


def most_resident(*, from_now: bool = False) -> float:
    """Return the most bytes of memory that this process has had, on Linux since it was asked ``from_now``."""
    if not sys.platform.startswith("linux"):
        # Kilobytes elsewhere, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1.0 if sys.platform == "darwin" else 1024.0)
    if from_now:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


ENTRIES, ROWS, WIDTH = 2172, 16, 8192
"""Tensors of Llama 70B with AdamW's moments; rows of a shard, and columns."""


def index_costs(shards: int) -> list[str]:
    """Return the CPU seconds and megabytes of both indexes of a synthetic checkpoint, which is in no file."""
    metadata, files = synthetic_index(shards)
    pickled, pickling = cpu(partial(pickle.dumps, metadata))
    files[".metadata"] = len(pickled)
    packed, packing = cpu(partial(pack, metadata, len(pickled)))
    dist.init_process_group("fake", store=FakeStore(), rank=shards // 2, world_size=shards)
    mesh = init_device_mesh("cpu", (shards,))
    part = torch.zeros(1).expand(ROWS, WIDTH)  # takes no memory
    state = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name in metadata.state_dict_metadata}
    del metadata
    theirs, unpickling = cpu(partial(unpickle, pickled))
    planned, planning = cpu(partial(plan, DefaultLoadPlanner(), state, theirs))
    del theirs
    ours, unpacking = cpu(partial(unpack, packed, files))
    requests, narrowing = cpu(partial(plan, PlainLoadPlanner(), state, ours))
    assert requests == planned == ENTRIES
    return [
        f"bench checkpoint: index of {ENTRIES} tensors in {shards} shards, CPU seconds, torch {torch.__version__}",
        f"{'':<12}{'write':>8}{'MB':>8}{'read':>8}{'plan':>8}",
        f"{'.metadata':<12}{pickling:>8.2f}{len(pickled) / 1e6:>8.1f}{unpickling:>8.2f}{planning:>8.2f}",
        f"{'index.bin':<12}{packing:>8.2f}{len(packed) / 1e6:>8.1f}{unpacking:>8.2f}{narrowing:>8.2f}",
    ]


def synthetic_index(shards: int) -> tuple[Metadata, dict[str, int]]:
    """Return an index as DCP makes it, and the sizes of the files that it names."""
    entries: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    length = ROWS * WIDTH * 4 + 1200
    for number in range(ENTRIES):
        name = f"optim.state.model.layers.{number // 27}.mlp.weight_{number % 27}.exp_avg"
        chunks = []
        for shard in range(shards):
            offset = torch.Size([shard * ROWS, 0])
            chunks.append(ChunkStorageMetadata(offset, torch.Size([ROWS, WIDTH])))
            stored[MetadataIndex(name, offset, shard)] = _StorageInfo(f"__{shard}_0.distcp", number * length, length)
        size = torch.Size([shards * ROWS, WIDTH])
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=torch.float32), size, chunks)
    return Metadata(entries, storage_data=stored), {f"__{n}_0.distcp": ENTRIES * length for n in range(shards)}


def pack(metadata: Metadata, metadata_bytes: int) -> bytes:
    """Return our index of it, as rank 0 writes it."""
    header, columns = index.pack(metadata)
    return index.encode(header | {"metadata": metadata_bytes}, columns)


def unpack(data: bytes, files: dict[str, int]) -> Metadata:
    """Read our index, as every rank does."""
    packed = index.decode(data, files[".metadata"])
    assert packed is not None
    return index.unpack(*packed, files)


def plan(planner: Any, state: dict[str, Any], metadata: Any) -> int:
    """Plan a load on this rank; return the number of requests."""
    planner.set_up_planner(state, metadata)
    local = planner.create_local_plan()
    items = planner.finish_plan(local).items
    for item in items:
        metadata.storage_data[item.storage_index]
    return len(items)


def cpu(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and its CPU seconds."""
    began = time.process_time()
    return work(), time.process_time() - began


def void(_: Any) -> None:
    """Drop a result."""
