"""Conversion of a file set to token files, by all ranks together, in several processes each."""

from __future__ import annotations

import contextlib
import glob
import heapq
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.data import s3
from smp_train.data.arrays_file import read_header, write_arrays
from smp_train.data.atomic_file import publish
from smp_train.data.bad_records import BadRecords, judge_bad_records
from smp_train.data.cache import TokenCache, token_pairs, unwritable
from smp_train.data.files import DataFile, FileSet
from smp_train.data.rows import Recipe, RowMaker, read_rows
from smp_train.data.samples import Samples, Table, make_table, needs_tables, table_ranges
from smp_train.data.source import Source
from smp_train.data.token_file import VERSION, TokenFile, TokenRows, dtype_for, read_index
from smp_train.data.writer import writing
from smp_train.distributed.host import cores
from smp_train.errors import EXIT_CODES, ConfigError, DataError, SmpTrainError
from smp_train.progress import Progress

if TYPE_CHECKING:
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

Group = list[tuple[DataFile, str | None]]
"""Shards of one token file, each with its local copy where it is in S3."""
Report = Callable[[int], None]
"""Counts bytes of progress; raises an exception when another rank has failed."""
FILE_BYTES = 64 << 20
"""Bytes of shards in one token file. It is synced as a whole, so a kill loses at most this much work."""
WORTH_BYTES = {"tokens": 32 << 20, "text": 4 << 20, "chats": 4 << 20, "completions": 4 << 20}
"""Bytes of records below which starting processes takes longer than they save."""
TICK_BYTES = 1 << 20
POLL_SECONDS = 1.0


def processes_for(asked: int | None, local_ranks: int) -> int:
    """Return the number of processes that each rank converts with: as asked, or its share of the cores."""
    return max(1, asked if asked is not None else cores() // local_ranks)


def open_token_rows(
    files: FileSet, recipe: Recipe, *, cache_dir: str | None = None, max_bad: float | None = None,
    ranks: Runtime | None = None, processes: int = 1,
) -> TokenRows:  # fmt: skip
    """Return the rows of a file set, converted first where necessary; collective.

    Args:
        files: the same on every rank; token files (made by prepare) are opened as they are.
        recipe: makes rows of records.
        cache_dir: --data_cache_dir.
        max_bad: fraction of bad records that may be left out (--bad_rows skip); None allows none.
        ranks: this rank among all, which share the conversion; None: it is alone.
        processes: number of processes of this rank.
    """
    reading = f"reading {files.location}"
    prepared = files.files[0].kind == "tokens"
    with distributed.together(reading):
        cache = TokenCache(files, "prepared" if prepared else recipe.identity(), cache_dir)
        local = prepared and not files.files[0].remote
        if local and cache_dir is not None:
            logger.info("--data_cache_dir %s has no effect on %s: it is prepared already", cache_dir, files.location)
        missing = [] if local else _missing(cache, prepared, list(files.files))
        if missing and (ranks is None or ranks.local_rank == 0):
            _check_space(cache, missing, recipe, processes * (ranks.world_size if ranks else 1))

    def convert(share_of: tuple[int, int]) -> None:
        def work(report: Report) -> None:
            # Shares are taken of one list on all ranks, and not of the missing shards: those change meanwhile.
            mine = _missing(cache, prepared, share(files.files, *share_of))
            if prepared:
                _copy_pairs(cache, mine, report)
            elif mine:
                _convert(cache, recipe, mine, report, processes, max_bad is not None)

        total = sum(file.size * (1 + file.remote) for file in missing)
        with Progress(f"Converting {files.location}", total, "B", ranks is None or ranks.is_main) as progress:
            distributed.finish_together(reading, work, progress=progress, total=total)

    if not local:
        convert((ranks.rank, ranks.world_size) if ranks else (0, 1))
        if ranks and ranks.num_nodes > 1:
            # Where the cache is on each node's disk, a node converts what other nodes have converted for themselves.
            convert((ranks.local_rank, ranks.local_world_size))
    with distributed.together(f"opening {files.location}"):
        if prepared:
            rows = _open_prepared(cache, recipe.vocab_size, max_bad)
        else:
            rows = _open_converted(cache, max_bad)
        rows.cache = cache
        return rows


def open_samples(
    source: Source, seq_len: int, *, long: str, short: str, ranks: Runtime | None = None
) -> Samples:  # fmt: skip
    """Return the samples of rows; tables of samples are made by all ranks together, and kept in the cache; collective.

    Rows without a cache, as a program's own, have their tables in the memory of each rank.
    """
    cache = getattr(source, "cache", None)
    if cache is None or not needs_tables(source, seq_len, long, short):
        with distributed.together("laying out the samples"):
            return Samples(source, seq_len, long=long, short=short)
    layout = f"{short} {long} {seq_len}"
    ranges = table_ranges(source)

    def path(number: int) -> str:
        return str(cache.table(source.fingerprint, layout, number))

    def make(rank: int, world: int) -> None:
        def work(report: Report) -> None:
            for number in range(rank, len(ranges), world):
                report(0)
                if read_header(path(number), VERSION) is None:
                    table = make_table(source, ranges[number], seq_len, long, short)
                    try:
                        write_arrays(path(number), VERSION, list(table), list(table.values()))
                    except OSError as error:
                        raise unwritable(cache.destination[0], error) from None
            cache.remove_old_tables(source.fingerprint)

        with Progress("Laying out samples", shown=ranks is None or ranks.is_main) as progress:
            distributed.finish_together("laying out the samples", work, progress=progress)

    make(*((ranks.rank, ranks.world_size) if ranks else (0, 1)))
    if ranks and ranks.num_nodes > 1:
        make(ranks.local_rank, ranks.local_world_size)
    with distributed.together("opening the samples"):
        tables = [_open_table(path(number)) for number in range(len(ranges))]
        return Samples(source, seq_len, long=long, short=short, tables=tables)


def _open_table(path: str) -> Table:
    file = read_header(path, VERSION)
    if file is None:
        raise DataError(f"{path}: vanished or damaged; is something clearing the --data_cache_dir? start again")
    arrays = file.map()
    return {name: arrays[number] for number, name in enumerate(file.header)}


def share(files: Sequence[DataFile], rank: int, world: int) -> list[DataFile]:
    """Return a rank's share: the largest files first, each to the rank with the fewest bytes so far.

    A ``.tok`` and its ``.idx`` stay together.
    """
    by_stem: dict[str, list[DataFile]] = {}
    for file in files:
        by_stem.setdefault(os.path.splitext(file.name)[0] if file.kind == "tokens" else file.name, []).append(file)
    loads = [(0, number) for number in range(world)]
    mine: list[DataFile] = []
    sizes = {stem: sum(file.size for file in group) for stem, group in by_stem.items()}
    for stem in sorted(by_stem, key=lambda stem: (-sizes[stem], stem)):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + max(1, sizes[stem]), least))
        if least == rank:
            mine += by_stem[stem]
    return mine


def _missing(cache: TokenCache, prepared: bool, files: Sequence[DataFile]) -> list[DataFile]:
    if not prepared:
        return cache.missing(files)
    pairs = token_pairs(replace(cache.files, files=tuple(files)))
    return [file for pair in pairs if read_index(cache.base(pair)) is None for file in pair]


def _check_space(cache: TokenCache, missing: Sequence[DataFile], recipe: Recipe, processes: int) -> None:
    """Log the size, the expected time and the disk space of a conversion; ConfigError where the cache cannot fit."""
    total = sum(file.size for file in missing)
    if not total:  # a data set on the hub
        return
    folder = cache.destination[0]
    tokens = sum(file.size * _tokens_per_byte(file, recipe) for file in missing)
    bytes_per_token = dtype_for(recipe.vocab_size).itemsize + 4 * recipe.kind.answers_only
    needed = total if missing[0].kind == "tokens" else tokens * bytes_per_token
    free = shutil.disk_usage(folder).free
    seconds = tokens / (20e6 if recipe.kind.name == "tokens" else 1e6) / processes
    logger.info(
        "%s: converting %d files, %.2f GB, in about %s; the token cache in %s takes about %.2f GB of %.2f GB free",
        cache.files.location, len(missing), total / 1e9, _duration(seconds), folder, needed / 1e9, free / 1e9,
    )  # fmt: skip
    # The estimate may be off by a factor of two.
    if needed / 2 > free:
        raise ConfigError(
            f"{folder}: the token cache of {cache.files.location} takes about {needed / 1e9:.2f} GB, but "
            f"{free / 1e9:.2f} GB are free; train on it without a cache by --streaming 1, or give another "
            "--data_cache_dir"
        )


def _tokens_per_byte(file: DataFile, recipe: Recipe) -> float:
    """Return roughly how many tokens a byte of a file holds."""
    compressed = 4 if file.name.lower().endswith((".gz", ".parquet")) else 1
    return compressed / (8 if recipe.kind.name == "tokens" else 4)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _convert(
    cache: TokenCache, recipe: Recipe, files: Sequence[DataFile], report: Report, processes: int, skip_bad: bool
) -> None:
    """Convert files, in this process or in several."""
    total = sum(file.size for file in files)
    with _copies(files, cache.destination[0], report) as copies:
        groups = _groups(copies)
        if processes > 1 and len(files) > 1 and total >= WORTH_BYTES[recipe.kind.name]:
            _convert_in_processes(cache, recipe, groups, report, min(processes, len(files)), skip_bad)
            return
        maker = recipe.open()
        for group in groups:
            write_group(cache.base([file for file, _ in group]), group, maker, recipe.vocab_size, report, skip_bad)


@contextlib.contextmanager
def _copies(files: Sequence[DataFile], folder: str, report: Report) -> Iterator[Iterable[tuple[DataFile, str | None]]]:
    """Yield an iterator of (file, local copy); objects in S3 are fetched ahead, other files have no copy."""
    if not files or not files[0].path.startswith("s3://"):
        yield ((file, None) for file in files)
        return
    with s3.fetch(files, folder, tick=report) as copies:
        yield copies


def _groups(copies: Iterable[tuple[DataFile, str | None]]) -> Iterator[Group]:
    """Put files together up to `FILE_BYTES`."""
    group: Group = []
    size = 0
    for file, copy in copies:
        group.append((file, copy))
        size += file.size
        # The size of a shard on the hub is unknown, and probably large.
        if size >= FILE_BYTES or file.kind == "hub":
            yield group
            group, size = [], 0
    if group:
        yield group


def write_group(base: str, group: Group, maker: RowMaker, vocab_size: int, tick: Report, skip_bad: bool) -> None:
    """Convert files to one token file, and delete their local copies. Raises DataError."""
    try:
        with writing(base, vocab_size) as writer:
            for file, copy in group:
                bad = BadRecords(skip_bad)
                rows = read_rows(file, maker, bad, copy=copy, tick=tick)
                writer.add(
                    file.name, file.size, file.version, rows, bad, shown=file.shown, may_be_empty=file.kind == "text"
                )
                if not file.remote:
                    _refuse_changed(file)
    except InterruptedError:
        raise
    except OSError as error:
        raise unwritable(os.path.dirname(base), error) from None
    finally:
        for _, copy in group:
            if copy is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(copy)


def _refuse_changed(file: DataFile) -> None:
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise DataError(
            f"{file.path}: vanished while it was being read ({error.strerror}); put it back and start again"
        ) from None
    if (status.st_size, str(status.st_mtime_ns)) != (file.size, file.version):
        raise DataError(f"{file.path}: changed while it was being read; start again when it is complete")


class _Worker:
    """A process that converts one group after another."""

    def __init__(self, recipe: Recipe, skip_bad: bool, threads: int) -> None:
        # Spawned: a fork would copy a process that may hold CUDA contexts, threads and locks.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_run_worker, args=(theirs, recipe, skip_bad, threads), daemon=True)
        self.process.start()
        theirs.close()
        self.group: Group = []
        self.base = ""

    def begin(self, base: str, group: Group) -> None:
        """Send the worker a group."""
        self.base, self.group = base, group
        with contextlib.suppress(BrokenPipeError):  # a dead worker is seen when its answer is read
            self.connection.send((base, group))

    def receive(self, report: Report) -> None:
        """Read a message of the worker: progress, the end of its group, or an error. Raises that error."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise SmpTrainError(self._death()) from None
        if isinstance(message, int):
            report(message)
        elif message is None:
            self.base, self.group = "", []
        else:
            code, text = message
            raise EXIT_CODES.get(code, SmpTrainError)(text)

    def _death(self) -> str:
        code = self.process.exitcode or 0
        manner = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others = f" and {len(self.group) - 1} more" if len(self.group) > 1 else ""
        advice = "start again"
        if code == -signal.SIGKILL:
            advice = "memory may have run out: start again with fewer --data_num_workers"
        return f"{self.group[0][0].shown}{others}: the process that converted it {manner}; {advice}"

    def close(self) -> None:
        """End the process; delete the temporary files and the copies of its group."""
        self.connection.close()
        if self.group:
            self.process.kill()
        self.process.join()
        if self.group:
            folder, name = os.path.split(self.base)
            leftovers = glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.tmp"))
            for path in [*leftovers, *(copy for _, copy in self.group if copy is not None)]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _convert_in_processes(
    cache: TokenCache, recipe: Recipe, groups: Iterator[Group], report: Report, processes: int, skip_bad: bool
) -> None:
    workers: list[_Worker] = []
    threads = max(1, cores() // processes)
    try:
        for group in groups:
            worker = next((worker for worker in workers if not worker.group), None)
            if worker is None and len(workers) < processes:
                worker = _Worker(recipe, skip_bad, threads)
                workers.append(worker)
            while worker is None:
                _receive(workers, report)
                worker = next((worker for worker in workers if not worker.group), None)
            worker.begin(cache.base([file for file, _ in group]), group)
        while any(worker.group for worker in workers):
            _receive(workers, report)
    finally:
        for worker in workers:
            worker.close()


def _receive(workers: list[_Worker], report: Report) -> None:
    """Wait for messages of busy workers, for a limited time, and handle them."""
    busy: dict[Any, _Worker] = {worker.connection: worker for worker in workers if worker.group}
    for connection in wait(list(busy), timeout=POLL_SECONDS):
        busy[connection].receive(report)
    report(0)


def _run_worker(connection: Connection, recipe: Recipe, skip_bad: bool, threads: int) -> None:
    """Convert the groups that arrive, until the connection is closed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which gets the same signal, decides
    os.environ.update(RAYON_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true" if threads > 1 else "false")
    maker: RowMaker | None = None
    done = [0]

    def tick(size: int) -> None:
        done[0] += size
        if done[0] >= TICK_BYTES:
            connection.send(done[0])
            done[0] = 0

    while True:
        try:
            base, group = connection.recv()
        except EOFError:
            return
        try:
            maker = maker or recipe.open()
            write_group(base, group, maker, recipe.vocab_size, tick, skip_bad)
        except Exception as error:
            text = str(error)
            if not isinstance(error, SmpTrainError):
                text = f"{group[0][0].shown}: {type(error).__name__}: {text}"
            connection.send((getattr(error, "exit_code", 1), text))
            return
        connection.send(done[0])
        done[0] = 0
        connection.send(None)


def end_with_parent() -> None:
    """End this process when its parent ends, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _copy_pairs(cache: TokenCache, files: Sequence[DataFile], report: Report) -> None:
    """Copy prepared token files from S3 into the cache, each ``.tok`` before its ``.idx``."""
    pairs = token_pairs(replace(cache.files, files=tuple(files)))
    in_order = [file for pair in pairs for file in pair]
    bases = {file.name: cache.base(pair) for pair in pairs for file in pair}
    with _copies(in_order, cache.destination[0], report) as copies:
        for file, copy in copies:
            assert copy is not None
            report(file.size)
            publish(copy, bases[file.name] + os.path.splitext(file.name)[1])


def _open_converted(cache: TokenCache, max_bad: float | None) -> TokenRows:
    """Open shards that have all been converted. Raises DataError."""
    shards = sorted(cache.files.files, key=lambda file: (file.name, file.shard))
    for shard in cache.missing(shards):
        raise DataError(f"{shard.shown}: its token cache vanished; is something clearing the --data_cache_dir?")
    rows = TokenRows(shards, [stored for stored in map(cache.stored, shards) if stored is not None])
    _judge(rows, max_bad)
    return rows


def _open_prepared(cache: TokenCache, vocab_size: int, max_bad: float | None) -> TokenRows:
    """Open prepared token files, ordered by the names of the shards they were made of. Raises DataError."""
    stored: list[tuple[str, TokenFile, int]] = []
    for tok, idx in token_pairs(cache.files):
        file = read_index(cache.base((tok, idx)) if tok.remote else tok.path.removesuffix(".tok"))
        if file is None:
            raise DataError(f"{idx.shown}: damaged, or of another version; make it or copy it again")
        for number, header in enumerate(file.headers):
            if header.vocab_size > vocab_size:
                raise DataError(
                    f"{idx.shown}: was made for a vocabulary of {header.vocab_size}, the model has {vocab_size}; "
                    "use the tokenizer of the model, or set --vocab_size"
                )
            stored.append((header.source, file, number))
    stored.sort(key=lambda each: (each[0], each[1].base))
    for (name, file, _), (next_name, other, _) in pairwise(stored):
        if name == next_name:
            raise DataError(f"{file.path}: {other.path} holds the same shard, {name}; remove one of the two")
    shards = [DataFile(file.path, name, 0, "", "tokens") for name, file, _ in stored]
    remedy = "start again, and it is fetched" if cache.files.files[0].remote else "copy or make it again"
    rows = TokenRows(shards, [(file, number) for _, file, number in stored], remedy)
    _judge(rows, max_bad, "; such records were left out when this was made: accept that with --bad_rows skip")
    return rows


def _judge(rows: TokenRows, max_bad: float | None, remedy: str = "") -> None:
    """Raise DataError where more records were left out than --max_bad allows."""
    bad = [
        (file, header.skipped, header.first_bad_number, header.first_bad)
        for file, header in zip(rows.files, rows.headers, strict=True)
    ]
    judge_bad_records(bad, len(rows), max_bad, remedy)
