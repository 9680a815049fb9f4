"""What data sets and their storage do to a run that meant well; and that size alone does not slow its start."""

import json
import os
import time
import zlib

import numpy as np
import pytest

from smp_train.data.open_data import open_place
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import TrainingData
from smp_train.data.token_cache import BESIDE, share
from smp_train.data.token_dataset import open_prepared
from smp_train.data.token_file import MAGIC, PREFIX, VERSION, Header, crc32, read_index
from smp_train.data.token_writer import write_rows
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from tests.shards import convert

LINE = b'{"input_ids": [1, 2, 3]}'


def test_lines_of_other_systems(tmp_path):
    folder = tmp_path / "é with space"
    folder.mkdir()
    (folder / "a.json").write_bytes(b"\r\n" + LINE + b"\r\n\r\n" + b'{"input_ids": [4, 5]}')
    source = open_place(str(folder), vocab_size=97)
    assert [source.row(n).input_ids.tolist() for n in range(2)] == [[1, 2, 3], [4, 5]]
    assert [source.name(n) for n in range(2)] == ["a.json:2", "a.json:4"]


def test_text_among_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "hello"}')
    with pytest.raises(DataError, match=r"b\.jsonl:1: .*input_ids.*smp-train prepare"):
        open_place(str(tmp_path), vocab_size=97)


@pytest.mark.slow
def test_ten_thousand_shards_are_listed_and_dealt_out(tmp_path):
    for number in range(10_000):
        os.mknod(tmp_path / f"{number:05}.json")
        os.truncate(tmp_path / f"{number:05}.json", 2 + number % 7)
    shards = list_shards(str(tmp_path))
    assert len(shards) == 10_000
    hands = [share(shards, rank, 16) for rank in range(16)]
    assert sorted(shard.name for hand in hands for shard in hand) == [shard.name for shard in shards]
    sizes = [sum(shard.size for shard in hand) for hand in hands]
    assert max(sizes) - min(sizes) < 10


@pytest.mark.parametrize("skew", [-86_400, 86_400])
def test_a_file_server_with_another_clock(tmp_path, monkeypatch, skew):
    """Shards written tomorrow or yesterday, by this node's clock: what is stale is judged by the server's own."""
    (tmp_path / "a.json").write_bytes(LINE)
    now = time.time()
    os.utime(tmp_path / "a.json", (now + skew, now + skew))
    monkeypatch.setattr(time, "time", lambda: now - skew)
    cache = tmp_path / BESIDE
    cache.mkdir()
    (cache / ".b.json.tok.x.tmp").write_bytes(b"another job is writing this")
    assert convert(str(tmp_path), vocab_size=97) == 1
    assert convert(str(tmp_path), vocab_size=97) == 0
    assert (cache / ".b.json.tok.x.tmp").exists()


def test_files_that_are_removed_under_the_reader(tmp_path):
    """Shards are not needed once converted, and an open cache is read to the end."""
    (tmp_path / "a.json").write_bytes(LINE + b"\n" + LINE)
    source = open_place(str(tmp_path), vocab_size=97)
    source.row(0)
    os.unlink(tmp_path / "a.json")
    for path in (tmp_path / BESIDE).iterdir():
        path.unlink()
    assert source.row(1).input_ids.tolist() == [1, 2, 3]
    source.found[0][0].close()
    with pytest.raises(DataError, match=r"\.tok: "):
        source.row(1)


ROWS, SHARDS, TOKENS = 10**6, 1000, 8


def index_of(rows: int, dense: bool, name: str, header: Header, crc: np.ndarray):
    """Return the index of ``rows`` rows of zeros, its checksums left out (a hole in the file) unless ``dense``."""
    fields = {
        "source": name, "rows": rows, "tok_bytes": rows * 2 * TOKENS, "tokens": rows * TOKENS,
        "arrays": {"crc": ["<u4", rows]},
    }  # fmt: skip
    whole = {"version": VERSION, "crc": crc32(crc), "shards": [{**header.__dict__, **fields}]}
    text = json.dumps(whole).encode()
    prefix = PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text
    return prefix + (crc.tobytes() if dense else b"")


def test_a_billion_rows_start_and_resume_at_once(tmp_path):
    """1e9 rows in 1,000 prepared shards, of which only what the first batches ask for is really on disk.

    It takes two to three times the CPU seconds of reading 1,000 headers, which is the least that it could
    (benchmarks/README.md has the figures). The best of five of each, as the machine may be slow, and busy.
    """
    write_rows("x", str(tmp_path / "one"), 97, np.zeros((1, TOKENS), dtype=np.uint16))
    one = read_index(str(tmp_path / "one"))
    (header,) = one.headers
    crc = np.full(ROWS, one.arrays(0)["crc"][0], dtype="<u4")
    for suffix in (".tok", ".idx"):
        (tmp_path / f"one{suffix}").unlink()
    order = Order(ROWS * SHARDS, seed=3)
    starts = [0, ROWS * SHARDS * 9 // 10]
    asked = {int(row) // ROWS for start in starts for row in order.rows(np.arange(start, start + 2))[1]}
    for number in range(SHARDS):
        name = f"{number:04}"
        with open(tmp_path / f"{name}.idx", "wb") as file:
            file.write(index_of(ROWS, number in asked, name, header, crc))
            file.truncate(len(index_of(ROWS, False, name, header, crc)) + 4 * ROWS)
        with open(tmp_path / f"{name}.tok", "wb") as file:
            file.truncate(ROWS * 2 * TOKENS)

    def first_batch(start: int) -> float:
        began = time.process_time()
        source = open_prepared(str(tmp_path), 97)
        data = TrainingData(
            source, Order(len(source), seed=3), seq_len=TOKENS, micro_batch=2, accumulation=1, dp_rank=0, dp_size=1,
            prefetch=0,
        )  # fmt: skip
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
