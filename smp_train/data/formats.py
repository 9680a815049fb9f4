"""Which kind of data set a place holds, told by what lies there; converted and opened accordingly."""

from __future__ import annotations

import logging
import os
from itertools import pairwise
from typing import Any

from smp_train.data import bad_rows, hf_dataset, index, s3, token_cache
from smp_train.data.copies import bring
from smp_train.data.index import Caches, TokenShards
from smp_train.data.source import Source
from smp_train.data.token_cache import Header
from smp_train.data.utils import Shard, is_shard_name
from smp_train.errors import ConfigError, DataError

logger = logging.getLogger("smp_train.data")

SHARDS, PREPARED, ARROW = "JSON-lines shards", "prepared tokens", "Hugging Face data set"
LEFT_OUT = "; such lines were left out when this was made: make it again, or accept that with --bad_rows skip"


def kind_of(location: str, dataset_type: str = "gpt_jsonl") -> str:
    """Return `SHARDS`, `PREPARED` (.tok and .idx) or `ARROW`. Raises DataError for a mix, or another than asked for."""
    names = _names(location)
    kinds = {SHARDS: any(is_shard_name(name) and name not in (hf_dataset.STATE, hf_dataset.INFO) for name in names)}
    kinds[PREPARED] = any(name.endswith(".idx") and name[0] not in "._" for name in names)
    kinds[ARROW] = hf_dataset.is_hf_dataset(names)
    found = [kind for kind, there in kinds.items() if there]
    if not s3.is_s3(location):
        hf_dataset.refuse_dict(location, names)
    if len(found) > 1:
        raise DataError(f"{location}: holds {' and '.join(found)}; keep one kind in a folder")
    if dataset_type == "hf" and found != [ARROW]:
        raise DataError(f"{location}: --dataset_type hf, but save_to_disk did not write this; leave the flag out")
    return found[0] if found else SHARDS


def _names(location: str) -> set[str]:
    if s3.is_s3(location):
        return {shard.name for shard in s3.list_folder(location)[0]}
    return set(os.listdir(location)) if os.path.isdir(location) else {os.path.basename(location)}


def refuse_zipped(location: str, kind: str, zipped: bool | None) -> None:
    """Raise ConfigError for a check of how shards are stored where there are none."""
    if kind != SHARDS and zipped is not None:
        raise ConfigError(f"--zipped_data {int(zipped)} is for JSON-lines shards, {location} holds none: leave it out")


def convert_place(
    location: str,
    *,
    dataset_type: str = "gpt_jsonl",
    vocab_size: int,
    cache_dir: str | None = None,
    zipped: bool | None = None,
    max_bad: float | None = None,
    rank: int = 0,
    world: int = 1,
    processes: int = 1,
) -> int:
    """Do this rank's share of what has to be done once before rows can be read; return how many files that were.

    No collectives. Raises DataError.
    """
    kind = kind_of(location, dataset_type)
    refuse_zipped(location, kind, zipped)
    if kind == SHARDS:
        return index.convert(
            location, vocab_size=vocab_size, cache_dir=cache_dir, zipped=zipped, max_bad=max_bad, rank=rank,
            world=world, processes=processes,
        )  # fmt: skip
    if s3.is_s3(location):
        return len(bring(location, cache_dir, rank, world)[1])
    if kind == PREPARED:
        if cache_dir is not None:
            logger.info("--data_cache_dir %s has no effect on %s: it is prepared already", cache_dir, location)
        return 0
    caches = Caches(location, vocab_size, cache_dir, skip_bad=max_bad is not None)
    return hf_dataset.check_share(caches, location, rank, world, processes)


def check_place(
    location: str, *, dataset_type: str = "gpt_jsonl", vocab_size: int, cache_dir: str | None = None,
    max_bad: float | None = None, rank: int = 0, world: int = 1, processes: int = 1, **_: Any,
) -> int:  # fmt: skip
    """Do this rank's share of what needs the whole of a place that was brought from S3; return how many files.

    For after `convert_place` on all ranks. No collectives. Raises DataError.
    """
    if not s3.is_s3(location) or kind_of(location, dataset_type) != ARROW:
        return 0
    here, _fetched = bring(location, cache_dir, rank, world)
    caches = Caches(here, vocab_size, cache_dir, skip_bad=max_bad is not None)
    return hf_dataset.check_share(caches, here, rank, world, processes)


def open_place(
    location: str,
    *,
    dataset_type: str = "gpt_jsonl",
    vocab_size: int,
    cache_dir: str | None = None,
    zipped: bool | None = None,
    max_bad: float | None = None,
    rank: int = 0,
    world: int = 1,
    processes: int = 1,
) -> Source:
    """Open a place after `convert_place` and `check_place` on all ranks.

    What they have left out, being called for one rank alone or by ranks that do not see each other's files, is done
    here first. Raises DataError.
    """
    kind = kind_of(location, dataset_type)
    if kind == SHARDS:
        return index.open_source(
            location, vocab_size=vocab_size, cache_dir=cache_dir, zipped=zipped, max_bad=max_bad, rank=rank,
            world=world, processes=processes,
        )  # fmt: skip
    logger.info("%s: %s", location, kind)
    here = bring(location, cache_dir)[0] if s3.is_s3(location) else location
    if kind == PREPARED:
        cure = "copy or make it again" if here == location else "start again, and it is fetched"
        return open_prepared(here, vocab_size, max_bad, cure)
    return hf_dataset.open_hf_dataset(Caches(here, vocab_size, cache_dir, skip_bad=max_bad is not None), here, max_bad)


def open_prepared(
    location: str, vocab_size: int, max_bad: float | None = None, cure: str = "copy or make it again"
) -> TokenShards:
    """Open a folder of ``.tok`` and ``.idx`` files, in order of the names of the shards they were made from.

    ``max_bad`` is the fraction of lines that may have been left out when they were made; None tolerates none.
    ``cure`` is what to do about a damaged file.
    """
    found = []
    for name in sorted(os.listdir(location)):
        if not name.endswith(".idx") or name[0] in "._":
            continue
        path = os.path.join(location, name)
        base = path[: -len(".idx")]
        opened = token_cache.read_header(base)
        if opened is None:
            raise DataError(f"{path}: is damaged, of another version, or without its .tok; make it or copy it again")
        found.append((opened[0], base))
    ordered = in_order(found, vocab_size)
    files = [Shard(base + ".tok", header.source, header.size, 0) for header, base in ordered]
    source = TokenShards(files, [(base, header) for header, base in ordered], cure)
    judge_left_out(ordered, len(source), max_bad)
    return source


def judge_left_out(found: list[tuple[Header, str]], rows: int, max_bad: float | None) -> None:
    """Hold what was left out when prepared files were made against what may be, as `bad_rows.judge`."""
    left_out = [(f"{base}.tok: {header.source}", header.skipped, header.first_bad) for header, base in found]
    bad_rows.judge(left_out, rows, max_bad, LEFT_OUT)


def in_order(found: list[tuple[Header, str]], vocab_size: int) -> list[tuple[Header, str]]:
    """Sort (header, base name) of prepared files by the shards they were made from.

    Raises DataError for two of one shard, and for another vocabulary.
    """
    for header, base in found:
        if header.vocab_size > vocab_size:
            raise DataError(
                f"{base}.idx: was made for a vocabulary of {header.vocab_size}, the model has {vocab_size}; "
                "use the tokenizer of the model, or set --vocab_size"
            )
    ordered = sorted(found, key=lambda entry: (entry[0].source, entry[1]))
    for (header, base), (again, other) in pairwise(ordered):
        if header.source == again.source:
            raise DataError(f"{base}.tok: {other}.tok holds the same shard, {header.source}; remove one of the two")
    return ordered
