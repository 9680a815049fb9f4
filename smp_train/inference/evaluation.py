"""``smp-train evaluate``: loss and perplexity of a checkpoint on data sets, on one device or sharded over all ranks.

Every flag of ``train`` that lays out the model or the data may be given; those that the checkpoint's run was given are
the default. There is no optimizer and no training data.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from smp_train import backends, distributed, train_utils
from smp_train.arguments import Arguments, Resolved, parse
from smp_train.arguments.groups import flags
from smp_train.arguments.model_flags import ParallelArguments
from smp_train.arguments.validation import check_values, refuse_natively
from smp_train.arguments.verb_parser import beside_train
from smp_train.data.indexed import ValidationData
from smp_train.data.open_data import Opener, open_evaluation
from smp_train.data.source import Source
from smp_train.errors import ConfigError
from smp_train.inference import open_model as inference
from smp_train.models.hugging_face import trust_code
from smp_train.models.resolve import row_length
from smp_train.progress import Progress
from smp_train.telemetry.logging_utils import perplexity, setup_logging

if TYPE_CHECKING:
    import torch

    from smp_train.data.batch import Batch

OF_THE_RUN = ("max_context_width", "short", "long", "text_column", "bf16", "attn_implementation", "chunked_loss")
"""Flags whose default is what the checkpoint's run was given."""
INSTEAD = {
    "training_dir": "give --data", "test_dir": "give --data", "dataset": "give --data",
    "resume_from_checkpoint": "give --checkpoint",
}  # fmt: skip
"""Flags of ``train`` in whose place this verb has others."""
READ = {
    *OF_THE_RUN, "trust_remote_code", "seed", "dataset_type", "zipped_data", "data_num_workers", "bad_rows", "max_bad",
    "data_cache_dir", "dataset_config_name", "streaming", "tokenizer", "chat_template", "val_batch_size", "config",
    "smp_config", "debug", "distributed_backend", "distributed_timeout_minutes",
}  # fmt: skip
"""Flags with an effect here, besides those of parallelism."""


def options() -> argparse.ArgumentParser:
    """Return the parser of this verb's own flags."""

    found = beside_train("evaluate", __doc__ or "", "--hybrid_shard_degree, --val_batch_size")
    add = found.add_argument
    add("--checkpoint", required=True, help="checkpoint, a run's folder of checkpoints, or Hugging Face model; also s3://")
    add("--data", nargs="+", required=True, help="token shards, Arrow data sets or text; each is evaluated by itself")
    add("--batches", type=int, help="batches of a data set at most, per data-parallel rank (default: all)")
    add("--json", action="store_true", help="print one JSON object")
    add("--model", help="configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Collective under a launcher."""
    own, rest = options().parse_known_args(list(argv))
    found = run(parse(rest, environ={}), own.checkpoint, own.data, batches=own.batches, model=own.model)
    if distributed.detect().is_main:
        report(found, as_json=own.json)
    return 0


class Score(NamedTuple):
    """Loss in nats per counted token, e to its power, and the counted tokens."""

    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """What `smp-train evaluate` finds.

    Attributes:
        checkpoint: location of the checkpoint that was chosen, or of the model.
        step: of the checkpoint; None for a model.
        data: of each data set.
        all: of all tokens together.
    """

    checkpoint: str
    step: int | None
    data: dict[str, Score]
    all: Score


def run(
    resolved: Resolved, checkpoint: str, places: Sequence[str] | Mapping[str, str | Source], *,
    batches: int | None = None, model: str | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluate a checkpoint on data sets; collective under a launcher.

    Args:
        resolved: flags of ``train`` that were given.
        checkpoint: as --checkpoint.
        places: as --data, or places and rows of a program's own by name.
        batches: as --batches.
        model: as --model.
    """
    for name, remedy in INSTEAD.items():
        if resolved.given(name):
            raise ConfigError(f"--{name} is for training; {remedy}")
    if idle := [name for name in flags() if resolved.given_here(name) and name not in _effective()]:
        raise ConfigError(f"--{idle[0]} has no effect on an evaluation; leave it out")
    if resolved.args.backend == "smp":
        raise ConfigError("--backend smp: evaluate is of the native backend; on SMP, use train --evaluate_only 1")
    if batches is not None and batches < 1:
        raise ConfigError(f"--batches {batches}: must be at least 1")
    args = replace(resolved.args, evaluate_only=True, backend="native")
    check_values(args)
    refuse_natively(args)
    trust_code(args.trust_remote_code)
    ranks = distributed.detect()
    setup_logging(ranks.rank, level="DEBUG" if args.debug else "WARNING")
    with (
        distributed.started(
            ranks, distributed_backend=args.distributed_backend, timeout_seconds=60 * args.distributed_timeout_minutes
        ) as device,
        ExitStack() as opened,
    ):
        described = inference.describe(checkpoint, model)
        args = take_over(args, described, given={name for name in flags() if resolved.given(name)})
        by_name = places if isinstance(places, Mapping) else {place: place for place in places}
        if not by_name:
            raise ConfigError("there is no data to evaluate on; give --data")
        found = evaluate(args, ranks, device, described, by_name, batches, opened)
    tokens = sum(count for _, count in found.values())
    total = sum(loss * count for loss, count in found.values()) / tokens
    rows = {place: Score(loss, perplexity(loss), count) for place, (loss, count) in found.items()}
    step = None if described.checkpoint is None else described.checkpoint.step
    return Evaluation(described.location, step, rows, Score(total, perplexity(total), tokens))


def _effective() -> set[str]:
    return READ | {field.name for field in fields(ParallelArguments)}


def take_over(args: Arguments, described: inference.Described, given: set[str]) -> Arguments:
    """Return the settings with the values of the checkpoint's run for flags not ``given``, and with a row length."""
    before = {} if described.checkpoint is None else described.checkpoint.meta.get("arguments") or {}
    args = replace(
        args, **{name: before[name] for name in OF_THE_RUN if name not in given and before.get(name) is not None}
    )
    return replace(args, max_context_width=row_length(args, described.spec))


def evaluate(
    args: Arguments,
    ranks: distributed.Runtime,
    device: torch.device,
    described: inference.Described,
    places: Mapping[str, str | Source],
    most: int | None,
    opened: ExitStack,
) -> dict[str, tuple[float, int]]:
    """Return (loss in nats per counted token, counted tokens) of each data set; collective."""
    backend, _ = backends.select(args, ranks, device)
    spec, seq_len = described.spec, args.max_context_width
    assert seq_len is not None
    meta = backend.check(spec, seq_len=seq_len)
    tokenizer: list[str | None] = [args.tokenizer] if args.tokenizer else []

    def tokenizer_for_text() -> str | None:
        if not tokenizer:
            tokenizer.append(opened.enter_context(described.tokenizer_folder()))
        return tokenizer[0]

    topology = backend.topology
    data = {}
    opener = Opener(
        args, vocab_size=spec.config.vocab_size, seq_len=seq_len, ranks=ranks, tokenizer=tokenizer_for_text
    )  # fmt: skip
    for name, place in places.items():
        if isinstance(place, Source):
            samples = opener.program_rows(place, name)
        else:
            samples = open_evaluation(opener, place, most and most * args.val_batch_size * topology.dp_size)
        with distributed.together(f"preparing {name}"):
            data[name] = ValidationData(
                samples, seq_len=seq_len, micro_batch=args.val_batch_size, max_batches=most,
                dp_rank=topology.dp_rank, dp_size=topology.dp_size, pin_memory=device.type == "cuda",
            )  # fmt: skip
    model = backend.build(meta, seed=args.seed, initial=False)
    described.fill(model)
    return {
        place: train_utils.evaluate(backend, model, batches(each, place, show=ranks.is_main))
        for place, each in data.items()
    }


def batches(data: ValidationData, place: str, *, show: bool) -> Iterator[Batch]:
    """Yield the batches, read so that a failure on one rank is one on all; ``show`` shows progress."""
    with Progress(place, len(data), "batches", show) as progress:
        yield from progress.over(train_utils.read_together(data, f"reading {place}"))


def report(found: Evaluation, *, as_json: bool) -> None:
    """Print the result: a line per data set and, of several, one of all their tokens; or one JSON object."""
    if as_json:
        data = {place: _row(score) for place, score in found.data.items()}
        print(json.dumps({"checkpoint": found.checkpoint, "step": found.step, "data": data, "all": _row(found.all)}))
        return
    print(found.checkpoint)
    rows = found.data if len(found.data) == 1 else {**found.data, "all": found.all}
    width = max(map(len, rows))
    for name, row in rows.items():
        print(f"  {name:<{width}}  loss {row.loss:.5f}  perplexity {row.perplexity:.2f}  tokens {row.tokens}")


def _row(score: Score) -> dict[str, Any]:
    return {**score._asdict(), "perplexity": score.perplexity if math.isfinite(score.perplexity) else None}
