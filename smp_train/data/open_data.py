"""Opens the training data and the validation data of a run, on all ranks together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.arguments.program_inputs import ProgramInputs, Rows
from smp_train.arguments.sources import HELD_OUT, is_streamed, training_sources
from smp_train.data.bad_records import BadRecords
from smp_train.data.blend import BlendOrder, Joined
from smp_train.data.convert import open_samples, open_token_rows, processes_for
from smp_train.data.files import FileSet, Selection, list_sources
from smp_train.data.indexed import TrainingData, ValidationData
from smp_train.data.kinds import TOKENS, Kind
from smp_train.data.loader import Loader
from smp_train.data.order import Order
from smp_train.data.own_rows import Checked
from smp_train.data.rows import Recipe
from smp_train.data.samples import Samples
from smp_train.data.stream import Reading
from smp_train.data.streamed import StreamedData, first_samples
from smp_train.data.synthetic import Synthetic
from smp_train.data.token_file import TokenRows
from smp_train.data.tokenizer import spread_tokenizing
from smp_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

COSTLY_READERS = 1.5
"""A warning is logged if each record is read by more ranks than this, on average."""


def layout(args: Arguments, kind: Kind) -> tuple[str, str]:
    """Return --long and --short, with their defaults for a kind of record.

    Records with answers are truncated: a later piece would have no prompt, and maybe no answer.
    """
    short = args.short or ("concat" if kind.name == "text" and args.long in (None, "split") else "pad")
    truncates = short == "pad" or (short == "pack" and kind.answers_only)
    long = args.long or ("truncate" if truncates else "split")
    return long, short


@dataclass
class Opener:
    """Opens the sources of one run; its methods are collective."""

    args: Arguments
    vocab_size: int
    seq_len: int
    ranks: Runtime
    tokenizer: Callable[[], str | None]
    """Returns the location of the tokenizer or None; called only for records that need a tokenizer."""
    reads_text: bool = False
    """Whether the records opened so far need a tokenizer."""

    @property
    def max_bad(self) -> float | None:
        """Return the largest fraction of bad records; None without --bad_rows skip, which allows no bad record."""
        return self.args.max_bad if self.args.bad_rows == "skip" else None

    def list(self, locations: Sequence[str], flag: str, **options: Any) -> list[FileSet]:
        """Return the files of some locations."""
        column, config, zipped = self.args.text_column, self.args.dataset_config_name, self.args.zipped_data
        selection = Selection(column=column, config=config, zipped=zipped, flag=flag)
        return list_sources(locations, selection, ranks=self.ranks, **options)

    def recipe(self, kind: Kind) -> Recipe:
        """Return the recipe by which records of a kind become rows."""
        self.reads_text |= kind.name != "tokens"
        with distributed.together("reading the tokenizer"):
            tokenizer = None if kind.name == "tokens" else self.tokenizer()
        template, trusted = self.args.chat_template, self.args.trust_remote_code
        return Recipe(kind, self.vocab_size, tokenizer, template, trust_remote_code=trusted)

    def samples(self, files: FileSet) -> Samples:
        """Return the samples of a location, after conversion of the files that are not in the cache."""
        args, location = self.args, files.location
        long, short = layout(args, files.kind)
        rows = open_token_rows(
            files, self.recipe(files.kind), cache_dir=args.data_cache_dir, max_bad=self.max_bad, ranks=self.ranks,
            processes=processes_for(args.data_num_workers, self.ranks.local_world_size),
        )  # fmt: skip
        with distributed.together(f"checking {location}"):
            logger.info(
                "%(location)s: %(rows)d rows of at most %(longest)d tokens, %(tokens)d in all, %(counted_tokens)d of "
                "them with loss", {"location": location, **rows.report()},
            )  # fmt: skip
            if long == "truncate":
                _refuse_unlearnable(rows, self.seq_len, self.max_bad)
        _refuse_different(location, rows.fingerprint)
        return open_samples(rows, self.seq_len, long=long, short=short, ranks=self.ranks)

    def program_rows(self, rows: Rows, keyword: str) -> Samples:
        """Return the samples of the rows that a program passes as ``keyword``."""
        long, short = layout(self.args, TOKENS)
        with distributed.together(f"opening {keyword}"):
            source = Checked(rows, keyword, self.vocab_size)
        _refuse_different(keyword, (source.fingerprint, len(source)))
        with distributed.together(f"laying out {keyword}"):
            return Samples(source, self.seq_len, long=long, short=short)

    def held_out(self, files: FileSet, most: int) -> Samples:
        """Return the samples of a location to validate on; if it is streamed, only the first ``most``, in memory."""
        if not (files.on_hub if self.args.streaming is None else self.args.streaming):
            return self.samples(files)
        long, short = layout(self.args, files.kind)
        short = "pad" if short == "pack" else short
        recipe = self.recipe(files.kind)
        with distributed.together(f"reading {files.location}"):
            reading = self._reading([files], [recipe], long=long, short=short, shuffled=False, epochs=1)
            return Samples(first_samples(reading, most), self.seq_len)

    def streams(self, filesets: Sequence[FileSet], **share: Any) -> Loader:
        """Return the streamed data of a run after a check of its first records; ``share``: arguments of `Loader`."""
        layouts = {layout(self.args, files.kind) for files in filesets}
        if len(layouts) > 1:
            raise ConfigError("the sources hold text and other records; choose one --short for all of them")
        ((long, short),) = layouts
        args, recipes = self.args, [self.recipe(files.kind) for files in filesets]
        spread_tokenizing(self.ranks.local_world_size)
        with distributed.together("opening the streams"):
            how = {"long": long, "short": short, "shuffled": args.shuffle != "none", "epochs": args.epochs}
            training = StreamedData(
                self._reading(filesets, recipes, **how), merge=distributed.largest, micro_batch=args.train_batch_size,
                accumulation=args.gradient_accumulation_steps, **share,
            )  # fmt: skip
            training.check()
        logger.log(
            logging.WARNING if training.readers > COSTLY_READERS else logging.INFO,
            "Streaming %d files in %d streams: each record is read by %.2f ranks on average; by one where the number "
            "of data-parallel ranks (%d) divides the number of streams",
            sum(len(files.files) for files in filesets), training.streams, training.readers, training.dp_size,
        )  # fmt: skip
        return training

    def _reading(self, filesets: Sequence[FileSet], recipes: Sequence[Recipe], **how: Any) -> Reading:
        makers = [recipe.open() for recipe in recipes]
        return Reading(filesets, makers, self.seq_len, self.args.seed, bad=BadRecords(self.max_bad), **how)


def open_data(
    args: Arguments, *, vocab_size: int, seq_len: int, ranks: Runtime, dp_rank: int, dp_size: int,
    pin_memory: bool = False, inputs: ProgramInputs | None = None, tokenizer: Callable[[], str | None] = lambda: None,
) -> tuple[Loader, ValidationData | None, bool]:  # fmt: skip
    """Return this rank's training data and validation data, and whether a tokenizer converts any of it; collective.

    ``dp_rank`` is one of ``dp_size`` data-parallel ranks, which share the samples; ``inputs`` has a program's rows; the
    other arguments are the fields of `Opener`.
    """
    inputs = inputs or ProgramInputs()
    opener = Opener(args, vocab_size, seq_len, ranks, tokenizer)
    share: dict[str, Any] = {"seq_len": seq_len, "dp_rank": dp_rank, "dp_size": dp_size, "pin_memory": pin_memory}

    def read_flags() -> tuple[list[str], list[float] | None, bool]:
        if inputs.training_data is not None or args.use_synthetic_data:
            return [], None, False
        locations, weights = training_sources(args)
        return locations, weights, bool(locations) and is_streamed(args, locations)

    # Only rank 0 reads the flags: on another rank, a relative location may mean something else.
    locations, weights, streamed = distributed.on_main("reading the flags of the data", read_flags)
    filesets = opener.list(locations, "--training_dir" if args.training_dir else "--dataset") if locations else []
    training: Loader | None = opener.streams(filesets, **share) if streamed else None
    samples: Samples | Joined | None = None
    if inputs.training_data is not None:
        samples = opener.program_rows(inputs.training_data, "training_data")
    elif args.use_synthetic_data:
        samples = Samples(Synthetic(seq_len=seq_len, vocab_size=vocab_size, seed=args.seed), seq_len)
    elif filesets and not streamed:
        sources = [opener.samples(files) for files in filesets]
        samples = sources[0] if len(sources) == 1 else Joined(sources, locations)
    held_out = None
    if args.validation_freq or args.evaluate_only:
        held_out = _open_held_out(opener, inputs, locations, args.validation_batches * args.val_batch_size * dp_size)
    if training is None and samples is None:
        samples = held_out  # only with --evaluate_only, which trains on no batch
    with distributed.together("preparing the data"):
        if samples is not None:
            order: Order | BlendOrder = Order(len(samples), args.seed, args.shuffle)
            if weights is not None and isinstance(samples, Joined):
                order = BlendOrder(samples, weights, args.seed, args.shuffle)
                logger.info("Samples are drawn %s", order.shares())
            training = TrainingData(
                samples, order, with_names=args.data_audit, epochs=args.epochs, micro_batch=args.train_batch_size,
                accumulation=args.gradient_accumulation_steps, **share,
            )  # fmt: skip
        assert training is not None
        if held_out is None:
            return training, None, opener.reads_text
        first = held_out.last_shard().start if args.fast_validation else 0
        validation = ValidationData(
            held_out, first, micro_batch=args.val_batch_size, max_batches=args.validation_batches, **share
        )  # fmt: skip
        return training, validation, opener.reads_text


def _open_held_out(opener: Opener, inputs: ProgramInputs, locations: Sequence[str], most: int) -> Samples:
    """Return the validation samples of a run; collective."""
    args = opener.args
    if inputs.validation_data is not None:
        return opener.program_rows(inputs.validation_data, "validation_data")
    if args.use_synthetic_data:
        # Use another seed: synthetic rows have no end, so no rows can be held out of them.
        source = Synthetic(seq_len=opener.seq_len, vocab_size=opener.vocab_size, seed=args.seed + 1)
        return Samples(source, opener.seq_len)
    if args.test_dir:
        filesets = opener.list([args.test_dir], "--test_dir", split=HELD_OUT)
    else:
        filesets = opener.list(locations, "--training_dir", held_out=True)
    if not filesets:
        cause = "--evaluate_only" if args.evaluate_only else f"--validation_freq {args.validation_freq}"
        raise ConfigError(
            f"{cause} needs --test_dir: {' '.join(locations) or 'training_data'} has no split called validation or test"
        )
    if len(filesets) > 1:
        logger.info("Validating on %s only; choose with --test_dir", filesets[0].location)
    return opener.held_out(filesets[0], most)


def open_evaluation(opener: Opener, location: str, most: int | None) -> Samples:
    """Return the samples of a location to evaluate on; if it is streamed, only the first ``most``. Collective."""
    (files,) = opener.list([location], "--data", split=(*HELD_OUT, "train"))
    if files.on_hub and most is None:
        raise ConfigError(f"--data {location}: is on the hub, and streamed; give the number of batches with --batches")
    return opener.held_out(files, most or sys.maxsize)


def _refuse_unlearnable(rows: TokenRows, seq_len: int, max_bad: float | None) -> None:
    """Refuse rows without loss among their first ``seq_len`` tokens; --bad_rows skip tolerates up to ``max_bad``."""
    count, first = 0, ""
    for shard, header in enumerate(rows.headers):
        if header.latest_target >= seq_len:
            late = (rows.first_targets(shard) >= seq_len).nonzero()[0]
            count += late.size
            first = first or rows.name(rows.shards[shard][int(late[0])])
    problem = f"{first}: none of its first {seq_len} tokens is counted: nothing to learn; raise --max_context_width"
    BadRecords(max_bad, count, problem).judge_all(len(rows))


def _refuse_different(location: str, value: Any) -> None:
    """Raise DataError where a value differs between ranks; collective."""
    values = distributed.gather(f"comparing {location}", lambda: value)
    different = [rank for rank, value_of_rank in enumerate(values) if value_of_rank != values[0]]
    if different:
        raise DataError(f"{location}: rank {different[0]} reads other rows than rank 0; give every rank the same data")
