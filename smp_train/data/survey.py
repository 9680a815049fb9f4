"""What is in a data set, and all that is wrong with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from smp_train.data import formats, hf_dataset, manifest, s3
from smp_train.data.lines import read_lines
from smp_train.data.rows import RowParser
from smp_train.data.s3_cache import bring
from smp_train.data.source import Row, Source, trimmed
from smp_train.data.token_cache import own_folder
from smp_train.data.token_dataset import open_prepared, refuse_mixed
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from smp_train.progress import Progress

ANY_VOCABULARY = 1 << 31
SAMPLE_TOKENS = 512


@dataclass
class Survey:
    """What was seen of a data set."""

    kind: str
    seq_len: int | None = None
    """Context length at which rows must have something to learn."""
    shards: int = 0
    rows: int = 0
    tokens: int = 0
    counted: int = 0
    labelled: int = 0
    """Rows with labels."""
    lowest: int = ANY_VOCABULARY
    highest: int = -1
    left_out: int = 0
    """Lines that were left out when prepared tokens were made."""
    lengths: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sample: Row | None = None
    sample_name: str = ""

    def add(self, name: str, row: Row, folder: str = "") -> None:
        """Count one row; the first is the sample."""
        ids, targets, most = row.input_ids, row.targets(), self.seq_len
        self.rows += 1
        self.tokens += ids.size
        self.counted += ids.size if targets is None else int(targets.sum())
        self.labelled += row.labels is not None
        if most is not None and ids.size > most and not trimmed(row).cut(0, most).has_target():
            self.problems.append(f"{folder}{name}: none of its first {most} tokens is counted: nothing to learn")
        self.lowest, self.highest = min(self.lowest, int(ids.min())), max(self.highest, int(ids.max()))
        self.lengths[ids.size] += 1
        if self.sample is None:
            self.sample, self.sample_name = row.cut(0, SAMPLE_TOKENS), name

    def quantile(self, part: float) -> int:
        """Return the length that ``part`` of all rows do not exceed."""
        wanted, seen = part * self.rows, 0
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= wanted:
                return length
        return 0

    def text(self, tokenizer: str | None) -> str:
        """Return the report that ``data inspect`` prints."""
        lines = [f"{self.kind}: {self.rows} rows, {self.tokens} tokens in {self.shards} files"]
        if self.sample is not None:
            lines += [
                f"counted: {self.counted} tokens ({self.counted / self.tokens:.2%})",
                f"labels: in {self.labelled} of {self.rows} rows",
                f"length: {self.quantile(0)} to {self.quantile(1)}, median {self.quantile(0.5)}, "
                f"95 % up to {self.quantile(0.95)}",
                f"token ids: {self.lowest} to {self.highest}: --vocab_size must be at least {self.highest + 1}",
                f"{self.sample_name} begins: {' '.join(map(str, self.sample.input_ids[:24]))} ...",
            ]
            if tokenizer:
                marked = " (counted tokens in [[ ]])" if self.sample.targets() is not None else ""
                lines.append(f"as text{marked}: {marked_text(self.sample, tokenizer)!r}")
        if self.left_out:
            lines.append(f"left out when this was made, as no rows: {self.left_out} lines")
        lines.append(f"problems: {len(self.problems)}")
        return "\n".join(lines)


def marked_text(row: Row, tokenizer: str) -> str:
    """Return the text of a row; where not all of it is counted, with what is in double brackets."""
    from smp_train.data.prepare.tokenizer import load

    loaded, targets = load(tokenizer), row.targets()
    if targets is None:
        return str(loaded.decode(row.input_ids.tolist(), skip_special_tokens=False))
    edges = np.flatnonzero(np.diff(targets)) + 1
    runs = zip(np.split(row.input_ids, edges), np.split(targets, edges), strict=True)
    texts = [(loaded.decode(ids.tolist(), skip_special_tokens=False), bool(counted[0])) for ids, counted in runs]
    return "".join(f"[[{text}]]" if counted else text for text, counted in texts)


def look(path: str, vocab_size: int, cache_dir: str | None = None, seq_len: int | None = None) -> Survey:
    """Read a whole data set, going on after each problem. Raises DataError when it cannot even be listed."""
    manifest.refuse_root(path)
    survey = Survey(formats.kind_of(path), seq_len)
    if survey.kind == formats.SHARDS:
        _look_at_shards(survey, path, vocab_size, cache_dir)
        return survey
    here = bring(path, cache_dir)[0] if s3.is_s3(path) else path
    if survey.kind == formats.ARROW:
        source: Source | None = _check_hf_dataset(survey, here, vocab_size)
    else:
        source = prepared = open_prepared(here, vocab_size, max_bad=1)
        survey.shards = len(prepared.files)
        survey.left_out = sum(header.skipped for header in prepared.headers)
    if source is None:
        return survey
    for index in range(len(source)):
        try:
            survey.add(source.name(index), source.row(index))
        except DataError as error:
            survey.problems.append(str(error))
    return survey


def _check_hf_dataset(survey: Survey, folder: str, vocab_size: int) -> Source | None:
    """Look for problems in a Hugging Face data set; return its good rows, or None when it cannot be opened."""
    files = hf_dataset.files_of(folder)
    checked = []
    for shard in files:
        survey.shards += 1

        def bad(row: int, why: str, path: str = shard.path) -> None:
            survey.problems.append(f"{path}: row {row}: {why}")

        try:
            checked.append(hf_dataset.check(shard.path, vocab_size, bad))
        except DataError as error:
            survey.problems.append(str(error))
    return hf_dataset.HfRows(files, checked) if len(checked) == len(files) else None


def _look_at_shards(survey: Survey, path: str, vocab_size: int, cache_dir: str | None) -> None:
    shards = list_shards(path)
    folder = cache_dir or own_folder()
    if s3.is_s3(path):
        Path(folder).mkdir(parents=True, exist_ok=True)
    coming = s3.staged(shards, folder) if s3.is_s3(path) else ((shard, None) for shard in shards)
    labelled: list[tuple[str, bool]] = []
    with Progress("reading", sum(shard.size for shard in shards), "B") as progress:
        for shard, copy in coming:
            survey.shards += 1
            rows = survey.rows
            try:
                parse = RowParser(vocab_size)
                for number, line in read_lines(copy or shard.path, progress.update, shown=shard.path):
                    try:
                        survey.add(f"{shard.name}:{number}", parse(line), shard.path[: -len(shard.name)])
                    except ValueError as error:
                        survey.problems.append(f"{shard.path}:{number}: {error}")
                if survey.rows == rows:
                    survey.problems.append(f"{shard.path}: empty shard (no row in it); write it again or remove it")
                if parse.labelled is not None:
                    refuse_mixed([*labelled[:1], (shard.path, parse.labelled)])
                    labelled.append((shard.path, parse.labelled))
            except DataError as error:
                survey.problems.append(str(error))
            finally:
                if copy:
                    Path(copy).unlink()
