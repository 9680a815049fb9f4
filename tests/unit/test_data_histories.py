"""Random histories of runs: kills, resumes on other world sizes and micro-batches; no token is lost or read twice."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from smp_train.data import stream
from smp_train.data.convert import open_token_rows
from smp_train.data.files import FileSet, list_files
from smp_train.data.indexed import TrainingData
from smp_train.data.kinds import TOKENS
from smp_train.data.order import Order
from smp_train.data.rows import Recipe
from smp_train.data.samples import Samples
from smp_train.data.stream import Reading
from tests.streams import positions_of, spans_of, state_of, streamed_ranks

SEQ_LEN, FIRST = 24, 16
LAYOUTS = [("pad", "split"), ("concat", "split"), ("pack", "split"), ("pad", "crop"), ("pad", "truncate")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[FileSet, dict[str, list[int]]]:
    """Return the files of 150 rows of 2 to 70 tokens, and the tokens of each row by name."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    rows = {}
    for name, size in {"a.jsonl": 60, "b.jsonl": 11, "c.jsonl": 79}.items():
        found = [[draw.randrange(1, 500) for _ in range(draw.choice([2, 5, 20, 30, 70]))] for _ in range(size)]
        (folder / name).write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in found))
        rows |= {f"{name}:{number}": ids for number, ids in enumerate(found, 1)}
    return list_files(str(folder)), rows


def history(draw: random.Random, loaders, epochs: int) -> list[tuple[str, list[int]]]:
    """Return the samples that a run of several starts trained on, in order: (name, tokens).

    Each start has another number of ranks, micro-batch and accumulation, and ends by a kill some steps after its save.
    Started again at its end, the run has nothing left to do but with more epochs.
    """
    trained: list[tuple[str, list[int]]] = []
    saved = None
    while True:
        shape = {"micro_batch": draw.randint(1, 3), "accumulation": draw.randint(1, 2)}
        ranks = loaders(dp_size=draw.randint(1, 8), prefetch=draw.choice([0, 0, 2]), epochs=epochs, **shape)
        (consumed,) = {rank.restore_state(saved) for rank in ranks} if saved else {0}
        iterators = [rank.batches(consumed) for rank in ranks]
        steps_to_save, steps_lost = draw.randint(0, 12), draw.randint(0, 2)
        unsaved: list[tuple[str, list[int]]] = []
        for number in range(steps_to_save + steps_lost + 1):
            if number == steps_to_save:
                saved = state_of(ranks, consumed)
                trained += unsaved
                unsaved = []
            if ended(ranks, consumed):
                if number <= steps_to_save:
                    saved = state_of(ranks, consumed)
                    for more in (0, 1):
                        (again,) = alone(loaders, epochs + more)
                        assert ended([again], again.restore_state(saved)) == (not more)
                    return trained + unsaved
                break
            unsaved += positions_of(ranks, iterators, consumed)
            consumed += ranks[0].global_batch
        for iterator in iterators:
            iterator.close()


def alone(loaders, epochs: int):
    return loaders(dp_size=1, epochs=epochs, prefetch=0, micro_batch=1, accumulation=1)


def ended(ranks, consumed: int) -> bool:
    return ranks[0].end <= consumed if ranks[0].end is not None else all(rank.exhausted for rank in ranks)


def check(samples, rows: dict[str, list[int]], epochs: int, long: str) -> None:
    """Check that every token of every row, or of its part that --long keeps, was used once per epoch, in its sample."""
    times: Counter[str] = Counter()
    for name, ids in samples:
        spans = [(row, begin, len(rows[row]) if end is None else end) for row, begin, end in spans_of(name)]
        joined = [token for row, begin, end in spans for token in rows[row][begin:end]]
        assert ids == joined + [0] * (SEQ_LEN - len(joined))
        for row, begin, end in spans:
            # A crop is drawn anew in every epoch.
            times.update(
                f"{row} {0 if long == 'crop' else begin + n}" for n in range(1 if long == "crop" else end - begin)
            )
    whole = {"split": lambda size: size, "truncate": lambda size: min(size, SEQ_LEN), "crop": lambda size: 1}[long]
    wanted = {f"{row} {n}": epochs for row, ids in rows.items() for n in range(whole(len(ids)))}
    assert times == wanted


def indexed(source, short, long, seed, shuffled):
    """Return what makes the ranks of an indexed run."""
    samples = Samples(source, SEQ_LEN, long=long, short=short)
    order = Order(len(samples), seed, "global" if shuffled else "none")

    def ranks(dp_size, **share):
        share |= {"seq_len": SEQ_LEN, "dp_size": dp_size}
        return [TrainingData(samples, order, dp_rank=rank, **share) for rank in range(dp_size)]

    return ranks


def streamed(files, short, long, seed, shuffled, streams):
    """Return what makes the ranks of a streamed run."""

    def ranks(dp_size, epochs, **share):
        how = {"seed": seed, "shuffled": shuffled, "short": short, "long": long, "epochs": epochs}
        reading = Reading([files], [Recipe(TOKENS, 500).open()], SEQ_LEN, **how)
        return streamed_ranks(reading, streams, dp_size, seq_len=SEQ_LEN, **share)

    return ranks


@pytest.mark.parametrize("kind", ["indexed", "streamed"])
@pytest.mark.parametrize("histories", [10, pytest.param(200, marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_history_loses_or_repeats_a_token_or_has_another_order(corpus, tmp_path, monkeypatch, kind, histories):
    files, rows = corpus
    monkeypatch.setattr(stream, "BLOCK_RECORDS", 8)
    source = open_token_rows(files, Recipe(TOKENS, 500), cache_dir=str(tmp_path)) if kind == "indexed" else None
    for number in range(histories):
        draw = random.Random(number)
        short, long = draw.choice(LAYOUTS)
        epochs, layout = draw.randint(1, 3), (short, long, draw.randrange(100), draw.random() < 0.8)
        loaders = indexed(source, *layout) if kind == "indexed" else streamed(files, *layout, draw.choice([1, 2, 8]))
        trained = history(draw, loaders, epochs)
        check(trained, rows, epochs, long)
        # Only at the beginning: once a stream has ended, a micro-batch has its blank rows last.
        (rank,) = alone(loaders, epochs)
        iterator = rank.batches(0)
        assert trained[:FIRST] == [positions_of([rank], [iterator], n)[0] for n in range(FIRST)], "on one rank"
