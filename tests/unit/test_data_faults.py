"""Token files that are damaged, forged, removed, too many or huge: noticed, rebuilt, and no slower to open."""

import contextlib
import json
import os
import time
import zlib
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import pytest

from smp_train.data import token_file
from smp_train.data.learnable import leave_out_unlearnable
from smp_train.data.order import Order
from smp_train.data.token_cache import BESIDE
from smp_train.data.token_dataset import open_prepared
from smp_train.data.token_file import MAGIC, PREFIX, VERSION, crc32, read_index
from smp_train.data.token_writer import write_rows
from smp_train.errors import DataError
from tests.shards import convert, training, write_shard
from tests.unit.test_data_cache import KINDS, check_rows, opened, plain_rows, random_rows


@pytest.mark.parametrize("suffix", [".tok", ".idx"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "longer"])
def test_damaged_files_are_rebuilt(tmp_path, suffix, damage):
    write_shard(tmp_path / "a.json", random_rows("ragged, padded", 30))
    opened(tmp_path)
    path = next((tmp_path / BESIDE).glob("*" + suffix))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-1], "empty": b"", "longer": content + b"x"}[damage])
    assert convert(str(tmp_path), vocab_size=97) == 1
    assert path.read_bytes() == content
    check_rows(opened(tmp_path), random_rows("ragged, padded", 30))


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_read(tmp_path, kind):
    """Each byte of the cache in turn is damaged: what is read is right, or a DataError names the file."""
    rows = random_rows(kind, 6)
    write_shard(tmp_path / "a.json", rows)
    opened(tmp_path)
    learnable = len(leave_out_unlearnable(opened(tmp_path), 4, long="truncate", max_bad=1))
    noticed = 0
    for path in (path for path in (tmp_path / BESIDE).iterdir() if path.suffix in (".tok", ".idx")):
        content = path.read_bytes()
        for place in range(0, len(content), 1 if path.suffix == ".tok" else 3):
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            try:
                source = open_prepared(str(tmp_path / BESIDE), 97)
                check_rows(source, rows)
                assert len(leave_out_unlearnable(source, 4, long="truncate", max_bad=1)) == learnable
            except DataError as error:
                noticed += str(path)[:-4] in str(error)
        path.write_bytes(content)
    assert noticed > 50


def test_faults_under_the_reader(tmp_path, monkeypatch):
    """Shards are not needed once converted, an open cache is read to the end, and what is lost is named."""
    write_shard(tmp_path / "a.json", plain_rows(50))
    source = opened(tmp_path)
    check_rows(source, plain_rows(50))
    (tok,) = (tmp_path / BESIDE).glob("*.tok")

    def stale(*_):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(token_file.os, "preadv", stale)
        with pytest.raises(DataError, match=r"\.tok: cannot be read \(Stale file handle\)"):
            source.row(1)
    for path in (tmp_path / "a.json", *(tmp_path / BESIDE).iterdir()):
        os.rename(path, tmp_path / f"{path.name}.gone")
    check_rows(source, plain_rows(50))
    os.truncate(tmp_path / f"{tok.name}.gone", 100)
    with pytest.raises(DataError, match=r"row 40 \(a\.json:41\) does not match its checksum"):
        source.row(40)
    source.found[0][0].close()
    with pytest.raises(DataError, match=r"\.tok: was removed"):
        source.row(1)


def files_of_two(folder, count):
    """Write so many token files of two rows; return the rows."""
    block = np.arange(1, 9).reshape(2, 4)
    for n in range(count):
        write_rows(f"{n:02}", str(folder / f"{n:02}"), 97, block + n)
    return [((row + n).tolist(), [1] * 4) for n in range(count) for row in block]


def open_below(folder):
    """Return how many files below a folder this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(path.startswith(f"{folder}/") for path in found)


@pytest.fixture
def limit(monkeypatch):
    """Return the soft and hard limit of descriptors, to set before the first is opened."""
    found = [0, 0]
    monkeypatch.setattr(token_file, "_opened", deque())
    monkeypatch.setattr(token_file, "most_open", cache(token_file.most_open.__wrapped__))
    monkeypatch.setattr(token_file.resource, "getrlimit", lambda what: tuple(found))
    monkeypatch.setattr(token_file.resource, "setrlimit", lambda what, pair: found.__setitem__(0, pair[0]))
    return found


def test_more_token_files_than_may_be_open(tmp_path, limit):
    limit[:] = [6, 6]
    rows = files_of_two(tmp_path, 12)
    source, other = (open_prepared(str(tmp_path), 97) for _ in range(2))
    for one in (source, other, source):
        check_rows(one, rows)
        assert open_below(tmp_path) == 3, "of all data sets together"
    del source, other, one
    assert open_below(tmp_path) == 0, "a data set that is dropped closes its files"


def test_however_many_files_each_is_opened_once(tmp_path, monkeypatch, limit):
    """What a row costs does not depend on how many files there are: each is opened, and its index read, once."""
    limit[:] = [12, 1000]
    rows = files_of_two(tmp_path, 40)
    source = open_prepared(str(tmp_path), 97)
    opens, reads = [], []
    opener, reader = os.open, np.fromfile
    monkeypatch.setattr(token_file.os, "open", lambda *given: opens.append(given[0]) or opener(*given))
    monkeypatch.setattr(np, "fromfile", lambda path, *given, **how: reads.append(path) or reader(path, *given, **how))
    order = Order(len(source), seed=3)
    for row in order.rows(np.arange(3 * 80))[1].tolist():
        assert source.row(row).input_ids.tolist() == rows[row][0]
    assert len(opens) == len(set(opens)) == len(reads) == len(set(reads)) == 40
    assert limit == [1000, 1000], "raised as far as it goes"


def index_with(header, crc, **changes):
    """Return an index of one shard up to its arrays, with some of its header changed."""
    text = json.dumps({"version": VERSION, "crc": crc, "shards": [{**header.__dict__, **changes}]}).encode()
    return PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text


FORGED: dict[str, dict[str, Any]] = {
    "no rows": {"rows": 0, "tokens": 0},
    "more rows than its arrays": {"rows": 10**6, "tokens": 16 * 10**6, "tok_bytes": 32 * 10**6},
    "rows of a terabyte": {"row_length": 10**12},
    "rows of unequal lengths without their starts": {"row_length": None},
    "a negative number of rows": {"rows": -4},
    "no arrays": {"arrays": {}},
    "an array of objects": {"arrays": {"crc": ["O", 4]}},
    "an unknown kind of mask": {"mask": "none of these"},
    "a kind of ids that is none": {"dtype": "<f8"},
    "text for a number": {"longest": "long"},
    "masks that are not there": {"mask": "bits"},
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_index_is_made_again(forged, tmp_path):
    write_shard(tmp_path / "a.json", plain_rows(4))
    opened(tmp_path)
    (path,) = tmp_path.glob("**/*.idx")
    whole = path.read_bytes()
    end = 16 + int.from_bytes(whole[8:12], "little")
    (header,) = read_index(str(path)[:-4]).headers
    path.write_bytes(index_with(header, 0, **FORGED[forged]) + whole[end:])
    check_rows(opened(tmp_path), plain_rows(4))
    assert path.read_bytes() == whole


ROWS, SHARDS, TOKENS = 10**6, 1000, 8


def test_a_billion_rows_start_and_resume_at_once(tmp_path):
    """1e9 rows in 1,000 prepared shards, of which only what the first batches ask for is really on disk.

    It takes two to three times the CPU seconds of reading 1,000 headers, which is the least that it could
    (benchmarks/README.md has the figures). The best of five of each, as the machine may be slow, and busy.
    """
    write_rows("x", str(tmp_path / "one"), 97, np.zeros((1, TOKENS), dtype=np.uint16))
    one = read_index(str(tmp_path / "one"))
    (header,) = one.headers
    crc = np.full(ROWS, one.arrays(0)["crc"][0], dtype="<u4")
    sum_of_crc = crc32(crc)
    for suffix in (".tok", ".idx"):
        (tmp_path / f"one{suffix}").unlink()
    order = Order(ROWS * SHARDS, seed=3)
    starts = [0, ROWS * SHARDS * 9 // 10]
    asked = {int(row) // ROWS for start in starts for row in order.rows(np.arange(start, start + 2))[1]}
    for number in range(SHARDS):
        name = f"{number:04}"
        index = index_with(
            header, sum_of_crc, source=name, rows=ROWS, tok_bytes=ROWS * 2 * TOKENS, tokens=ROWS * TOKENS,
            arrays={"crc": ["<u4", ROWS]},
        )  # fmt: skip
        with open(tmp_path / f"{name}.idx", "wb") as file:
            file.write(index + (crc.tobytes() if number in asked else b""))
            file.truncate(len(index) + 4 * ROWS)
        with open(tmp_path / f"{name}.tok", "wb") as file:
            file.truncate(ROWS * 2 * TOKENS)

    def first_batch(start: int) -> float:
        began = time.process_time()
        source = open_prepared(str(tmp_path), 97)
        data = training(source, TOKENS, 2, order=Order(len(source), seed=3))
        assert data.check_state({**data.state(start)}) == start
        batches = data.batches(start)
        (batch,) = next(batches)
        took = time.process_time() - began
        batches.close()
        assert batch.input_ids.shape == (2, TOKENS)
        assert len(source) == 10**9
        return took

    def headers() -> float:
        began = time.process_time()
        for number in range(SHARDS):
            with open(tmp_path / f"{number:04}.idx", "rb") as file:
                content = file.read(4096)
            _, length, _ = PREFIX.unpack_from(content)
            assert json.loads(content[PREFIX.size :][:length])["shards"][0]["rows"] == ROWS
        return time.process_time() - began

    for start in starts:
        took = [(first_batch(start), headers()) for _ in range(5)]
        first, least = (min(each) for each in zip(*took, strict=True))
        print(f"first batch at row {start}: {1000 * first:.0f} ms of CPU; the headers alone: {1000 * least:.0f} ms")
        assert first <= 8 * least
