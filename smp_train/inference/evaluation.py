"""``smp-train evaluate``: loss and perplexity of a checkpoint on data sets, on one device or sharded over all ranks.

Every flag of ``train`` for the model's layout or the data may be given; some flags default to the value in the
checkpoint's run. There is no optimizer and no training data.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from smp_train import backends, distributed, train_utils
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.groups import flags
from smp_train.arguments.model_flags import ParallelArguments
from smp_train.arguments.parse import from_keywords, read_command_line
from smp_train.arguments.validation import check_flags
from smp_train.arguments.verb_parser import parser_with_train_flags
from smp_train.data.indexed import ValidationData
from smp_train.data.open_data import Opener, open_evaluation
from smp_train.data.source import Source
from smp_train.errors import ConfigError
from smp_train.inference.open_model import SavedModel, open_model
from smp_train.models.hugging_face import trust_code
from smp_train.models.resolve import row_length
from smp_train.progress import Progress
from smp_train.telemetry.logging_utils import perplexity, setup_logging

if TYPE_CHECKING:
    from torch import nn

    from smp_train.backends.base import Backend

FLAGS_OF_RUN = ("max_context_width", "short", "long", "text_column", "bf16", "attn_implementation", "chunked_loss")
"""Flags whose default is their value in the checkpoint's run."""
EFFECTIVE_FLAGS = {
    *FLAGS_OF_RUN, *(field.name for field in fields(ParallelArguments)), "trust_remote_code", "seed",
    "zipped_data", "data_num_workers", "bad_rows", "max_bad", "data_cache_dir", "dataset_config_name", "streaming",
    "tokenizer", "chat_template", "val_batch_size", "config", "smp_config", "debug", "distributed_backend",
    "distributed_timeout_minutes",
}  # fmt: skip
"""Flags of ``train`` with an effect on an evaluation."""
REPLACEMENTS = {
    "training_dir": "--data", "test_dir": "--data", "dataset": "--data", "resume_from_checkpoint": "--checkpoint",
}  # fmt: skip
"""Flags of ``train`` and the flags of this verb that replace them."""


class Score(NamedTuple):
    """Loss in nats per counted token, the perplexity, and the number of counted tokens."""

    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        checkpoint: location of the checkpoint or model.
        step: step of the checkpoint; None for a model.
        data: score of each data set, by name.
        all: score of all tokens together.
    """

    checkpoint: str
    step: int | None
    data: dict[str, Score]
    all: Score


def options() -> argparse.ArgumentParser:
    """Return the parser of the flags that `smp-train train` lacks."""
    parser = parser_with_train_flags("evaluate", __doc__ or "", "--hybrid_shard_degree, --val_batch_size")
    add = parser.add_argument
    add("--checkpoint", required=True, help="checkpoint, a run's folder of checkpoints, or Hugging Face model; also s3://")
    add("--data", nargs="+", required=True, help="token shards, Arrow data sets or text; each is evaluated by itself")
    add("--batches", type=int, help="batches of a data set at most, per data-parallel rank (default: all)")
    add("--json", action="store_true", help="print one JSON object")
    add("--model", help="configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Collective under a launcher."""
    arguments, flags_of_train = options().parse_known_args(list(argv))
    flags = {flag.name: flag.value for flag in read_command_line(flags_of_train)}
    evaluation = evaluate(
        arguments.checkpoint, arguments.data, batches=arguments.batches, model=arguments.model, **flags
    )
    if distributed.detect().is_main:
        report(evaluation, as_json=arguments.json)
    return 0


def evaluate(
    checkpoint: str, data: str | Source | Sequence[str] | Mapping[str, str | Source], *, batches: int | None = None,
    model: str | None = None, **flags: Any,
) -> Evaluation:  # fmt: skip
    """Return loss, perplexity and tokens of a checkpoint on data sets, as ``smp-train evaluate`` does; collective.

    Args:
        checkpoint: checkpoint, a run's folder of checkpoints (the newest), or Hugging Face model; also ``s3://``.
        data: one or several locations (token shards, Arrow data sets, text), or locations and `Source` objects by name.
        batches: largest number of batches of each data set, per data-parallel rank; None for all.
        model: configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub.
        flags: flags of ``smp-train train``, by name; the defaults of `FLAGS_OF_RUN` are their values in the
            checkpoint's run.
    """
    resolved = from_keywords(flags, environ={})
    if isinstance(data, Source):
        data = {"data": data}
    elif not isinstance(data, Mapping):
        data = {location: location for location in ([data] if isinstance(data, str) else data)}
    if not data:
        raise ConfigError("there is no data to evaluate on; give --data")
    if batches is not None and batches < 1:
        raise ConfigError(f"--batches {batches}: must be at least 1")
    refuse_flags(resolved)
    args = replace(resolved.args, evaluate_only=True, backend="native")
    check_flags(args, natively=True)
    trust_code(args.trust_remote_code)
    ranks = distributed.detect()
    setup_logging(ranks.rank, level="DEBUG" if args.debug else "WARNING")
    group = {
        "distributed_backend": args.distributed_backend, "timeout_seconds": 60 * args.distributed_timeout_minutes,
    }  # fmt: skip
    with distributed.started(ranks, **group) as device, ExitStack() as opened:
        saved = open_model(checkpoint, model)
        args = with_flags_of_run(args, resolved, saved)
        seq_len = row_length(args, saved.spec)
        args = replace(args, max_context_width=seq_len)
        backend, _ = backends.select(args, ranks, device)
        meta_model = backend.check(saved.spec, seq_len=seq_len)
        tokenizer = functools.cache(lambda: args.tokenizer or opened.enter_context(saved.tokenizer_location()))
        vocab_size = saved.spec.config.vocab_size
        opener = Opener(args, vocab_size=vocab_size, seq_len=seq_len, ranks=ranks, tokenizer=tokenizer)
        rows = {name: open_data(opener, name, location, backend, batches) for name, location in data.items()}
        loaded = backend.build(meta_model, seed=args.seed, initial=False)
        saved.load_weights(loaded)
        scores = {name: score(backend, loaded, rows[name], name) for name in data}
    tokens = sum(row.tokens for row in scores.values())
    loss = sum(row.loss * row.tokens for row in scores.values()) / tokens
    step = None if saved.checkpoint is None else saved.checkpoint.step
    return Evaluation(saved.location, step, scores, Score(loss, perplexity(loss), tokens))


def refuse_flags(resolved: Resolved) -> None:
    """Raise `ConfigError` for a flag without effect, except in a ``--config`` file, which may serve other verbs."""
    for name in flags():
        if resolved.given_here(name) and name not in EFFECTIVE_FLAGS:
            remedy = f"give {REPLACEMENTS[name]}" if name in REPLACEMENTS else "leave it out"
            raise ConfigError(f"--{name} has no effect on an evaluation; {remedy}")
    if resolved.args.backend == "smp":
        raise ConfigError("--backend smp: evaluate is of the native backend; on SMP, use train --evaluate_only 1")


def with_flags_of_run(args: Arguments, resolved: Resolved, saved: SavedModel) -> Arguments:
    """Return the settings, with the values of the checkpoint's run for `FLAGS_OF_RUN` that the user has not set."""
    meta = {} if saved.checkpoint is None else saved.checkpoint.meta
    run = meta.get("arguments") or {}
    names = [name for name in FLAGS_OF_RUN if not resolved.given(name) and run.get(name) is not None]
    return replace(args, **{name: run[name] for name in names})


def open_data(
    opener: Opener, name: str, location: str | Source, backend: Backend, batches: int | None
) -> ValidationData:
    """Return the rows of a location, or of a program's source, as batches for this rank; collective."""
    size, topology = opener.args.val_batch_size, backend.topology
    if isinstance(location, Source):
        samples = opener.program_rows(location, name)
    else:
        samples = open_evaluation(opener, location, batches and batches * size * topology.dp_size)
    with distributed.together(f"preparing {name}"):
        return ValidationData(
            samples, seq_len=opener.seq_len, micro_batch=size, max_batches=batches, dp_rank=topology.dp_rank,
            dp_size=topology.dp_size, pin_memory=topology.device.type == "cuda",
        )  # fmt: skip


def score(backend: Backend, model: nn.Module, data: ValidationData, name: str) -> Score:
    """Return the model's score on a data set, and show the progress on rank 0; collective."""
    with Progress(name, len(data), "batches", distributed.rank() == 0) as progress:
        batches = progress.over(train_utils.read_together(data, f"reading {name}"))
        loss, tokens = train_utils.evaluate(backend, model, batches)
    return Score(loss, perplexity(loss), tokens)


def report(evaluation: Evaluation, *, as_json: bool) -> None:
    """Print a line per data set, and a line for all tokens if there are several; or print one JSON object."""
    if as_json:
        data = {name: _as_json(score) for name, score in evaluation.data.items()}
        checkpoint = {"checkpoint": evaluation.checkpoint, "step": evaluation.step}
        print(json.dumps({**checkpoint, "data": data, "all": _as_json(evaluation.all)}))
        return
    print(evaluation.checkpoint)
    rows = evaluation.data if len(evaluation.data) == 1 else {**evaluation.data, "all": evaluation.all}
    width = max(map(len, rows))
    for name, row in rows.items():
        print(f"  {name:<{width}}  loss {row.loss:.5f}  perplexity {row.perplexity:.2f}  tokens {row.tokens}")


def _as_json(score: Score) -> dict[str, Any]:
    return {**score._asdict(), "perplexity": score.perplexity if math.isfinite(score.perplexity) else None}
