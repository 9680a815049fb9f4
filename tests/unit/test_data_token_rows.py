"""Token rows: lines that are rows, with their padding trimmed, and the reason for each kind of line that is none."""

import json
import random

import numpy as np
import pytest

from smp_train.data.source import Problem, Row
from smp_train.data.token_rows import TokenRecords

GOOD = {
    "plain": (b'{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}', [1, 2, 3]),
    "mask first": (b'{"attention_mask": [1, 1], "input_ids": [4, 5]}', [4, 5]),
    "no mask": (b'{"input_ids": [4, 5]}', [4, 5]),
    "crlf": (b'{"input_ids": [1, 2], "attention_mask": [1, 1]}\r\n', [1, 2]),
    "right padded": (b'{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}', [1, 2]),
    "left padded": (b'{"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]}', [1, 2]),
    "padded on both sides": (b'{"input_ids": [0, 1, 2, 0], "attention_mask": [0, 1, 1, 0]}', [1, 2]),
    "extra keys": (b'{"id": 7, "input_ids": [1, 2], "ok": true, "attention_mask": [1, 1]}', [1, 2]),
    "field named in a string": (rb'{"t": "\"input_ids\": [9]", "input_ids": [1, 2]}', [1, 2]),
    "mask named in a string": (rb'{"input_ids": [1, 2], "t": "x, \"attention_mask\""}', [1, 2]),
    "escaped name": (rb'{"input\u005fids": [1, 2], "attention_mask": [1, 1]}', [1, 2]),
    "other lists": (b'{"at": [[3], {"input_ids": [7]}], "input_ids": [1, 2], "attention_mask": [1, 1]}', [1, 2]),
    "labels last": (b'{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]}', [1, 2], [-100, 2]),
    "labels first": (b'{"labels": [-100, 2], "input_ids": [1, 2], "attention_mask": [1, 1]}', [1, 2], [-100, 2]),
    "labels, no mask": (b'{"input_ids": [1, 2], "labels": [-100, 0]}', [1, 2], [-100, 0]),
    "labels and padding": (
        b'{"input_ids": [0, 1, 2, 3], "labels": [9, -100, 2, 3], "attention_mask": [0, 1, 1, 0]}', [1, 2], [-100, 2],
    ),
}  # fmt: skip

# ruff: noqa: E501
BAD = {
    "byte order mark": (b'\xef\xbb\xbf{"input_ids": [1, 2], "attention_mask": [1, 1]}', "byte order mark"),
    "truncated": (b'{"input_ids": [1, 2, 3], "attention_mask": [1, 1', "broken JSON"),
    "two objects": (b'{"input_ids": [1, 2]} {"input_ids": [3, 4]}', "broken JSON"),
    "NUL bytes": (b"\0\0\0\0", "broken JSON"),
    "not UTF-8": (b'{"input_ids": [1, 2], "t": "\xff"}', "UTF-8"),
    "nested without end": (b"[" * 100_000, "jq -c"),
    "nested within": (b'{"t": ' * 100_000, "broken JSON"),
    "UTF-16": ('{"input_ids": [1, 2]}'.encode("utf-16"), "UTF-16"),
    "NaN": (b'{"input_ids": [1, NaN]}', "broken JSON"),
    "number": (b"17", "no object in this line"),
    "no ids": (b'{"attention_mask": [1, 1]}', "no input_ids"),
    "ids no list": (b'{"input_ids": 5, "attention_mask": [1]}', "input_ids is 5; a list of integers"),
    "empty": (b'{"input_ids": [], "attention_mask": []}', "input_ids is empty"),
    "float": (b'{"input_ids": [1, 2.7], "attention_mask": [1, 1]}', "input_ids[1] is 2.7;"),
    "bool": (b'{"input_ids": [1, true], "attention_mask": [1, 1]}', "input_ids[1] is true"),
    "null": (b'{"input_ids": [null, 1], "attention_mask": [1, 1]}', "input_ids[0] is null"),
    "nested": (b'{"input_ids": [[1, 2]], "attention_mask": [1, 1]}', "input_ids[0] is ["),
    "nested, then an empty list": (b'{"input_ids": [[1, 2], []], "attention_mask": [1, 1]}', "input_ids[0] is ["),
    "mask nested": (b'{"input_ids": [1, 2], "attention_mask": [[1], [1]]}', "attention_mask[0] is ["),
    "negative": (b'{"input_ids": [1, -1], "attention_mask": [1, 1]}', "token id -1 is outside the vocabulary [0, 100)"),
    "outside": (b'{"input_ids": [1, 100], "attention_mask": [1, 1]}', "token id 100 is outside the vocabulary [0, 100)"),
    "65 bits": (b'{"input_ids": [1, 99999999999999999999]}', "input_ids[1] is "),
    "mask short": (b'{"input_ids": [1, 2], "attention_mask": [1]}', "input_ids has 2 elements and attention_mask 1"),
    "mask 2": (b'{"input_ids": [1, 2, 3], "attention_mask": [1, 2, 1]}', "attention_mask[1] is 2; use 0 or 1"),
    "nothing counted": (b'{"input_ids": [1, 2], "attention_mask": [0, 0]}', "nothing to learn"),
    "only the first counted": (b'{"input_ids": [1, 2], "attention_mask": [1, 0]}', "none to predict"),
    "a hole": (b'{"input_ids": [3, 1, 2, 5], "attention_mask": [1, 0, 1, 0]}', "attention_mask[1] is 0 between"),
    "a key twice elsewhere": (rb'{"input_ids": [1, 2], "t": {"a": "\\", "a": 2}}', "a is given twice"),
    "one token": (b'{"input_ids": [1], "attention_mask": [1]}', "none to predict"),
    "ids twice, once escaped": (rb'{"input_ids": [1, 2], "input\u005fids": [3, 4], "attention_mask": [1, 1]}', "input_ids is given twice"),
    "mask twice, once escaped": (rb'{"input_ids": [1, 2], "attention\u005fmask": [1, 0], "attention_mask": [1, 1]}', "attention_mask is given twice"),
    "labels twice": (b'{"input_ids": [1, 2], "labels": [1, 2], "labels": [-100, 2]}', "labels is given twice"),
}  # fmt: skip


BAD_LABELS = {
    "[1, 2]": "input_ids has 3 elements and labels 2",
    "[1, 2, 100]": "labels[2] is 100, outside the vocabulary [0, 100)",
    "[1, -1, 2]": "labels[1] is -1, outside the vocabulary",
    "[1, 2, 9223372036854775808]": "labels[2] is 9223372036854775808",
    "[1, 2.0, 3]": "labels[1] is 2.0;",
    "null": "labels is null",
    "[[1], [2], [3]]": "labels[0] is [",
    "[-100, -100, -100]": "nothing to learn",
    "[1, -100, -100]": "nothing to learn",
}
for labels, reason in BAD_LABELS.items():
    others = '"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]'
    BAD[f"labels {labels} last"] = (f'{{{others}, "labels": {labels}}}'.encode(), reason)
    BAD[f"labels {labels} first"] = (f'{{"labels": {labels}, {others}}}'.encode(), reason)


@pytest.fixture(params=["simdjson", "json"])
def either_parser(request, monkeypatch):
    if request.param == "json":
        monkeypatch.setattr("smp_train.data.token_rows.Parser", None)


def one_row(make: TokenRecords, line: bytes) -> Row | Problem:
    (row,) = make([line])
    assert row is not None
    return row


@pytest.mark.parametrize("name", GOOD)
def test_good_rows(name, either_parser):
    line, ids, *labels = GOOD[name]
    make = TokenRecords(100)
    # Twice: the second time the mask may be a remembered one.
    for _ in range(2):
        row = one_row(make, line)
        assert isinstance(row, Row)
        assert row.input_ids.tolist() == ids
        assert row.input_ids.dtype == np.int64
        assert ([] if row.labels is None else [row.labels.tolist()]) == labels


@pytest.mark.parametrize("name", BAD)
def test_bad_rows(name, either_parser):
    line, reason = BAD[name]
    fresh, used = TokenRecords(100), TokenRecords(100)
    used([b'{"input_ids": [1, 2], "attention_mask": [1, 1]}'])
    for make in (fresh, used):
        for _ in range(2):
            problem = one_row(make, line)
            assert isinstance(problem, Problem)
            assert reason in problem
            assert "\n" not in problem


def test_rows_of_tables():
    """Arrays, as tables give them, and the lists they fall back to."""
    make = TokenRecords(100)
    ids = np.array([0, 1, 2], dtype=np.uint16)
    good, null, nulls, huge, floats = make([
        {"input_ids": ids, "attention_mask": np.array([0, 1, 1], dtype=np.int8)}, {"input_ids": None},
        {"input_ids": [1, None]}, {"input_ids": np.array([1, 2**63], dtype=np.uint64)}, {"input_ids": [1.5, 2.0]},
    ])  # fmt: skip
    assert isinstance(good, Row)
    assert good.input_ids.tolist() == [1, 2]
    for problem, reason in ((null, "input_ids is null"), (nulls, "input_ids[1] is null"), (huge, "outside the vocabulary"),
                            (floats, "input_ids[0] is 1.5;")):  # fmt: skip
        assert isinstance(problem, Problem)
        assert reason in problem


def trimmed(record: dict) -> list[int]:
    mask = record.get("attention_mask", [1] * len(record["input_ids"]))
    kept = [index for index, attended in enumerate(mask) if attended]
    assert len(kept) == kept[-1] + 1 - kept[0], "a mask with a hole was accepted"
    return record["input_ids"][kept[0] : kept[-1] + 1]


def test_agrees_with_json_on_mangled_lines():
    """After any one edit a line is read as json reads it, or refused."""
    line = b'{"a": [true], "input_ids": [1, 23, 4], "attention_mask": [1, 1, 0]}'
    rng = random.Random(0)
    make = TokenRecords(100)
    accepted = 0
    for _ in range(20_000):
        mangled = bytearray(line)
        position = rng.randrange(len(line))
        mangled[position : position + rng.randrange(3)] = bytes(
            rng.choice(b'{}[],": 01239tax') for _ in range(rng.randrange(3))
        )
        row = one_row(make, bytes(mangled))
        if isinstance(row, Row):
            accepted += 1
            assert row.input_ids.tolist() == trimmed(json.loads(mangled))
    assert accepted > 1000


REMEMBERED = b', "attention_mask": [1, 1]}'


@pytest.mark.parametrize(("line", "reason"), [
    (b'{"t": {"input_ids": [1, 2]' + REMEMBERED, "broken JSON"),
    (b'{"input_ids": [1, 2' + REMEMBERED, "broken JSON"),
    (b'{"input_ids": [1, 2],' + REMEMBERED, "broken JSON"),
    (b'{"input_ids": [1, 2]}' + REMEMBERED, "broken JSON"),
    (b'{"t": "}", "input_ids": [1, 2], "attention_mask": [1, 0]' + REMEMBERED, "given twice"),
    (b'{"input_ids": [1, 2, 3]' + REMEMBERED, "attention_mask 2"),
])  # fmt: skip
def test_a_remembered_mask_at_the_end_of_a_bad_line(line, reason):
    make = TokenRecords(100)
    assert isinstance(one_row(make, b'{"input_ids": [3, 4]' + REMEMBERED), Row)
    assert reason in str(one_row(make, line))
