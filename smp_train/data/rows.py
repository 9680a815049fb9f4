"""One line of a shard, read strictly: what is not exactly a row of token ids is refused with a reason."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from smp_train.data.source import IGNORED, Row
from smp_train.data.utils import BYTE_ORDER_MARK

try:
    from orjson import loads
except ImportError:
    loads: Callable[[bytes], Any] = json.loads  # type: ignore[no-redef]

try:  # Three times as fast as orjson: it makes no Python integers.
    import simdjson

    Parser: Any = simdjson.Parser
except ImportError:
    Parser = None

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"


def _integers(values: Any, typecode: str, field: str) -> np.ndarray:
    """Turn a list of ints into an array, or say which element is no int (`array` takes nothing else)."""
    if not isinstance(values, list):
        raise ValueError(f"{field} is {_kind(values)}; a list of integers is needed")
    try:
        return np.frombuffer(array(typecode, values), dtype=np.int64 if typecode == "q" else np.uint8)
    except (TypeError, OverflowError):
        pass
    for place, value in enumerate(values):
        if type(value) is not int:
            raise ValueError(f"{field}[{place}] is {_kind(value)}; every element must be an integer")
        if not (-(2**63) <= value < 2**63 if typecode == "q" else 0 <= value < 256):
            raise ValueError(
                f"{field}[{place}] is {value}; " + ("no such token id" if typecode == "q" else "use 0 or 1")
            )
    raise ValueError(f"{field} holds something that is not an integer")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value}, a float"
    return {str: "a string", list: "a nested list", dict: "an object", int: "an integer"}.get(
        type(value), "missing"
    )


def _no_booleans(values: list, field: str) -> None:
    for place, value in enumerate(values):
        if isinstance(value, bool):
            raise ValueError(f"{field}[{place}] is {json.dumps(value)}; every element must be an integer")


def _no_repeats(line: bytes) -> None:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        keys[:] = [key for key, _ in found]
        return dict(found)

    keys: list[str] = []
    json.loads(line, object_pairs_hook=pairs)
    # The outermost object is finished last, so these are its keys.
    for field in (IDS, MASK, LABELS):
        if keys.count(field) > 1:
            raise ValueError(f"{field} is given twice; keep one")


class RowParser:
    """Parses the lines of one shard, remembering the last mask: most shards have one mask, all ones.

    All rows of a shard have labels, or none has: the first good row decides.

    Args:
        vocab_size: ids must be in [0, vocab_size).
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.labelled: bool | None = None
        """Whether the rows have labels; None before the first."""
        self._simd = Parser and Parser()
        self._tail = b""
        self._tail_mask = np.empty(0, dtype=np.uint8)
        self._tail_full = False

    def __call__(self, line: bytes) -> Row:
        """Return the row, its ids and labels int64; ValueError: reason; what to do."""
        line = line.strip()
        if line.startswith(BYTE_ORDER_MARK):
            # One parser passes over it, the other does not.
            raise ValueError("starts with a byte order mark, as where files were joined; remove it")
        # An escape may write a field's name in another way, which only a whole parse sees.
        ids, mask, labels = (None if b"\\" in line else self._split(line) or self._three(line)) or self._whole(line)
        if ids.size == 0:
            raise ValueError(f"{IDS} is empty; remove the row")
        # One pass for both ends: a negative id is a huge one when read as unsigned.
        if int(ids.view(np.uint64).max()) >= self.vocab_size:
            place = int(np.argmax(ids.view(np.uint64) >= self.vocab_size))
            raise ValueError(
                f"token id {int(ids[place])} is outside the vocabulary [0, {self.vocab_size}); "
                "use the tokenizer of the model, or set --vocab_size"
            )
        counted = None if mask is None else self._counted(ids, mask)
        if ids.size < 2:
            raise ValueError("a row of one token has none to predict; remove the row")
        row = Row(ids, counted, None, labels)
        if labels is not None:
            self._check_labels(row)
        if self.labelled not in (None, labels is not None):
            has, others = ("labels", "none") if labels is not None else (f"no {LABELS}", "them")
            raise ValueError(
                f"has {has}, and the rows before it have {others}; give all rows of a shard {LABELS}, or no row"
            )
        self.labelled = labels is not None
        return row

    def _check_labels(self, row: Row) -> None:
        ids, labels = row.input_ids, row.labels
        assert labels is not None
        if labels.size != ids.size:
            raise ValueError(
                f"{IDS} has {ids.size} elements and {LABELS} {labels.size}; they must be as long as each other"
            )
        wrong = (labels.view(np.uint64) >= self.vocab_size) & (labels != IGNORED)
        if wrong.any():
            place = int(wrong.argmax())
            raise ValueError(
                f"{LABELS}[{place}] is {int(labels[place])}, outside the vocabulary [0, {self.vocab_size}); "
                f"use a token id, or {IGNORED} where nothing is to be learnt"
            )
        if not row.has_target():
            raise ValueError(
                f"{LABELS} and {MASK} count no token that has one before it: nothing to learn; remove the row"
            )

    def _counted(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray | None:
        if mask.size != ids.size:
            raise ValueError(
                f"{IDS} has {ids.size} elements and {MASK} {mask.size}; they must be as long as each other"
            )
        if mask is self._tail_mask and self._tail_full:
            return None
        if int(mask.max()) > 1:
            place = int(np.argmax(mask > 1))
            raise ValueError(f"{MASK}[{place}] is {int(mask[place])}; use 0 or 1")
        if mask.all():
            return None
        if not mask[1:].any():
            raise ValueError(
                f"{MASK} counts no token that has one before it: nothing to learn; remove the row"
            )
        return mask.view(bool)

    def _split(self, line: bytes) -> tuple[np.ndarray, np.ndarray, None] | None:
        """Read a line that ends in its mask, parsing the mask only when it differs from the last one's.

        ``{a, b}`` is a JSON object exactly when ``{a}`` and ``{b}`` are, so the halves are checked each on
        its own. None sends the line to `_whole`, which has the last word on every doubtful one.
        """
        comma = line.rfind(b",", 0, line.rfind(b'"' + MASK.encode() + b'"'))
        if comma < 0:
            return None
        head, tail = line[:comma] + b"}", line[comma + 1 :]
        if head.count(b'"input_ids"') > 1:
            return None
        try:
            if tail != self._tail:
                self._learn(tail)
            found = self._integers_of(head, IDS, without=(MASK, LABELS))
            if found is not None:
                return found[0], self._tail_mask, None
            record = loads(head)
        except ValueError:
            return None
        if type(record) is not dict or IDS not in record or MASK in record or LABELS in record:
            return None
        ids = _integers(record[IDS], "q", IDS)
        if b"true" in head or b"false" in head:
            _no_booleans(record[IDS], IDS)
        return ids, self._tail_mask, None

    def _three(self, line: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Read a line of ids, mask and labels and nothing else; None sends it to `_whole`."""
        if line.count(b'"') != 6:
            return None
        found = self._integers_of(line, IDS, MASK, LABELS)
        if found is None or not found[1].size or found[1].min() < 0 or found[1].max() > 255:
            return None
        return found[0], found[1].astype(np.uint8), found[2]

    def _integers_of(self, text: bytes, *fields: str, without: tuple[str, ...] = ()) -> list[np.ndarray] | None:
        """Return the lists of integers in an object that has no field of ``without``; None whenever in doubt."""
        # The buffer of a nested list is that of a flat one, so there must be no other list to nest.
        if self._simd is None or text.count(b"[") != len(fields) or text.count(b"{") != 1:
            return None
        try:
            record = self._simd.parse(text)
            if any(other in record for other in without):
                return None
            lists = [record[field] for field in fields]
            found = [np.frombuffer(values.as_buffer(of_type="i"), dtype=np.int64) for values in lists]
            return found if [values.size for values in found] == [len(values) for values in lists] else None
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            # What failed may still be held by its traceback, and a parser whose document is held parses no other.
            self._simd = Parser()
            return None

    def _learn(self, tail: bytes) -> None:
        if b":" in tail[tail.find(b":") + 1 :] or tail.count(b'"') != 2:
            raise ValueError
        found = self._integers_of(b"{" + tail, MASK, without=(IDS,))
        if found is not None and (found[0].size == 0 or (found[0].min() >= 0 and found[0].max() < 256)):
            self._tail_mask = found[0].astype(np.uint8)
            self._tail_full = bool((found[0] == 1).all())
            self._tail = tail
            return
        record = loads(b"{" + tail)
        if type(record) is not dict or list(record) != [MASK] or b"true" in tail or b"false" in tail:
            raise ValueError
        self._tail_mask = _integers(record[MASK], "B", MASK)
        self._tail_full = bool((self._tail_mask == 1).all())
        self._tail = tail

    def _whole(self, line: bytes) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        try:
            record = loads(line)
        except ValueError as error:
            if line[:1] == b"[":
                raise ValueError("starts a JSON array; one object per line is needed: jq -c '.[]'") from None
            raise ValueError(f"broken JSON ({error}); one whole object per line is needed") from None
        if isinstance(record, list):
            raise ValueError("is a JSON array; one object per line is needed: jq -c '.[]'")
        if not isinstance(record, dict):
            raise ValueError(f"is {_kind(record)}, not an object with {IDS}")
        if IDS not in record:
            raise ValueError(
                f"no {IDS}; "
                + (
                    "turn text into tokens with: smp-train prepare"
                    if "text" in record
                    else "not a token shard?"
                )
            )
        if b"\\u" in line or any(line.count(f'"{field}"'.encode()) > 1 for field in (IDS, MASK, LABELS)):
            _no_repeats(line)
        ids = _integers(record[IDS], "q", IDS)
        mask = _integers(record[MASK], "B", MASK) if MASK in record else None
        labels = _integers(record[LABELS], "q", LABELS) if LABELS in record else None
        if b"true" in line or b"false" in line:
            for field in (IDS, MASK, LABELS):
                _no_booleans(record.get(field, []), field)
        return ids, mask, labels
