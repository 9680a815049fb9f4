"""Makes rows of tokens from texts, and from prompts with completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smp_train.data.kinds import INPUT, INSTRUCTION, OUTPUT, Kind, names_of
from smp_train.data.readers import Record, not_utf8, parse_object
from smp_train.data.source import IGNORED, Problem, Row

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Stanford Alpaca's prompts.
ALPACA = (
    "Below is an instruction that describes a task{context}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
ALPACA_CONTEXT = ", paired with an input that provides further context"
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
        raise ValueError(f'no "{name}" string in this record (it has {names_of(fields)}); set --text_column')
    return checked_text(value)


def checked_text(text: str) -> str:
    """Return a text. Raises ValueError if it holds a NUL character, or half of a surrogate pair."""
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is a NUL; is it text? remove it")
    text.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
    return text


class Texts:
    """Makes a row from each text: the tokens of the whole text and the token ``end``. All tokens carry loss."""

    def __init__(self, tokenizer: Tokenizer, end: int, field: str) -> None:
        self._end, self._field = end, field
        # tokenizers 0.20 and later have `encode_batch_fast`, which is faster because it leaves out offsets.
        self._encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, the problem with it, or None for a blank text."""
        rows: list[Row | Problem | None] = [None] * len(records)
        texts: dict[int, str] = {}
        for number, record in enumerate(records):
            try:
                text = checked_text(record) if isinstance(record, str) else string(object_of(record), self._field)
                if text.strip():
                    texts[number] = text
            except ValueError as error:
                rows[number] = Problem(error)
        encodings = self._encode(list(texts.values()), add_special_tokens=False)
        for number, encoding in zip(texts, encodings, strict=True):
            rows[number] = Row(np.array([*encoding.ids, self._end], dtype=np.uint32))
        return rows


class Completions:
    """Makes a row from each prompt with its completion: only the completion and the token ``end`` carry loss."""

    def __init__(self, tokenizer: Tokenizer, end: int, kind: Kind) -> None:
        self._tokenizer, self._end, self._kind = tokenizer, end, kind

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, or the problem with it."""
        return [self._row(record) for record in records]

    def _row(self, record: Record) -> Row | Problem:
        try:
            fields = object_of(record)
            if self._kind.style == "alpaca":
                extra = string(fields, INPUT) if fields.get(INPUT) is not None else ""
                more = (ALPACA_CONTEXT, f"### Input:\n{extra}\n\n") if extra.strip() else ("", "")
                prompt = ALPACA.format(instruction=string(fields, INSTRUCTION), context=more[0], input=more[1])
                completion = string(fields, OUTPUT)
            else:
                prompt, completion = (string(fields, name) for name in self._kind.fields)
        except ValueError as error:
            return Problem(error)
        if not completion.strip():
            return Problem(f"{self._kind.fields[1]} is empty: nothing to learn; remove the record")
        encoding = self._tokenizer.encode(prompt + completion)
        ids = list(encoding.ids)
        answer = tokens_in_spans(encoding.offsets, [(len(prompt), len(prompt) + len(completion))])
        if ids[-1:] != [self._end]:  # some tokenizers add the end token themselves
            ids, answer = [*ids, self._end], np.append(answer, True)
        answer[-1] = True
        return answer_row(ids, answer)


def tokens_in_spans(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Return which tokens overlap a span, bool [tokens]."""
    edges = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    inside = np.zeros(len(edges), dtype=bool)
    for begin, end in spans:
        inside |= (edges[:, 1] > begin) & (edges[:, 0] < end)
    return inside


def answer_row(ids: Sequence[int], answer: np.ndarray) -> Row | Problem:
    """Return a row in which only the tokens marked by ``answer``, bool [tokens], carry loss."""
    labels = np.where(answer, ids, IGNORED).astype(np.int32)
    labels[:1] = IGNORED  # the first token has no token before it
    row = Row(np.array(ids, dtype=np.uint32), labels)
    return row if row.has_target() else Problem("no token of an answer carries loss: nothing to learn; remove it")
