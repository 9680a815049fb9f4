"""One line of a shard, read strictly: what is not exactly a row of token ids is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from smp_train.data.lines import BYTE_ORDER_MARK
from smp_train.data.source import IGNORED, Row

try:  # Ten times as fast as Python's parser: it makes no Python integers.
    import simdjson

    Parser: Any = simdjson.Parser
except ImportError:
    Parser = None

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
FIELDS = (IDS, MASK, LABELS)
_ARRAY = "is a JSON array; one object per line is needed: jq -c '.[]'"

Lists = tuple[np.ndarray, "np.ndarray | None", "np.ndarray | None"]
"""Ids, mask and labels of a line, int64."""


class RowParser:
    """Parses the lines of one shard, of which all have labels or none has: the first good row decides.

    Args:
        vocab_size: ids must be in [0, vocab_size).
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.labelled: bool | None = None
        """Whether the rows have labels; None before the first."""
        self._simd = Parser and Parser()
        self._last_mask: tuple[bytes, np.ndarray] = (b"", np.empty(0, dtype=np.int64))
        """Text of the last mask at the end of a line, and the mask: most shards repeat a single one, all ones."""

    def __call__(self, line: bytes) -> Row:
        """Return the row, its ids and labels int64. Raises ValueError: reason; what to do."""
        line = line.strip()
        row = checked_row(*(self._fast(line) or _strict(line)), self.vocab_size)
        if self.labelled not in (None, row.labels is not None):
            has, others = ("labels", "none") if row.labels is not None else (f"no {LABELS}", "them")
            raise ValueError(
                f"has {has}, and the rows before it have {others}; give all rows of a shard {LABELS}, or no row"
            )
        self.labelled = row.labels is not None
        return row

    def _fast(self, line: bytes) -> Lists | None:
        """Read a line of well-formed lists; None leaves every doubtful line to `_strict`.

        A mask at the end that equals the last one is not parsed again: ``{a, b}`` is a JSON object if ``{a}`` and
        ``{b}`` are.
        """
        comma = line.rfind(b",", 0, max(0, line.rfind(b'"attention_mask"')))
        tail, known = line[comma:], None
        if comma > 0 and tail == self._last_mask[0]:
            line, known = line[:comma] + b"}", self._last_mask[1]
        # An escape may write a field's name in another way; the buffer of a nested list is that of a flat one.
        if self._simd is None or not line.startswith(b"{") or b"\\" in line:
            return None
        quotes = _places(line, b'"')
        strings = [line[start + 1 : end] for start, end in zip(quotes[::2], quotes[1::2], strict=False)]
        counts = [strings.count(field.encode()) for field in FIELDS]
        doubtful = counts[0] != 1 or max(counts) > 1 or len(_places(line, b"[")) != sum(counts)
        if doubtful or (known is not None and counts[1]):
            return None
        try:
            record = self._simd.parse(line)
            ids, mask, labels = (
                np.frombuffer(record[field].as_buffer(of_type="i"), dtype=np.int64) if count else None
                for field, count in zip(FIELDS, counts, strict=True)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            # The traceback may still hold the document, and a parser whose document is held parses no other.
            self._simd = Parser()
            return None
        # After that comma must come the mask alone, in the outermost object.
        alone = [1, 2, 0, 1]
        if mask is not None and labels is None and [tail.count(mark) for mark in (b"[", b'"', b"{", b"}")] == alone:
            self._last_mask = tail, mask
        return None if ids is None else (ids, mask if known is None else known, labels)


def _places(line: bytes, mark: bytes) -> list[int]:
    """Return where a character is: `bytes.find` is memchr, thirty times as fast as `bytes.count`."""
    places, at = [], line.find(mark)
    while at >= 0:
        places.append(at)
        at = line.find(mark, at + 1)
    return places


def checked_row(ids: np.ndarray, mask: np.ndarray | None, labels: np.ndarray | None, vocab_size: int) -> Row:
    """Return lists, int64, as a row that training can use. Raises ValueError: reason; what to do."""
    if ids.size == 0:
        raise ValueError(f"{IDS} is empty; remove the row")
    for name, values in ((MASK, mask), (LABELS, labels)):
        if values is not None and values.size != ids.size:
            raise ValueError(
                f"{IDS} has {ids.size} elements and {name} {values.size}; they must be as long as each other"
            )
    if (at := _first_outside(ids, vocab_size)) is not None:
        raise ValueError(
            f"token id {ids[at]} is outside the vocabulary [0, {vocab_size}); "
            "use the tokenizer of the model, or set --vocab_size"
        )
    if mask is not None and (at := _first_outside(mask, 2)) is not None:
        raise ValueError(f"{MASK}[{at}] is {mask[at]}; use 0 or 1")
    if labels is not None:
        at = _first_outside(np.where(labels == IGNORED, 0, labels), vocab_size)
        if at is not None:
            raise ValueError(
                f"{LABELS}[{at}] is {labels[at]}, outside the vocabulary [0, {vocab_size}); "
                f"use a token id, or {IGNORED} where nothing is to be learnt"
            )
    if ids.size < 2:
        raise ValueError("a row of one token has none to predict; remove the row")
    row = Row(ids, None if mask is None or mask.all() else mask.astype(bool), None, labels)
    if not row.has_target():
        fields = MASK if labels is None else f"{LABELS} and {MASK}"
        raise ValueError(f"{fields} counts no token that has one before it: nothing to learn; remove the row")
    return row


def _first_outside(values: np.ndarray, limit: int) -> int | None:
    """Return the index of the first int64 outside [0, limit), if any."""
    # One pass for both ends: a negative number is a huge one when read as unsigned.
    unsigned = values.view(np.uint64)
    return None if int(unsigned.max()) < limit else int(np.argmax(unsigned >= limit))


def _strict(line: bytes) -> Lists:
    """Read a line with Python's own parser. Raises ValueError with the reason why it is no row."""
    if line.startswith(BYTE_ORDER_MARK):
        raise ValueError("starts with a byte order mark, as where files were joined; remove it")
    try:
        record = json.loads(line.decode(), object_pairs_hook=_Object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        if line[:1] == b"[":
            raise ValueError(_ARRAY) from None
        raise ValueError(f"broken JSON ({error}); one whole object per line is needed") from None
    if isinstance(record, list):
        raise ValueError(_ARRAY)
    if not isinstance(record, _Object):
        raise ValueError(f"is {_kind(record)}, not an object with {IDS}")
    if IDS not in record:
        hint = "turn text into tokens with: smp-train prepare" if "text" in record else "not a token shard?"
        raise ValueError(f"no {IDS}; {hint}")
    for field in FIELDS:
        if record.keys_given.count(field) > 1:
            raise ValueError(f"{field} is given twice; keep one")
    mask, labels = (_integers(record[field], field) if field in record else None for field in (MASK, LABELS))
    return _integers(record[IDS], IDS), mask, labels


class _Object(dict[str, Any]):
    """A JSON object with all keys as they were written, repeated ones too."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.keys_given = [key for key, _ in pairs]


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _integers(values: Any, field: str) -> np.ndarray:
    """Return a list of integers as int64; ValueError names the first element that is none."""
    if not isinstance(values, list):
        raise ValueError(f"{field} is {_kind(values)}; a list of integers is needed")
    for place, value in enumerate(values):
        if type(value) is not int:
            raise ValueError(f"{field}[{place}] is {_kind(value)}; every element must be an integer")
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{field}[{place}] is {value}; no such token id")
    return np.array(values, dtype=np.int64)


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value}, a float"
    kinds: dict[type, str] = {str: "a string", list: "a nested list", _Object: "an object"}
    return kinds.get(type(value), "an integer")
