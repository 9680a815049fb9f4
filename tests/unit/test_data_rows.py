"""What is a row and what is not, with the outcome of each kind of bad line."""

import json
import random
import re

import numpy as np
import pytest

from smp_train.data.rows import RowParser

GOOD = {
    "plain": (b'{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}', [1, 2, 3], None),
    "compact": (b'{"input_ids":[1,2,3],"attention_mask":[1,1,1]}', [1, 2, 3], None),
    "mask first": (b'{"attention_mask": [1, 1], "input_ids": [4, 5]}', [4, 5], None),
    "no mask": (b'{"input_ids": [4, 5]}', [4, 5], None),
    "crlf": (b'{"input_ids": [1, 2], "attention_mask": [1, 1]}\r\n', [1, 2], None),
    "right padded": (
        b'{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}',
        [1, 2, 0],
        [True, True, False],
    ),
    "left padded": (b'{"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1]}', [0, 1, 2], [False, True, True]),
    "holes": (b'{"input_ids": [3, 1, 2], "attention_mask": [1, 0, 1]}', [3, 1, 2], [True, False, True]),
    "extra keys": (b'{"id": 7, "input_ids": [1, 2], "ok": true, "attention_mask": [1, 1]}', [1, 2], None),
    "extra key last": (b'{"input_ids": [1, 2], "attention_mask": [1, 1], "note": null}', [1, 2], None),
    "field named in a string": (rb'{"t": "\"input_ids\": [9]", "input_ids": [1, 2]}', [1, 2], None),
    "mask named in a string": (rb'{"input_ids": [1, 2], "t": "x, \"attention_mask\""}', [1, 2], None),
    "mask named as a value": (b'{"input_ids": [1, 2], "t": "attention_mask"}', [1, 2], None),
    "escaped name": (rb'{"input\u005fids": [1, 2], "attention_mask": [1, 1]}', [1, 2], None),
    "other lists": (b'{"at": [[3], {"input_ids": [7]}], "input_ids": [1, 2], "attention_mask": [1, 1]}', [1, 2], None),
    "largest id": (b'{"input_ids": [0, 99]}', [0, 99], None),
    "labels last": (b'{"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]}', [1, 2], None, [-100, 2]),
    "labels first": (b'{"labels": [-100, 2], "input_ids": [1, 2], "attention_mask": [1, 1]}', [1, 2], None, [-100, 2]),
    "labels between": (b'{"input_ids": [1, 2], "labels": [5, 99], "attention_mask": [1, 1]}', [1, 2], None, [5, 99]),
    "labels, no mask": (b'{"input_ids": [1, 2], "labels": [-100, 0]}', [1, 2], None, [-100, 0]),
    "labels and mask": (
        b'{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 0]}',
        [1, 2, 3],
        [True, True, False],
        [-100, 2, 3],
    ),
}

# ruff: noqa: E501
BAD = {
    "byte order mark": (b'\xef\xbb\xbf{"input_ids": [1, 2], "attention_mask": [1, 1]}', "byte order mark"),
    "byte order mark, no mask": (b' \xef\xbb\xbf{"input_ids": [1, 2]}', "byte order mark"),
    "truncated": (b'{"input_ids": [1, 2, 3], "attention_mask": [1, 1', "broken JSON"),
    "truncated in ids": (b'{"input_ids": [1, 2, 3', "broken JSON"),
    "two objects": (b'{"input_ids": [1, 2]} {"input_ids": [3, 4]}', "broken JSON"),
    "carriage returns only": (b'{"input_ids": [1, 2]}\r{"input_ids": [3, 4]}', "broken JSON"),
    "pretty printed": (b"{", "broken JSON"),
    "NUL bytes": (b"\0\0\0\0", "broken JSON"),
    "not UTF-8": (b'{"input_ids": [1, 2], "t": "\xff"}', "broken JSON"),
    "NaN elsewhere": (b'{"input_ids": [1, 2], "t": NaN}', "broken JSON"),
    "nested without end": (b"[" * 100_000, "jq -c"),
    "nested within": (b'{"t": ' * 100_000, "broken JSON"),
    "UTF-16": ('{"input_ids": [1, 2]}'.encode("utf-16-le"), "broken JSON"),
    "NaN": (b'{"input_ids": [1, NaN]}', "broken JSON"),
    "array of objects": (b'[{"input_ids": [1, 2]}]', "jq -c"),
    "start of an array": (b"[", "jq -c"),
    "number": (b"17", "is an integer, not an object"),
    "string": (b'"input_ids"', "is a string, not an object"),
    "no ids": (b'{"attention_mask": [1, 1]}', "no input_ids"),
    "text": (b'{"text": "hello"}', "smp-train prepare"),
    "ids no list": (b'{"input_ids": 5, "attention_mask": [1]}', "input_ids is an integer; a list of integers"),
    "ids null": (b'{"input_ids": null}', "input_ids is null; a list"),
    "ids a string": (b'{"input_ids": "1 2 3"}', "input_ids is a string"),
    "empty": (b'{"input_ids": [], "attention_mask": []}', "input_ids is empty"),
    "float": (b'{"input_ids": [1, 2.7], "attention_mask": [1, 1]}', "input_ids[1] is 2.7, a float"),
    "whole float": (b'{"input_ids": [1, 2.0], "attention_mask": [1, 1]}', "input_ids[1] is 2.0, a float"),
    "bool": (b'{"input_ids": [1, true], "attention_mask": [1, 1]}', "input_ids[1] is true"),
    "null": (b'{"input_ids": [null, 1], "attention_mask": [1, 1]}', "input_ids[0] is null"),
    "string id": (b'{"input_ids": [1, "2"], "attention_mask": [1, 1]}', "input_ids[1] is a string"),
    "nested": (b'{"input_ids": [[1, 2]], "attention_mask": [1, 1]}', "input_ids[0] is a nested list"),
    "each nested": (b'{"input_ids": [[1], [2], [3]], "attention_mask": [1, 1, 1]}', "input_ids[0] is a nested list"),
    "each nested, no mask": (b'{"input_ids": [[1], [2], [3]]}', "input_ids[0] is a nested list"),
    "nested beside an empty list": (b'{"input_ids": [[1, 2], []], "attention_mask": [1, 1]}', "input_ids[0] is a nested list"),
    "nested further on": (b'{"input_ids": [1, [2]], "attention_mask": [1, 1]}', "input_ids[1] is a nested list"),
    "object": (b'{"input_ids": [{"a": 1}, 2], "attention_mask": [1, 1]}', "input_ids[0] is an object"),
    "mask nested": (b'{"input_ids": [1, 2], "attention_mask": [[1], [1]]}', "attention_mask[0] is a nested list"),
    "mask nested beside an empty list": (b'{"input_ids": [1, 2], "attention_mask": [[1, 1], []]}', "attention_mask[0] is a nested list"),
    "negative": (b'{"input_ids": [1, -1], "attention_mask": [1, 1]}', "token id -1 is outside the vocabulary [0, 100)"),
    "outside": (b'{"input_ids": [1, 100], "attention_mask": [1, 1]}', "token id 100 is outside the vocabulary [0, 100)"),
    "64 bits": (b'{"input_ids": [1, 9223372036854775808]}', "input_ids[1] is 9223372036854775808"),
    "65 bits": (b'{"input_ids": [1, 99999999999999999999]}', "input_ids[1] is 99999999999999999999"),
    "mask short": (b'{"input_ids": [1, 2], "attention_mask": [1]}', "input_ids has 2 elements and attention_mask 1"),
    "mask long": (b'{"input_ids": [1, 2], "attention_mask": [1, 1, 1]}', "input_ids has 2 elements and attention_mask 3"),
    "mask 2": (b'{"input_ids": [1, 2, 3], "attention_mask": [1, 2, 1]}', "attention_mask[1] is 2; use 0 or 1"),
    "mask -1": (b'{"input_ids": [1, 2], "attention_mask": [1, -1]}', "attention_mask[1] is -1; use 0 or 1"),
    "mask 256": (b'{"input_ids": [1, 2], "attention_mask": [1, 256]}', "attention_mask[1] is 256; use 0 or 1"),
    "mask float": (b'{"input_ids": [1, 2], "attention_mask": [1, 0.5]}', "attention_mask[1] is 0.5, a float"),
    "mask bool": (b'{"input_ids": [1, 2], "attention_mask": [1, true]}', "attention_mask[1] is true"),
    "mask null": (b'{"input_ids": [1, 2], "attention_mask": null}', "attention_mask is null; a list"),
    "nothing counted": (b'{"input_ids": [1, 2], "attention_mask": [0, 0]}', "nothing to learn"),
    "only the first counted": (b'{"input_ids": [1, 2], "attention_mask": [1, 0]}', "nothing to learn"),
    "one token": (b'{"input_ids": [1], "attention_mask": [1]}', "none to predict"),
    "ids twice": (b'{"input_ids": [1, 2], "input_ids": [3, 4]}', "input_ids is given twice"),
    "ids twice and mask": (b'{"input_ids": [1, 2], "input_ids": [3, 4], "attention_mask": [1, 1]}', "given twice"),
    "ids twice, once escaped": (rb'{"input_ids": [1, 2], "input\u005fids": [3, 4], "attention_mask": [1, 1]}', "input_ids is given twice"),
    "ids twice, escaped first": (rb'{"input\u005fids": [3, 4], "input_ids": [1, 2], "attention_mask": [1, 1]}', "input_ids is given twice"),
    "mask twice, once escaped": (rb'{"input_ids": [1, 2], "attention\u005fmask": [1, 0], "attention_mask": [1, 1]}', "attention_mask is given twice"),
    "labels twice": (b'{"input_ids": [1, 2], "labels": [1, 2], "labels": [-100, 2]}', "labels is given twice"),
    "mask twice": (b'{"input_ids": [1, 2], "attention_mask": [1, 1], "attention_mask": [1, 0]}', "given twice"),
}  # fmt: skip


BAD_LABELS = {
    "[1, 2]": "input_ids has 3 elements and labels 2",
    "[1, 2, 3, 4]": "input_ids has 3 elements and labels 4",
    "[1, 2, 100]": "labels[2] is 100, outside the vocabulary [0, 100)",
    "[1, -1, 2]": "labels[1] is -1, outside the vocabulary",
    "[1, 2, 9223372036854775808]": "labels[2] is 9223372036854775808",
    "[1, 2.0, 3]": "labels[1] is 2.0, a float",
    "[1, true, 3]": "labels[1] is true",
    "null": "labels is null",
    "[1, null, 3]": "labels[1] is null",
    "[[1], [2], [3]]": "labels[0] is a nested list",
    '"1 2 3"': "labels is a string",
    "3": "labels is an integer",
    "[-100, -100, -100]": "nothing to learn",
    "[1, -100, -100]": "nothing to learn",
    "[-100, -100, 3]": "labels and attention_mask counts no token",
}
for labels, reason in BAD_LABELS.items():
    mask = "[1, 1, 0]" if "and attention_mask" in reason else "[1, 1, 1]"
    rest = f'"input_ids": [1, 2, 3], "attention_mask": {mask}'
    BAD[f"labels {labels} last"] = (f'{{{rest}, "labels": {labels}}}'.encode(), reason)
    BAD[f"labels {labels} first"] = (f'{{"labels": {labels}, {rest}}}'.encode(), reason)


@pytest.fixture(params=["simdjson", "json"])
def either_parser(request, monkeypatch):
    if request.param == "json":
        monkeypatch.setattr("smp_train.data.rows.Parser", None)


@pytest.mark.parametrize("name", GOOD)
def test_good_rows(name, either_parser):
    line, ids, mask, *labels = GOOD[name]
    parser = RowParser(100)
    # Twice: the second time the mask may be a remembered one.
    for _ in range(2):
        row = parser(line)
        assert row.input_ids.tolist() == ids
        assert row.input_ids.dtype == np.int64
        assert (None if row.counted is None else row.counted.tolist()) == mask
        assert ([] if row.labels is None else [row.labels.tolist()]) == labels


@pytest.mark.parametrize("name", BAD)
def test_bad_rows(name, either_parser):
    line, reason = BAD[name]
    fresh, used = RowParser(100), RowParser(100)
    used(b'{"input_ids": [1, 2], "attention_mask": [1, 1]}')
    for parser in (fresh, used):
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(reason)) as caught:
                parser(line)
            assert "\n" not in str(caught.value)


def test_long_line():
    ids = [7] * 200_000
    got, counted, *_ = RowParser(8)(json.dumps({"input_ids": ids, "attention_mask": [1] * len(ids)}).encode())
    assert got.size == 200_000
    assert counted is None


def test_agrees_with_json_on_mangled_lines():
    """Whatever one edit does to a line: it is read as json reads it, or it is refused."""
    line = b'{"a": [true], "input_ids": [1, 23, 4], "attention_mask": [1, 1, 0]}'
    rng = random.Random(0)
    parser = RowParser(100)
    read = 0
    for _ in range(20_000):
        mangled = bytearray(line)
        place = rng.randrange(len(line))
        mangled[place : place + rng.randrange(3)] = bytes(
            rng.choice(b'{}[],": 01239tax') for _ in range(rng.randrange(3))
        )
        try:
            ids, counted, *_ = parser(bytes(mangled))
        except ValueError:
            continue
        read += 1
        record = json.loads(mangled)
        assert ids.tolist() == record["input_ids"]
        mask = record.get("attention_mask", [1] * ids.size)
        assert ([1] * ids.size if counted is None else counted.tolist()) == mask
    assert read > 1000


@pytest.mark.parametrize("ragged", [False, True])
def test_remembered_masks_are_the_right_ones(ragged):
    rng = random.Random(1)
    parser = RowParser(100)
    for _ in range(500):
        n = rng.randrange(2, 6) if ragged else 4
        mask = [1, 1] + [rng.randrange(2) for _ in range(n - 2)]
        ids = [rng.randrange(100) for _ in range(n)]
        got, counted, *_ = parser(json.dumps({"input_ids": ids, "attention_mask": mask}).encode())
        assert got.tolist() == ids
        assert ([True] * n if counted is None else counted.tolist()) == [bool(m) for m in mask]


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
    parser = RowParser(100)
    assert parser(b'{"input_ids": [3, 4]' + REMEMBERED).counted is None
    with pytest.raises(ValueError, match=reason):
        parser(line)
