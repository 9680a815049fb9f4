"""`--shuffle window:K` on sets larger than the disk: two windows at hand, the rows those of the whole set."""

import contextlib
import errno
import gc
import gzip
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from smp_train import distributed
from smp_train.data import folder_lock, staging, token_writer, windowed
from smp_train.data.blend import BlendOrder, Joined
from smp_train.data.layout import lay_out
from smp_train.data.open_data import open_place
from smp_train.data.open_data import open_place as open_source
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import TrainingData
from smp_train.data.prepare.writing import write_block
from smp_train.data.source import shards
from smp_train.data.token_writer import write_rows
from smp_train.data.window_index import WindowIndex
from smp_train.data.windowed import Windowed, assemble
from smp_train.errors import DataError
from smp_train.storage.client import ATTEMPTS, client

SHARDS, ROWS, WINDOW = 11, 20, 2


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("boto3")
    pytest.importorskip("moto.server")
    from tests.s3_server import serving

    with serving() as proxy:
        yield proxy


@pytest.fixture
def bucket(server, monkeypatch, request):
    """Return (client, name) of a bucket of this test's own, on a server that forgot the tests before."""
    from tests import s3_server

    name = s3_server.bucket(server, monkeypatch, request.node.nodeid).removeprefix("s3://")
    server.gets.clear()
    return client(), name


def put_folder(bucket, key, folder):
    for path in folder.iterdir():
        if path.is_file():
            bucket[0].put_object(Bucket=bucket[1], Key=f"{key}/{path.name}", Body=path.read_bytes())


def write_shards(folder: Path, count=SHARDS, rows=ROWS, length=lambda n: 16) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        lines = [json.dumps({"input_ids": [n, r, *[7] * (length(n + r) - 2)]}).encode() for r in range(rows + n)]
        (folder / f"{n:02}.json.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n", mtime=0))
    return str(folder)


def opened(place, cache, window=WINDOW, **options):
    """Open a place as a run of one rank does."""
    return open_place(
        place, vocab_size=300, cache_dir=str(cache), window=window, ranks=distributed.detect(), **options
    )


def training(source, order=None, dp_rank=0, dp_size=1, micro_batch=2, seq_len=16, epochs=None):
    order = order or Order(len(source), 5, f"window:{WINDOW}", shards(source))
    return TrainingData(
        source, order, seq_len=seq_len, micro_batch=micro_batch, accumulation=1, dp_rank=dp_rank, dp_size=dp_size,
        epochs=epochs,
    )  # fmt: skip


def in_order(place, cache, positions):
    """Return the names of the rows at positions, of the set opened whole."""
    whole = open_source(place, vocab_size=300, cache_dir=str(cache))
    rows = Order(len(whole), 5, f"window:{WINDOW}", whole.shards).rows(np.arange(*positions))[1]
    return [whole.name(row) for row in rows.tolist()]


def read(data, consumed, until):
    """Return the names of the samples of steps from one position to another."""
    names = []
    batches = data.batches(consumed)
    with contextlib.closing(batches):
        while consumed < until:
            names += [name for batch in next(batches) for name in batch.samples]
            consumed += data.global_batch
    return names


def measured(monkeypatch, folder):
    """Return a list that takes the bytes in a folder at every file that comes."""
    sizes, replace = [], os.replace

    def size():
        total = 0
        for path in Path(folder).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                total += path.stat().st_size
        return total

    def noted(source, target):
        sizes.append(size())
        replace(source, target)

    monkeypatch.setattr(staging.os, "replace", noted)
    return sizes


@pytest.mark.parametrize("kind", ["json.gz", "prepared"])
def test_an_epoch_of_s3_on_a_small_disk(bucket, tmp_path, monkeypatch, kind):
    """The rows of the whole set, in the same order, out of a folder that never holds more than three windows."""
    rng, made = np.random.default_rng(0), tmp_path / "made"
    made.mkdir()
    for n in range(SHARDS):
        # Of ids that gzip cannot make smaller, so that a copy is as large as what it becomes.
        block = rng.integers(0, 256, (20, 512))
        if kind == "prepared":
            write_rows(f"{n:02}", str(made / f"{n:02}"), 300, block)
        else:
            write_block("shards", str(made), f"{n:02}", block, 300, True)
    put_folder(bucket, "t", made)
    largest = max(20 * 512 * 2, *(path.stat().st_size for path in made.iterdir()))
    sizes = measured(monkeypatch, tmp_path / "cache")
    place, cache = f"s3://{bucket[1]}/t", tmp_path / "cache"
    source = opened(place, cache)
    total = len(source)
    assert isinstance(source, Windowed)
    names = read(training(source, seq_len=512), 0, 2 * total)
    assert len(sizes) > 2 * SHARDS - 2 * WINDOW
    indexes = sum(path.stat().st_size for path in cache.rglob("*.idx"))
    assert max(sizes) - indexes <= 3 * WINDOW * largest
    assert 4.5 * WINDOW * largest < SHARDS * 20 * 512 * 2, "else the bound is none"
    assert not list(cache.rglob(".*-*/*")), "nothing half done is left"
    whole = open_place(place, vocab_size=300, cache_dir=str(tmp_path / "whole"))
    assert whole.fingerprint == source.fingerprint, "a run may go on with the one or the other"
    rows = Order(total, 5, f"window:{WINDOW}", whole.shards).rows(np.arange(2 * total))[1]
    assert names[: 2 * total] == [whole.name(row) for row in rows.tolist()]
    assert sorted(names[:total]) == sorted(names[total : 2 * total]) == sorted(map(whole.name, range(total)))


def as_ranks(place, cache, world, consumed, until):
    """Train with the ranks of one node as threads, which vote at every step; return what each has read, or raised."""
    barrier = threading.Barrier(world, timeout=300)
    results = [None] * world
    failures = [None] * world
    first = WindowIndex(place, prepared=False, window=WINDOW, vocab_size=300, cache_dir=str(cache))
    slot, lock = staging.claim_slot(first.destination.folder)
    list(first.count(slot, 0, 1, 1, 1))

    def meet(what, steps):
        """Run the steps of the one rank that has some, and raise its failure on all."""
        rank = int(threading.current_thread().name)
        try:
            list(steps)
            failures[rank] = None
        except DataError as error:
            failures[rank] = error
        barrier.wait()
        failure = next(filter(None, failures), None)
        barrier.wait()
        if failure is not None:
            raise failure

    def run(rank):
        place_of = WindowIndex(place, prepared=False, window=WINDOW, vocab_size=300, cache_dir=str(cache))
        source = assemble(place_of, WINDOW, slot, lambda of: staging.Stager(of, lock=lock) if rank == 0 else None)
        data = training(source, dp_rank=rank, dp_size=world)
        barrier.wait()
        names, failed = [], None
        batches = data.batches(consumed)
        with contextlib.closing(batches):
            for _ in range(-(-(until - consumed) // data.global_batch)):
                try:
                    names.append([name for batch in next(batches) for name in batch.samples])
                except DataError as error:
                    failed = error
                votes[rank] = failed
                barrier.wait()
                stop = any(votes)
                barrier.wait()
                if stop:
                    break
        results[rank] = next(filter(None, votes), names)

    votes = [None] * world
    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(world)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed, "in_rounds", meet)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert lock is not None
    lock.release()  # as the end of the job's processes does; the collector may come to it later
    return results


def in_turn(results):
    """Return the samples of all ranks in the order of positions."""
    return [name for step in zip(*results, strict=True) for names in step for name in names]


def test_epochs_end_with_every_row_used_as_often(tmp_path):
    place = write_shards(tmp_path / "data")
    total = sum(ROWS + n for n in range(SHARDS))
    data = training(opened(place, tmp_path / "cache"), micro_batch=total // 2 + 1, epochs=2)
    names = read(data, 0, 2 * total)
    assert len(names) > 2 * total, "the last batch is filled up"
    assert [name for name in names if name] == in_order(place, tmp_path / "whole", (0, 2 * total))


def test_ranks_share_a_stage_and_come_and_go(bucket, server, tmp_path):
    """Each shard of a window is fetched once for all ranks of a node; a resume in mid-window has other ranks."""
    put_folder(bucket, "t", Path(write_shards(tmp_path / "data")))
    place = f"s3://{bucket[1]}/t"
    total = sum(ROWS + n for n in range(SHARDS))
    cut = 6 * ((total // 2) // 6)
    opened(place, tmp_path / "cache").stager.lock.release()  # else the ranks take another slot
    server.gets.clear()
    first = in_turn(as_ranks(place, tmp_path / "cache", 3, 0, cut))
    gets = [key for key, _ in server.gets if key.endswith(".gz")]
    assert len(set(gets)) == len(gets), "once for all three"
    there = {int(path.stem) for path in (tmp_path / "cache").rglob("slot-*/*.idx")}  # put last
    assert there
    server.gets.clear()
    second = in_turn(as_ranks(place, tmp_path / "cache", 2, cut, 2 * total))
    gets = [int(key[2:4]) for key, _ in server.gets if key.endswith(".gz")]
    assert there.isdisjoint(gets[:2]), "what the first left is read, not fetched"
    names = in_order(place, tmp_path / "whole", (0, 2 * total))
    assert first + second[: 2 * total - cut] == names


FAULTS = {
    "denied": (["AccessDenied"] * 40, r"access denied \(403 AccessDenied\)"),
    "replaced": ("replaced", r"was replaced while it was being read \(412\)"),
    "full": ("full", r"cannot write the token cache \(No space left on device\); free some space or give a"),
}


@pytest.mark.parametrize(("faults", "message"), FAULTS.values(), ids=FAULTS)
def test_a_stage_that_fails_stops_every_rank(bucket, server, tmp_path, monkeypatch, faults, message):
    data = Path(write_shards(tmp_path / "data"))
    put_folder(bucket, "t", data)
    place = f"s3://{bucket[1]}/t"
    source = opened(place, tmp_path / "cache")
    order = Order(len(source), 5, f"window:{WINDOW}", shards(source))
    third, _ = order.window(order.window(0)[0])
    bad = source.files[order.window(third)[1][0]]
    write = staging.Slot.write

    def full(self, group, tick):
        if group[0][0] == bad:
            raise self.unwritable(OSError(28, "No space left on device"))
        write(self, group, tick)

    if faults == "full":
        monkeypatch.setattr(staging.Slot, "write", full)
    elif faults == "replaced":
        faults = [lambda: bucket[0].put_object(Bucket=bucket[1], Key=f"t/{bad.name}", Body=b"other")]
    server.faults[f"t/{bad.name}"].extend(faults if isinstance(faults, list) else ())
    results = as_ranks(place, tmp_path / "cache", 2, 0, len(source))
    assert all(isinstance(result, DataError) for result in results)
    with pytest.raises(DataError, match=message):
        raise results[0]
    server.faults.clear()
    monkeypatch.setattr(staging.Slot, "write", write)
    if "replaced" not in message:
        assert len(in_turn(as_ranks(place, tmp_path / "cache", 2, 0, len(source)))) >= len(source), "mended, it goes on"


def test_a_manifest_makes_the_counting_unnecessary(bucket, server, tmp_path, caplog):
    made = tmp_path / "made" / "train"
    made.mkdir(parents=True)
    block = np.arange(1, 41).reshape(10, 4)
    entries = [write_block("shards", str(made), f"train-{n:05}", block + n, 300, True) for n in range(7)]
    (made.parent / "_manifest.json").write_text(
        json.dumps({"seq_len": 4, "splits": {"train": {"shards": entries}, "test": {"shards": []}}})
    )
    put_folder(bucket, "m/train", made)
    put_folder(bucket, "m", made.parent)
    place = f"s3://{bucket[1]}/m/train"
    whole = open_source(place, vocab_size=300, cache_dir=str(tmp_path / "whole"))
    server.faults["m/_manifest.json"].extend(["SlowDown"] * ATTEMPTS)
    with pytest.raises(DataError, match=r"m/_manifest\.json: S3 does not answer as it should \(.*SlowDown"):
        opened(place, tmp_path / "cache")
    server.gets.clear()
    # One rank that took trouble in reading it for its absence would count shards that the others know.
    server.faults["m/_manifest.json"].extend(["short", "reset"])
    source = opened(place, tmp_path / "cache")
    assert not server.faults["m/_manifest.json"]
    assert not [key for key, _ in server.gets if key.endswith(".gz")], "no shard was read to know them"
    assert source.fingerprint == whole.fingerprint
    assert lay_out(source, 8, long="split", short="concat").fingerprint, "nor to know how long rows are"
    for vocab_size in (300, 70_000):
        other = open_source(str(made), vocab_size=vocab_size, cache_dir=str(tmp_path / str(vocab_size)))
        found = open_place(
            place, vocab_size=vocab_size, cache_dir=str(tmp_path / "c"), window=2, ranks=distributed.detect()
        )
        assert found.fingerprint == other.fingerprint, "for any width of ids"
    assert read(training(source, seq_len=4), 0, 70) == in_order(place, tmp_path / "whole", (0, 70))
    # Of the same size, but other rows than the manifest counted.
    bad = block + 3
    bad[0, 0] = 9
    entries[3] = write_block("shards", str(made), "train-00003", bad, 300, False)
    (made / "train-00003.json.gz").unlink()
    entries[3]["digests"] = entries[2]["digests"]
    (made.parent / "_manifest.json").write_text(json.dumps({"seq_len": 4, "splits": {"train": {"shards": entries}}}))
    with pytest.raises(DataError, match=r"train-00003\.json: its rows are not those that the order was made from"):
        read(training(opened(str(made), tmp_path / "other"), seq_len=4), 0, 70)
    # A manifest of other files is none, and so is anything else of its name.
    entries.pop()
    (made.parent / "_manifest.json").write_text(json.dumps({"seq_len": 4, "splits": {"train": {"shards": entries}}}))
    assert len(opened(str(made), tmp_path / "third")) == 70
    (made.parent / "_manifest.json").write_text('{"splits": [1]}')
    assert len(opened(str(made), tmp_path / "fourth")) == 70


def test_prepared_tokens_that_are_not_whole(bucket, tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    for n in range(5):
        write_rows(f"{n}", str(made / f"{n}"), 300, np.arange(1, 41).reshape(10, 4))
    put_folder(bucket, "p", made)
    place = f"s3://{bucket[1]}/p"
    bucket[0].put_object(Bucket=bucket[1], Key="p/3.tok", Body=(made / "3.tok").read_bytes()[:-8])
    for _ in range(2):  # the second start too: it must not take what the first has fetched
        with pytest.raises(DataError, match=r"p/3\.idx: is damaged, of another version, or of another \.tok"):
            opened(place, tmp_path / "cache")
    bucket[0].delete_object(Bucket=bucket[1], Key="p/3.tok")
    with pytest.raises(DataError, match=r"p/3\.idx: its \.tok is not beside it"):
        opened(place, tmp_path / "cache")
    bucket[0].delete_object(Bucket=bucket[1], Key="p/3.idx")
    bucket[0].delete_object(Bucket=bucket[1], Key="p/1.idx")
    with pytest.raises(DataError, match=r"p/1\.tok: its \.idx is not beside it"):
        opened(place, tmp_path / "cache")


@pytest.mark.parametrize(("short", "long"), [("pad", "split"), ("concat", "split"), ("pack", "truncate")])
def test_samples_that_are_laid_out(tmp_path, short, long):
    """A sample may be of rows in several shards, which are at hand then though they are not of its window."""
    place = write_shards(tmp_path / "data", rows=3, length=lambda n: 2 + n % 9)
    cache = tmp_path / "cache"
    found = []
    for source in (opened(place, cache), open_source(place, vocab_size=300, cache_dir=str(tmp_path / "whole"))):
        laid = lay_out(source, 7, long=long, short=short)
        data = training(laid, Order(len(laid), 5, "window:2", laid.shards), seq_len=7)
        batches = data.batches(0)
        found.append([next(batches)[0].input_ids.tolist() for _ in range(len(laid))])
        batches.close()
    assert found[0] == found[1]
    assert len(list(cache.rglob("*.tok"))) < SHARDS


def test_a_blend_of_windows(tmp_path):
    places = [write_shards(tmp_path / name, count=count, rows=4) for name, count in (("a", 9), ("b", 6))]
    found = []
    for folder, open_one in (("cache", opened), ("whole", lambda place, cache: open_source(
        place, vocab_size=300, cache_dir=str(cache)
    ))):  # fmt: skip
        joined = Joined([open_one(place, tmp_path / folder) for place in places], ["a", "b"])
        data = training(joined, BlendOrder(joined, [0.7, 0.3], 3, "window:2"))
        found.append(read(data, 4, 150))
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").rglob("*.tok"))) <= 8


def test_what_needs_no_stage(tmp_path, monkeypatch):
    """A set of two windows is kept whole; so is one that an unbounded run has converted whole, for all ranks to see."""
    few = write_shards(tmp_path / "few", count=4)
    place = write_shards(tmp_path / "data")
    open_source(place, vocab_size=300, cache_dir=str(tmp_path / "c"))
    for one, cache in ((few, "few_c"), (place, "c")):
        assert not isinstance(opened(one, tmp_path / cache), Windowed)
    (left,) = (tmp_path / "c").glob("*.tok")
    monkeypatch.setattr(distributed, "any_rank", lambda yes: True)
    source = opened(place, tmp_path / "c")
    assert isinstance(source, Windowed)
    assert read(training(source), 0, 330) == in_order(place, tmp_path / "x", (0, 330))
    assert left.exists()


def test_a_window_that_one_rank_cannot_open_is_a_failure_of_all(tmp_path, monkeypatch):
    """In a blend the next place's window is collective: no rank may come to it alone."""
    source, met = opened(write_shards(tmp_path / "data"), tmp_path / "cache"), []

    def meet(what, steps):
        try:
            list(steps)
        except DataError:
            met.append(what)
            raise

    def removed(self, shard):
        raise DataError("was removed")

    monkeypatch.setattr(windowed, "in_rounds", meet)
    monkeypatch.setattr(Windowed, "_staged_rows", removed)
    with pytest.raises(DataError, match="was removed"):
        source.want([0], [1])
    assert met == ["opening the next window"]
    source.rest()


def test_bad_rows_are_judged_before_the_first_step(tmp_path):
    place = Path(write_shards(tmp_path / "data"))
    (place / "05.json").write_text('{"input_ids": [1, 2]}\n' * 9 + '{"input_ids": [1, -2]}\n')
    (place / "05.json.gz").unlink()
    with pytest.raises(DataError, match=r"05\.json:10: token id -2 is outside"):
        opened(str(place), tmp_path / "cache")
    source = opened(str(place), tmp_path / "cache", max_bad=0.01)
    assert source.report()["lines_left_out"] == 1
    with pytest.raises(DataError, match=r"1 of \d+ lines are no rows, more than --max_bad 0\.0001%"):
        opened(str(place), tmp_path / "cache", max_bad=1e-6)


def _stage_and_hang(place, cache, reached):
    source = opened(place, cache)

    def hang(*given):
        reached.set()
        time.sleep(600)

    token_writer._refuse_changed = hang
    next(training(source).batches(0))


def test_kill_9_while_staging(tmp_path):
    """What a killed run was making goes at the next start, at once: it must not add up on a small disk."""
    place = write_shards(tmp_path / "data", rows=70)
    context = multiprocessing.get_context("forkserver")
    reached = context.Event()
    process = context.Process(target=_stage_and_hang, args=(place, tmp_path / "cache", reached))
    process.start()
    assert reached.wait(300)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (left,) = (tmp_path / "cache").rglob(".*.tmp")
    assert left.parent.name == "slot-0"
    assert not list((tmp_path / "cache").rglob("*.tok")), "nothing half done has a name"
    source = opened(place, tmp_path / "cache")
    assert read(training(source), 100, 400) == in_order(place, tmp_path / "whole", (100, 400))
    assert not left.exists()
    assert source.slot.folder == str(left.parent), "the kernel has released it"


def test_files_that_something_else_removes(tmp_path):
    """Those of the window that is read are read on; others are staged again."""
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")
    source.want([0, 3], [5, 6])
    source.stager._thread.join()
    for path in (tmp_path / "cache").glob("window-*/slot-0/*"):
        path.unlink()
    assert source.name(source.shards[3][4]) == "03.json.gz:5"
    assert source.row(source.shards[3][4]).input_ids[:2].tolist() == [3, 4]
    into = np.zeros((2, 16), dtype=np.int64)
    assert source.fill([source.shards[0][1], source.shards[3][2]], into)
    assert into[:, 1].tolist() == [1, 2]
    source.want([5, 6], [7])
    assert source.row(source.shards[6][4]).input_ids[:2].tolist() == [6, 4]
    source.rest()


def test_what_is_not_wanted_any_more_is_removed(tmp_path):
    """Also what of an earlier run is in the slot, and what was staged after it was wanted."""
    place = write_shards(tmp_path / "data")
    source = opened(place, tmp_path / "cache")
    source.want([0, 1], [2, 3])
    source.want([2, 3], [4, 5])
    source.stager._thread.join()
    assert source.slot.here() == {2, 3, 4, 5}
    source.rest()
    del source
    source = opened(place, tmp_path / "cache")
    source.want([3], [7])
    source.stager._thread.join()
    assert source.slot.here() == {3, 7}
    source.rest()


def test_two_jobs_on_one_cache_folder(tmp_path):
    """Neither removes what the other reads; the slot of one that has ended is taken over, or removed, by the next."""
    place = write_shards(tmp_path / "data")
    total = sum(ROWS + n for n in range(SHARDS))
    jobs = [opened(place, tmp_path / "cache") for _ in range(2)]
    assert [Path(job.slot.folder).name for job in jobs] == ["slot-0", "slot-1"]
    names = [[], []]
    running = [training(job).batches(consumed) for job, consumed in zip(jobs, (0, total // 4 * 2), strict=True)]
    for _ in range(total // 2):
        for batches, read_so_far in zip(running, names, strict=True):
            read_so_far += [name for batch in next(batches) for name in batch.samples]
    assert names[0] == in_order(place, tmp_path / "whole", (0, total // 2 * 2))
    assert names[1] == in_order(place, tmp_path / "whole", (total // 4 * 2, total // 4 * 2 + total // 2 * 2))
    for batches in running:
        batches.close()
    assert len(list((tmp_path / "cache").glob("window-*"))) == 1, "of the indexes there is one set"
    del running, batches, jobs
    gc.collect()
    third = opened(place, tmp_path / "cache")
    assert Path(third.slot.folder).name == "slot-0"
    assert not list((tmp_path / "cache").rglob("slot-1/*"))


def test_slots_where_files_cannot_be_locked(tmp_path, monkeypatch, caplog):
    """Each job has a folder that no other ever takes or removes."""

    def no_locks(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(folder_lock.fcntl, "flock", no_locks)
    slots = {staging.claim_slot(str(tmp_path))[0] for _ in range(3)}
    assert len(slots) == 3
    assert all(map(os.path.isdir, slots))
    assert "files cannot be locked there" in caplog.text


def test_another_users_slot_is_held(tmp_path, monkeypatch):
    opener = os.open
    (tmp_path / "slot-0.lock").touch()

    def denied(path, *given):
        if path.endswith("slot-0.lock"):
            raise PermissionError
        return opener(path, *given)

    monkeypatch.setattr(folder_lock.os, "open", denied)
    assert Path(staging.claim_slot(str(tmp_path))[0]).name == "slot-1"


def test_a_shard_that_nobody_stages_is_not_waited_for(tmp_path):
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")
    with pytest.raises(DataError, match=r"00\.json\.gz: is not staged, as no training is going on"):
        source.row(0)


def test_waiting_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(staging, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(staging, "WAIT_SECONDS", 0.01)
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")
    write, said = staging.Slot.write, threading.Event()
    monkeypatch.setattr(staging.logger, "warning", lambda text, *given: (caplog.text, said.set()))
    monkeypatch.setattr(staging.Slot, "write", lambda *given: (said.wait(300), write(*given)))
    source.want([0], [3])
    assert said.is_set()
    source.rest()


def test_a_staged_shard_of_other_rows_than_known(tmp_path):
    """Something has put another file in place of the one that the order was made from: it is staged again."""
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")
    other = [[2, r, *[8] * 14] for r in range(ROWS + 2)]
    write_rows("x", source.slot.unit_base(2), 300, np.array(other))
    source.want([2], [3])
    assert source.row(source.shards[2][3]).input_ids.tolist() == [2, 3, *[7] * 14]
    source.rest()


def test_a_stager_that_has_failed_tries_again(tmp_path, monkeypatch):
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")

    def full(self, *given):
        raise self.unwritable(OSError(28, "No space left on device"))

    with monkeypatch.context() as patch:
        patch.setattr(staging.Slot, "write", full)
        with pytest.raises(DataError, match="No space left"):
            source.want([0], [1])
        with pytest.raises(DataError, match="is not staged"):
            source.row(0)
    source.want([0], [1])
    assert source.row(0).input_ids[:2].tolist() == [0, 0]
    source.rest()


def test_a_damaged_staged_shard_says_what_to_do(tmp_path):
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")
    source.want([0], [1])
    tok = Path(source.slot.unit_base(0) + ".tok")
    tok.write_bytes(bytes(tok.stat().st_size))
    with pytest.raises(DataError) as refused:
        source.row(4)
    line = f"{tok}: row 4 (00.json.gz:5) does not match its checksum; remove this file, start again, and it is staged"
    assert line in str(refused.value)
    source.rest()


def test_prepared_tokens_have_the_access_of_other_files(bucket, tmp_path):
    """Not that of the temporary file they came in: another user reads the folder."""
    made = tmp_path / "made"
    made.mkdir()
    for n in range(5):
        write_rows(f"{n}", str(made / f"{n}"), 300, np.arange(1, 41).reshape(10, 4))
    put_folder(bucket, "p", made)
    source = opened(f"s3://{bucket[1]}/p", tmp_path / "cache")
    source.want([0], [1])
    source.rest()
    open_place(f"s3://{bucket[1]}/p", vocab_size=300, cache_dir=str(tmp_path / "cache"))
    found = [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".tok", ".idx")]
    assert len({path.parent for path in found}) == 3, "of windows the indexes and a slot, and a copy of all"
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in found} == {(tmp_path / "plain").stat().st_mode}


def test_a_folder_that_cannot_be_written(tmp_path):
    place = write_shards(tmp_path / "data")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot hold the token cache .*; give a --data_cache_dir"):
        opened(place, tmp_path / "file")
    source = opened(place, tmp_path / "cache")
    shutil.rmtree(source.slot.folder)
    with pytest.raises(DataError, match=r"window-\w+/slot-0: .*No such file"):
        next(training(source).batches(0))
