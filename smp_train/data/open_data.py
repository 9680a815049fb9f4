"""The data of a run, as its arguments ask for it: opened on all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.arguments.own import Own, Rows
from smp_train.data import hf_dataset, manifest, s3
from smp_train.data.blend import BlendOrder, Joined, read_weights
from smp_train.data.conversion import processes_for
from smp_train.data.formats import ARROW, PREPARED, SHARDS, kind_of, refuse_zipped
from smp_train.data.layout import lay_out
from smp_train.data.learnable import leave_out_unlearnable
from smp_train.data.order import Order, read_shuffle
from smp_train.data.own_rows import Checked
from smp_train.data.pipelines.data_pipeline import Loader, TrainingData, ValidationData
from smp_train.data.rounds import in_rounds
from smp_train.data.s3_cache import bring
from smp_train.data.source import Source, shards
from smp_train.data.synthetic import Synthetic
from smp_train.data.text.opening import open_text, open_text_rows, text_at
from smp_train.data.token_cache import TokenCache
from smp_train.data.token_dataset import convert, open_converted, open_prepared
from smp_train.data.utils import list_shards
from smp_train.data.windowed import open_windowed, refuse_different
from smp_train.distributed import ALL_RANKS
from smp_train.errors import ConfigError

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")


def long_rows(args: Arguments) -> str:
    """Return what becomes of long rows: --long, or by default what goes with --short."""
    # Samples joined or packed of rows are to keep every token.
    return args.long or ("truncate" if args.short == "pad" else "split")


def open_data(
    args: Arguments, *, vocab_size: int, seq_len: int, ranks: Runtime, dp_rank: int, dp_size: int,
    pin_memory: bool = False, own: Own | None = None,
) -> tuple[Loader, ValidationData | None]:
    """Open the training and the validation data as this rank sees them; collective.

    Args:
        args: the flags of the run.
        vocab_size: ids must be below it.
        seq_len: tokens of a sample.
        ranks: this rank among all, which share the conversion.
        dp_rank: this rank among the data-parallel ones, which share the rows.
        dp_size: data-parallel ranks.
        pin_memory: make batches in page-locked memory.
        own: rows that a program gives in place of places.
    """
    own = own or Own()
    opened = partial(open_rows, args, vocab_size=vocab_size, seq_len=seq_len, ranks=ranks)
    long = long_rows(args)
    share: dict[str, Any] = {"seq_len": seq_len, "dp_rank": dp_rank, "dp_size": dp_size, "pin_memory": pin_memory}
    if args.dataset is not None:
        return open_text(args, vocab_size=vocab_size, ranks=ranks, shards=opened, **share)
    source: Source
    held_out: Source | None = None
    order: Order | BlendOrder | None = None
    test_dir = None if args.use_synthetic_data else args.test_dir
    if (own.validation_data is not None or test_dir) and (args.validation_freq or args.evaluate_only):
        if own.validation_data is not None:
            held_out = open_own(args, own.validation_data, "validation_data", vocab_size=vocab_size, seq_len=seq_len)
        elif test_dir is not None:
            held_out = opened(test_dir)
    if own.training_data is not None:
        source = open_own(args, own.training_data, "training_data", vocab_size=vocab_size, seq_len=seq_len)
    elif args.use_synthetic_data:
        source = Synthetic(seq_len=seq_len, vocab_size=vocab_size, seed=args.seed)
        # Another seed, not another part: synthetic rows have no end.
        held_out = held_out or Synthetic(seq_len=seq_len, vocab_size=vocab_size, seed=args.seed + 1)
    elif args.training_dir is None:
        assert held_out is not None, "checked by arguments.validate"
        source = held_out  # with --evaluate_only, which draws no batch to train on
    else:
        places, weights = read_weights(args.training_dir)
        sources = [opened(place, shuffle=args.shuffle) for place in places]
        source = sources[0] if len(sources) == 1 else Joined(sources, places)
        if weights is not None and isinstance(source, Joined):
            order = BlendOrder(source, weights, args.seed, args.shuffle)
            logger.info("Samples are drawn %s", order.shares())
    with distributed.together("preparing the data"):
        training = TrainingData(
            source, order or Order(len(source), args.seed, args.shuffle, shards(source)), long=long,
            micro_batch=args.train_batch_size, accumulation=args.gradient_accumulation_steps, named=args.data_audit,
            epochs=args.epochs, **share,
        )
        return training, None if held_out is None else ValidationData(
            held_out, micro_batch=args.val_batch_size, max_batches=args.validation_batches, fast=args.fast_validation,
            long=long, **share,
        )


def open_rows(
    args: Arguments, place: str, *, vocab_size: int, seq_len: int, ranks: Runtime, shuffle: str = "none"
) -> Source:
    """Open one place's rows, laid out as samples of ``seq_len`` tokens; collective."""
    max_bad, long = args.max_bad if args.bad_rows == "skip" else None, long_rows(args)
    with distributed.together(f"reading {place}"):
        manifest.check(place)
    source = open_place(
        place, dataset_type=args.dataset_type, vocab_size=vocab_size, cache_dir=args.data_cache_dir,
        zipped=args.zipped_data, max_bad=max_bad, window=read_shuffle(shuffle), ranks=ranks,
        processes=processes_for(args.data_num_workers, ranks.local_world_size),
    )
    with distributed.together(f"laying out {place}"):
        say(place, source)
        source = lay_out(source, seq_len, long=long, short=args.short)
        source = leave_out_unlearnable(source, seq_len, long=long, max_bad=max_bad, place=place)
    refuse_different(place, source.fingerprint)
    return source


def open_own(args: Arguments, rows: Rows, what: str, *, vocab_size: int, seq_len: int) -> Source:
    """Return a program's own rows, checked as they are read, laid out as samples of ``seq_len`` tokens; collective."""
    max_bad, long = args.max_bad if args.bad_rows == "skip" else None, long_rows(args)
    with distributed.together(f"opening {what}"):
        source: Source = Checked(rows, what, vocab_size)
    refuse_different(what, (source.fingerprint, len(source)))
    with distributed.together(f"laying out {what}"):
        source = lay_out(source, seq_len, long=long, short=args.short)
        return leave_out_unlearnable(source, seq_len, long=long, max_bad=max_bad, place=what)


def open_evaluation(args: Arguments, place: str, *, vocab_size: int, seq_len: int, ranks: Runtime) -> Source:
    """Open rows to evaluate on: token rows, or text, tokenised by --tokenizer and held in memory; collective."""
    with distributed.together(f"looking at {place}"):
        text = text_at(place, args)
        if text and args.tokenizer is None:
            raise ConfigError(f"{place} is text, and the checkpoint has no tokenizer; give --tokenizer")
    if not text:
        return open_rows(args, place, vocab_size=vocab_size, seq_len=seq_len, ranks=ranks)
    with distributed.together(f"reading {place}"):
        return open_text_rows(args, text, vocab_size=vocab_size, seq_len=seq_len)


def say(place: str, source: Source) -> None:
    """Log what is in a place, where its source knows."""
    totals = source.report()
    if totals is not None:
        logger.info(
            "%s: %d rows in %d files, %d tokens of which %d count%s, the longest row of %d",
            place, totals["rows"], totals["shards"], totals["tokens"], totals["counted_tokens"],
            " by their labels" if totals.get("labelled") else "", totals["longest"],
        )


def open_place(
    location: str, *, dataset_type: str = "gpt_jsonl", vocab_size: int, cache_dir: str | None = None,
    zipped: bool | None = None, max_bad: float | None = None, processes: int = 1, window: int = 0,
    ranks: Runtime | None = None,
) -> Source:
    """Open the rows of a place, converted or copied first where that was not done before; collective.

    Args:
        location: folder, file or ``s3://`` prefix.
        dataset_type: ``hf`` insists on a Hugging Face data set.
        vocab_size: ids must be below it.
        cache_dir: --data_cache_dir.
        zipped: whether shards must be gzipped; None asks nothing.
        max_bad: fraction of malformed rows that may be left out; None tolerates none.
        processes: to convert in.
        window: shards of a window (--shuffle window:K); below 1 all are kept on disk.
        ranks: this rank among all, which share the work; None: it is alone.
    """
    reading = f"reading {location}"
    with distributed.together(reading):
        kind = kind_of(location, dataset_type)
        refuse_zipped(location, kind, zipped)
    refuse_different(location, kind)
    remote = s3.is_s3(location)
    if window > 0 and remote and kind == ARROW:
        logger.warning("%s: a Hugging Face data set is copied whole, whatever --shuffle", location, extra=ALL_RANKS)
    with distributed.together(reading):
        cache = TokenCache(location, vocab_size, cache_dir, max_bad is not None)
        files = list_shards(location, zipped) if kind == SHARDS else []
        if kind != SHARDS:
            logger.info("%s: %s", location, kind)
        if kind == PREPARED and not remote and cache_dir is not None:
            logger.info("--data_cache_dir %s has no effect on %s: it is prepared already", cache_dir, location)
    if window > 0 and ranks is not None and (kind == SHARDS or (kind == PREPARED and remote)):
        source = open_windowed(location, window, cache, files, ranks, max_bad=max_bad, processes=processes)
        if source is not None:
            return source

    def steps(rank: int, world: int) -> Generator[int, None, None]:
        if kind == SHARDS:
            yield from convert(cache, files, rank=rank, world=world, processes=processes)
        elif remote:
            yield len(bring(location, cache_dir, rank, world)[1])
        elif kind == ARROW:
            yield hf_dataset.check_share(cache, location, rank, world, processes)

    here = (ranks.local_rank, ranks.local_world_size) if ranks is not None else (0, 1)
    in_rounds(reading, steps(*((ranks.rank, ranks.world_size) if ranks is not None else here)))
    # Where nodes keep files of their own, the ranks of each do what the other nodes have done for themselves.
    in_rounds(reading, steps(*here))
    folder, cure = location, "copy or make it again"
    if remote and kind != SHARDS:
        cure = "start again, and it is fetched"
        with distributed.together(reading):
            folder = bring(location, cache_dir)[0]
            if kind == ARROW:
                cache = TokenCache(folder, vocab_size, cache_dir, max_bad is not None)
                hf_dataset.check_share(cache, folder, *here, processes)
    with distributed.together(f"opening {location}"):
        if kind == ARROW:
            return hf_dataset.open_hf_dataset(cache, folder, max_bad)
        if kind == PREPARED:
            return open_prepared(folder, vocab_size, max_bad, cure)
        return open_converted(cache, files, max_bad)
