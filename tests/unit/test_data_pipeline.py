"""Who reads what, in which order, over which history; and what a batch is made of."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import Row, Source, TrainingData, ValidationData, collate
from smp_train.data.pipelines.prefetch import Prefetch
from smp_train.data.synthetic import Synthetic
from smp_train.errors import ConfigError, DataError
from tests.tiers import slow

ROOT = Path(__file__).resolve().parents[2]


class Numbers(Source):
    """Row i is three times i."""

    fingerprint = "numbers"

    def __init__(self, size, broken=None):
        self.size = size
        self.broken = broken

    def __len__(self):
        return self.size

    def row(self, index):
        assert 0 <= index < self.size
        if index == self.broken:
            raise DataError(f"numbers:{index}: broken")
        return Row(np.full(3, index))

    def name(self, index):
        return f"numbers:{index}"


def data(size, *, seed=1, shuffle="global", mb=2, acc=1, rank=0, world=1, **options):
    options.setdefault("prefetch", 0)
    return TrainingData(
        Numbers(size, options.pop("broken", None)), Order(size, seed, shuffle), seq_len=3, micro_batch=mb,
        accumulation=acc, dp_rank=rank, dp_size=world, **options,
    )  # fmt: skip


def global_batch(streams):
    """Put the ranks' micro-batches of the next step back into the global order."""
    batches = [next(stream) for stream in streams]
    return [int(row[0]) for micro in zip(*batches, strict=True) for batch in micro for row in batch.input_ids]


run = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(0, 3))


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 90),
    seed=st.integers(0, 2**40),
    shuffle=st.sampled_from(["global", "global", "none"]),
    runs=st.lists(run, min_size=1, max_size=6),
    prefetch=st.sampled_from([0, 0, 0, 1, 5]),
)
def test_any_history_sees_every_sample_once_in_one_order(size, seed, shuffle, runs, prefetch):
    """Each run takes some steps on some ranks, then is killed some steps after its last checkpoint."""
    consumed, seen = 0, []
    for world_size, mb, acc, steps, lost in runs:
        options = {"seed": seed, "shuffle": shuffle, "mb": mb, "acc": acc, "world": world_size, "prefetch": prefetch}
        world = [data(size, rank=r, **options) for r in range(world_size)]
        starts = {rank.check_state(world[0].state(consumed)) for rank in world}
        assert starts == {consumed}
        streams = [rank.batches(consumed) for rank in world]
        for step in range(steps + lost):
            batch = global_batch(streams)
            assert len(batch) == world[0].global_batch
            if step < steps:
                seen += batch
                consumed += world[0].global_batch
        for stream in streams:
            stream.close()
    alone = Order(size, seed, shuffle).rows(np.arange(consumed))[1]
    assert seen == alone.tolist()
    for epoch in range(consumed // size):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    epochs=st.integers(1, 3),
    shuffle=st.sampled_from(["global", "none"]),
    runs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 4)), max_size=5),
    prefetch=st.sampled_from([0, 0, 3]),
)
def test_epochs_end_with_every_row_used_as_often(size, epochs, shuffle, runs, prefetch):
    """Runs of any shape follow one another; the last goes to the end, where what is missing of a batch is filled up."""
    consumed, seen = 0, []
    for world_size, mb, acc, steps in [*runs, (2, 3, 2, None)]:
        world = [
            data(size, shuffle=shuffle, mb=mb, acc=acc, rank=r, world=world_size, prefetch=prefetch, epochs=epochs)
            for r in range(world_size)
        ]
        streams = [rank.batches(consumed) for rank in world]
        while steps is None or steps > 0:
            found = [next(stream, None) for stream in streams]
            if found[0] is None:
                assert not any(found)
                break
            rows = [
                (name, int(row[0]), int((labels != -100).sum()))
                for micro in zip(*found, strict=True)
                for batch in micro
                for name, row, labels in zip(batch.samples, batch.input_ids, batch.labels, strict=True)
            ]
            assert len(rows) == world[0].global_batch, "every rank has as many rows"
            taken = world[0].step_samples(consumed)
            assert all(counted == 0 and not name for name, _, counted in rows[taken:])
            assert all(counted == 3 and name == f"numbers:{number}" for name, number, counted in rows[:taken])
            seen += [number for _, number, _ in rows[:taken]]
            consumed += taken
            steps = None if steps is None else steps - 1
        for stream in streams:
            stream.close()
    assert seen == Order(size, 1, shuffle).rows(np.arange(epochs * size))[1].tolist()


@pytest.mark.parametrize("start", [1, 17 * 5, 2**33])
def test_resume_anywhere(start):
    stream = data(17, mb=2, acc=2, prefetch=8).batches(start)
    expected = Order(17, 1).rows(np.arange(start, start + 40))[1].tolist()
    assert [row for _ in range(10) for row in global_batch([stream])] == expected
    stream.close()


def test_no_thread_outlives_its_stream():
    before = set(threading.enumerate())  # there may be some of other tests

    def reading():
        return [thread for thread in threading.enumerate() if thread.name == "smp-train-data" and thread not in before]

    stream = data(50, prefetch=3).batches(0)
    next(stream)
    assert len(reading()) == 1
    stream.close()
    assert not reading()
    stream = data(50, prefetch=3).batches(0)
    next(stream)
    del stream
    gc.collect()
    assert not reading()


def test_a_stream_that_is_closed_holds_nothing():
    """Though its thread was waiting for something, and gave up with an error: a folder it holds is free at once."""

    class Folder:
        pass

    folder, waiting, rest = Folder(), threading.Event(), threading.Event()

    def steps(folder):
        yield folder
        waiting.set()
        assert rest.wait(300)
        raise DataError("no training is going on")

    held, ahead = weakref.ref(folder), Prefetch(steps(folder), 2, rest.set)
    del folder
    gc.disable()
    try:
        next(ahead)
        assert waiting.wait(300)
        ahead.close()
        del ahead
        assert held() is None
    finally:
        gc.enable()


EXIT = """
import threading
from smp_train.data.pipelines.data_pipeline import Order, TrainingData
from smp_train.data.synthetic import Synthetic
source, begun = Synthetic(seq_len=512, vocab_size=9), threading.Event()
data = TrainingData(
    source, Order(len(source)), seq_len=512, micro_batch=64, accumulation=2, dp_rank=0, dp_size=1
)
stream = data.batches(0)
{reading}
{ending}
"""
READING = {
    "main thread": "next(stream)",
    "another thread": """
threading.Thread(target=lambda: [begun.set() for _ in stream], daemon=True).start()
begun.wait()
""",
}


@pytest.mark.parametrize(
    ("reading", "ending", "code"),
    slow([("main thread", "", 0), ("main thread", "raise SystemExit(7)", 7), ("main thread", "1 / 0", 1),
          ("another thread", "", 0)], lambda case: case[2] != 7),
)  # fmt: skip
def test_the_process_ends_while_reading_ahead(reading, ending, code):
    program = EXIT.format(reading=READING[reading], ending=ending)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    if code == 1:
        assert "abort" not in done.stderr.lower()
        assert "Fatal" not in done.stderr
    else:
        assert done.stderr == ""


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_error_comes_in_the_step_it_belongs_to(prefetch):
    order = Order(20, 1).rows(np.arange(20))[1].tolist()
    stream = data(20, prefetch=prefetch, broken=order[9]).batches(0)
    for _ in range(4):
        next(stream)
    with pytest.raises(DataError, match=f"numbers:{order[9]}: broken"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_state_refuses_other_data(caplog):
    state = data(17, seed=3).state(34)
    assert data(17, seed=3, mb=5, world=2).check_state(state) == 34
    for other, change, reason in [
        (data(17, seed=4), {}, "--seed changed: 3 in the checkpoint, 4 now"),
        (data(18, seed=3), {}, "samples 17 in the checkpoint, 18 now.*--allow_data_change 1"),
        (data(17, seed=3, shuffle="none"), {}, "--shuffle changed: global in the checkpoint, none now"),
        (data(17, seed=3), {"fingerprint": "else"}, r"fingerprint else .*numbers"),
        (data(17, seed=3), {"version": 99}, "version 99"),
    ]:
        with pytest.raises(DataError, match=reason):
            other.check_state({**state, **change})
    assert data(18, seed=3).check_state(state, allow_data_change=True) == 34
    assert "samples 17 in the checkpoint, 18 now" in caplog.text
    with pytest.raises(DataError, match="--seed"):
        data(17, seed=4).check_state(state, allow_data_change=True)


def test_bad_arguments():
    with pytest.raises(ConfigError, match=r"4 rows.* 5"):
        TrainingData(Numbers(5), Order(4), seq_len=3, micro_batch=1, accumulation=1, dp_rank=0, dp_size=1)
    for options, reason in (
        ({"long": "some"}, "--long some"), ({"mb": 0}, "--train_batch_size"), ({"rank": 2, "world": 2}, "rank 2 .* 2"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            data(5, **options)


ROWS = {
    "full": Row(np.array([1, 2, 3, 4], dtype=np.uint16)),
    "short": Row(np.array([5, 6])),
    "long": Row(np.array([1, 2, 3, 4, 5, 6], dtype=np.uint32)),
    "left padded": Row(np.array([0, 0, 3, 4]), np.array([False, False, True, True])),
    "long, end uncounted": Row(np.array([1, 2, 3, 4, 0, 0]), np.array([True] * 4 + [False] * 2)),
}


def test_rows_become_a_batch():
    batch = collate([ROWS["full"], ROWS["long"], ROWS["long, end uncounted"]], ["a:1", "a:2", "a:3"], 4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4]] * 3
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.labels is batch.input_ids, "nothing is copied where nothing differs"
    assert batch.attention_mask is None
    assert batch.samples == ["a:1", "a:2", "a:3"]
    assert (batch.counted_tokens(), batch.truncated) == (9, 1), "padding is no loss"
    batch = collate([ROWS["full"], ROWS["short"], ROWS["left padded"]], ["", "", ""], 4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [0, 0, 3, 4]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, -100, -100], [-100, -100, 3, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]]
    assert batch.attention_mask.dtype == torch.int64
    assert batch.counted_tokens() == 3 + 1 + 2
    batch = collate([ROWS["full"], ROWS["short"], ROWS["short"]._replace(counted=np.array([True, False]))], [""] * 3, 4)
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, -100, -100], [5, -100, -100, -100]]
    assert batch.attention_mask is None, "no token attends to padding behind it"
    with pytest.raises(DataError, match=r"a:7: .*6 .* 4 .*--max_context_width"):
        collate([ROWS["long"]], ["a:7"], 4, long="error")


class Lines(Source):
    """Rows of lengths 2 to 6, the last three a shard of their own; knows its longest."""

    fingerprint = "lines"
    shards = (range(8), range(8, 11))

    def __len__(self):
        return 11

    def row(self, index):
        return Row(np.full(2 + index % 5, index))

    def name(self, index):
        return f"lines:{index + 1}"

    def report(self):
        return {"longest": 6, "longest_at": "lines:5"}


def test_long_rows_are_refused_before_the_first_step():
    options = {"seq_len": 5, "micro_batch": 1, "dp_rank": 0, "dp_size": 1}
    with pytest.raises(DataError, match=r"lines:5: .*6 .* 5"):
        TrainingData(Lines(), Order(11), accumulation=1, long="error", **options)
    with pytest.raises(DataError, match=r"lines:5: .*6"):
        ValidationData(Lines(), long="error", **options)


def test_truncation_is_counted_and_said_once(caplog):
    trained = TrainingData(Lines(), Order(11), seq_len=5, micro_batch=11, accumulation=1, dp_rank=0, dp_size=1)
    stream = trained.batches(0)
    next(stream)
    next(stream)
    stream.close()
    assert trained.rows_truncated == 4
    assert caplog.text.count("--long truncate") == 1


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("mb", [1, 2, 5])
@pytest.mark.parametrize(("fast", "cap"), [(False, None), (False, 2), (True, None), (True, 1)])
def test_validation_reads_each_row_once(world, mb, fast, cap):
    ranks = [
        ValidationData(Lines(), seq_len=6, micro_batch=mb, dp_rank=r, dp_size=world, max_batches=cap, fast=fast)
        for r in range(world)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    batches = [list(rank.batches()) for rank in ranks]
    assert [len(found) for found in batches] == [len(rank) for rank in ranks]
    names, counted = [], 0
    for number in range(len(ranks[0])):
        for found in batches:
            batch = found[number]
            assert batch.input_ids.shape == (mb, 6)
            names += [name for name in batch.samples if name]
            counted += batch.counted_tokens()
            for name, labels in zip(batch.samples, batch.labels, strict=True):
                assert bool(name) == bool((labels != -100).any())
    rows = list(Lines.shards[-1] if fast else range(11))[: world * mb * len(ranks[0])]
    assert names == [f"lines:{row + 1}" for row in rows]
    assert counted == sum(1 + row % 5 for row in rows)
    again = [batch.input_ids for batch in ranks[0].batches()]
    assert all(a.equal(b.input_ids) for a, b in zip(again, batches[0], strict=True))


def test_synthetic_rows_depend_on_seed_and_index_alone():
    source = Synthetic(seq_len=9, vocab_size=50, seed=12345, size=100)
    # The same on every machine and in every version: measurements and tests compare them.
    assert source.row(0).input_ids.tolist() == [2, 32, 27, 38, 48, 39, 42, 7, 17]
    assert source.row(1).input_ids.tolist() == [45, 17, 26, 45, 10, 16, 12, 2, 47]
    rows = [source.row(i).input_ids for i in range(100)]
    assert len({row.tobytes() for row in rows}) == 100
    again = Synthetic(seq_len=9, vocab_size=50, seed=12345, size=200)
    assert again.row(77).input_ids.tolist() == rows[77].tolist()
    assert not np.array_equal(Synthetic(seq_len=9, vocab_size=50, seed=1).row(77).input_ids, rows[77])
    assert again.fingerprint != source.fingerprint
    assert source.name(3) == "synthetic:3"
    with pytest.raises(IndexError):
        source.row(100)


@pytest.mark.parametrize("vocab_size", [2, 1000, 65_537])
def test_synthetic_tokens_are_uniform(vocab_size):
    ids = Synthetic(seq_len=100_001, vocab_size=vocab_size).row(3).input_ids
    assert ids.size == 100_001
    assert ids.min() >= 0
    assert ids.max() < vocab_size
    counts = np.histogram(ids, bins=2, range=(0, vocab_size))[0]
    assert abs(counts[0] / ids.size - 0.5) < 0.01


def test_the_example_of_the_documentation(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), flags=re.DOTALL)
    space: dict = {}
    exec(example, space)
    np.arange(16 * 5, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    seen = []
    for rank in range(2):
        stream = space["training_data"](str(tmp_path / "ids.bin"), rank, 2).batches(0)
        for _ in range(5):
            seen += [row[0] // 16 for batch in next(stream) for row in batch.input_ids.tolist()]
        stream.close()
    assert sorted(seen) == sorted([0, 1, 2, 3, 4] * 4), "20 positions, 4 epochs of 5 rows"
