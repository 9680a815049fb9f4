"""The token cache: what is read is what was written, files appear whole or not at all, damage is noticed."""

import contextlib
import gc
import gzip
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_train.data import conversion, token_cache, token_file, token_writer
from smp_train.data.open_data import open_place
from smp_train.data.order import Order
from smp_train.data.token_cache import BESIDE, TokenCache
from smp_train.data.token_dataset import open_prepared
from smp_train.data.token_file import ShardRows, read_index
from smp_train.data.token_writer import write_rows
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from tests.shards import convert

ROOT = Path(__file__).resolve().parents[2]


def write_shard(path: Path, rows, blanks: bool = False) -> None:
    lines = []
    for ids, mask in rows:
        record = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
        lines.append(json.dumps(record) + "\n" + ("\n" if blanks else ""))
    text = "".join(lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)


def plain_rows(n, length=6, base=0):
    return [([(base + i * length + k) % 97 for k in range(length)], [1] * length) for i in range(n)]


def random_rows(kind, n, seed=0):
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        length = 9 if kind in ("same length", "same length, padded") else rng.randrange(2, 40)
        mask = [1] * length
        if "padded" in kind:
            valid = rng.randrange(2, length + 1)
            mask = [1] * valid + [0] * (length - valid)
        elif kind == "holes":
            mask = [rng.randrange(2) for _ in range(length - 1)] + [1]
        rows.append(([rng.randrange(97) for _ in range(length)], mask))
    return rows


def check_rows(source, rows):
    assert len(source) == len(rows)
    for i in random.Random(1).sample(range(len(rows)), len(rows)):
        ids, mask = rows[i]
        row = source.row(i)
        assert row.input_ids.tolist() == ids
        assert (row.counted is None) == (mask is None or all(mask))
        if row.counted is not None:
            assert row.counted.tolist() == [bool(m) for m in mask]


KINDS = ["same length", "same length, padded", "ragged", "ragged, padded", "holes"]


@pytest.mark.parametrize("vocab_size", [97, 65_536, 65_537])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back(tmp_path, kind, vocab_size):
    rows = random_rows(kind, 70)
    rows[3] = ([vocab_size - 1] * len(rows[3][0]), rows[3][1])
    for n, name in enumerate(["a.json", "b.json.gz", "c.jsonl"]):
        write_shard(tmp_path / name, rows[n * 25 : (n + 1) * 25], blanks=n == 1)
    source = open_place(str(tmp_path), vocab_size=vocab_size)
    check_rows(source, rows)
    assert source.name(24) == "a.json:25"
    assert source.name(27) == "b.json.gz:5", "blank lines count"
    assert source.shards[-1] == range(50, 70)
    report = source.report()
    assert report["rows"] == 70
    assert report["tokens"] == sum(len(ids) for ids, _ in rows)
    assert report["counted_tokens"] == sum(sum(mask) for _, mask in rows)
    assert report["longest"] == max(len(ids) for ids, _ in rows)
    first = next(i for i, (ids, _) in enumerate(rows) if len(ids) == report["longest"])
    assert report["longest_at"] == str(tmp_path / source.name(first))
    (tok,) = (tmp_path / BESIDE).glob("*.tok")
    headers = read_index(str(tok)[:-4]).headers
    assert {header.source for header in headers} == {"a.json", "b.json.gz", "c.jsonl"}, "small shards share a file"
    assert {header.dtype for header in headers} == {"<u2" if vocab_size <= 65_536 else "<u4"}
    with pytest.raises(IndexError):
        source.row(70)


def test_the_second_start_converts_nothing(tmp_path):
    write_shard(tmp_path / "a.json", plain_rows(5))
    write_shard(tmp_path / "b.json", plain_rows(5))
    assert convert(str(tmp_path), vocab_size=97) == 2
    assert convert(str(tmp_path), vocab_size=97) == 0
    assert convert(str(tmp_path), vocab_size=98) == 2, "another vocabulary may refuse other rows"


def test_shares_are_disjoint_and_complete(tmp_path):
    for n in range(7):
        write_shard(tmp_path / f"{n}.json", plain_rows(1 + n * 3))
    assert sum(convert(str(tmp_path), vocab_size=97, rank=rank, world=3) for rank in range(3)) == 7
    assert len(list((tmp_path / BESIDE).glob("*.idx"))) == 3


def test_a_rank_that_sees_no_cache_of_the_others_makes_its_own(tmp_path):
    for n in range(4):
        write_shard(tmp_path / "data" / f"{n}.json", plain_rows(3, base=n))
    node = str(tmp_path / "node-local")
    assert convert(str(tmp_path / "data"), vocab_size=97, cache_dir=node, rank=1, world=2) == 2
    source = open_place(str(tmp_path / "data"), vocab_size=97, cache_dir=node)
    check_rows(source, [row for n in range(4) for row in plain_rows(3, base=n)])


def test_fingerprint_is_of_the_content(tmp_path):
    rows = random_rows("ragged, padded", 20)
    write_shard(tmp_path / "one" / "a.json", rows)
    write_shard(tmp_path / "two" / "other.json.gz", rows, blanks=True)
    first = open_place(str(tmp_path / "one"), vocab_size=97).fingerprint
    assert open_place(str(tmp_path / "two"), vocab_size=97).fingerprint == first
    for n, change in enumerate(["id", "mask", "order", "fewer"]):
        changed = [(list(ids), list(mask)) for ids, mask in rows]
        if change == "id":
            changed[7][0][1] ^= 1
        elif change == "mask":
            changed[7] = (changed[7][0], [1, 1] + [1 - changed[7][1][-1]] * (len(changed[7][0]) - 2))
        elif change == "order":
            changed[3], changed[4] = changed[4], changed[3]
        else:
            changed.pop()
        write_shard(tmp_path / f"changed{n}" / "a.json", changed)
        assert open_place(str(tmp_path / f"changed{n}"), vocab_size=97).fingerprint != first, change


def test_bad_lines_are_named(tmp_path):
    write_shard(tmp_path / "a.json", plain_rows(3))
    path = tmp_path / "b.json"
    path.write_bytes(b'{"input_ids": [1, 2]}\n\n{"input_ids": [1, 32000]}\n')
    with pytest.raises(DataError) as caught:
        convert(str(tmp_path), vocab_size=32000)
    assert str(caught.value).startswith(f"{path}:3: token id 32000 is outside the vocabulary [0, 32000); ")
    assert os.listdir(tmp_path / BESIDE) == [".gitignore"], "nothing half done is left"
    path.write_bytes(b"\n \n\n")
    with pytest.raises(DataError, match=r"b\.json: empty shard \(no row in it\)"):
        convert(str(tmp_path), vocab_size=32000)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"b\.json: empty shard \(no row in it\)"):
        convert(str(tmp_path), vocab_size=32000)


def bad_rows(folder, bad, good=300):
    lines = ['{"input_ids": [1, 2]}'] * good
    for place in bad:
        lines[place] = '{"input_ids": [1, -2]}'
    (folder / "a.json").write_text("\n".join(lines) + "\n")
    write_shard(folder / "b.json", plain_rows(100))


def test_bad_rows_are_left_out_and_said(tmp_path, caplog):
    bad_rows(tmp_path, [7, 200])
    source = open_place(str(tmp_path), vocab_size=97, max_bad=0.01)
    assert len(source) == 398
    assert [source.name(i) for i in (6, 7, 298)] == ["a.json:7", "a.json:9", "b.json:1"]
    assert source.report()["lines_left_out"] == 2
    assert "left out 2 of 400 lines that are no rows" in caplog.text
    assert f"{tmp_path / 'a.json'}:8: token id -2" in caplog.text
    again = open_place(str(tmp_path), vocab_size=97, max_bad=0.01)
    assert again.fingerprint == source.fingerprint
    with pytest.raises(DataError, match=rf"^{tmp_path / 'a.json'}:8: token id -2 is outside"):
        open_place(str(tmp_path), vocab_size=97)
    too_many = r"2 of 400 lines are no rows, more than --max_bad 0\.4000%; the first is .*a\.json:8"
    with pytest.raises(DataError, match=too_many):
        open_place(str(tmp_path), vocab_size=97, max_bad=0.004)


def test_skipping_needs_something_to_keep(tmp_path):
    bad_rows(tmp_path, range(300))
    with pytest.raises(DataError, match=r"a\.json: empty shard \(none of its lines is a row \(1: token id -2"):
        open_place(str(tmp_path), vocab_size=97, max_bad=1)
    path = tmp_path / "a.json"
    path.write_bytes(gzip.compress(b'{"input_ids": [1, 2]}\n' * 900)[:-9])
    with pytest.raises(DataError, match=r"gzip stream is damaged or cut short"):
        open_place(str(tmp_path), vocab_size=97, max_bad=1)


def test_several_processes_write_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "WORTH_BYTES", 0)
    monkeypatch.setattr(conversion, "WAIT_SECONDS", 0.01)
    found = []
    for name, processes in (("one", 1), ("three", 3)):
        for n in range(5):
            write_shard(tmp_path / name / f"{n}.json.gz", random_rows("ragged, padded", 40, n))
        assert convert(str(tmp_path / name), vocab_size=97, processes=processes) == 5
        found.append(open_place(str(tmp_path / name), vocab_size=97).fingerprint)
    assert found[0] == found[1]
    (tmp_path / "three/2.json.gz").write_bytes(gzip.compress(b'{"input_ids": [1, "x"]}\n'))
    (tmp_path / "three/3.json.gz").write_bytes(gzip.compress(b'{"input_ids": [1, 2]}\n'))
    with pytest.raises(DataError, match=r"2\.json\.gz:1: input_ids\[1\] is a string"):
        convert(str(tmp_path / "three"), vocab_size=97, processes=3)


def test_a_changed_shard_is_converted_again(tmp_path):
    path = tmp_path / "a.json"
    write_shard(path, plain_rows(3))
    before = open_place(str(tmp_path), vocab_size=97)
    write_shard(path, plain_rows(3, base=1))
    os.utime(path, ns=(1, 1))
    after = open_place(str(tmp_path), vocab_size=97)
    check_rows(before, plain_rows(3))
    check_rows(after, plain_rows(3, base=1))
    assert before.fingerprint != after.fingerprint


def test_a_shard_that_changes_under_the_converter(tmp_path):
    path = tmp_path / "a.json"
    write_shard(path, plain_rows(300))
    to = TokenCache(str(tmp_path), 97, None).destination
    shard = list_shards(str(tmp_path))[0]
    with pytest.raises(DataError, match=r"a\.json: changed while it was being read"):
        to.write([(shard, None)], lambda done: os.utime(path, ns=(5, 5)))
    assert os.listdir(to.folder) == [".gitignore"]
    shard = list_shards(str(tmp_path))[0]
    with pytest.raises(DataError, match=r"a\.json: vanished while it was being read .*put it back"):
        to.write([(shard, None)], lambda done: path.unlink(missing_ok=True))


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_conversion_that_is_told_to_stop_blames_no_shard(tmp_path, name):
    """At the end of a run, or when a peer has failed: a message about a damaged shard would be that run's last."""
    write_shard(tmp_path / name, plain_rows(300))

    def stop(done):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        TokenCache(str(tmp_path), 97, None).destination.write([(list_shards(str(tmp_path))[0], None)], stop)
    assert os.listdir(tmp_path / BESIDE) == [".gitignore"]


@pytest.mark.parametrize("suffix", [".tok", ".idx"])
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "longer"])
def test_damaged_files_are_rebuilt(tmp_path, suffix, damage):
    write_shard(tmp_path / "a.json", random_rows("ragged, padded", 30))
    open_place(str(tmp_path), vocab_size=97)
    path = next((tmp_path / BESIDE).glob("*" + suffix))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": content[:-1], "empty": b"", "longer": content + b"x"}[damage])
    assert convert(str(tmp_path), vocab_size=97) == 1
    assert path.read_bytes() == content
    check_rows(open_place(str(tmp_path), vocab_size=97), random_rows("ragged, padded", 30))


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_is_read(tmp_path, kind):
    """Each byte of the cache in turn is damaged: what is read is right, or a DataError names the file."""
    rows = random_rows(kind, 6)
    write_shard(tmp_path / "a.json", rows)
    open_place(str(tmp_path), vocab_size=97)
    noticed = 0
    for path in sorted((tmp_path / BESIDE).glob("*.*x")) + sorted((tmp_path / BESIDE).glob("*.tok")):
        content = path.read_bytes()
        for place in range(0, len(content), 1 if path.suffix == ".tok" else 3):
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            found = read_index(str(path)[:-4])
            if found is None:
                noticed += 1
                continue
            try:
                reader = ShardRows(found, 0)
                for i, (ids, mask) in enumerate(rows):
                    row = reader.row(i)
                    assert row.input_ids.tolist() == ids
                    assert (mask if row.counted is None else row.counted.tolist()) == [bool(m) for m in mask]
            except DataError as error:
                noticed += f"{path}"[:-4] in str(error) and "remove this file" in str(error)
        path.write_bytes(content)
    assert noticed > 50


def test_a_cache_truncated_under_the_reader_is_an_error(tmp_path):
    write_shard(tmp_path / "a.json", plain_rows(50))
    source = open_place(str(tmp_path), vocab_size=97)
    source.row(0)
    os.truncate(next((tmp_path / BESIDE).glob("*.tok")), 100)
    with pytest.raises(DataError, match=r"row 40 \(a\.json:41\) does not match its checksum"):
        source.row(40)


def test_a_file_system_that_fails_under_the_reader_is_an_error(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", plain_rows(4))
    source = open_place(str(tmp_path), vocab_size=256)
    source.row(0)

    def stale(*_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(token_file.os, "preadv", stale)
    with pytest.raises(DataError, match=r"\.tok: cannot be read \(Stale file handle\)"):
        source.row(1)


def files_of_two(folder, count):
    """Write so many token files of two rows; return the rows."""
    block = np.arange(1, 9).reshape(2, 4)
    for n in range(count):
        write_rows(f"{n:02}", str(folder / f"{n:02}"), 97, block + n)
    return [((row + n).tolist(), None) for n in range(count) for row in block]


def open_below(folder):
    """Return how many files below a folder this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(path.startswith(f"{folder}/") for path in found)


def count_anew(monkeypatch):
    """Let the limit be asked for anew, with no file open."""
    monkeypatch.setattr(token_file, "_opened", deque())
    monkeypatch.setattr(token_file, "most_open", cache(token_file.most_open.__wrapped__))


def test_more_token_files_than_may_be_open(tmp_path, monkeypatch):
    count_anew(monkeypatch)
    monkeypatch.setattr(token_file.resource, "getrlimit", lambda what: (6, 6))
    rows = files_of_two(tmp_path, 12)
    source = open_prepared(str(tmp_path), 97)
    check_rows(source, rows)
    assert open_below(tmp_path) == 3
    other = open_prepared(str(tmp_path), 97)
    check_rows(other, rows)
    assert open_below(tmp_path) == 3, "of all data sets together"
    check_rows(source, rows)
    del source, other
    assert open_below(tmp_path) == 0, "a data set that is dropped closes its files"


def test_however_many_files_each_is_opened_once(tmp_path, monkeypatch):
    """What a row costs does not depend on how many files there are: each is opened, and its index read, once."""
    limit = [12, 1000]
    count_anew(monkeypatch)
    monkeypatch.setattr(token_file.resource, "getrlimit", lambda what: tuple(limit))
    monkeypatch.setattr(token_file.resource, "setrlimit", lambda what, pair: limit.__setitem__(0, pair[0]))
    rows = files_of_two(tmp_path, 40)
    source = open_prepared(str(tmp_path), 97)
    opened, read = [], []
    opener, reader = os.open, np.fromfile
    monkeypatch.setattr(token_file.os, "open", lambda *given: opened.append(given[0]) or opener(*given))
    monkeypatch.setattr(np, "fromfile", lambda path, *given, **how: read.append(path) or reader(path, *given, **how))
    order = Order(len(source), seed=3)
    for epoch in range(3):
        for row in order.rows(np.arange(80) + 80 * epoch)[1].tolist():
            assert source.row(row).input_ids.tolist() == rows[row][0]
    assert len(opened) == len(set(opened)) == len(read) == len(set(read)) == 40
    assert limit == [1000, 1000], "raised as far as it goes"


def test_a_cache_moves_with_its_folder(tmp_path):
    write_shard(tmp_path / "here" / "a.json", plain_rows(3))
    convert(str(tmp_path / "here"), vocab_size=97)
    os.rename(tmp_path / "here", tmp_path / "there")
    assert convert(str(tmp_path / "there"), vocab_size=97) == 0


def test_one_cache_folder_for_two_data_sets_of_one_shape(tmp_path):
    for n in range(2):
        write_shard(tmp_path / str(n) / "a.json", [([n, n + 1], [1, 1])])
        os.utime(tmp_path / str(n) / "a.json", ns=(7, 7))
    cache = str(tmp_path / "cache")
    sources = [open_place(str(tmp_path / str(n)), vocab_size=97, cache_dir=cache) for n in range(2)]
    assert [source.row(0).input_ids.tolist() for source in sources] == [[0, 1], [1, 2]]
    assert not (tmp_path / "0" / BESIDE).exists()


def test_no_place_beside_the_data(tmp_path, monkeypatch, caplog):
    """A plain file where the cache folder would be stands for a folder that cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_shard(tmp_path / "data" / "a.json", plain_rows(3))
    (tmp_path / "data" / BESIDE).touch()
    with caplog.at_level("INFO"):
        check_rows(open_place(str(tmp_path / "data"), vocab_size=97), plain_rows(3))
    assert "cannot hold the token cache" in caplog.text
    assert len(list((tmp_path / "home").rglob("*.idx"))) == 1
    assert convert(str(tmp_path / "data"), vocab_size=97) == 0
    with pytest.raises(DataError, match=r"cannot hold the token cache .*; give a --data_cache_dir"):
        convert(str(tmp_path / "data"), vocab_size=97, cache_dir=str(tmp_path / "data" / BESIDE))


READ_ONLY = """
import os, sys
sys.path.insert(0, {root!r})
from smp_train.data.open_data import open_place
from smp_train.data.token_cache import BESIDE
os.setgid(65534)
os.setuid(65534)
source = open_place({data!r}, vocab_size=97)
assert not os.path.exists(os.path.join({data!r}, BESIDE))
print(len(source), os.path.dirname(source.found[0][0].base))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user who may not write")
def test_read_only_data_folder(tmp_path):
    # Not below tmp_path, whose folders are root's alone.
    base = Path(tempfile.mkdtemp(prefix="smp-train-test-", dir="/tmp"))
    base.chmod(0o755)
    try:
        write_shard(base / "data" / "a.json", plain_rows(3))
        (base / "home").mkdir(mode=0o777)
        os.chmod(base / "home", 0o777)
        environment = {**os.environ, "XDG_CACHE_HOME": str(base / "home")}
        code = READ_ONLY.format(root=str(ROOT), data=str(base / "data"))
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["3", str(base / "home/smp_train/tokens")]
    finally:
        shutil.rmtree(base)


def test_full_disk(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", plain_rows(3))

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match=r"cannot write the token cache \(No space left.*free some space or give a --data"
    ):
        convert(str(tmp_path), vocab_size=97)
    assert os.listdir(tmp_path / BESIDE) == [".gitignore"]


def test_killed_between_the_two_files(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", plain_rows(30))

    class Killed(BaseException):
        pass

    def killed(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(token_writer, "atomic_file", killed)
        with pytest.raises(Killed):
            convert(str(tmp_path), vocab_size=97)
    assert [path.suffix for path in (tmp_path / BESIDE).glob("[!.]*")] == [".tok"]
    assert convert(str(tmp_path), vocab_size=97) == 1
    check_rows(open_place(str(tmp_path), vocab_size=97), plain_rows(30))


def _convert_and_hang(folder, reached):
    def tick(done):
        reached.set()
        time.sleep(600)

    TokenCache(folder, 97, None).destination.write([(list_shards(folder)[0], None)], tick)


def test_kill_9_during_conversion(tmp_path):
    write_shard(tmp_path / "a.json", plain_rows(300))
    context = multiprocessing.get_context("forkserver")
    reached = context.Event()
    process = context.Process(target=_convert_and_hang, args=(str(tmp_path), reached))
    process.start()
    assert reached.wait(300)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = list((tmp_path / BESIDE).glob(".*.tmp"))
    assert len(left) == 1
    assert convert(str(tmp_path), vocab_size=97) == 1
    check_rows(open_place(str(tmp_path), vocab_size=97), plain_rows(300))
    assert left[0].exists(), "it may belong to another job that is still writing"
    os.utime(left[0], (time.time() - 2 * token_cache.STALE_SECONDS,) * 2)
    write_shard(tmp_path / "b.json", plain_rows(3))
    convert(str(tmp_path), vocab_size=97)
    assert not left[0].exists()


def _convert_all(folder, start):
    start.wait(300)
    convert(folder, vocab_size=97)
    return open_place(folder, vocab_size=97).fingerprint


def _job(folder, start, results):
    results.put(_convert_all(folder, start))


def test_two_jobs_at_once(tmp_path):
    rows = []
    for n in range(5):
        rows += plain_rows(200, base=n)
        write_shard(tmp_path / f"{n}.json.gz", plain_rows(200, base=n))
    context = multiprocessing.get_context("forkserver")
    start, results = context.Barrier(2), context.Queue()
    jobs = [context.Process(target=_job, args=(str(tmp_path), start, results)) for _ in range(2)]
    for job in jobs:
        job.start()
    found = [results.get(timeout=300) for _ in jobs]
    for job in jobs:
        job.join()
    source = open_place(str(tmp_path), vocab_size=97)
    assert found == [source.fingerprint] * 2
    check_rows(source, rows)
    assert not list((tmp_path / BESIDE).glob(".*.tmp"))


def index_with(header, changes):
    """Return an index of one shard up to its arrays, with some of its header changed."""
    whole = {"version": token_file.VERSION, "crc": 0, "shards": [{**header.__dict__, **changes}]}
    text = json.dumps(whole).encode()
    return token_file.PREFIX.pack(token_file.MAGIC, len(text), zlib.crc32(text)) + text


def test_opening_does_not_grow_with_the_rows(tmp_path):
    """Headers alone are read at the start: a shard of 1e9 rows opens as fast as one of ten."""
    write_shard(tmp_path / "a.json", plain_rows(10))
    convert(str(tmp_path), vocab_size=97)
    base = str(next((tmp_path / BESIDE).glob("*.idx")))[:-4]
    (header,) = read_index(base).headers
    rows = 10**9
    huge = {"rows": rows, "tok_bytes": rows * 12, "tokens": rows * 6, "arrays": {"crc": ["<u4", rows]}}
    content = index_with(header, huge)
    with open(base + ".idx", "wb") as file:
        file.write(content)
        file.truncate(len(content) + rows * 4)
    os.truncate(base + ".tok", rows * 12)
    gc.disable()  # what other tests have left takes its own time
    try:
        began = time.process_time()
        source = open_place(str(tmp_path), vocab_size=97)
        assert len(source) == rows
        took = time.process_time() - began
    finally:
        gc.enable()
    assert took < 1.0, "the first time, too: later ones may have something to go by"
    assert np.array_equal(source.shards[-1][-1:], [rows - 1])


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
    rows = [list(open_place(str(tmp_path), vocab_size=97).row(row).input_ids) for row in range(4)]
    (path,) = tmp_path.glob("**/*.idx")
    whole = path.read_bytes()
    end = 16 + int.from_bytes(whole[8:12], "little")
    (header,) = read_index(str(path)[:-4]).headers
    path.write_bytes(index_with(header, FORGED[forged]) + whole[end:])
    source = open_place(str(tmp_path), vocab_size=97)
    assert [list(source.row(row).input_ids) for row in range(4)] == rows
    assert path.read_bytes() == whole
