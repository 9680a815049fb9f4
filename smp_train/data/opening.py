"""The data of a run, as its arguments ask for it: opened on all ranks together."""

from __future__ import annotations

import hashlib
import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.data import manifest
from smp_train.data.blend import BlendOrder, Joined, read_weights
from smp_train.data.conversion import processes_for
from smp_train.data.formats import check_place, convert_place, open_place
from smp_train.data.layout import lay_out
from smp_train.data.learnable import leave_out_unlearnable
from smp_train.data.order import Order, read_shuffle
from smp_train.data.pipelines.data_pipeline import Dealing, TrainingData, ValidationData
from smp_train.data.source import Source, shards
from smp_train.data.synthetic import Synthetic
from smp_train.data.text.opening import open_text
from smp_train.data.windows import Windows, look
from smp_train.errors import DataError

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

KEEP_ALL = ("concat", "pack")


def long_rows(args: Arguments) -> str:
    """Return what becomes of long rows: --long, or by default what goes with --short."""
    return args.long or ("split" if args.short in KEEP_ALL else "truncate")


def open_data(
    args: Arguments,
    *,
    vocab_size: int,
    seq_len: int,
    ranks: Runtime,
    dp_rank: int,
    dp_size: int,
    pin_memory: bool = False,
) -> tuple[Dealing, ValidationData | None]:
    """Open the training and the validation data as this rank sees them; collective.

    Args:
        args: the flags of the run.
        vocab_size: ids must be below it.
        seq_len: tokens of a sample.
        ranks: this rank among all, which share the conversion.
        dp_rank: this rank among the data-parallel ones, which share the rows.
        dp_size: data-parallel ranks.
        pin_memory: make batches in page-locked memory.
    """

    def opened(place: str, shuffle: str = "none") -> Source:
        with distributed.together(f"reading {place}"):
            manifest.check(place)
        source = _open_windows(args, place, vocab_size, ranks, read_shuffle(shuffle))
        if source is None:
            source = _open_place(args, place, vocab_size, ranks)
        with distributed.together(f"laying out {place}"):
            say(place, source)
            source = lay_out(source, seq_len, long=long_rows(args), short=args.short)
            max_bad = args.max_bad if args.bad_rows == "skip" else None
            source = leave_out_unlearnable(source, seq_len, long=long_rows(args), max_bad=max_bad, place=place)
        _refuse_different(place, source.fingerprint)
        return source

    if args.dataset is not None:
        return open_text(
            args, vocab_size=vocab_size, seq_len=seq_len, ranks=ranks, dp_rank=dp_rank, dp_size=dp_size,
            pin_memory=pin_memory, shards=opened,
        )  # fmt: skip
    long = long_rows(args)
    share: dict[str, Any] = {
        "seq_len": seq_len, "dp_rank": dp_rank, "dp_size": dp_size, "long": long, "pin_memory": pin_memory,
    }  # fmt: skip
    source: Source
    held_out: Source | None = None
    order: Order | BlendOrder | None = None
    if args.use_synthetic_data:
        source = Synthetic(seq_len=seq_len, vocab_size=vocab_size, seed=args.seed)
        # Another seed, not another part: synthetic rows have no end.
        held_out = Synthetic(seq_len=seq_len, vocab_size=vocab_size, seed=args.seed + 1)
    else:
        assert args.training_dir is not None, "checked by arguments.validate"
        places, weights = read_weights(args.training_dir)
        sources = [opened(place, args.shuffle) for place in places]
        source = sources[0] if len(sources) == 1 else Joined(sources, places)
        if weights is not None and isinstance(source, Joined):
            order = BlendOrder(source, weights, args.seed, args.shuffle)
        if args.test_dir is not None and (args.validation_freq or args.evaluate_only):
            held_out = opened(args.test_dir)
    with distributed.together("preparing the data"):
        training = TrainingData(
            source,
            order or Order(len(source), args.seed, args.shuffle, shards(source)),
            micro_batch=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            named=args.data_audit,
            epochs=args.epochs,
            **share,
        )
        if held_out is None:
            return training, None
        return training, ValidationData(
            held_out,
            micro_batch=args.val_batch_size,
            max_batches=args.validation_batches,
            fast=args.fast_validation,
            **share,
        )


def say(place: str, source: Source) -> None:
    """Say in the log what is in a place, where its source knows."""
    report = getattr(source, "report", None)
    if report is not None:
        totals = report()
        logger.info(
            "%s: %d rows in %d files, %d tokens of which %d count%s, the longest row of %d",
            place, totals["rows"], totals["shards"], totals["tokens"], totals["counted_tokens"],
            " by their labels" if totals.get("labelled") else "", totals["longest"],
        )  # fmt: skip


def _open_windows(args: Arguments, place: str, vocab_size: int, ranks: Runtime, window: int) -> Source | None:
    """Open a place of which only windows of so many shards are to be at hand; None when it is to be so whole."""
    windows: Windows | None = None
    if window < 1:
        return None
    with distributed.together(f"reading {place}"):
        windows = look(
            place, args.dataset_type, window=window, vocab_size=vocab_size, cache_dir=args.data_cache_dir,
            zipped=args.zipped_data, max_bad=args.max_bad if args.bad_rows == "skip" else None,
        )  # fmt: skip
        # Made by the first look: a node that cannot write there stops all.
        folder = "" if windows is None else windows.stage.folder
    _refuse_different(place, "" if windows is None else windows.listing())
    if windows is None:
        return None
    shared = ranks.num_nodes > 1 and _is_shared(folder, ranks)
    disk, rank, world = 0, ranks.rank, ranks.world_size
    if not shared:
        disk, rank, world = ranks.node_rank, ranks.local_rank, ranks.local_world_size
    _enter_slot(windows, disk, rank)
    counting = f"counting the rows of {place}"
    options = {
        "local_world": ranks.local_world_size,
        "processes": processes_for(args.data_num_workers, ranks.local_world_size),
    }
    with distributed.together(counting):
        windows.count(ranks.rank, ranks.world_size, **options)
    if distributed.any_rank(not all(map(windows.known, windows.shards))):
        _exchange_indexes(windows, ranks, counting)
    with distributed.together(counting):
        windows.count(ranks.local_rank, ranks.local_world_size, **options)
    whole = _agreed(windows.whole(), disk, 1 if shared else ranks.num_nodes)
    with distributed.together(f"opening {place}"):
        return windows.open(rank, world, whole)


def _refuse_different(place: str, seen: str) -> None:
    """Raise DataError on all ranks where they have not all ``seen`` the same; collective, of two integers."""
    number = int.from_bytes(hashlib.blake2b(seen.encode(), digest_size=7).digest(), "big")
    highest, lowest = distributed.largest([number, -number])
    if highest != -lowest:
        with distributed.together(f"comparing {place}"):
            raise DataError(
                f"{place}: the data changed while ranks listed it, or is not the same on every node; start again, "
                "with the same data on all"
            )


def _enter_slot(windows: Windows, disk: int, rank: int) -> None:
    """Let the first of the ranks that share a disk take a folder for this job, and tell the others; collective."""
    mine = ""
    with distributed.together("taking a folder to stage shards in"):
        if rank == 0:
            mine = f"{disk} {windows.claim()}"
    told = dict(text.decode().split(" ", 1) for text in distributed.exchange(mine.encode()))
    with distributed.together("taking a folder to stage shards in"):
        windows.enter(told[str(disk)])


def _agreed(mine: list[bool], disk: int, disks: int) -> list[bool]:
    """Return which of this rank's ``mine`` are true on all ranks of its disk; collective."""
    lacking = [0] * (len(mine) * disks)
    lacking[disk * len(mine) : (disk + 1) * len(mine)] = [int(not one) for one in mine]
    return [not one for one in distributed.largest(lacking)[disk * len(mine) : (disk + 1) * len(mine)]]


def _exchange_indexes(windows: Windows, ranks: Runtime, counting: str) -> None:
    """Give every node the indexes of what the others have counted; collective."""
    with distributed.together(counting):
        mine = windows.indexes(ranks.rank, ranks.world_size)
    failure: DataError | None = None
    for indexes in distributed.exchange(mine):
        if ranks.local_rank == 0 and failure is None:
            try:
                windows.take(indexes)
            except DataError as error:
                # The others are in the exchange: to its end first.
                failure = error
    with distributed.together(counting):
        if failure is not None:
            raise failure


def _is_shared(folder: str, ranks: Runtime) -> bool:
    """Tell whether all nodes see one folder; collective."""
    mine = f".shared-{uuid.uuid4().hex}.tmp" if ranks.is_main else ""
    (name,) = distributed.exchange(mine.encode())
    probe = Path(folder, name.decode())
    with distributed.together(f"looking at {folder}"):
        if ranks.is_main:
            probe.touch()
    shared = not distributed.any_rank(not probe.exists())
    if ranks.is_main:
        probe.unlink(missing_ok=True)
    return shared


def _open_place(args: Arguments, place: str, vocab_size: int, ranks: Runtime) -> Source:
    options: dict[str, Any] = {
        "dataset_type": args.dataset_type,
        "vocab_size": vocab_size,
        "cache_dir": args.data_cache_dir,
        "zipped": args.zipped_data,
        "processes": processes_for(args.data_num_workers, ranks.local_world_size),
        "max_bad": args.max_bad if args.bad_rows == "skip" else None,
    }
    here: dict[str, Any] = {"rank": ranks.local_rank, "world": ranks.local_world_size, **options}
    with distributed.together(f"reading {place}"):
        convert_place(place, rank=ranks.rank, world=ranks.world_size, **options)
    # Where nodes keep files of their own, the ranks of each do what the other nodes have done for themselves.
    with distributed.together(f"reading {place}"):
        convert_place(place, **here)
    with distributed.together(f"checking {place}"):
        check_place(place, **here)
    with distributed.together(f"opening {place}"):
        return open_place(place, **here)
