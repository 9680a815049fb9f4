"""Counts of a data set's rows, and everything that is wrong with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from smp_train.data import manifest
from smp_train.data.bad_records import BadRecords
from smp_train.data.convert import open_token_rows
from smp_train.data.files import DataFile, FileSet
from smp_train.data.rows import ANY_VOCABULARY, Recipe, read_rows
from smp_train.data.source import IGNORED, Row
from smp_train.data.tokenizer import load
from smp_train.errors import DataError
from smp_train.progress import Progress

SAMPLE_TOKENS = 512
SHOWN_TOKENS = 24


@dataclass
class Survey:
    """Counts and problems of the rows read so far."""

    kind: str
    """Name of the records in messages."""
    seq_len: int | None = None
    """Context length within which each row must have a target."""
    files: int = 0
    rows: int = 0
    tokens: int = 0
    counted: int = 0
    """Tokens that carry loss."""
    labelled: int = 0
    """Rows with labels."""
    lowest: int = ANY_VOCABULARY
    highest: int = -1
    left_out: int = 0
    """Records that were left out when prepared tokens were made."""
    longer: int = 0
    """Rows longer than the context."""
    lengths: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    sample: Row | None = None
    sample_name: str = ""

    def add(self, name: str, row: Row) -> None:
        """Count a row; the first one is the sample."""
        ids = row.input_ids
        self.rows += 1
        self.tokens += ids.size
        self.counted += int(np.count_nonzero(row.targets() != IGNORED))
        self.labelled += row.labels is not None
        if self.seq_len is not None and ids.size > self.seq_len:
            self.longer += 1
            if row.first_target() >= self.seq_len:
                self.problems.append(f"{name}: none of its first {self.seq_len} tokens carries loss: nothing to learn")
        self.lowest, self.highest = min(self.lowest, int(ids.min())), max(self.highest, int(ids.max()))
        self.lengths[ids.size] += 1
        if self.sample is None:
            self.sample, self.sample_name = row.cut(0, SAMPLE_TOKENS), name

    def quantile(self, share: float) -> int:
        """Return the length that ``share`` of all rows do not exceed."""
        rows = 0
        for length in sorted(self.lengths):
            rows += self.lengths[length]
            if rows >= share * self.rows:
                return length
        return 0

    def text(self, tokenizer: str | None) -> str:
        """Return the report of ``data inspect``."""
        lines = [f"{self.kind}: {self.rows} rows, {self.tokens} tokens in {self.files} files"]
        if self.sample is not None:
            lines += [
                f"counted: {self.counted} tokens ({self.counted / self.tokens:.2%})",
                f"labels: in {self.labelled} of {self.rows} rows",
                f"length: {self.quantile(0)} to {self.quantile(1)}, median {self.quantile(0.5)}, "
                f"95 % up to {self.quantile(0.95)}",
                f"token ids: {self.lowest} to {self.highest}: --vocab_size must be at least {self.highest + 1}",
                f"{self.sample_name} begins: {' '.join(map(str, self.sample.input_ids[:SHOWN_TOKENS]))} ...",
            ]
            if self.seq_len is not None:
                lines.insert(4, f"longer than {self.seq_len} tokens: {self.longer} rows")
            if tokenizer:
                marked = " (counted tokens in [[ ]])" if self.sample.labels is not None else ""
                lines.append(f"as text{marked}: {_marked_text(self.sample, tokenizer)!r}")
        if self.left_out:
            lines.append(f"left out when this was prepared, as malformed: {self.left_out} records")
        lines.append(f"problems: {len(self.problems)}")
        return "\n".join(lines)


def _marked_text(row: Row, tokenizer: str) -> str:
    """Return the text of a row; where not all tokens carry loss, those that do are in double brackets."""
    decode = load(tokenizer).decode
    if row.labels is None:
        return str(decode(row.input_ids.tolist(), skip_special_tokens=False))
    counted = row.labels != IGNORED
    edges = np.flatnonzero(np.diff(counted)) + 1
    runs = zip(np.split(row.input_ids, edges), np.split(counted, edges), strict=True)
    texts = [(decode(ids.tolist(), skip_special_tokens=False), bool(run[0])) for ids, run in runs]
    return "".join(f"[[{text}]]" if in_loss else text for text, in_loss in texts)


class _AllProblems(BadRecords):
    """Keeps the problem of every malformed record."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(skip=True)
        self.problems = problems

    def add(self, file: DataFile, number: int, problem: str) -> None:
        """Keep a problem."""
        self.problems.append(f"{file.at(number)}: {problem}")


def survey(files: FileSet, recipe: Recipe, *, cache_dir: str | None = None, seq_len: int | None = None) -> Survey:
    """Read a whole data set, past every malformed record.

    Args:
        files: the data set.
        recipe: how its records become rows.
        cache_dir: folder for copies of prepared tokens in S3.
        seq_len: context length within which each row must have a target.
    """
    result = Survey(files.kind.plural.capitalize(), seq_len)
    if any(file.kind == "tokens" for file in files.files):
        _read_prepared(result, files, recipe, cache_dir)
    else:
        _read_records(result, files, recipe)
    return result


def _read_prepared(result: Survey, files: FileSet, recipe: Recipe, cache_dir: str | None) -> None:
    rows = open_token_rows(files, recipe, cache_dir=cache_dir, max_bad=1)
    report = rows.report() or {}
    result.kind, result.files = "Prepared tokens", report.get("shards", 0)
    result.left_out = report.get("left_out", 0)
    for index in range(len(rows)):
        try:
            result.add(rows.name(index), rows.row(index))
        except DataError as error:
            result.problems.append(str(error))


def _read_records(result: Survey, files: FileSet, recipe: Recipe) -> None:
    maker = recipe.open()
    labelled: dict[bool, str] = {}
    """First file with labels, and first file without."""
    with Progress("reading", files.size, "B") as progress:
        for file in files.files:
            result.files += 1
            rows, with_labels = result.rows, result.labelled
            try:
                for number, row in read_rows(file, maker, _AllProblems(result.problems), tick=progress.update):
                    result.add(file.at(number), row)
            except DataError as error:
                result.problems.append(str(error))
                continue
            if result.rows == rows:
                result.problems.append(f"{file.shown}: no row in this file; write it again or remove it")
            else:
                labelled.setdefault(result.labelled > with_labels, file.shown)
    if len(labelled) > 1:
        result.problems.append(f"{labelled[True]}: has labels, and {labelled[False]} has none; give both or neither")


def manifest_problems(files: FileSet) -> list[str]:
    """Return what differs from the manifest of a data set that ``prepare`` wrote, checksums included."""
    sizes = {file.name: file.size for file in files.files}
    differences = manifest.differences(files.location, sizes, checksums=True)
    return [f"{files.location}: {problem} (by {manifest.MANIFEST})" for problem in differences]
