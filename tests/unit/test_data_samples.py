"""Rows of any length as samples of one length: which tokens are in which sample, and what is in a batch."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from smp_train import losses
from smp_train.data import convert, samples
from smp_train.data.batch import collate
from smp_train.data.convert import open_samples
from smp_train.data.indexed import ValidationData
from smp_train.data.order import Order
from smp_train.data.samples import Sample, Samples, pack, window
from smp_train.data.source import IGNORED, Row
from smp_train.errors import ConfigError, DataError
from smp_train.models.traits import packed_inputs
from tests.shards import Documents, opened, training, write_shard


def everything(data):
    return [data.sample(index).row.input_ids.tolist() for index in range(len(data))]


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.integers(2, 40), min_size=1, max_size=14), seq_len=st.integers(2, 17),
       short=st.sampled_from(["pad", "concat", "pack"]), table=st.sampled_from([3, 1 << 22]))  # fmt: skip
def test_every_token_is_in_one_sample(sizes, seq_len, short, table):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "TABLE_ROWS", table)
        made = Samples(Documents(sizes), seq_len, long="split", short=short)
        tokens = everything(made)
        assert len({made.sample(index).name for index in range(len(made))}) == len(made)
    assert all(2 <= len(sample) <= seq_len for sample in tokens)
    seen = sorted(token for sample in tokens for token in sample)
    assert len(seen) == len(set(seen))
    # Single tokens at the end of a document (or, joined, of all) are left out: they have no token to predict.
    ends = np.cumsum(sizes).tolist()
    if short == "concat":
        left_out = {sum(sizes)} if sum(sizes) % seq_len == 1 else set()
    else:
        left_out = {end for end, size in zip(ends, sizes, strict=True) if size % seq_len == 1}
    assert set(range(1, sum(sizes) + 1)) - set(seen) == left_out


def test_concat_joins_across_shards():
    made = Samples(Documents([5, 2, 4, 3]), 4, long="split", short="concat")
    assert everything(made) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14]]
    assert made.sample(1).name == "d:1[4:5]+d:2+d:3[0:1]"
    assert all(made.sample(index).row.documents is None for index in range(4)), "joined documents see each other"


def test_pack_keeps_documents_whole_and_apart():
    made = Samples(Documents([5, 2, 3, 6, 9]), 8, long="split", short="pack")
    assert everything(made) == [
        [1, 2, 3, 4, 5, 8, 9, 10],
        [6, 7, 11, 12, 13, 14, 15, 16],
        [17, 18, 19, 20, 21, 22, 23, 24],
    ]
    batch = collate([made.sample(0), sample([6, 7])], 8)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [[-100, 2, 3, 4, 5, -100, 9, 10], [-100, 7] + [-100] * 6]
    assert batch.counted_tokens() == 4 + 2 + 1
    assert (batch.documents[0].tolist(), batch.documents[1]) == ([0, 5, 8, 10, 16], 6)


def best_fit(sizes, capacity):
    """Return the number of bins of best-fit decreasing, one item at a time."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(capacity - size)
    return len(rooms)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_bins_are_those_of_best_fit_decreasing(sizes):
    order, bounds = pack(np.array(sizes), 30)
    bins = [order[a:b].tolist() for a, b in pairwise(bounds.tolist())]
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(0 < sum(sizes[item] for item in items) <= 30 for items in bins)
    assert len(bins) == best_fit(sizes, 30)
    assert [items[0] for items in bins] == sorted(items[0] for items in bins), "rows near each other stay so"


def answer(size, targets):
    """Return a row in which the tokens at ``targets`` carry loss."""
    labels = np.full(size, IGNORED)
    labels[targets] = 7
    return Row(np.arange(size), labels)


def test_the_lost_answer_tokens_of_truncated_rows_are_counted(tmp_path):
    rows = [([1] * 9, [1] * 9, [-100, 1, *[-100] * 3, *[1] * 4]), ([1] * 3, [1] * 3, [1] * 3)]
    write_shard(tmp_path / "a.json", rows)
    for short in ("pad", "pack"):
        data = training(opened(tmp_path), 6, 2, long="truncate", short=short)
        batches = [batch for step in data.batches(0) for batch in step] if data.end else next(data.batches(0))
        assert sum(batch.truncated for batch in batches) >= 1
        assert sum(batch.truncated_targets for batch in batches) == 3 * sum(batch.truncated for batch in batches)
    assert data.samples.sample(0).name == "a.json:1[0:6]"
    split = Samples(opened(tmp_path), 6, long="split")
    assert sum(split.sample(index).truncated for index in range(len(split))) == 0


def test_a_crop_has_a_target_and_depends_on_seed_epoch_and_row_alone():
    row = answer(12, [0, 10, 11])
    assert {window(row, "d", 4, "crop", str(key)) for key in range(60)} == {(7, 11), (8, 12)}
    assert {window(Row(np.arange(10)), "", 8, "crop", str(key))[0] for key in range(60)} == {0, 1, 2}

    def data(seed=1, rank=0, world=1, mb=2):
        return training(Documents([50] * 4), 8, mb, order=Order(4, seed), dp_rank=rank, dp_size=world, long="crop")

    def names(ranks):
        streams = [rank.batches(0) for rank in ranks]
        return [name for _ in range(3) for stream in streams for batch in next(stream) for name in batch.samples]

    one = names([data(mb=4)])
    assert names([data(rank=0, world=2), data(rank=1, world=2)]) == one
    assert len(set(one)) == 12, "another window in each epoch"
    assert names([data(seed=2, mb=4)]) != one
    held = ValidationData(Samples(Documents([50] * 4), 8, long="crop"), seq_len=8, micro_batch=4, dp_rank=0, dp_size=1)
    first, again = ([batch.input_ids.tolist() for batch in held.batches()] for _ in range(2))
    assert first == again


def test_layouts_that_do_not_go_together_and_rows_that_are_too_long(tmp_path):
    source = Documents([5, 12])
    for long, short, flag in (("crop", "pack", "--long crop"), ("truncate", "concat", "--short concat")):
        with pytest.raises(ConfigError, match=flag):
            Samples(source, 8, long=long, short=short)
    for short in ("pad", "pack"):
        with pytest.raises(DataError, match=r"d:2: .*12 .* 8 .*--max_context_width"):
            everything(Samples(source, 8, long="error", short=short))
    write_shard(tmp_path / "a.json", [[1] * 5, [1] * 9])
    with pytest.raises(DataError, match=r"a\.json:2: .*9 .* 8 .*--max_context_width"):
        Samples(opened(tmp_path), 8, long="error")


def test_resume_with_another_layout_is_refused(tmp_path, caplog):
    write_shard(tmp_path / "a.json", [[1] * size for size in (30, 7, 9)])
    source = opened(tmp_path)

    def data(seq_len, short="pad", long="split"):
        return training(source, seq_len, long=long, short=short)

    state = data(8, "concat").state(3)
    assert data(8, "concat").check_state(state) == 3
    for other in (data(9, "concat"), data(8, "pack"), data(8), data(8, long="truncate")):
        with pytest.raises(DataError, match=r"made by --short concat --long split --max_context_width 8"):
            other.check_state(state)
    assert data(40, long="truncate").check_state(data(30, long="split").state(3)) == 3, "neither cuts a row"
    assert data(9, long="truncate").check_state(data(8, long="truncate").state(3), allow_data_change=True) == 3
    assert "--max_context_width 8 in the checkpoint" in caplog.text


def test_tables_of_samples_are_made_once_and_mapped(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", [[1] * (2 + number % 29) for number in range(100)])
    monkeypatch.setattr(samples, "TABLE_ROWS", 40)
    source = opened(tmp_path)
    first = open_samples(source, 16, long="split", short="pack")
    assert len(list(tmp_path.glob(".smp_train_cache/*.tab"))) == 3
    monkeypatch.setattr(convert, "make_table", lambda *_: pytest.fail("made again"))
    again = open_samples(source, 16, long="split", short="pack")
    in_memory = Samples(source, 16, long="split", short="pack")
    names = [[made.sample(index).name for index in range(len(made))] for made in (first, again, in_memory)]
    assert names[0] == names[1] == names[2]
    assert first.fingerprint == in_memory.fingerprint


def test_a_damaged_table_of_samples_is_made_again(tmp_path):
    write_shard(tmp_path / "a.json", [[1] * (2 + number % 29) for number in range(100)])
    source = opened(tmp_path)
    before = open_samples(source, 16, long="split", short="pack")
    names = [before.sample(index).name for index in range(len(before))]
    (table,) = tmp_path.glob(".smp_train_cache/*.tab")
    content = bytearray(table.read_bytes())
    content[-200] ^= 1
    table.write_bytes(content)
    again = open_samples(source, 16, long="split", short="pack")
    assert [again.sample(index).name for index in range(len(again))] == names


def sample(ids, labels=None):
    return Sample(Row(np.array(ids), labels and np.array(labels)), "a:1")


def test_samples_become_a_batch():
    batch = collate([Sample(sample([1, 2, 3, 4]).row, "a:1", 1, 2), sample([5, 6, 7, 8])], 4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.labels is batch.input_ids, "nothing is copied where nothing differs"
    assert (batch.samples, batch.truncated, batch.truncated_targets) == (["a:1", "a:1"], 1, 2)
    batch = collate([sample([1, 2, 3, 4]), sample([5, 6]), sample([7, 8, 9], [-100, -100, 3])], 4, size=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0], [0] * 4]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, -100, -100], [-100, -100, 3, -100], [-100] * 4]
    assert batch.samples == ["a:1"] * 3 + [""]
    assert batch.counted_tokens() == 3 + 1 + 1
    assert collate([], 4, size=2).counted_tokens() == 0


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
    """Loss of a packed row, and its gradient, are the sums over its documents alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, **FAMILIES[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    source = Documents([9, 5, 8, 6])
    made = Samples(source, 16, long="split", short="pack")
    batch = collate([made.sample(index) for index in range(len(made))], 16)
    assert batch.position_ids is not None
    context = packed_inputs(model, batch.position_ids)
    logits = model(input_ids=batch.input_ids, use_cache=False, **context).logits
    together = losses.cross_entropy_sum(logits, losses.shift(batch.labels))
    together.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    alone = 0.0
    for index in range(4):
        row = source.row(index)
        one = collate([Sample(row, "")], row.input_ids.size)
        loss = losses.cross_entropy_sum(
            model(input_ids=one.input_ids, use_cache=False).logits, losses.shift(one.labels)
        )
        loss.backward()
        alone += loss.item()
    assert together.item() == pytest.approx(alone, rel=1e-5)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(packed[name], p.grad, rtol=2e-4, atol=2e-5)
