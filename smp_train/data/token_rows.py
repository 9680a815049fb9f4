"""Token rows: records with input_ids, and optionally attention_mask and labels, checked strictly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from smp_train.data.kinds import IDS, LABELS, MASK, TOKENS
from smp_train.data.readers import Record
from smp_train.data.source import IGNORED, Problem, Row
from smp_train.data.text import object_of

try:  # simdjson reads lists of integers without making Python integers, ten times as fast as json.
    import simdjson

    Parser: Any = simdjson.Parser
except ImportError:
    Parser = None

FIELDS = TOKENS.fields
SHOWN = 40
"""Characters of a wrong value that are shown."""
Lists = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""Ids, attention mask and labels of a record, int64."""


class TokenRecords:
    """Makes a row from each token record, whose ids must be below ``vocab_size``."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self._simd = vocab_size, Parser and Parser()
        self._last_mask: tuple[bytes, np.ndarray] = (b"", np.empty(0, dtype=np.int64))
        """Text and values of the latest mask at the end of a line: most files repeat one mask, all ones."""

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, ids and labels int64, or the problem with it."""
        return [self._row(record) for record in records]

    def _row(self, record: Record) -> Row | Problem:
        try:
            lists = self._fast(record.strip()) if isinstance(record, bytes) else None
            return checked_row(*(lists or lists_of(object_of(record))), self.vocab_size)
        except ValueError as error:
            return Problem(error)

    def _fast(self, line: bytes) -> Lists | None:
        """Return the lists of a plainly formed line; None for any doubtful line, which is then parsed strictly.

        A mask at the end of the line that equals the latest one is not parsed again: ``{a, b}`` is a JSON object if
        ``{a}`` and ``{b}`` are.
        """
        comma = line.rfind(b",", 0, max(0, line.rfind(b'"attention_mask"')))
        tail, known = line[comma:], None
        if comma > 0 and tail == self._last_mask[0]:
            line, known = line[:comma] + b"}", self._last_mask[1]
        # A backslash may hide a field's name. simdjson flattens nested lists, so brackets are counted.
        if self._simd is None or not line.startswith(b"{") or b"\\" in line:
            return None
        quotes = _positions(line, b'"')
        strings = [line[start + 1 : end] for start, end in zip(quotes[::2], quotes[1::2], strict=False)]
        counts = [strings.count(field.encode()) for field in FIELDS]
        lists, mask_twice = len(_positions(line, b"[")), known is not None and counts[1]
        if counts[0] != 1 or max(counts) > 1 or lists != sum(counts) or mask_twice:
            return None
        try:
            document = self._simd.parse(line)
            ids, mask, labels = (
                np.frombuffer(document[field].as_buffer(of_type="i"), dtype=np.int64) if count else None
                for field, count in zip(FIELDS, counts, strict=True)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            # The traceback may hold the document, and simdjson refuses to reuse a parser whose document is held.
            self._simd = Parser()
            return None
        # Remember the mask only if it alone follows the comma, in the outermost object.
        alone = [1, 2, 0, 1]
        if mask is not None and labels is None and [tail.count(mark) for mark in (b"[", b'"', b"{", b"}")] == alone:
            self._last_mask = tail, mask
        return None if ids is None else (ids, mask if known is None else known, labels)


def _positions(line: bytes, mark: bytes) -> list[int]:
    """Return the positions of a character: `bytes.find` is 30 times as fast as `bytes.count`."""
    positions, position = [], line.find(mark)
    while position >= 0:
        positions.append(position)
        position = line.find(mark, position + 1)
    return positions


def lists_of(record: dict[str, Any]) -> Lists:
    """Return the lists of a parsed record. Raises ValueError: "reason; what to do"."""
    if IDS not in record:
        raise ValueError(f"no {IDS} in this record; keep records of one kind in a data set")
    mask, labels = (integers(record[name], name) if name in record else None for name in (MASK, LABELS))
    return integers(record[IDS], IDS), mask, labels


def checked_row(ids: np.ndarray, mask: np.ndarray | None, labels: np.ndarray | None, vocab_size: int) -> Row:
    """Return int64 lists as a row without padding. Raises ValueError: "reason; what to do"."""
    if ids.size == 0:
        raise ValueError(f"{IDS} is empty; remove the row")
    for name, values in ((MASK, mask), (LABELS, labels)):
        if values is not None and values.size != ids.size:
            raise ValueError(f"{IDS} has {ids.size} elements and {name} {values.size}; they must have the same length")
    if (index := _first_outside(ids, vocab_size)) is not None:
        raise ValueError(
            f"token id {ids[index]} is outside the vocabulary [0, {vocab_size}); "
            "use the tokenizer of the model, or set --vocab_size"
        )
    if labels is not None and (index := _first_outside(np.where(labels == IGNORED, 0, labels), vocab_size)) is not None:
        raise ValueError(
            f"{LABELS}[{index}] is {labels[index]}, outside the vocabulary [0, {vocab_size}); "
            f"use a token id, or {IGNORED} where a token carries no loss"
        )
    row = Row(ids, labels)
    if mask is not None:
        row = row.cut(*_attended(mask))
    if row.input_ids.size < 2:
        raise ValueError("a row of one token has none to predict; remove the row")
    if not row.has_target():
        raise ValueError(f"{LABELS} counts no token after the first: nothing to learn; remove the row")
    return row


def _attended(mask: np.ndarray) -> tuple[int, int]:
    """Return the range of tokens that the attention mask keeps. Raises ValueError for a mask with holes."""
    if (index := _first_outside(mask, 2)) is not None:
        raise ValueError(f"{MASK}[{index}] is {mask[index]}; use 0 or 1")
    if mask.all():
        return 0, mask.size
    if not mask.any():
        raise ValueError(f"{MASK} is 0 everywhere: nothing to learn; remove the row")
    begin, end = int(mask.argmax()), mask.size - int(mask[::-1].argmax())
    if not mask[begin:end].all():
        raise ValueError(
            f"{MASK}[{begin + int(mask[begin:end].argmin())}] is 0 between attended tokens; only padding at the ends "
            f"is supported: use {LABELS} of {IGNORED} for tokens without loss"
        )
    return begin, end


def _first_outside(values: np.ndarray, limit: int) -> int | None:
    """Return the index of the first int64 outside [0, limit), if any."""
    # Viewed as unsigned integers, negative numbers are huge, so one pass checks both limits.
    unsigned = values.view(np.uint64)
    return None if int(unsigned.max()) < limit else int(np.argmax(unsigned >= limit))


def integers(values: Any, field: str) -> np.ndarray:
    """Return a list or an array of integers as int64. Raises ValueError that names a wrong element."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or (values.size and values.dtype.kind not in "iub"):
            shape = list(values.shape)
            raise ValueError(f"{field} has {values.dtype} values of shape {shape}; give integers in one dimension")
        return values.astype(np.int64)  # huge unsigned ids become negative, and are refused
    if not isinstance(values, list):
        raise ValueError(f"{field} is {json.dumps(values, default=str)[:SHOWN]}; a list of integers is needed")
    if set(map(type, values)) <= {int}:
        with suppress(OverflowError):
            return np.array(values, dtype=np.int64)
    index = next(n for n, value in enumerate(values) if type(value) is not int or not -(2**63) <= value < 2**63)
    shown = json.dumps(values[index])[:SHOWN]
    raise ValueError(f"{field}[{index}] is {shown}; every element must be a 64-bit integer")
