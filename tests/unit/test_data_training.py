"""Reading ahead, state, validation, synthetic rows, and a program's rows."""

import gc
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from smp_train.data.indexed import ValidationData
from smp_train.data.order import Order
from smp_train.data.own_rows import Checked
from smp_train.data.samples import Samples
from smp_train.data.source import Row, Source
from smp_train.data.synthetic import Synthetic
from smp_train.errors import ConfigError, DataError
from tests.shards import Documents, training
from tests.tiers import slow

ROOT = Path(__file__).resolve().parents[2]


def data(size, *, seed=1, shuffle="global", mb=2, acc=1, rank=0, world=1, broken=None, **options):
    return training(
        Documents([3] * size, broken), 3, mb, order=Order(size, seed, shuffle), accumulation=acc, dp_rank=rank,
        dp_size=world, **options,
    )  # fmt: skip


def test_no_thread_outlives_its_stream():
    before = set(threading.enumerate())  # there may be some of other tests

    def reading():
        return [one for one in set(threading.enumerate()) - before if one.name.startswith("smp-train-data")]

    for end in ("close", "drop"):
        stream = data(50, prefetch=3).batches(0)
        next(stream)
        assert len(reading()) == 1
        if end == "close":
            stream.close()
        else:
            del stream
            gc.collect()
        assert not reading()


EXIT = """
from smp_train.data.synthetic import Synthetic
from tests.shards import Documents, training
data = training(Synthetic(seq_len=512, vocab_size=9), 512, 64, accumulation=2, prefetch=4)
stream = data.batches(0)
next(stream)
"""


@pytest.mark.parametrize(
    ("ending", "code"), slow([("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)], lambda case: case[1] != 7)
)
def test_the_process_ends_while_reading_ahead(ending, code):
    program = [sys.executable, "-c", EXIT + ending]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert not done.stderr if code != 1 else not re.search("abort|Fatal", done.stderr)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_error_comes_in_the_step_it_belongs_to(prefetch):
    order = Order(20, 1).rows(np.arange(20))[1].tolist()
    stream = data(20, prefetch=prefetch, broken=order[9]).batches(0)
    for _ in range(4):
        next(stream)
    with pytest.raises(DataError, match=f"d:{order[9] + 1}: broken"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_state_refuses_other_data(caplog):
    state = data(17, seed=3).state(34)
    assert data(17, seed=3, mb=5, world=2).restore_state(state) == 34
    for other, change, reason in [
        (data(17, seed=4), {}, "--seed changed: 3 in the checkpoint, 4 now"),
        (data(18, seed=3), {}, "samples 17 in the checkpoint, 18 now.*--allow_data_change 1"),
        (data(17, seed=3, shuffle="none"), {}, "--shuffle changed: global in the checkpoint, none now"),
        (data(17, seed=3), {"fingerprint": "else"}, r"fingerprint else "),
        (data(17, seed=3), {"version": 99}, "version 99"),
        (data(17, seed=3), {"kind": "streamed"}, "--streaming 1"),
    ]:
        with pytest.raises(DataError, match=reason):
            other.restore_state({**state, **change})
    assert data(18, seed=3).restore_state(state, allow_data_change=True) == 34
    assert "samples 17 in the checkpoint, 18 now" in caplog.text
    with pytest.raises(DataError, match="--seed"):
        data(17, seed=4).restore_state(state, allow_data_change=True)


LINES = [2 + number % 5 for number in range(11)]
"""Lengths of rows, the last two in a shard of their own."""


@pytest.mark.parametrize(("world", "mb"), [(1, 1), (2, 5), (8, 1)])
@pytest.mark.parametrize(("fast", "most"), [(False, None), (False, 2), (True, None), (True, 1)])
def test_validation_reads_each_row_once(world, mb, fast, most):
    samples = Samples(Documents(LINES), 6)
    first = samples.last_shard().start if fast else 0
    ranks = [
        ValidationData(samples, first, seq_len=6, micro_batch=mb, dp_rank=r, dp_size=world, max_batches=most)
        for r in range(world)
    ]
    batches = [list(rank.batches()) for rank in ranks]
    assert {len(of_rank) for of_rank in batches} == {len(ranks[0])}
    in_order = [batch for number in range(len(ranks[0])) for batch in (of_rank[number] for of_rank in batches)]
    read = list(range(9, 11) if fast else range(11))[: world * mb * len(ranks[0])]
    assert [name for batch in in_order for name in batch.samples if name] == [f"d:{row + 1}" for row in read]
    assert sum(batch.counted_tokens() for batch in in_order) == sum(1 + row % 5 for row in read)
    assert all(batch.input_ids.shape == (mb, 6) for batch in in_order)
    again = [batch.input_ids for batch in ranks[0].batches()]
    assert all(a.equal(b.input_ids) for a, b in zip(again, batches[0], strict=True))


def test_synthetic_rows_depend_on_seed_and_index_alone():
    source = Synthetic(seq_len=9, vocab_size=50, seed=12345)
    # The same on every machine and in every version: measurements and tests compare them.
    assert source.row(0).input_ids.tolist() == [2, 32, 27, 38, 48, 39, 42, 7, 17]
    assert source.row(1).input_ids.tolist() == [45, 17, 26, 45, 10, 16, 12, 2, 47]
    other = Synthetic(seq_len=9, vocab_size=50, seed=1)
    assert not np.array_equal(other.row(77).input_ids, source.row(77).input_ids)
    assert other.fingerprint != source.fingerprint
    for vocab_size in (2, 1000, 65_537):
        ids = Synthetic(seq_len=100_001, vocab_size=vocab_size).row(3).input_ids
        counts = np.histogram(ids, bins=2, range=(0, vocab_size))[0]
        assert (ids.size, ids.min() >= 0, ids.max() < vocab_size) == (100_001, True, True)
        assert abs(counts[0] / ids.size - 0.5) < 0.01


class Bad(Documents):
    def __init__(self, *row):
        super().__init__(LINES)
        self.bad = row

    def row(self, index):
        return Row(*self.bad) if index == 3 else super().row(index)


BAD_ROWS = [
    (([1, 50],), r"token id 50 is outside the vocabulary \[0, 50\)"), (([1, -1],), "token id -1"),
    (([1.5, 2],), "integers in one dimension"), (([[1, 2]],), "integers in one dimension"),
    ((None,), "integers in one dimension"), (([1],), "a row of one token"),
    (([1, 2], [-100, -100]), "nothing to learn"), (([1, 2], [1]), "2 elements and labels 1"),
    (([1, 2], [1, -7]), r"labels\[1\] is -7"), (("ab", 3, 4, 5), "TypeError"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_programs_rows_are_checked(row, reason):
    source = Checked(Bad(*row), "training_data", 50)
    assert source.row(2).input_ids.dtype == np.int64
    assert source.lengths(range(2)).tolist() == [2, 3]
    with pytest.raises(DataError, match=rf"^training_data, d:4: .*{reason}"):
        source.row(3)


def test_a_program_must_give_a_source():
    for thing, reason in ((object(), "is no Source"), (Source(), "has no fingerprint"), (Documents([]), "has no row")):
        with pytest.raises((ConfigError, DataError), match=f"training_data.*{reason}"):
            Checked(thing, "training_data", 50)


def test_the_example_of_the_documentation(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), flags=re.DOTALL)
    space: dict = {}
    exec(example, space)
    np.arange(16 * 5, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    source = space["Windows"](str(tmp_path / "ids.bin"), 16)
    seen = []
    for rank in range(2):
        stream = training(source, 16, order=Order(len(source), 3), dp_rank=rank, dp_size=2).batches(0)
        seen += [row[0] // 16 for _ in range(10) for batch in next(stream) for row in batch.input_ids.tolist()]
    assert sorted(seen) == sorted([0, 1, 2, 3, 4] * 4), "20 positions, 4 epochs of 5 rows"
