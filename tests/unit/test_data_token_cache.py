"""The token cache: it returns what was written, its files appear whole or not at all, and damage is noticed."""

import gzip
import multiprocessing
import os
import random
import shutil
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from smp_train.data import convert, token_file, writer
from smp_train.data.arrays_file import read_header, write_arrays
from smp_train.data.bad_records import BadRecords
from smp_train.data.cache import FOLDER_NAME, STALE_SECONDS, TokenCache
from smp_train.data.files import DataFile, list_files
from smp_train.data.order import Order
from smp_train.data.rows import Recipe
from smp_train.data.source import Row
from smp_train.data.token_file import VERSION, read_index, row_checksum
from smp_train.errors import ConfigError, DataError, SmpTrainError
from tests.shards import opened, training, write_shard
from tests.tiers import slow

KINDS = ["same length", "ragged", "labels"]


def random_rows(kind, n, seed=0, vocab_size=97):
    """Return n tuples of ids and mask, and of labels where the kind has them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        length = 9 if kind == "same length" else rng.randrange(2, 40)
        ids = [rng.randrange(vocab_size) for _ in range(length)]
        labels = [rng.choice((-100, token)) for token in ids[:-1]] + [1]
        rows.append((ids, [1] * length, labels) if kind == "labels" else (ids, [1] * length))
    return rows


def check_rows(source, rows):
    assert len(source) == len(rows)
    for index in random.Random(1).sample(range(len(rows)), len(rows)):
        row, (ids, _, *labels) = source.row(index), rows[index]
        assert row.input_ids.tolist() == ids
        assert ([] if row.labels is None else [row.labels.tolist()]) == labels


def files_in(folder, pattern="*"):
    return sorted(path.name for path in (folder / FOLDER_NAME).glob(pattern))


@pytest.mark.parametrize("vocab_size", [97, 65_536, 65_537])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back(tmp_path, kind, vocab_size):
    rows = random_rows(kind, 75, vocab_size=vocab_size)
    rows[3][0][0] = vocab_size - 1
    for number, name in enumerate(["a.json", "b.json.gz", "c.jsonl"]):
        write_shard(tmp_path / name, rows[number * 25 : (number + 1) * 25], blanks=number == 1)
    source = opened(tmp_path, vocab_size)
    check_rows(source, rows)
    sizes = [len(ids) for ids, *_ in rows]
    assert source.lengths(range(10, 60)).tolist() == sizes[10:60]
    assert [source.find_token(token)[0] for token in (0, sum(sizes[:30]), sum(sizes) - 1)] == [0, 30, 74]
    assert [source.name(index) for index in (0, 26, 74)] == ["a.json:1", "b.json.gz:3", "c.jsonl:25"]
    firsts = [next(i for i, label in enumerate(row[-1]) if i and label != -100) for row in rows]
    stored = np.concatenate([source.first_targets(shard) for shard in range(3)]).tolist()
    assert stored == (firsts if kind == "labels" else [1] * 75)
    assert len(files_in(tmp_path, "*.tok")) == 1, "small shards share a file"
    assert {header.dtype for header in source.headers} == {"<u2" if vocab_size <= 65_536 else "<u4"}
    report = source.report()
    assert (report["rows"], report["tokens"], report["longest"]) == (75, sum(sizes), max(sizes))
    for index in (-1, 75):
        with pytest.raises(IndexError):
            source.row(index)


def test_each_shard_is_converted_by_one_rank_and_a_cache_moves_with_its_folder(tmp_path):
    many = [DataFile("", f"{number:05}", 2 + number % 7, "", "lines") for number in range(10_000)]
    shares = [convert.share(many, rank, 16) for rank in range(16)]
    assert sorted(file.name for share in shares for file in share) == [file.name for file in many]
    sizes = [sum(file.size for file in share) for share in shares]
    assert max(sizes) - min(sizes) < 10
    write_shard(tmp_path / "here" / "0.json", random_rows("ragged", 9))
    opened(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    before = files_in(tmp_path / "there")
    opened(tmp_path / "there")
    assert files_in(tmp_path / "there") == before
    opened(tmp_path / "there", 98)
    assert len(files_in(tmp_path / "there")) == len(before) + 2, "another vocabulary may refuse other rows"


def test_fingerprint_is_of_the_content(tmp_path):
    rows = random_rows("labels", 20)
    write_shard(tmp_path / "one" / "a.json", rows)
    write_shard(tmp_path / "two" / "other.json.gz", rows, blanks=True)
    first = opened(tmp_path / "one").fingerprint
    assert opened(tmp_path / "two").fingerprint == first
    ids, mask, labels = rows[7]
    changes = {
        "id": [*rows[:7], ([ids[0], ids[1] ^ 1, *ids[2:]], mask, labels), *rows[8:]],
        "label": [*rows[:7], (ids, mask, [labels[0] ^ 1 if labels[0] >= 0 else 3, *labels[1:]]), *rows[8:]],
        "order": [*rows[:3], rows[4], rows[3], *rows[5:]],
        "fewer": rows[:-1],
    }
    for change, changed in changes.items():
        write_shard(tmp_path / change / "a.json", changed)
        assert opened(tmp_path / change).fingerprint != first, change


def test_a_folder_has_labels_in_all_shards_or_in_none(tmp_path):
    write_shard(tmp_path / "0.json", random_rows("labels", 3))
    write_shard(tmp_path / "1.json", random_rows("ragged", 3))
    with pytest.raises(DataError, match=r"1\.json: has no labels, but .*0\.json has"):
        opened(tmp_path)


def test_bad_rows_are_left_out_and_counted(tmp_path, caplog):
    write_shard(tmp_path / "a.json", [[1, -2] if number in (7, 200) else [1, 2] for number in range(300)])
    write_shard(tmp_path / "b.json", random_rows("ragged", 100))
    source = opened(tmp_path, max_bad=0.01)
    assert len(source) == 398
    assert [source.name(index) for index in (6, 7, 298)] == ["a.json:7", "a.json:9", "b.json:1"]
    assert "2 of 400 records are bad" in caplog.text
    assert f"{tmp_path / 'a.json'}:8: token id -2" in caplog.text
    with pytest.raises(DataError, match=rf"^{tmp_path / 'a.json'}:8: token id -2 is outside"):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"2 of 400 .* --max_bad 0\.4.*a\.json:8"):
        opened(tmp_path, max_bad=0.004)


@pytest.mark.parametrize("content", [b"\n \n\n", gzip.compress(b"", mtime=0), b'{"input_ids": [1, -2]}\n'])
def test_a_shard_without_a_row(tmp_path, content):
    write_shard(tmp_path / "a.json", random_rows("ragged", 3))
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"^{tmp_path}/b\.json: empty shard"):
        opened(tmp_path, max_bad=1)
    assert files_in(tmp_path) == [".gitignore"], "nothing half done is left"


def test_several_processes_write_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setitem(convert.WORTH_BYTES, "tokens", 0)
    monkeypatch.setattr(convert, "FILE_BYTES", 0)
    fingerprints = []
    for name, processes in (("one", 1), ("three", 3)):
        for number in range(5):
            write_shard(tmp_path / name / f"{number}.json.gz", random_rows("ragged", 40, number))
        fingerprints.append(opened(tmp_path / name, processes=processes).fingerprint)
    assert fingerprints[0] == fingerprints[1]


def test_a_killed_worker_is_one_line(tmp_path, monkeypatch):
    """A conversion process that the kernel kills used to leave BrokenProcessPool."""
    monkeypatch.setitem(convert.WORTH_BYTES, "tokens", 0)
    for number in range(2):
        write_shard(tmp_path / f"{number}.json", random_rows("ragged", 50_000))
    wait = convert.wait

    def kill_first(pending, **options):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
        return wait(pending, **options)

    monkeypatch.setattr(convert, "wait", kill_first)
    monkeypatch.setattr(convert, "FILE_BYTES", 0)
    with pytest.raises(SmpTrainError, match=r"[01]\.json: a process that converted one of these files was killed"):
        opened(tmp_path, processes=2)


def write_one(folder, tick):
    """Convert the first shard of a folder as a rank does, with progress going to ``tick``."""
    files = list_files(str(folder))
    recipe = Recipe(files.kind, 97)
    cache = TokenCache(files, recipe.identity, None)
    group = files.files[:1]
    convert.write_group(cache.base(group), group, recipe.open(), 97, tick, None)


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(5, 5)), lambda path: path.unlink(True)])
def test_a_shard_that_changes_under_the_converter(tmp_path, change):
    path = write_shard(tmp_path / "a.json", random_rows("ragged", 300))
    with pytest.raises(DataError, match=r"a\.json: was changed or removed while it was being read"):
        write_one(tmp_path, lambda done: change(path))
    assert files_in(tmp_path) == [".gitignore"]


def test_no_writable_folder_in_the_data(tmp_path, monkeypatch, caplog):
    """A plain file instead of the cache folder stands for a folder that cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_shard(tmp_path / "data" / "a.json", random_rows("ragged", 3))
    (tmp_path / "data" / FOLDER_NAME).touch()
    with caplog.at_level("INFO"):
        check_rows(opened(tmp_path / "data"), random_rows("ragged", 3))
    assert "cannot hold the token cache" in caplog.text
    assert len(list((tmp_path / "home").rglob("*.idx"))) == 1
    with pytest.raises(DataError, match=r"cannot hold the token cache .*; give a --data_cache_dir"):
        opened(tmp_path / "data", cache_dir=str(tmp_path / "data" / FOLDER_NAME))
    for number in range(2):
        os.utime(write_shard(tmp_path / str(number) / "a.json", [[number, number + 1]]), ns=(7, 7))
    sources = [opened(tmp_path / str(number), cache_dir=str(tmp_path / "cache")) for number in range(2)]
    assert [source.row(0).input_ids.tolist() for source in sources] == [[0, 1], [1, 2]], "one folder for both"


def test_full_disk(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", random_rows("ragged", 30))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DataError, match=r"cannot write the token cache \(No space left.*free some space or"):
            opened(tmp_path)
    assert files_in(tmp_path) == [".gitignore"]
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"takes about .* are free; .*--streaming 1, .*another --data_cache_dir"):
        opened(tmp_path)


def _convert_and_hang(folder, reached):
    def tick(done):
        reached.set()
        time.sleep(600)

    write_one(folder, tick)


@pytest.mark.parametrize("skew", [-86_400, 86_400])
def test_kill_9_during_conversion(tmp_path, monkeypatch, skew):
    """Stale files are judged by the file server's clock, which may differ from this node's."""
    write_shard(tmp_path / "a.json", random_rows("ragged", 300))
    context = multiprocessing.get_context("forkserver")
    reached = context.Event()
    process = context.Process(target=_convert_and_hang, args=(str(tmp_path), reached))
    process.start()
    assert reached.wait(300)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (left,) = files_in(tmp_path, ".*.partial")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + skew)
    check_rows(opened(tmp_path), random_rows("ragged", 300))
    assert files_in(tmp_path, ".*.partial") == [left], "it may belong to another job that is still writing"
    make_old(tmp_path, left)
    write_shard(tmp_path / "b.json", random_rows("ragged", 3))
    opened(tmp_path)
    assert files_in(tmp_path, ".*.partial") == []


def make_old(folder, *names):
    for path in (folder / FOLDER_NAME / name for name in names):
        os.utime(path, (path.stat().st_mtime - 2 * STALE_SECONDS,) * 2)


def test_old_caches_of_changed_and_removed_shards_are_deleted(tmp_path, monkeypatch):
    """They used to stay for ever."""
    monkeypatch.setattr(convert, "FILE_BYTES", 0)
    write_shard(tmp_path / "b.json", random_rows("ragged", 3))
    for number in range(3):
        os.utime(write_shard(tmp_path / "a.json", random_rows("ragged", 3, number)), ns=(number, number))
        opened(tmp_path)
        make_old(tmp_path, *files_in(tmp_path, "[!.]*"))
        assert len(files_in(tmp_path, "*.tok")) == len(files_in(tmp_path, "*.idx")) == 2, "b, and a as it is now"
    (tmp_path / "b.json").unlink()
    orphan, foreign = "0" * 16 + "-1.tok", files_in(tmp_path, "*.tok")[0].partition("-")[0] + "-orphan.tok"
    for name in (orphan, foreign):
        (tmp_path / FOLDER_NAME / name).write_bytes(b"x")
    make_old(tmp_path, orphan, foreign)
    write_shard(tmp_path / "c.json", random_rows("ragged", 3))
    check_rows(opened(tmp_path), random_rows("ragged", 3, 2) + random_rows("ragged", 3))
    left = files_in(tmp_path, "*.tok")
    assert (orphan in left, foreign in left, len(left)) == (True, False, 3), "of another data set; orphan; a, c, other"


@pytest.mark.parametrize("suffix", [".tok", ".idx"])
def test_damaged_files_are_made_again(tmp_path, suffix):
    write_shard(tmp_path / "a.json", random_rows("ragged", 30))
    opened(tmp_path)
    path = next((tmp_path / FOLDER_NAME).glob("*" + suffix))
    content = path.read_bytes()
    for damage in (None, content[:-1], b"", content + b"x"):
        path.unlink() if damage is None else path.write_bytes(damage)
        check_rows(opened(tmp_path), random_rows("ragged", 30))
        assert path.read_bytes() == content


@pytest.mark.parametrize("kind", slow(KINDS, lambda kind: kind != "labels"))
def test_no_flipped_bit_is_read(tmp_path, kind):
    """Each byte of the cache in turn is damaged: it is made again, or a DataError names the file."""
    rows = random_rows(kind, 6)
    write_shard(tmp_path / "a.json", rows)
    opened(tmp_path)
    noticed = 0
    for path in (path for path in (tmp_path / FOLDER_NAME).iterdir() if path.suffix in (".tok", ".idx")):
        content = path.read_bytes()
        for offset in range(0, len(content), 1 if path.suffix == ".tok" else 3):
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
            try:
                check_rows(opened(tmp_path), rows)
            except DataError as error:
                noticed += str(path)[:-4] in str(error)
        path.write_bytes(content)
    assert noticed > 50


def test_an_open_cache_is_read_to_the_end_and_a_lost_or_cut_file_is_named(tmp_path):
    rows = random_rows("same length", 50)
    write_shard(tmp_path / "a.json", rows)
    source, unread = opened(tmp_path), opened(tmp_path)
    check_rows(source, rows)
    (tok,) = (tmp_path / FOLDER_NAME).glob("*.tok")
    for path in (tmp_path / "a.json", *(tmp_path / FOLDER_NAME).iterdir()):
        os.rename(path, tmp_path / f"{path.name}.gone")
    check_rows(source, rows)
    os.truncate(tmp_path / f"{tok.name}.gone", 100)
    with pytest.raises(DataError, match=r"row 40 \(a\.json:41\) does not match its checksum"):
        source.row(40)
    with pytest.raises(DataError, match="was removed"):
        unread.row(1)


def test_a_billion_rows_are_never_held(tmp_path):
    """A batch at the start, and one at 90 %, take the memory of their rows: indexes are mapped, the order computed."""
    rows, tokens, base = 10**6, 8, str(tmp_path / "0")
    file = DataFile("0", "0", 0, "", "lines")
    writer.write_token_file(base, [(file, [(1, Row(np.zeros(tokens, np.uint16)))], BadRecords())], 97)
    header = {**read_header(base + ".idx", VERSION).header[0], "rows": rows, "tokens": rows * tokens}
    starts, numbers = np.arange(rows + 1, dtype="<u8") * tokens, np.arange(1, rows + 1, dtype="<u8")
    crc = np.full(rows, row_checksum(bytes(2 * tokens), tokens), dtype="<u4")
    arrays = {"starts": starts, "numbers": numbers, "crc": crc, "first_targets": np.ones(rows, "<u4")}
    write_arrays(base + ".idx", VERSION, [header], arrays)
    os.truncate(base + ".tok", 2 * rows * tokens)
    source = token_file.TokenRows([file] * 1000, [(read_index(base), 0)] * 1000)
    tracemalloc.start()
    data = training(source, tokens, 2, order=Order(len(source), seed=3))
    for start in (0, 9 * 10**8):
        assert data.restore_state(data.state(start)) == start
        (batch,) = next(data.batches(start))
        assert (batch.input_ids.shape, len(source)) == ((2, tokens), 10**9)
    maps = Path("/proc/self/maps")  # of Linux; tracemalloc does not count torch's memory
    assert not maps.exists() or base in maps.read_text()
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
