"""Text, and prompts with completions, as rows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smp_train.data.kinds import INPUT, INSTRUCTION, OUTPUT, Kind
from smp_train.data.readers import Record, not_utf8, parse_object
from smp_train.data.source import IGNORED, Problem, Row
from smp_train.errors import first_few

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""The prompts with which Stanford Alpaca was trained."""

Span = tuple[int, int]
"""Begin and end of an answer, in characters of its text."""


def object_of(record: Record) -> dict[str, Any]:
    """Return the fields of a record. Raises ValueError: "reason; what to do"."""
    if isinstance(record, bytes):
        return parse_object(record)
    if isinstance(record, dict):
        return record
    raise ValueError(not_utf8(record) if isinstance(record, UnicodeDecodeError) else "is a whole text, not an object")


def string(fields: dict[str, Any], name: str) -> str:
    """Return the string in a field. Raises ValueError: "reason; what to do"."""
    value = fields.get(name)
    if isinstance(value, UnicodeDecodeError):
        raise ValueError(not_utf8(value))
    if not isinstance(value, str):
        names = first_few(list(fields), most=8) or "no field"
        raise ValueError(f'no "{name}" string in this record (it has {names}); set --text_column')
    return without_nul(value)


def without_nul(text: str) -> str:
    """Return a text. Raises ValueError if it holds a NUL character."""
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is a NUL; is it text? remove it")
    return text


class Texts:
    """Makes rows of texts: the tokens of the whole text and an end token. All tokens carry loss.

    Args:
        tokenizer: which reads special tokens in a text as text.
        end: id of the end token.
        field: field of the text in a record.
    """

    def __init__(self, tokenizer: Tokenizer, end: int, field: str) -> None:
        self._end, self._field = end, field
        # tokenizers 0.20 and later: faster, without offsets.
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, the problem with it, or None for a blank text."""
        texts = [self._text(record) for record in records]
        visible = [text for text in texts if text and not isinstance(text, Problem)]
        encodings = iter(self._encode(visible, add_special_tokens=False))
        return [
            text if isinstance(text, Problem) else self._row(next(encodings).ids) if text else None for text in texts
        ]

    def _text(self, record: Record) -> str | Problem:
        try:
            text = without_nul(record) if isinstance(record, str) else string(object_of(record), self._field)
        except ValueError as error:
            return Problem(error)
        return text if text.strip() else ""

    def _row(self, ids: list[int]) -> Row:
        return Row(np.array([*ids, self._end], dtype=np.uint32))


class Completions:
    """Makes rows of prompts with completions: the completion and the end token carry loss.

    Args:
        tokenizer: any.
        end: id of the end token.
        kind: names the fields; ``alpaca`` style writes the prompt with which Alpaca was trained.
    """

    def __init__(self, tokenizer: Tokenizer, end: int, kind: Kind) -> None:
        self._tokenizer, self._end, self._kind = tokenizer, end, kind

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, or the problem with it."""
        pairs = [self._pair(record) for record in records]
        texts = [pair[0] + pair[1] for pair in pairs if isinstance(pair, tuple)]
        encodings = iter(self._tokenizer.encode_batch(texts))
        rows: list[Row | Problem | None] = []
        for pair in pairs:
            if isinstance(pair, Problem):
                rows.append(pair)
                continue
            encoding = next(encodings)
            ids = list(encoding.ids)
            answer = tokens_in_spans(encoding.offsets, [(len(pair[0]), len(pair[0]) + len(pair[1]))])
            # Some tokenizers end each text themselves.
            if ids[-1:] != [self._end]:
                ids.append(self._end)
                answer = np.append(answer, True)
            answer[-1] = True
            rows.append(answer_row(ids, answer))
        return rows

    def _pair(self, record: Record) -> tuple[str, str] | Problem:
        """Return prompt and completion of a record."""
        try:
            fields = object_of(record)
            if self._kind.style == "alpaca":
                prompt, completion = _alpaca_prompt(fields), string(fields, OUTPUT)
            else:
                prompt, completion = (string(fields, name) for name in self._kind.fields)
        except ValueError as error:
            return Problem(error)
        if not completion.strip():
            return Problem(f"{self._kind.fields[1]} is empty: nothing to learn; remove it")
        return prompt, completion


def _alpaca_prompt(fields: dict[str, Any]) -> str:
    instruction = string(fields, INSTRUCTION)
    extra = string(fields, INPUT) if fields.get(INPUT) is not None else ""
    return (ALPACA_INPUT if extra.strip() else ALPACA).format(instruction=instruction, input=extra)


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return which tokens overlap a span, bool [tokens]."""
    edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    inside = np.zeros(len(edges), dtype=bool)
    for begin, end in spans:
        inside |= (edges[:, 1] > begin) & (edges[:, 0] < end)
    return inside


def answer_row(ids: Sequence[int], answer: np.ndarray) -> Row | Problem:
    """Return a row in which only the tokens marked by ``answer``, bool [tokens], carry loss."""
    answer = answer.copy()
    answer[:1] = False  # the first token has no token before it
    labels = np.where(answer, ids, IGNORED).astype(np.int32)
    row = Row(np.array(ids, dtype=np.uint32), labels)
    return row if row.has_target() else Problem("no token of an answer carries loss: nothing to learn; remove it")
