"""What control costs at thousands of ranks, by the package's own code, with the ranks simulated in one process.

CPU seconds, as most of it runs on one rank. What needs the ranks themselves is in docs/scaling.md.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import pickle
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.cells import table
from benchmarks.program import STEADY, TINY, below, opened, stepping, words
from smp_train import arguments, train_utils
from smp_train.checkpoints.dcp.index import pack, unpack
from smp_train.checkpoints.dcp.pickled import unpickle
from smp_train.checkpoints.dcp.planner import SavePlanner
from smp_train.checkpoints.folder import open_folder
from smp_train.checkpoints.format import COMMITTED, META, Marker
from smp_train.data import audit
from smp_train.data.loader import Loader
from smp_train.data.order import Order
from smp_train.distributed import Runtime, group
from smp_train.distributed.heartbeat import PHASES
from smp_train.models.build import build_meta
from smp_train.models.resolve import resolve
from smp_train.run import saving
from smp_train.storage.checksum import FileRecord, checksum_of
from smp_train.telemetry.audit import DataAudit
from smp_train.telemetry.step_times import summary

STEPS = 20
ROWS = 1_000_000_000


def main(argv: Sequence[str]) -> int:
    """Print a table of costs, in Markdown."""
    parser = argparse.ArgumentParser(prog="smp-train bench scale", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--shard", type=int, default=64, help="--hybrid_shard_degree of the checkpoints (default 64)")
    parser.add_argument("--model_size", default="1b", help="of llama_v3, whose checkpoint is planned (default 1b)")
    parser.add_argument("--torchs", type=int, default=64, help="ranks of torch's own planning, to compare (default 64)")
    options = parser.parse_args(argv)
    ranks, shard = options.ranks, min(options.shard, options.ranks)
    rows: list[dict[str, Any]] = []

    def show(what: str, where: str, **figures: Any) -> None:
        rows.append({"what": what, "on": where, **figures})
        print(json.dumps(rows[-1], default=str), flush=True)

    show("order of a step, 1e9 rows", "every rank, every step", **order(ranks))
    with collectives() as counted:
        for when, calls in counted.items():
            show(f"collectives of {when}", "every rank", calls=", ".join(f"{n} {name}" for name, n in calls.items()))
    show("one gather of small objects", "every rank", **gathered(ranks))
    show("times of all ranks", "every rank, every log line", **timed(ranks))
    show("rendezvous", "all ranks, once", **rendezvous(ranks))
    state = State(options.model_size, ranks, shard)
    small = State(options.model_size, min(options.torchs, ranks), min(options.torchs, shard))
    show(f"planning as torch does, {small.ranks} ranks", "rank 0, each save", **small.planned(DefaultSavePlanner)[0])
    planned, plans, metadata = state.planned(SavePlanner)
    show(f"planning, {shard} shards", "rank 0, each save", **planned)
    show("index of the tensors", "rank 0 writes, all ranks read", **index(plans, metadata))
    show("commit", "rank 0, each save", **commit(ranks))
    show(f"audit of {STEPS} steps", "afterwards", **audited(ranks))
    print(table(rows, lead=()))
    return 0


def cpu(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def order(ranks: int) -> dict[str, Any]:
    """Time a step's rows of one rank, of this many and of eight."""

    def steps(world: int) -> float:
        loader = Loader(seq_len=8, micro_batch=2, accumulation=1, dp_rank=world - 1, dp_size=world)
        rows = Order(ROWS)
        rows.rows(loader.positions(0))
        return cpu(lambda: [rows.rows(loader.positions(k * loader.global_batch)) for k in range(1000)])

    return {"seconds": steps(ranks) / 1000, "of 8 ranks": steps(8) / 1000}


def gathered(ranks: int) -> dict[str, Any]:
    """Time what each rank does with what `distributed.gather` brings from all."""
    value = ("rank 1234 on ip-10-0-0-1.ec2.internal: ", {"0/__1234_0.distcp": FileRecord(123456789, "0123abcd")})
    one = pickle.dumps((None, value))
    return {"seconds": cpu(lambda: [pickle.loads(one) for _ in range(ranks)]), "bytes": len(one) * ranks}


def timed(ranks: int) -> dict[str, Any]:
    """Time what each rank makes of the times that all ranks bring to a log line."""
    rows = np.random.default_rng(0).random((ranks, len(PHASES) + 4), dtype=np.float32)
    hosts = [f"node{rank // 8}" for rank in range(ranks)]
    return {"seconds": cpu(lambda: [summary(rows, hosts) for _ in range(100)]) / 100, "bytes": rows.nbytes}


@contextmanager
def collectives() -> Iterator[dict[str, Counter[str]]]:
    """Yield the collectives of two real ranks: those of a start, of a step, of one with a log line, and of a save."""
    with tempfile.TemporaryDirectory() as folder, socket_store() as port:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=count, args=(rank, port, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = json.loads(Path(folder, "counts.json").read_text())
    yield {when: Counter(calls) for when, calls in found.items()}


@contextmanager
def socket_store() -> Iterator[int]:
    """Serve a store, as torchrun's agent does, and yield its port."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


def count(rank: int, port: int, folder: str) -> None:
    """Train a few steps on this rank, and count its calls of torch.distributed."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "scale",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        called = getattr(dist, name)

        def wrapper(*args: Any, **more: Any) -> Any:
            calls[name] += 1
            return called(*args, **more)

        setattr(dist, name, wrapper)

    for name in ("all_gather_object", "all_reduce", "barrier", "broadcast", "gather_object", "scatter_object_list",
                 "broadcast_object_list"):  # fmt: skip
        counted(name)
    found: dict[str, Counter[str]] = {}

    def note(when: str) -> None:
        found[when] = calls.copy()
        calls.clear()

    flags = {**STEADY, **TINY, **below(Path(folder)), "checkpoint_freq": 4, "logging_freq": 3}
    with opened(words(flags)) as run, stepping(run) as one:
        note("a start")
        for when in ("the first step", "a step", "a step with a log line"):
            one()
            note(when)
        one()
        calls.clear()
        saving.save(run, force=True)
        note("a save")
    if rank == 0:
        Path(folder, "counts.json").write_text(json.dumps(found))


def rendezvous(ranks: int) -> dict[str, Any]:
    """Let that many clients meet, by the package's own rounds, at a store that this process serves: its CPU seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with socket_store() as port:
            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of the clients: no line for each address without a name
            began, served = time.perf_counter(), time.process_time()
            context = multiprocessing.get_context("spawn")
            shares = [context.Process(target=meet, args=(range(n, ranks, 2), ranks, port)) for n in range(2)]
            for process in shares:
                process.start()
            for process in shares:
                process.join()
            if any(process.exitcode for process in shares):
                raise RuntimeError(f"ranks did not meet: {[process.exitcode for process in shares]}")
            served = time.process_time() - served
            return {"seconds": served, "by the clock, clients included": time.perf_counter() - began}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def meet(members: range, world: int, port: int) -> None:
    """Meet as each of some ranks, in a thread for each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            group.meet(Runtime("torchrun", rank, world, rank % 8, 8, rank // 8, world // 8, "127.0.0.1", port,
                               f"node{rank // 8}", False), 300)  # fmt: skip
        except BaseException as failure:
            failures.append(failure)

    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


class State:
    """The state of a model and AdamW on a mesh of ranks that are not there."""

    def __init__(self, size: str, ranks: int, shard: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        self.ranks, self.shard = ranks, shard
        self.mesh = init_device_mesh("cpu", (ranks // shard, shard))
        flags = ["--model_type", "llama_v3", "--model_size", size]
        self.tensors: dict[str, Any] = {}
        for name, parameter in build_meta(resolve(arguments.parse(flags, {}).args)).named_parameters():
            rows = -(-parameter.shape[0] // shard)
            for key in ("", ".exp_avg", ".exp_avg_sq"):
                part = torch.empty([rows, *parameter.shape[1:]], device="meta")
                self.tensors[name + key] = DTensor.from_local(
                    part, self.mesh, (Replicate(), Shard(0)), run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
            self.tensors[f"{name}.step"] = torch.zeros(())

    def local_plan(self, planner: Any, rank: int) -> Any:
        """Return what a rank plans to write."""
        self.mesh._coordinate_on_dim = (rank // self.shard, rank % self.shard)
        planner.set_up_planner(self.tensors, is_coordinator=rank == 0)
        return planner.create_local_plan()

    def planned(self, kind: Callable[[], Any]) -> tuple[dict[str, Any], list[Any], Any]:
        """Plan a save as rank 0 does with what all ranks send; return figures, all plans, and the index."""
        local = cpu(lambda: self.local_plan(kind(), self.ranks - 1))
        sent = [pickle.dumps(self.local_plan(kind(), rank)) for rank in range(self.ranks)]
        coordinator = kind()
        self.local_plan(coordinator, 0)
        with train_utils.garbage_collected_together():  # as training does
            began = time.process_time()
            plans, metadata = coordinator.create_global_plan([pickle.loads(one) for one in sent])
            answers = [pickle.dumps(plan) for plan in plans]
            seconds = time.process_time() - began
        figures = {
            "seconds": seconds, "of a rank's own": local, "MB to rank 0": sum(map(len, sent)) / 1e6,
            "MB back": sum(map(len, answers)) / 1e6,
            "items": sum(len(pickle.loads(one).items) for one in sent),
        }  # fmt: skip
        return figures, plans, metadata


def index(plans: list[Any], metadata: Any) -> dict[str, Any]:
    """Time the writing of DCP's index, and the guarded reading of it."""
    sizes: Counter[str] = Counter()
    metadata.storage_data = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            file, length = f"__{rank}_0.distcp", item.tensor_storage_size() or 512
            metadata.storage_data[item.index] = _StorageInfo(file, sizes[file], length)
            sizes[file] += length
    began = time.process_time()
    data = pickle.dumps(metadata)
    wrote = time.process_time() - began
    return {"seconds": cpu(lambda: unpack(*pack(unpickle(data)), sizes)), "to write": wrote, "MB": len(data) / 1e6}


def commit(ranks: int) -> dict[str, Any]:
    """Time rank 0's commit: the sizes of all files are looked up, COMMITTED is written, read and compared."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = open_folder(scratch)
        name = folder.begin("llama", 1, generation=1)
        files = {f"__{rank}_0.distcp": checksum_of([b"x"]) for rank in range(ranks)} | {META: checksum_of([b"{}"])}
        for file in files:
            Path(scratch, name, file).write_bytes(b"{}" if file == META else b"x")

        def committed() -> None:
            sizes = folder.sizes(name)
            folder.commit(name, Marker(1, "llama", 1, files))
            assert not Marker.from_bytes(folder.read(name, COMMITTED)).size_problems(sizes)

        return {"seconds": cpu(committed)}


def audited(ranks: int) -> dict[str, Any]:
    """Time the audit of the records of all ranks, and one rank's record of a step."""
    with tempfile.TemporaryDirectory() as scratch:
        place, write = Path(scratch), 0.0
        rows = Order(ROWS)
        for rank in range(ranks):
            record = DataAudit(place, rank, 1, rank, ranks)
            loader = Loader(seq_len=8, micro_batch=2, accumulation=1, dp_rank=rank, dp_size=ranks)
            _, found = rows.rows(np.stack([loader.positions(k * loader.global_batch) for k in range(STEPS)]))
            names = [[f"train-{n // 1000}.json.gz:{n % 1000}" for n in each.ravel().tolist()] for each in found]
            began = time.process_time()
            for step in range(STEPS):
                record.step(step + 1, names[step])
            write += time.process_time() - began
            record.close()
        with redirect_stdout(io.StringIO()):
            began = time.process_time()
            code = audit.audit(place, ROWS)
            seconds = time.process_time() - began
        if code:
            raise RuntimeError("the audit found faults in what the order gave")
    return {"seconds": seconds, "of a rank's record of a step": write / ranks / STEPS}
