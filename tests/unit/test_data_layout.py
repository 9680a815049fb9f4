"""Rows of any length as samples of one length: which tokens end up where, and what sees what."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from smp_train import losses
from smp_train.data.layout import Layout, lay_out, pack
from smp_train.data.order import Order
from smp_train.data.pipelines.batch import collate, crop
from smp_train.data.pipelines.data_pipeline import Row, Source, ValidationData
from smp_train.errors import ConfigError, DataError
from smp_train.models.traits import packed_inputs
from tests.shards import training


class Documents(Source):
    """Documents of given lengths, no token twice, padded by ``left`` and ``right`` zeros, in shards of three."""

    fingerprint = "documents"

    def __init__(self, sizes, left=0, right=0):
        ends = np.cumsum(sizes)
        self.tokens = [np.arange(end - size, end) + 1 for size, end in zip(sizes, ends, strict=True)]
        self.left, self.right = left, right
        self.shards = [range(a, min(a + 3, len(sizes))) for a in range(0, len(sizes), 3)]

    def __len__(self):
        return len(self.tokens)

    def row(self, index):
        padding = [np.zeros(self.left, int), np.zeros(self.right, int)]
        ids = np.concatenate([padding[0], self.tokens[index], padding[1]])
        return Row(ids, ids > 0 if self.left + self.right else None)

    def name(self, index):
        return f"d:{index + 1}"


def everything(layout):
    return [layout.row(i).input_ids.tolist() for i in range(len(layout))]


sizes_of = st.lists(st.integers(2, 40), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(sizes=sizes_of, seq_len=st.integers(2, 17), short=st.sampled_from(["pad", "concat", "pack"]),
       left=st.integers(0, 3), right=st.integers(0, 3))  # fmt: skip
def test_every_token_is_in_one_sample(sizes, seq_len, short, left, right):
    layout = Layout(Documents(sizes, left, right), seq_len, long="split", short=short)
    samples = everything(layout)
    assert all(2 <= len(sample) <= seq_len for sample in samples)
    seen = sorted(token for sample in samples for token in sample)
    whole = list(range(1, sum(sizes) + 1))
    # What is left over is single tokens at the ends of documents (or, joined, at the end of all).
    lost = set(whole) - set(seen)
    assert len(seen) == len(set(seen))
    last = {sum(sizes)} if short == "concat" else set(np.cumsum(sizes).tolist())
    assert lost <= last
    assert lost == {end for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True) if size % seq_len == 1} or (
        short == "concat" and lost == (last if sum(sizes) % seq_len == 1 else set())
    )
    assert [i for rows in layout.shards for i in rows] == list(range(len(layout)))
    assert len({layout.name(i) for i in range(len(layout))}) == len(layout)


def test_concat_joins_across_shards():
    layout = Layout(Documents([5, 2, 4, 3]), 4, short="concat")
    assert everything(layout) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14]]
    assert layout.name(1) == "d:1[4:5]+d:2+d:3[0:1]"
    assert layout.shards == [range(3), range(3, 4)]
    assert all(layout.row(i).documents is None for i in range(4)), "documents joined end to end see each other"


def test_validation_when_the_last_shard_has_no_sample_of_its_own():
    source = lay_out(Documents([9, 9, 9, 3]), 8, long="split", short="concat")
    assert len(source.shards[-1]) == 0
    held = ValidationData(source, seq_len=8, micro_batch=2, dp_rank=0, dp_size=1, fast=True)
    assert len(held) == 2
    assert sum(batch.counted_tokens() for batch in held.batches()) == 30 - 4


def test_pack_keeps_documents_whole_and_apart():
    layout = Layout(Documents([5, 2, 3, 6, 9]), 8, long="split", short="pack")
    rows = [layout.row(i) for i in range(len(layout))]
    assert [row.input_ids.tolist() for row in rows] == [
        [1, 2, 3, 4, 5, 8, 9, 10],
        [6, 7],
        [11, 12, 13, 14, 15, 16],
        [17, 18, 19, 20, 21, 22, 23, 24],
    ]
    assert [None if row.documents is None else row.documents.tolist() for row in rows] == [[5, 3], None, None, None]
    batch = collate(rows[:2], ["a", "b"], 8)
    assert batch.attention_mask is None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [[-100, 2, 3, 4, 5, -100, 9, 10], [-100, 7] + [-100] * 6]
    assert batch.counted_tokens() == 4 + 2 + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_bins(sizes):
    bins = pack(np.array(sizes), 30)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in items) <= 30 for items in bins)
    assert len(bins) <= 11 / 9 * -(-sum(sizes) // 30) + 1 + sum(size > 15 for size in sizes)
    assert pack(np.array(sizes), 30) == bins


def test_truncate_takes_the_beginning_after_left_padding():
    source = Documents([6, 3], left=5)
    layout = Layout(source, 4, long="truncate", short="concat")
    assert everything(layout) == [[1, 2, 3, 4], [7, 8, 9]]
    batch = collate([source.row(0)], ["a:1"], 4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4]]
    assert batch.counted_tokens() == 3
    assert batch.truncated == 1


def test_a_cut_row_with_nothing_counted_is_an_error():
    row = Row(np.arange(9), np.array([True] + [False] * 7 + [True]))
    with pytest.raises(DataError, match="a:3: "):
        collate([row], ["a:3"], 4)


class Dialogue(Documents):
    """One row, of which the first and the last two tokens are counted."""

    def row(self, index):
        ids = super().row(index).input_ids
        counted = np.zeros(ids.size, bool)
        counted[[0, -2, -1]] = True
        return Row(ids, counted)


@pytest.mark.parametrize(("long", "short"), [("split", "pad"), ("split", "concat")])
def test_a_sample_with_nothing_counted_is_an_error(long, short):
    source = Dialogue([12])
    samples = lay_out(source, 4, long=long, short=short)
    data = training(samples, 4, long=long, named=False)
    reason = r"d:1\[\d:\d\]: no token of this sample is counted: nothing to learn; raise --max_context_width"
    with pytest.raises(DataError, match=reason):
        [data.step(consumed) for consumed in range(30)]


def test_a_crop_has_something_to_learn():
    source = Dialogue([12])
    data = training(source, 4, order=Order(1, 1), long="crop")
    starts = set()
    for consumed in range(60):
        (batch,) = data.step(consumed)
        assert batch.counted_tokens() > 0
        starts.add(batch.samples[0])
    assert starts == {"d:1[7:11]", "d:1[8:12]"}
    nothing = Row(np.arange(12), np.arange(12) % 11 == 0, labels=np.full(12, -100))
    with pytest.raises(DataError, match="d:1: "):
        crop(nothing, "d:1", 4, "key")


def test_crop_depends_on_seed_epoch_and_row_alone():
    def data(seed=1, rank=0, world=1, mb=2):
        source = Documents([50] * 4)
        return training(source, 8, mb, order=Order(4, seed), dp_rank=rank, dp_size=world, long="crop")

    def samples(ranks, steps):
        return [name for at in steps for rank in ranks for batch in rank.step(at) for name in batch.samples]

    one = samples([data(mb=4)], [0, 4, 8])
    assert samples([data(rank=0, world=2), data(rank=1, world=2)], [0, 4, 8]) == one
    assert len(set(one)) == 12, "another window in each epoch"
    assert samples([data(seed=2, mb=4)], [0, 4, 8]) != one
    starts = {crop(Row(np.arange(10)), "", 8, str(key))[0].input_ids[0] for key in range(60)}
    assert starts == {0, 1, 2}, "the last window too"
    held = ValidationData(Documents([50] * 4), seq_len=8, micro_batch=4, dp_rank=0, dp_size=1, long="crop")
    first, again = ([batch.input_ids.tolist() for batch in held.batches()] for _ in range(2))
    assert first == again


def test_what_does_not_go_together():
    source = Documents([5, 12])
    assert lay_out(source, 8, long="truncate", short="pad") is source
    with pytest.raises(ConfigError, match=r"--long crop .*--short pack"):
        lay_out(source, 8, long="crop", short="pack")
    with pytest.raises(DataError, match=r"d:2: .*12 .* 8 .*--max_context_width"):
        lay_out(source, 8, long="error", short="concat")
    with pytest.raises(ConfigError, match="--short fold"):
        lay_out(source, 8, long="split", short="fold")
    holed = Row(np.arange(6), np.array([1, 0, 1, 1, 1, 1], bool), np.array([3, 3]))
    with pytest.raises(DataError, match="a:1: attention_mask"):
        collate([holed], ["a:1"], 8)


def test_resume_with_another_layout_is_refused():
    def data(seq_len, short):
        source = lay_out(Documents([30, 7, 9]), seq_len, long="split", short=short)
        return training(source, seq_len)

    state = data(8, "concat").state(3)
    assert data(8, "concat").check_state(state) == 3
    for other in (data(9, "concat"), data(8, "pack"), data(8, "pad")):
        with pytest.raises(DataError, match=r"samples are made by --short concat --long split --max_context_width 8"):
            other.check_state(state)


def test_resume_with_other_cuts_is_refused(caplog):
    def data(long, seq_len, longest=None):
        source = Documents([30, 7, 9])
        if longest is not None:
            source.report = lambda: {"longest": longest, "longest_at": "d:1"}
        return training(source, seq_len, long=long)

    state = data("truncate", 8).state(3)
    with pytest.raises(DataError, match=r"--long truncate .*crop"):
        data("crop", 8).check_state(state)
    for long in ("truncate", "crop"):
        state = data(long, 8).state(3)
        assert data(long, 8).check_state(state) == 3
        with pytest.raises(DataError, match=r"--max_context_width 8 .* 9 "):
            data(long, 9).check_state(state)
        with pytest.raises(DataError, match=r"--max_context_width 8 .* 40 "):
            data(long, 40, longest=30).check_state(state)
        assert data(long, 40, longest=8).check_state(state) == 3, "no row is cut at 8 either"
    assert data("truncate", 9).check_state(data("truncate", 8).state(3), allow_data_change=True) == 3
    assert "--max_context_width 8 in the checkpoint, 9 now (--allow_data_change 1)" in caplog.text
    assert data("error", 40, longest=30).check_state(data("error", 30, longest=30).state(3)) == 3


FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 6},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 2},
    "gpt_neox": {},
    "gpt2": {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "phi": {},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_documents_do_not_see_each_other(family, attention):
    """Loss of a packed row, and its gradient, are the sums of those of its documents alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, **FAMILIES[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    source = Documents([9, 5, 8, 6])
    layout = Layout(source, 16, short="pack")
    batch = collate([layout.row(i) for i in range(len(layout))], [""] * len(layout), 16)
    assert batch.position_ids is not None
    context = packed_inputs(model, batch.position_ids)
    logits = model(input_ids=batch.input_ids, use_cache=False, **context).logits
    together = losses.cross_entropy_sum(logits, losses.shift(batch.labels))
    together.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = 0.0
    for i in range(4):
        one = collate([source.row(i)], [""], source.row(i).input_ids.size)
        loss = losses.cross_entropy_sum(
            model(input_ids=one.input_ids, use_cache=False).logits, losses.shift(one.labels)
        )
        loss.backward()
        alone += loss.item()
    assert together.item() == pytest.approx(alone, rel=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(packed[name], p.grad, rtol=2e-4, atol=2e-5)
