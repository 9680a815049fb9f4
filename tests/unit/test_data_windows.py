"""`--shuffle window:K` on sets larger than the disk: two windows on disk, the rows those of the whole set."""

import contextlib
import errno
import gc
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

from smp_train import distributed, storage
from smp_train.data import folder_lock, staging, token_writer, windowed
from smp_train.data.blend import BlendOrder, Joined
from smp_train.data.layout import lay_out
from smp_train.data.open_data import open_place
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import TrainingData
from smp_train.data.prepare.writing import write_block
from smp_train.data.source import shards
from smp_train.data.token_cache import TokenCache
from smp_train.data.token_writer import write_rows
from smp_train.data.utils import list_shards
from smp_train.data.window_index import WindowIndex
from smp_train.data.windowed import Windowed, assemble
from smp_train.errors import DataError
from smp_train.storage.client import ATTEMPTS
from tests.s3_server import upload
from tests.shards import write_shard

SHARDS, ROWS, WINDOW = 11, 20, 2


def write_shards(folder: Path, count=SHARDS, rows=ROWS, length=lambda n: 16) -> str:
    for n in range(count):
        write_shard(folder / f"{n:02}.json.gz", ([n, r, *[7] * (length(n + r) - 2)] for r in range(rows + n)))
    return str(folder)


def write_prepared(folder: Path, count=5) -> Path:
    folder.mkdir()
    for n in range(count):
        write_rows(f"{n}", str(folder / f"{n}"), 300, np.arange(1, 41).reshape(10, 4))
    return folder


def opened(place, cache, window=WINDOW, **options):
    """Open a place as a run of one rank does."""
    return open_place(place, vocab_size=300, cache_dir=str(cache), window=window, ranks=distributed.detect(), **options)


def opened_whole(place, cache):
    return open_place(place, vocab_size=300, cache_dir=str(cache))


@pytest.fixture
def source(tmp_path):
    """Return a set of which nothing is staged yet."""
    source = opened(write_shards(tmp_path / "data"), tmp_path / "cache")
    assert isinstance(source, Windowed)
    yield source
    source.rest()


def training(source, order=None, dp_rank=0, dp_size=1, micro_batch=2, seq_len=16, epochs=None):
    return TrainingData(
        source, order or Order(len(source), 5, f"window:{WINDOW}", shards(source)), seq_len=seq_len, accumulation=1,
        micro_batch=micro_batch, dp_rank=dp_rank, dp_size=dp_size, epochs=epochs,
    )  # fmt: skip


def in_order(place, cache, *positions):
    """Return the names of the rows at positions, of the set opened whole."""
    whole = opened_whole(place, cache)
    rows = Order(len(whole), 5, f"window:{WINDOW}", whole.shards).rows(np.arange(*positions))[1]
    return [whole.name(row) for row in rows.tolist()]


def read(data, consumed, until):
    """Return the names of the samples of steps from one position to another."""
    names = []
    with contextlib.closing(data.batches(consumed)) as batches:
        while consumed < until:
            names += [name for batch in next(batches) for name in batch.samples]
            consumed += data.global_batch
    return names


def fail(error):
    """Return a function that raises an error whatever it is given."""

    def failing(*given, **more):
        raise error

    return failing


def measured(monkeypatch, folder):
    """Return a list that takes the bytes in a folder at every file that comes."""
    sizes, replace = [], os.replace

    def noted(source, target):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(sum(path.stat().st_size for path in Path(folder).rglob("*")))
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
    upload(f"{bucket}/t", made)
    largest = max(20 * 512 * 2, *(path.stat().st_size for path in made.iterdir()))
    sizes = measured(monkeypatch, tmp_path / "cache")
    place, cache = f"{bucket}/t", tmp_path / "cache"
    source = opened(place, cache)
    total = len(source)
    assert isinstance(source, Windowed)
    names = read(training(source, seq_len=512), 0, 2 * total)
    assert len(sizes) > 2 * SHARDS - 2 * WINDOW
    indexes = sum(path.stat().st_size for path in cache.rglob("*.idx"))
    assert max(sizes) - indexes <= 3 * WINDOW * largest
    assert 4.5 * WINDOW * largest < SHARDS * 20 * 512 * 2, "else the bound is none"
    assert not list(cache.rglob(".*-*/*")), "nothing half done is left"
    whole = opened_whole(place, tmp_path / "whole")
    assert whole.fingerprint == source.fingerprint, "a run may go on with the one or the other"
    assert names[: 2 * total] == in_order(place, tmp_path / "whole", 2 * total)
    assert sorted(names[:total]) == sorted(names[total : 2 * total]) == sorted(map(whole.name, range(total)))


def as_ranks(place, cache, world, consumed, until):
    """Train with the ranks of one node as threads, which vote at every step; return what each has read, or raised."""
    barrier = threading.Barrier(world, timeout=300)
    results, failures, votes = ([None] * world for _ in range(3))

    def index():
        return WindowIndex(place, WINDOW, TokenCache(place, 300, str(cache)), list_shards(place))

    first = index()
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
        source = assemble(index(), slot, lambda of: staging.Stager(of, lock=lock) if rank == 0 else None)
        data, names = training(source, dp_rank=rank, dp_size=world), []
        barrier.wait()
        with contextlib.closing(data.batches(consumed)) as batches:
            for _ in range(-(-(until - consumed) // data.global_batch)):
                try:
                    names.append([name for batch in next(batches) for name in batch.samples])
                except DataError as error:
                    votes[rank] = error
                barrier.wait()
                stop = any(votes)
                barrier.wait()
                if stop:
                    break
        results[rank] = next(filter(None, votes), names)

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(world)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windowed, "in_rounds", meet)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lock.release()  # as the end of the job's processes does; the collector may come to it later
    return results


def in_turn(results):
    """Return the samples of all ranks in the order of positions."""
    return [name for step in zip(*results, strict=True) for names in step for name in names]


def test_epochs_end_with_every_row_used_as_often(tmp_path, source):
    total = len(source)
    names = read(training(source, micro_batch=total // 2 + 1, epochs=2), 0, 2 * total)
    assert len(names) > 2 * total, "the last batch is filled up"
    assert [name for name in names if name] == in_order(str(tmp_path / "data"), tmp_path / "whole", 2 * total)


def test_ranks_share_a_stage_and_come_and_go(bucket, server, tmp_path):
    """Each shard of a window is fetched once for all ranks of a node; a resume in mid-window has other ranks."""
    upload(f"{bucket}/t", Path(write_shards(tmp_path / "data")))
    place, cache = f"{bucket}/t", tmp_path / "cache"
    total = sum(ROWS + n for n in range(SHARDS))
    middle = 6 * ((total // 2) // 6)
    opened(place, cache).stager.lock.release()  # else the ranks take another slot
    server.gets.clear()
    first = in_turn(as_ranks(place, cache, 3, 0, middle))
    gets = [key for key, _ in server.gets if key.endswith(".gz")]
    assert len(set(gets)) == len(gets), "once for all three"
    there = {int(path.stem) for path in cache.rglob("slot-*/*.idx")}  # put last
    assert there
    server.gets.clear()
    second = in_turn(as_ranks(place, cache, 2, middle, 2 * total))
    gets = [int(key[2:4]) for key, _ in server.gets if key.endswith(".gz")]
    assert there.isdisjoint(gets[:2]), "what the first left is read, not fetched"
    assert first + second[: 2 * total - middle] == in_order(place, tmp_path / "whole", 2 * total)


FAULTS = {
    "denied": r"access denied \(403 AccessDenied\)",
    "replaced": r"was replaced while it was being read \(412\)",
    "full": r"cannot write the token cache \(No space left on device\); free some space or give a",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stage_that_fails_stops_every_rank(bucket, server, tmp_path, monkeypatch, fault):
    upload(f"{bucket}/t", Path(write_shards(tmp_path / "data")))
    place, cache = f"{bucket}/t", tmp_path / "cache"
    source = opened(place, cache)
    order = Order(len(source), 5, f"window:{WINDOW}", shards(source))
    third, _ = order.window(order.window(0)[0])
    bad = source.files[order.window(third)[1][0]]
    write = staging.Slot.write

    def full(self, group, tick):
        if group[0][0] == bad:
            raise self.unwritable(OSError(28, "No space left on device"))
        write(self, group, tick)

    with monkeypatch.context() as patch:
        if fault == "full":
            patch.setattr(staging.Slot, "write", full)
        faults = {"denied": ["AccessDenied"] * 40, "replaced": [lambda: upload(f"{bucket}/t", {bad.name: b"other"})]}
        server.faults[f"t/{bad.name}"].extend(faults.get(fault, []))
        results = as_ranks(place, cache, 2, 0, len(source))
        assert all(isinstance(result, DataError) for result in results)
        with pytest.raises(DataError, match=FAULTS[fault]):
            raise results[0]
    server.faults.clear()
    if fault != "replaced":
        assert len(in_turn(as_ranks(place, cache, 2, 0, len(source)))) >= len(source), "mended, it goes on"


def test_a_manifest_makes_the_counting_unnecessary(bucket, server, tmp_path):
    made = tmp_path / "made" / "train"
    made.mkdir(parents=True)
    block = np.arange(1, 41).reshape(10, 4)
    entries = [write_block("shards", str(made), f"train-{n:05}", block + n, 300, True) for n in range(7)]

    def write_manifest(splits):
        (made.parent / "_manifest.json").write_text(json.dumps({"seq_len": 4, "splits": splits}))

    write_manifest({"train": {"shards": entries}, "test": {"shards": []}})
    upload(f"{bucket}/m", made.parent)
    place = f"{bucket}/m/train"
    whole = opened_whole(place, tmp_path / "whole")
    server.faults["m/_manifest.json"].extend(["SlowDown"] * ATTEMPTS)
    with pytest.raises(DataError, match=r"m/_manifest\.json: .*SlowDown"):
        opened(place, tmp_path / "cache")
    server.gets.clear()
    # One rank that took trouble in reading it for its absence would count shards that the others know.
    server.faults["m/_manifest.json"].extend(["short", "reset"])
    source = opened(place, tmp_path / "cache")
    assert not server.faults["m/_manifest.json"]
    assert not [key for key, _ in server.gets if key.endswith(".gz")], "no shard was read to know them"
    assert source.fingerprint == whole.fingerprint
    assert lay_out(source, 8, long="split", short="concat").fingerprint, "nor to know how long rows are"
    wide = [
        open_place(one, vocab_size=70_000, cache_dir=str(tmp_path / "wide"), window=window, ranks=distributed.detect())
        for one, window in ((str(made), 0), (place, 2))
    ]
    assert wide[0].fingerprint == wide[1].fingerprint, "for any width of ids"
    assert read(training(source, seq_len=4), 0, 70) == in_order(place, tmp_path / "whole", 70)
    # Of the same size, but other rows than the manifest counted.
    bad = block + 3
    bad[0, 0] = 9
    entries[3] = write_block("shards", str(made), "train-00003", bad, 300, False)
    (made / "train-00003.json.gz").unlink()
    entries[3]["digests"] = entries[2]["digests"]
    write_manifest({"train": {"shards": entries}})
    with pytest.raises(DataError, match=r"train-00003\.json: its rows are not those that the order was made from"):
        read(training(opened(str(made), tmp_path / "other"), seq_len=4), 0, 70)
    # A manifest of other files is none, and so is anything else of its name.
    for number, splits in enumerate(({"train": {"shards": entries[:-1]}}, [1])):
        write_manifest(splits)
        assert len(opened(str(made), tmp_path / f"without-{number}")) == 70


def test_prepared_tokens_in_s3(bucket, tmp_path):
    made, cache = write_prepared(tmp_path / "made"), tmp_path / "cache"
    upload(f"{bucket}/p", made)
    place = f"{bucket}/p"
    source = opened(place, tmp_path / "good")
    source.want([0], [1])
    source.rest()
    opened_whole(place, tmp_path / "good")
    found = [path for path in (tmp_path / "good").rglob("*") if path.suffix in (".tok", ".idx")]
    assert len({path.parent for path in found}) == 3, "of windows the indexes and a slot, and a copy of all"
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in found}
    assert modes == {(tmp_path / "plain").stat().st_mode}, "not that of the temporary file: another user reads it"
    upload(place, {"3.tok": (made / "3.tok").read_bytes()[:-8]})
    for _ in range(2):  # the second start too: it must not take what the first has fetched
        with pytest.raises(DataError, match=r"p/3\.idx: is damaged, of another version, or of another \.tok"):
            opened(place, cache)
    storage.at(place).delete("3.tok")
    with pytest.raises(DataError, match=r"p/3\.idx: its \.tok is not beside it"):
        opened(place, cache)
    for name in ("3.idx", "1.idx"):
        storage.at(place).delete(name)
    with pytest.raises(DataError, match=r"p/1\.tok: its \.idx is not beside it"):
        opened(place, cache)


@pytest.mark.parametrize(("short", "long"), [("pad", "split"), ("concat", "split"), ("pack", "truncate")])
def test_samples_that_are_laid_out(tmp_path, short, long):
    """A sample may be of rows in several shards, which are staged then though they are not of its window."""
    place = write_shards(tmp_path / "data", rows=3, length=lambda n: 2 + n % 9)
    found = []
    for source in (opened(place, tmp_path / "cache"), opened_whole(place, tmp_path / "whole")):
        laid = lay_out(source, 7, long=long, short=short)
        data = training(laid, Order(len(laid), 5, "window:2", laid.shards), seq_len=7)
        with contextlib.closing(data.batches(0)) as batches:
            found.append([next(batches)[0].input_ids.tolist() for _ in range(len(laid))])
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").rglob("*.tok"))) < SHARDS


def test_a_blend_of_windows(tmp_path):
    places = [write_shards(tmp_path / name, count=count, rows=4) for name, count in (("a", 9), ("b", 6))]
    found = []
    for folder, open_one in (("cache", opened), ("whole", opened_whole)):
        joined = Joined([open_one(place, tmp_path / folder) for place in places], ["a", "b"])
        found.append(read(training(joined, BlendOrder(joined, [0.7, 0.3], 3, "window:2")), 4, 150))
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").rglob("*.tok"))) <= 8


def test_what_needs_no_stage(tmp_path, monkeypatch):
    """A set of two windows is kept whole; so is one that an unbounded run has converted whole, for all ranks to see."""
    few, place = write_shards(tmp_path / "few", count=4), write_shards(tmp_path / "data")
    opened_whole(place, tmp_path / "c")
    for one, cache in ((few, "few_c"), (place, "c")):
        assert not isinstance(opened(one, tmp_path / cache), Windowed)
    (left,) = (tmp_path / "c").glob("*.tok")
    monkeypatch.setattr(distributed, "any_rank", lambda yes: True)
    source = opened(place, tmp_path / "c")
    assert isinstance(source, Windowed)
    assert read(training(source), 0, 330) == in_order(place, tmp_path / "x", 330)
    assert left.exists()


def test_a_window_that_one_rank_cannot_open_is_a_failure_of_all(source, monkeypatch):
    """In a blend the next place's window is collective: no rank may come to it alone."""
    met = []

    def meet(what, steps):
        try:
            list(steps)
        except DataError:
            met.append(what)
            raise

    monkeypatch.setattr(windowed, "in_rounds", meet)
    monkeypatch.setattr(Windowed, "_staged_rows", fail(DataError("was removed")))
    with pytest.raises(DataError, match="was removed"):
        source.want([0], [1])
    assert met == ["opening the next window"]


def test_bad_rows_are_judged_before_the_first_step(tmp_path):
    place = write_shards(tmp_path / "data")
    write_shard(tmp_path / "data" / "05.json", [[1, 2]] * 9 + [[1, -2]])
    (tmp_path / "data" / "05.json.gz").unlink()
    with pytest.raises(DataError, match=r"05\.json:10: token id -2 is outside"):
        opened(place, tmp_path / "cache")
    assert opened(place, tmp_path / "cache", max_bad=0.01).report()["lines_left_out"] == 1
    with pytest.raises(DataError, match=r"1 of \d+ lines .* --max_bad 0\.0001%"):
        opened(place, tmp_path / "cache", max_bad=1e-6)


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
    assert read(training(source), 100, 400) == in_order(place, tmp_path / "whole", 100, 400)
    assert not left.exists()
    assert source.slot.folder == str(left.parent), "the kernel has released it"


def test_files_that_something_else_removes(tmp_path, source):
    """Those of the window that is read are read on; others are staged again."""
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


def test_what_is_not_wanted_any_more_is_removed(tmp_path, source):
    """Also what of an earlier run is in the slot, and what was staged after it was wanted."""
    source.want([0, 1], [2, 3])
    source.want([2, 3], [4, 5])
    source.stager._thread.join()
    assert source.slot.here() == {2, 3, 4, 5}
    source.rest()
    source.stager.lock.release()
    again = opened(str(tmp_path / "data"), tmp_path / "cache")
    assert again.slot.folder == source.slot.folder
    again.want([3], [7])
    again.stager._thread.join()
    assert again.slot.here() == {3, 7}
    again.rest()


def test_two_jobs_on_one_cache_folder(tmp_path):
    """Neither removes what the other reads; the slot of one that has ended is taken over, or removed, by the next."""
    place = write_shards(tmp_path / "data")
    total = sum(ROWS + n for n in range(SHARDS))
    jobs = [opened(place, tmp_path / "cache") for _ in range(2)]
    assert [Path(job.slot.folder).name for job in jobs] == ["slot-0", "slot-1"]
    names, starts = [[], []], (0, total // 4 * 2)
    running = [training(job).batches(start) for job, start in zip(jobs, starts, strict=True)]
    for _ in range(total // 2):
        for batches, read_so_far in zip(running, names, strict=True):
            read_so_far += [name for batch in next(batches) for name in batch.samples]
    for start, found in zip(starts, names, strict=True):
        assert found == in_order(place, tmp_path / "whole", start, start + total // 2 * 2)
    for batches in running:
        batches.close()
    assert len(list((tmp_path / "cache").glob("window-*"))) == 1, "of the indexes there is one set"
    del running, batches, jobs
    gc.collect()
    third = opened(place, tmp_path / "cache")
    assert Path(third.slot.folder).name == "slot-0"
    assert not list((tmp_path / "cache").rglob("slot-1/*"))


def test_slots_where_files_cannot_be_locked(tmp_path, monkeypatch, caplog):
    """Each job has a folder that no other ever takes or removes. Another user's slot is held."""
    opener = os.open
    (tmp_path / "slot-0.lock").touch()
    with monkeypatch.context() as patch:
        patch.setattr(
            folder_lock.os, "open",
            lambda path, *given: fail(PermissionError())() if path.endswith("slot-0.lock") else opener(path, *given),
        )  # fmt: skip
        assert Path(staging.claim_slot(str(tmp_path))[0]).name == "slot-1"
    monkeypatch.setattr(folder_lock.fcntl, "flock", fail(OSError(errno.ENOSYS, "Function not implemented")))
    slots = {staging.claim_slot(str(tmp_path))[0] for _ in range(3)}
    assert len(slots) == 3
    assert all(map(os.path.isdir, slots))
    assert "files cannot be locked there" in caplog.text


def test_waiting_is_said(source, monkeypatch, caplog):
    monkeypatch.setattr(staging, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(staging, "WAIT_SECONDS", 0.01)
    write, said = staging.Slot.write, threading.Event()
    monkeypatch.setattr(staging.logger, "warning", lambda text, *given: said.set())
    monkeypatch.setattr(staging.Slot, "write", lambda *given: (said.wait(300), write(*given)))
    source.want([0], [3])
    assert said.is_set()


def test_a_staged_shard_of_other_rows_than_known(source):
    """Something has put another file in place of the one that the order was made from: it is staged again."""
    write_rows("x", source.slot.unit_base(2), 300, np.array([[2, r, *[8] * 14] for r in range(ROWS + 2)]))
    source.want([2], [3])
    assert source.row(source.shards[2][3]).input_ids.tolist() == [2, 3, *[7] * 14]


def test_a_stager_that_has_failed_tries_again(source, monkeypatch):
    with pytest.raises(DataError, match=r"00\.json\.gz: is not staged, as no training is going on"):
        source.row(0)
    with monkeypatch.context() as patch:
        patch.setattr(staging.Slot, "write", fail(source.slot.unwritable(OSError(28, "No space left on device"))))
        with pytest.raises(DataError, match="No space left"):
            source.want([0], [1])
        with pytest.raises(DataError, match="is not staged"):
            source.row(0)
    source.want([0], [1])
    assert source.row(0).input_ids[:2].tolist() == [0, 0]


def test_a_damaged_staged_shard(source):
    source.want([0], [1])
    tok = Path(source.slot.unit_base(0) + ".tok")
    tok.write_bytes(bytes(tok.stat().st_size))
    with pytest.raises(DataError) as refused:
        source.row(4)
    assert f"{tok}: row 4 (00.json.gz:5) does not match its checksum; remove this file, start" in str(refused.value)


def test_a_folder_that_cannot_be_written(tmp_path, source):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot hold the token cache .*; give a --data_cache_dir"):
        opened(str(tmp_path / "data"), tmp_path / "file")
    shutil.rmtree(source.slot.folder)
    with pytest.raises(DataError, match=r"window-\w+/slot-0: .*No such file"):
        next(training(source).batches(0))
