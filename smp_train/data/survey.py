"""Counts a data set's rows, and reports everything that is wrong with the data set."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from smp_train.data.bad_records import BadRecords
from smp_train.data.files import DataFile, FileSet
from smp_train.data.rows import Recipe, read_rows
from smp_train.data.source import IGNORED, Row
from smp_train.data.tokenizer import load
from smp_train.errors import DataError
from smp_train.progress import Progress

SAMPLE_TOKENS, SHOWN_TOKENS = 512, 24


@dataclass
class Survey(BadRecords):
    """Counts and problems of the rows of a data set, in which each row must have a target within ``seq_len``."""

    seq_len: int | None = None
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    counted: int = 0
    labelled: int = 0
    ids: tuple[int, int] = (1 << 62, -1)  # the lowest and the highest token id
    problems: list[str] = field(default_factory=list)
    sample: tuple[str, Row] | None = None  # name and beginning of the first row

    def add(self, file: DataFile, number: int, problem: str) -> None:
        """Keep the problem of a malformed record."""
        self.problems.append(f"{file.at(number)}: {problem}")

    def count_row(self, name: str, row: Row) -> None:
        """Count a row."""
        size = row.input_ids.size
        self.lengths.append(size)
        self.counted += int(np.count_nonzero(row.targets() != IGNORED))
        self.labelled += row.labels is not None
        if self.seq_len is not None and size > self.seq_len and row.first_target() >= self.seq_len:
            self.problems.append(f"{name}: none of its first {self.seq_len} tokens carries loss: nothing to learn")
        self.ids = min(self.ids[0], int(row.input_ids.min())), max(self.ids[1], int(row.input_ids.max()))
        self.sample = self.sample or (name, row.cut(0, SAMPLE_TOKENS))

    def text(self, files: FileSet, tokenizer: str | None) -> str:
        """Return the report of ``data inspect``."""
        rows, tokens = len(self.lengths), sum(self.lengths)
        lines = [f"{files.kind.plural.capitalize()}: {rows} rows, {tokens} tokens in {len(files.files)} files"]
        if self.sample is not None:
            name, row = self.sample
            least, median, most_of, most = np.quantile(self.lengths, (0, 0.5, 0.95, 1), method="inverted_cdf")
            lines += [
                f"counted: {self.counted} tokens ({self.counted / tokens:.2%})",
                f"labels: in {self.labelled} of {rows} rows",
                f"length: {least} to {most}, median {median}, 95 % up to {most_of}",
                f"token ids: {self.ids[0]} to {self.ids[1]}: --vocab_size must be at least {self.ids[1] + 1}",
                f"{name} begins: {' '.join(map(str, row.input_ids[:SHOWN_TOKENS]))} ...",
            ]
            if self.seq_len is not None:
                longer = sum(size > self.seq_len for size in self.lengths)
                lines.append(f"longer than {self.seq_len} tokens: {longer} rows")
            if tokenizer:
                marked = " (counted tokens in [[ ]])" if row.labels is not None else ""
                lines.append(f"as text{marked}: {_marked_text(row, tokenizer)!r}")
        return "\n".join([*lines, f"problems: {len(self.problems)}"])


def _marked_text(row: Row, tokenizer: str) -> str:
    """Return the text of a row; if the row has labels, tokens that carry loss are in double brackets."""
    decode = load(tokenizer).decode
    counted = np.zeros(row.input_ids.size, bool) if row.labels is None else row.labels != IGNORED
    edges = np.flatnonzero(np.diff(counted)) + 1
    runs = zip(np.split(row.input_ids, edges), np.split(counted, edges), strict=True)
    texts = [(decode(ids.tolist(), skip_special_tokens=False), bool(run[0])) for ids, run in runs]
    return "".join(f"[[{text}]]" if in_loss else text for text, in_loss in texts)


def survey(files: FileSet, recipe: Recipe, seq_len: int | None = None) -> Survey:
    """Read a whole data set and go on after malformed records; each row must have a target within ``seq_len``."""
    result = Survey(seq_len=seq_len)
    maker = recipe.open()
    with_labels: dict[bool, str] = {}  # the first file with labels, and the first file without labels
    with Progress("reading", files.size, "B") as progress:
        for file in files.files:
            rows_before, labelled_before = len(result.lengths), result.labelled
            try:
                for number, row in read_rows(file, maker, result, tick=progress.update):
                    result.count_row(file.at(number), row)
            except DataError as error:
                result.problems.append(str(error))
                continue
            if len(result.lengths) > rows_before:
                with_labels.setdefault(result.labelled > labelled_before, file.shown)
            elif file.kind != "text":
                result.problems.append(f"{file.shown}: no row in this file; write it again or remove it")
    if len(with_labels) > 1:
        result.problems.append(f"{with_labels[True]}: has labels, {with_labels[False]} has none; give both or neither")
    return result
