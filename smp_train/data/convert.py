"""Converts a file set to token files; all ranks take part, each with several processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

from smp_train import distributed
from smp_train.data import s3
from smp_train.data.arrays_file import read_header, write_arrays
from smp_train.data.bad_records import BadRecords
from smp_train.data.cache import TokenCache
from smp_train.data.files import DataFile, FileSet
from smp_train.data.rows import Recipe, RowMaker, grouped, read_rows
from smp_train.data.samples import Samples, Table, make_table, needs_tables, table_ranges
from smp_train.data.token_file import VERSION, TokenRows, dtype_for
from smp_train.data.writer import Shard, write_token_file
from smp_train.distributed.child import end_with_parent
from smp_train.distributed.host import cores
from smp_train.errors import ConfigError, DataError, SmpTrainError, first_few
from smp_train.progress import Progress
from smp_train.storage import is_s3

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

Report = Callable[[int], None]
"""Adds bytes to the progress; raises an exception when another rank has failed."""
FILE_BYTES = 64 << 20
"""Size of the shards in one token file. A token file is synced as a whole, so a kill loses at most this much work."""
FILE_SHARDS = 10_000
"""Most shards in one token file: their headers are read as a whole."""
WORTH_BYTES = {"tokens": 32 << 20, "text": 4 << 20, "chats": 4 << 20, "completions": 4 << 20}
"""Bytes of records, by kind, below which processes take longer to start than they save."""
POLL_SECONDS = 1.0


def processes_for(asked: int | None, local_ranks: int) -> int:
    """Return the number of processes that each rank converts with: ``asked``, or else the rank's share of the cores."""
    return max(1, asked if asked is not None else cores() // local_ranks)


def open_token_rows(
    files: FileSet, recipe: Recipe, *, cache_dir: str | None = None, max_bad: float | None = None,
    ranks: Runtime | None = None, processes: int = 1,
) -> TokenRows:  # fmt: skip
    """Return the rows of a file set, after conversion of the files that are not in the cache; collective.

    ``max_bad`` is the largest fraction of bad records with --bad_rows skip; None allows no bad record. All ``ranks``
    share the conversion, each with ``processes`` processes; without ``ranks`` this process converts alone.
    """
    with distributed.together(f"reading {files.location}"):
        cache = TokenCache(files, recipe.identity, cache_dir)
        missing = cache.missing(files.files)
        first_of_node = ranks is None or ranks.local_rank == 0
        if first_of_node:
            cache.remove_stale()
        if missing and first_of_node:
            _check_space(cache, missing, recipe, processes * (ranks.world_size if ranks else 1))

    def convert(rank: int, world: int, report: Report) -> None:
        # The list of missing shards changes during the conversion, so ranks divide the list of all shards.
        shards = cache.missing(share(files.files, rank, world))
        if shards:
            _convert(cache, recipe, shards, report, processes, max_bad)

    total = sum(file.size for file in missing)
    _on_all_nodes(f"converting {files.location}", convert, cache, ranks, total)
    with distributed.together(f"opening {files.location}"):
        shards = list(files.files)
        for shard in cache.missing(shards):
            raise DataError(f"{shard.shown}: its token cache vanished; is something clearing the --data_cache_dir?")
        rows = TokenRows(shards, [stored for stored in map(cache.stored, shards) if stored is not None])
        rows.cache = cache
        bad = [(shard, header) for shard, header in zip(shards, rows.headers, strict=True) if header.skipped]
        first = [f"{shard.at(header.first_bad_number)}: {header.first_bad}" for shard, header in bad[:1]]
        skipped = sum(header.skipped for _, header in bad)
        BadRecords(max_bad, skipped, "".join(first)).judge_all(len(rows) + skipped)
        return rows


def open_samples(source: TokenRows, seq_len: int, *, long: str, short: str, ranks: Runtime | None = None) -> Samples:
    """Return the samples of ``source``; all ranks together write its tables, if needed, to the cache; collective."""
    cache = source.cache
    if cache is None or not needs_tables(source, seq_len, long, short):
        with distributed.together("opening the samples"):
            return Samples(source, seq_len, long=long, short=short)
    ranges, laying_out = table_ranges(source), "laying out the samples"
    with distributed.together(laying_out):
        paths = [cache.table(source.fingerprint, f"{short} {long} {seq_len}", number) for number in range(len(ranges))]

    def write_tables(rank: int, world: int, report: Report) -> None:
        for path, rows in list(zip(paths, ranges, strict=True))[rank::world]:
            report(0)
            existing = read_header(path, VERSION)
            if existing is None or not existing.intact():
                write_arrays(path, VERSION, None, make_table(source, rows, seq_len, long, short)._asdict())

    _on_all_nodes(laying_out, write_tables, cache, ranks)
    with distributed.together("opening the samples"):
        tables = []
        for path in paths:
            file = read_header(path, VERSION)
            if file is None:
                raise DataError(f"{path}: vanished or damaged; is something clearing the --data_cache_dir? start again")
            tables.append(Table(**file.arrays))
        return Samples(source, seq_len, long=long, short=short, tables=tables)


def _on_all_nodes(
    doing: str, work: Callable[[int, int, Report], None], cache: TokenCache, ranks: Runtime | None, total: int = 0
) -> None:  # fmt: skip
    """Run ``work(rank, world size, report)`` over all ranks, then again over the ranks of each node; collective.

    The second turn, with local rank and local world size, fills the caches of nodes that do not share a disk.
    """

    def run(rank: int, world: int, report: Report) -> None:
        try:
            work(rank, world, report)
        except OSError as error:
            folder = cache.destination[0]
            raise DataError(
                f"{folder}: cannot write the token cache ({error.strerror}); free some space or give another "
                "--data_cache_dir"
            ) from None

    turns = [(ranks.rank, ranks.world_size)] if ranks else [(0, 1)]
    if ranks and ranks.num_nodes > 1:
        turns.append((ranks.local_rank, ranks.local_world_size))
    for turn in turns:
        with Progress(doing, total, "B", ranks is None or ranks.is_main) as progress:
            distributed.finish_together(doing, partial(run, *turn), progress=progress, total=total)


def share(files: Sequence[DataFile], rank: int, world: int) -> list[DataFile]:
    """Return a rank's share of the files, which are dealt out largest first, so that shares have similar sizes."""
    return sorted(files, key=lambda file: (-file.size, file.name))[rank::world]


def _check_space(cache: TokenCache, missing: Sequence[DataFile], recipe: Recipe, processes: int) -> None:
    """Log size, expected time and disk space of a conversion. Raises ConfigError if the token cache cannot fit."""
    folder, size = cache.destination[0], sum(file.size for file in missing)
    # A token takes 8 bytes of JSON, or 4 bytes of text. A compressed file expands to four times its size.
    bytes_of_token, tokens_per_second = (8, 20e6) if recipe.kind.name == "tokens" else (4, 1e6)
    packed = sum(file.size for file in missing if file.name.lower().endswith((".gz", ".parquet")))
    tokens = (size + 3 * packed) / bytes_of_token
    needed = tokens * (dtype_for(recipe.vocab_size).itemsize + 4 * recipe.kind.answers_only)
    free = shutil.disk_usage(folder).free
    logger.info(
        "%s: converting %d files, %.1f MB, in about %.1f min; the token cache in %s takes about %.1f of %.0f MB free",
        cache.files.location, len(missing), size / 1e6, tokens / tokens_per_second / processes / 60, folder,
        needed / 1e6, free / 1e6,
    )  # fmt: skip
    if needed / 2 > free:  # the estimate may be off by a factor of two
        raise ConfigError(
            f"{folder}: the token cache of {cache.files.location} takes about {needed / 1e6:.1f} MB, but "
            f"{free / 1e6:.1f} MB are free; train without a cache by --streaming 1, or give another --data_cache_dir"
        )


def _convert(
    cache: TokenCache, recipe: Recipe, files: Sequence[DataFile], report: Report, processes: int,
    max_bad: float | None,
) -> None:  # fmt: skip
    """Convert files, in this process or in several."""
    groups = grouped(files, FILE_BYTES, FILE_SHARDS, lambda file: file.size or FILE_BYTES)  # unknown on the hub
    if processes > 1 and len(files) > 1 and sum(file.size for file in files) >= WORTH_BYTES[recipe.kind.name]:
        _convert_in_processes(cache, recipe, groups, report, min(processes, len(files)), max_bad)
        return
    maker = recipe.open()
    for group in groups:
        write_group(cache.base(group), group, maker, recipe.vocab_size, report, max_bad)


def write_group(
    base: str, group: Sequence[DataFile], maker: RowMaker, vocab_size: int, tick: Report, max_bad: float | None
) -> None:  # fmt: skip
    """Convert files to one token file. Raises DataError."""

    def shards() -> Iterator[Shard]:
        for file, raw in zip(group, s3.open_in_sequence(group) if is_s3(group[0].path) else repeat(None)):  # noqa: B905
            bad = BadRecords(max_bad)
            # On this node, the file may have another modification time than on rank 0's node, where it was listed.
            modified = _modified(file)
            yield file, read_rows(file, maker, bad, raw=raw, tick=tick), bad
            if _modified(file) != modified:
                raise DataError(
                    f"{file.path}: was changed or removed while it was being read; start again when it is complete"
                )

    write_token_file(base, shards(), vocab_size)


def _modified(file: DataFile) -> int | None:
    """Return the modification time of a local file on this node, in ns; None for a missing or a remote file."""
    try:
        return None if file.remote else os.stat(file.path).st_mtime_ns
    except OSError:
        return None


def _convert_in_processes(
    cache: TokenCache, recipe: Recipe, groups: Iterator[list[DataFile]], report: Report, processes: int,
    max_bad: float | None,
) -> None:  # fmt: skip
    # Processes are spawned: a fork would copy a process that may hold CUDA contexts, threads and locks.
    context = multiprocessing.get_context("spawn")
    stopped, threads = context.Event(), max(1, cores() // processes)
    pending: dict[Future[None], list[DataFile]] = {}

    def collect(most: int) -> None:
        while len(pending) > most:
            for future in wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done:
                future.result()
                report(sum(file.size for file in pending.pop(future)))
            report(0)

    try:
        arguments = recipe, max_bad, threads, stopped
        with ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=arguments) as pool:
            try:
                for group in groups:
                    pending[pool.submit(_work, cache.base(group), group)] = group
                    collect(processes - 1)
                collect(0)
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)  # wait, or a process still writing would leave its temporary file
                raise
    except BrokenProcessPool:
        names = first_few([group[0].shown for group in pending.values()])
        raise SmpTrainError(
            f"{names}: a process that converted one of these files was killed; memory may have run out: start again, "
            "with fewer --data_num_workers"
        ) from None


_worker: list[tuple[RowMaker, int, float | None, Event]] = []
"""Arguments of a worker process: row maker, vocabulary size, --max_bad, and an event that is set to stop it."""


def _start_worker(recipe: Recipe, max_bad: float | None, threads: int, stopped: Event) -> None:
    """Set up a worker process; it ends when its parent ends, for whatever reason."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives ^C, too, and handles it
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true" if threads > 1 else "false")
    _worker.append((recipe.open(), recipe.vocab_size, max_bad, stopped))


def _work(base: str, group: Sequence[DataFile]) -> None:
    maker, vocab_size, max_bad, stopped = _worker[0]

    def tick(size: int) -> None:
        if stopped.is_set():
            raise SmpTrainError("the conversion was stopped")

    write_group(base, group, maker, vocab_size, tick, max_bad)
