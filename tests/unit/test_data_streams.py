"""Streams: each record once per epoch, one order for all world sizes, exact after a stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from smp_train.data import stream as streams_module
from smp_train.data.bad_records import BadRecords
from smp_train.data.files import DataFile, FileSet, list_files
from smp_train.data.kinds import TEXTS, TOKENS
from smp_train.data.rows import Recipe
from smp_train.data.stream import Reading, assign_parts, stream_count
from smp_train.data.streamed import first_samples
from smp_train.errors import DataError
from tests.shards import write_shard
from tests.streams import state_of, streamed_ranks

LENGTH = 24
RECORDS = 200


ROWS = [[1 + (number + place) % 499 for place in range(2 + number * 7 % 46)] for number in range(RECORDS)]


def write(folder: Path, rows: dict[str, list]) -> FileSet:
    for name, rows_of_file in rows.items():
        write_shard(folder / name, rows_of_file)
    return list_files(str(folder))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> FileSet:
    """Return the files of 200 rows in three files of different sizes."""
    files = {"a.jsonl": ROWS[:60], "b.jsonl": ROWS[60:75], "c.jsonl": ROWS[75:]}
    return write(tmp_path_factory.mktemp("corpus"), files)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 16 records, so that a stream has several."""
    monkeypatch.setattr(streams_module, "BLOCK_RECORDS", 16)


def reading(corpus: FileSet, **changes) -> Reading:
    bad = BadRecords(changes.pop("skip", None))
    return Reading([corpus], [Recipe(TOKENS, 500).open()], **{"seq_len": LENGTH, "seed": 1, "bad": bad, **changes})


def world(how: Reading, size: int, *, mb: int = 1, acc: int = 1, streams: int = 4, prefetch: int = 0):
    """Return the ranks of a run."""
    share = {"micro_batch": mb, "accumulation": acc, "seq_len": how.seq_len, "prefetch": prefetch}
    return streamed_ranks(how, streams, size, **share)


LAYOUTS = {"concat": {"short": "concat", "long": "split"}, "pad": {"short": "pad", "long": "truncate"}}


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_replaced_rank_skips_to_the_position_of_its_peers(corpus, epochs):
    (rank,), (late,) = (world(reading(corpus, **LAYOUTS["concat"], epochs=epochs), 1, mb=3) for _ in range(2))
    iterator = rank.batches()
    for _ in range(3):
        next(iterator)
    late.skip_to(9)
    assert state_of([late], 9) == state_of([rank], 9)
    for ours, theirs in zip(next(iterator), next(late.batches(9)), strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
    iterator.close()


def test_order_depends_on_seed_and_epoch(corpus):
    def order(**changes):
        (rank,) = world(reading(corpus, **LAYOUTS["pad"], epochs=2, **changes), 1, mb=4, streams=1)
        iterator = rank.batches()
        names = [name for _ in range(RECORDS // 2) for batch in next(iterator) for name in batch.samples]
        return [name.partition("[")[0].replace("@1", "") for name in names]

    stored, shuffled = order(shuffled=False), order()
    assert order(seed=2) != shuffled != stored == stored[:RECORDS] * 2
    assert sorted(shuffled[:RECORDS]) == sorted(shuffled[RECORDS:])
    assert shuffled[:RECORDS] != shuffled[RECORDS:]
    in_first_file = [int(name.rpartition(":")[2]) for name in stored[:RECORDS] if name[0] == stored[0][0]]
    assert in_first_file == sorted(in_first_file)


@pytest.mark.parametrize(("size", "mb", "acc", "streams", "readers"), [
    (1, 3, 1, 16, 1), (8, 3, 1, 16, 1), (16, 4, 2, 16, 1), (3, 1, 16, 16, 1.125), (12, 4, 1, 16, 1.5),
])  # fmt: skip
def test_ranks_read_few_streams(corpus, size, mb, acc, streams, readers):
    """Each rank that reads a stream makes rows of all of it: at most 1.5 ranks do, but for awkward world sizes."""
    ranks = world(reading(corpus), size, mb=mb, acc=acc, streams=streams)
    steps = [k * ranks[0].global_batch for k in range(streams)]
    pairs = {(v, r) for r, rank in enumerate(ranks) for k in steps for v in (rank.positions(k) % streams).ravel()}
    assert len(pairs) / streams == ranks[0].readers == readers


def test_a_state_of_other_data_is_refused(corpus, caplog):
    (rank,) = world(reading(corpus), 1)
    iterator = rank.batches()
    next(iterator)
    saved = state_of([rank], 1)
    with pytest.raises(ValueError, match=r"sample 1.* 2"):
        rank.state(2)
    for changes, reason in [
        ({"seed": 2}, "--seed changed: 1 in the checkpoint, 2 now"),
        ({"seq_len": 9}, "--max_context_width 24 in the checkpoint, .* --max_context_width 9 now"),
        ({"short": "pack"}, "--short concat"),
    ]:
        (other,) = world(reading(corpus, **changes), 1)
        with pytest.raises(DataError, match=reason) as refused:
            other.restore_state(saved)
        assert "\n" not in str(refused.value)
    fewer = FileSet(corpus.location, corpus.files[:-1], corpus.kind)
    larger = FileSet(corpus.location, (*corpus.files[:-1], DataFile("c", "c.jsonl", 1, "1", "lines")), corpus.kind)
    for changed in (fewer, larger):
        (other,) = world(reading(changed), 1)
        with pytest.raises(DataError, match="--allow_data_change 1"):
            other.restore_state(saved)
    (other,) = world(reading(fewer), 1)
    assert other.restore_state(saved, allow_data_change=True) == 1
    assert "may come twice or not at all" in caplog.text
    with pytest.raises(DataError, match=r"the checkpoint's data is indexed .*, the run's is streamed .*--streaming 0"):
        other.restore_state({"kind": "indexed", "consumed": 5})
    iterator.close()


def files(count, size, name="x.jsonl", kind="lines"):
    return [DataFile(f"/{n}/{name}", f"{n}/{name}", size, "1", kind) for n in range(count)]


@pytest.mark.parametrize(("count", "size", "name", "kind", "streams"), [
    (1, 100, "x.jsonl", "lines", 1), (1, 5 << 20, "x.jsonl", "lines", 4), (1, 1 << 30, "x.jsonl", "lines", 32),
    (1024, 300 << 20, "x.jsonl", "lines", 256), (9000, 1 << 20, "x.jsonl", "lines", 256),
    (3, 1 << 30, "x.txt", "text", 2), (5, 0, "shard", "hub", 32),
])  # fmt: skip
def test_streams_follow_the_data_alone(count, size, name, kind, streams):
    assert stream_count(files(count, size, name, kind)) == streams


@pytest.mark.parametrize(("count", "streams"), [(1, 16), (5, 4), (5, 16), (40, 16)])
def test_parts_of_files_make_them_whole(count, streams):
    assigned = assign_parts([FileSet("x", tuple(files(count, 1000)), TEXTS)], streams)
    assert len(list(filter(None, assigned))) == streams
    parts: dict[tuple[str, int], list[int]] = {}
    for part in (part for of_stream in assigned for part in of_stream):
        parts.setdefault((part.file.name, part.step), []).append(part.first)
    assert len(parts) == count
    assert all(sorted(firsts) == list(range(step)) for (_, step), firsts in parts.items())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_without_a_record_is_refused(tmp_path, prefetch):
    few = write(tmp_path, {"a.jsonl": ROWS[:1]})
    for step in (lambda rank: next(rank.batches()), lambda rank: rank.check()):
        (rank,) = world(reading(few), 1, mb=4, prefetch=prefetch)
        with pytest.raises(DataError, match=r"a\.jsonl: .*--streaming 0"):
            step(rank)


@pytest.mark.parametrize(("bad_records", "records", "stops"), [(3, 12, True), (1, 1100, False), (30, 1100, True)])
def test_more_bad_records_than_allowed_stop_the_run(tmp_path, bad_records, records, stops):
    """The first stops it without --bad_rows skip, and then before the model is built if it is in the first block."""
    bad = write(tmp_path, {"a.jsonl": [[-1, 1]] * bad_records + [[1, 2]] * records})
    with pytest.raises(DataError, match=r"a\.jsonl:\d+: token id -1"):
        world(reading(bad), 1, streams=1)[0].check()
    how = reading(bad, skip=0.001, epochs=1)
    (rank,) = world(how, 1, streams=1)
    if stops:
        with pytest.raises(DataError, match="--max_bad"):
            list(rank.batches())
        return
    iterator = rank.batches()
    while not rank.exhausted:
        next(iterator)
    assert how.bad.count == bad_records


def test_rows_cut_to_nothing_and_rows_that_lose_answers(tmp_path):
    def row(without_loss: int, with_loss: int) -> tuple[list[int], ...]:
        ones = [1] * (without_loss + with_loss)
        return ones, ones, [-100] * without_loss + [1] * with_loss

    prompts = write(tmp_path / "prompts", {"a.jsonl": [row(20, 7), row(23, 12), row(0, 6)]})
    (rank,) = world(reading(prompts, **LAYOUTS["pad"], shuffled=False), 1, mb=1, streams=1)
    iterator = rank.batches()
    (batch,) = next(iterator)
    assert (batch.truncated, batch.truncated_targets) == (1, 3)
    assert batch.samples == ["a.jsonl:1[0:24]"]
    (batch,) = next(iterator)
    assert (batch.truncated, batch.truncated_targets) == (1, 11)
    nothing = write(tmp_path / "nothing", {"a.jsonl": [row(0, 5), row(24, 9)]})
    (rank,) = world(reading(nothing, **LAYOUTS["pad"]), 1, streams=1)
    with pytest.raises(DataError, match=r"a\.jsonl:2: none of its first 24 tokens carries loss.*--max_context_width"):
        rank.check()
    (rank,) = world(reading(nothing, short="pad", long="error"), 1, streams=1)
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*--long"):
        rank.check()


def test_validation_is_the_beginning_in_stored_order(corpus):
    how = reading(corpus, shuffled=False, epochs=1)
    ids = [token for row in ROWS for token in row]
    for most, count in ((5, 5), (10**6, -(-len(ids) // LENGTH))):
        samples = first_samples(how, most)
        assert len(samples) == count
        found = np.concatenate([samples.row(n).input_ids for n in range(count)]).tolist()
        assert found == ids[: len(found)]
        assert samples.name(0).startswith("a.jsonl:1")
