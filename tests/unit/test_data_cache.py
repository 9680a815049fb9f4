"""The token cache: what is read is what was written, and files appear whole or not at all."""

import gzip
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from smp_train.data import conversion, token_cache, token_writer
from smp_train.data.open_data import open_place
from smp_train.data.shard import Shard
from smp_train.data.token_cache import BESIDE, TokenCache, share
from smp_train.data.token_file import read_index
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from tests.shards import convert, write_shard

ROOT = Path(__file__).resolve().parents[2]
GOOD = b'{"input_ids": [1, 2]}\n'


def plain_rows(n, length=6, base=0):
    return [([(base + i * length + k) % 97 for k in range(length)], [1] * length) for i in range(n)]


KINDS = ["same length", "same length, padded", "ragged", "ragged, padded", "holes", "labels"]


def random_rows(kind, n, seed=0):
    """Return (ids, mask), and labels where the kind has them."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        length = 9 if kind.startswith("same length") else rng.randrange(2, 40)
        ids, mask = [rng.randrange(97) for _ in range(length)], [1] * length
        if "padded" in kind:
            valid = rng.randrange(2, length + 1)
            mask = [1] * valid + [0] * (length - valid)
        elif kind == "holes":
            mask = [rng.randrange(2) for _ in range(length - 1)] + [1]
        labels = [rng.choice((-100, one)) for one in ids[:-1]] + [1]
        rows.append((ids, mask, labels) if kind == "labels" else (ids, mask))
    return rows


def check_rows(source, rows):
    assert len(source) == len(rows)
    for i in random.Random(1).sample(range(len(rows)), len(rows)):
        row, (ids, mask, *labels) = source.row(i), rows[i]
        assert row.input_ids.tolist() == ids
        assert (None if row.counted is None else row.counted.tolist()) == (None if all(mask) else list(map(bool, mask)))
        assert ([] if row.labels is None else [row.labels.tolist()]) == labels


def opened(folder, vocab_size=97, **options):
    return open_place(str(folder), vocab_size=vocab_size, **options)


@pytest.mark.parametrize("vocab_size", [97, 65_536, 65_537])
def test_rows_come_back(tmp_path, vocab_size):
    rows = random_rows("holes", 70)
    rows[3] = ([vocab_size - 1] * len(rows[3][0]), rows[3][1])
    for n, name in enumerate(["a.json", "b.json.gz", "c.jsonl"]):
        write_shard(tmp_path / name, rows[n * 25 : (n + 1) * 25])
    check_rows(opened(tmp_path, vocab_size), rows)
    (tok,) = (tmp_path / BESIDE).glob("*.tok")
    headers = read_index(str(tok)[:-4]).headers
    assert {header.source for header in headers} == {"a.json", "b.json.gz", "c.jsonl"}, "small shards share a file"
    assert {header.dtype for header in headers} == {"<u2" if vocab_size <= 65_536 else "<u4"}


def test_lines_of_other_systems(tmp_path):
    folder = tmp_path / "é with space"
    folder.mkdir()
    (folder / "a.json").write_bytes(b'\r\n{"input_ids": [1, 2, 3]}\r\n\r\n{"input_ids": [4, 5]}')
    source = opened(folder)
    assert [source.row(n).input_ids.tolist() for n in range(2)] == [[1, 2, 3], [4, 5]]
    assert [source.name(n) for n in range(2)] == ["a.json:2", "a.json:4"]


def test_each_shard_is_converted_once_by_one_rank(tmp_path):
    for n in range(7):
        write_shard(tmp_path / "here" / f"{n}.json", plain_rows(1 + n * 3))
    here = str(tmp_path / "here")
    assert sum(convert(here, vocab_size=97, rank=rank, world=3) for rank in range(3)) == 7
    assert len(list((tmp_path / "here" / BESIDE).glob("*.idx"))) == 3
    assert convert(here, vocab_size=97) == 0
    os.rename(here, tmp_path / "there")
    assert convert(str(tmp_path / "there"), vocab_size=97) == 0, "a cache moves with its folder"
    assert convert(str(tmp_path / "there"), vocab_size=98) == 7, "another vocabulary may refuse other rows"


def test_shares_of_ten_thousand_shards_are_of_one_size():
    shards = [Shard("", f"{number:05}", 2 + number % 7, 0) for number in range(10_000)]
    shares = [share(shards, rank, 16) for rank in range(16)]
    assert sorted(shard.name for one in shares for shard in one) == [shard.name for shard in shards]
    sizes = [sum(shard.size for shard in one) for one in shares]
    assert max(sizes) - min(sizes) < 10


def test_fingerprint_is_of_the_content(tmp_path):
    rows = random_rows("ragged, padded", 20)
    write_shard(tmp_path / "one" / "a.json", rows)
    write_shard(tmp_path / "two" / "other.json.gz", rows, blanks=True)
    first = opened(tmp_path / "one").fingerprint
    assert opened(tmp_path / "two").fingerprint == first
    ids, mask = rows[7]
    changes = {
        "id": [*rows[:7], ([ids[0], ids[1] ^ 1, *ids[2:]], mask), *rows[8:]],
        "mask": [*rows[:7], (ids, [1, 1] + [1 - mask[-1]] * (len(ids) - 2)), *rows[8:]],
        "order": [*rows[:3], rows[4], rows[3], *rows[5:]],
        "fewer": rows[:-1],
    }
    for change, changed in changes.items():
        write_shard(tmp_path / change / "a.json", changed)
        assert opened(tmp_path / change).fingerprint != first, change


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD + b'\n{"input_ids": [1, 32000]}\n',
            r"b\.json:3: token id 32000 is outside the vocabulary \[0, 32000\); ",
        ),
        (b"\n \n\n", r"b\.json: empty shard \(no row in it\)"),
        (gzip.compress(b"", mtime=0), r"b\.json: empty shard \(no row in it\)"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    write_shard(tmp_path / "a.json", plain_rows(3))
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path}/{message}"):
        convert(str(tmp_path), vocab_size=32000)
    assert os.listdir(tmp_path / BESIDE) == [".gitignore"], "nothing half done is left"


def bad_rows(folder, bad, good=300):
    write_shard(folder / "a.json", [[1, -2] if place in bad else [1, 2] for place in range(good)])
    write_shard(folder / "b.json", plain_rows(100))


def test_bad_rows_are_left_out_and_said(tmp_path, caplog):
    bad_rows(tmp_path, [7, 200])
    source = opened(tmp_path, max_bad=0.01)
    assert len(source) == 398
    assert [source.name(i) for i in (6, 7, 298)] == ["a.json:7", "a.json:9", "b.json:1"]
    assert source.report()["lines_left_out"] == 2
    assert "left out 2 of 400 lines" in caplog.text
    assert f"{tmp_path / 'a.json'}:8: token id -2" in caplog.text
    assert opened(tmp_path, max_bad=0.01).fingerprint == source.fingerprint
    with pytest.raises(DataError, match=rf"^{tmp_path / 'a.json'}:8: token id -2 is outside"):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"2 of 400 lines .* --max_bad 0\.4000%; the first is .*a\.json:8"):
        opened(tmp_path, max_bad=0.004)


def test_skipping_needs_something_to_keep(tmp_path):
    bad_rows(tmp_path, range(300))
    with pytest.raises(DataError, match=r"a\.json: empty shard \(none of its lines is a row \(1: token id -2"):
        opened(tmp_path, max_bad=1)
    (tmp_path / "a.json").write_bytes(gzip.compress(GOOD * 900)[:-9])
    with pytest.raises(DataError, match=r"gzip stream is damaged or cut short"):
        opened(tmp_path, max_bad=1)


def test_several_processes_write_what_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "WORTH_BYTES", 0)
    monkeypatch.setattr(conversion, "WAIT_SECONDS", 0.01)
    found = []
    for name, processes in (("one", 1), ("three", 3)):
        for n in range(5):
            write_shard(tmp_path / name / f"{n}.json.gz", random_rows("ragged, padded", 40, n))
        assert convert(str(tmp_path / name), vocab_size=97, processes=processes) == 5
        found.append(opened(tmp_path / name).fingerprint)
    assert found[0] == found[1]
    write_shard(tmp_path / "three/2.json.gz", [[1, "x"]])
    write_shard(tmp_path / "three/3.json.gz", [[1, 2]])
    with pytest.raises(DataError, match=r"2\.json\.gz:1: input_ids\[1\] is a string"):
        convert(str(tmp_path / "three"), vocab_size=97, processes=3)


def test_a_changed_shard_is_converted_again(tmp_path):
    path = write_shard(tmp_path / "a.json", plain_rows(3))
    before = opened(tmp_path)
    write_shard(path, plain_rows(3, base=1))
    os.utime(path, ns=(1, 1))
    after = opened(tmp_path)
    check_rows(before, plain_rows(3))
    check_rows(after, plain_rows(3, base=1))
    assert before.fingerprint != after.fingerprint


def test_a_shard_that_changes_under_the_converter(tmp_path):
    path = write_shard(tmp_path / "a.json", plain_rows(300))
    to = TokenCache(str(tmp_path), 97, None).destination
    for what, change in (
        ("changed", lambda done: os.utime(path, ns=(5, 5))),
        ("vanished", lambda done: path.unlink(missing_ok=True)),
    ):
        with pytest.raises(DataError, match=rf"a\.json: {what} while it was being read"):
            to.write([(list_shards(str(tmp_path))[0], None)], change)
        assert os.listdir(to.folder) == [".gitignore"]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_conversion_that_is_stopped_blames_no_shard(tmp_path, name):
    """At the end of a run, or when a peer has failed: a message about a damaged shard would be that run's last."""
    write_shard(tmp_path / name, plain_rows(300))

    def stop(done):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        TokenCache(str(tmp_path), 97, None).destination.write([(list_shards(str(tmp_path))[0], None)], stop)
    assert os.listdir(tmp_path / BESIDE) == [".gitignore"]


def test_one_cache_folder_for_two_data_sets_of_one_shape(tmp_path):
    for n in range(2):
        os.utime(write_shard(tmp_path / str(n) / "a.json", [[n, n + 1]]), ns=(7, 7))
    cache = str(tmp_path / "cache")
    sources = [opened(tmp_path / str(n), cache_dir=cache) for n in range(2)]
    assert [source.row(0).input_ids.tolist() for source in sources] == [[0, 1], [1, 2]]
    assert not (tmp_path / "0" / BESIDE).exists()


def test_no_place_beside_the_data(tmp_path, monkeypatch, caplog):
    """A plain file where the cache folder would be stands for a folder that cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_shard(tmp_path / "data" / "a.json", plain_rows(3))
    (tmp_path / "data" / BESIDE).touch()
    with caplog.at_level("INFO"):
        check_rows(opened(tmp_path / "data"), plain_rows(3))
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
def test_read_only_data_folder():
    # Not below tmp_path, whose folders are root's alone.
    base = Path(tempfile.mkdtemp(prefix="smp-train-test-", dir="/tmp"))
    base.chmod(0o755)
    try:
        write_shard(base / "data" / "a.json", plain_rows(3))
        (base / "home").mkdir()
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
    with pytest.raises(DataError, match=r"cannot write the token cache \(No space left.*free some space or.* --data"):
        convert(str(tmp_path), vocab_size=97)
    assert os.listdir(tmp_path / BESIDE) == [".gitignore"]


def test_killed_between_the_two_files(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", plain_rows(30))

    def killed(*args):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(token_writer, "atomic_file", killed)
        with pytest.raises(SystemExit):
            convert(str(tmp_path), vocab_size=97)
    assert [path.suffix for path in (tmp_path / BESIDE).glob("[!.]*")] == [".tok"]
    assert convert(str(tmp_path), vocab_size=97) == 1
    check_rows(opened(tmp_path), plain_rows(30))


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
    (left,) = (tmp_path / BESIDE).glob(".*.tmp")
    assert convert(str(tmp_path), vocab_size=97) == 1
    check_rows(opened(tmp_path), plain_rows(300))
    assert left.exists(), "it may belong to another job that is still writing"
    os.utime(left, (time.time() - 2 * token_cache.STALE_SECONDS,) * 2)
    write_shard(tmp_path / "b.json", plain_rows(3))
    convert(str(tmp_path), vocab_size=97)
    assert not left.exists()


@pytest.mark.parametrize("skew", [-86_400, 86_400])
def test_a_file_server_with_another_clock(tmp_path, monkeypatch, skew):
    """Shards written tomorrow or yesterday, by this node's clock: what is stale is judged by the server's own."""
    path, now = write_shard(tmp_path / "a.json", [[1, 2, 3]]), time.time()
    os.utime(path, (now + skew, now + skew))
    monkeypatch.setattr(time, "time", lambda: now - skew)
    other = tmp_path / BESIDE / ".b.json.tok.x.tmp"
    write_shard(other, [])
    assert [convert(str(tmp_path), vocab_size=97) for _ in range(2)] == [1, 0]
    assert other.exists(), "another job is writing it"


def _job(folder, start, results):
    start.wait(300)
    convert(folder, vocab_size=97)
    results.put(opened(folder).fingerprint)


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
    source = opened(tmp_path)
    assert found == [source.fingerprint] * 2
    check_rows(source, rows)
    assert not list((tmp_path / BESIDE).glob(".*.tmp"))
