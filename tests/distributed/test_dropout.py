"""Dropout of a split model: which ranks draw alike, and which must not."""

from __future__ import annotations

from typing import Any

import pytest

from tests import harness
from tests.tiers import core
from tests.training import built, group

SPLIT = {
    "model_type": "gpt_neox", "num_key_value_heads": None, "intermediate_size": None, "resid_pdrop": 0.5,
    "attn_pdrop": 0.5, "hidden_width": 64, "max_context_width": 32,
}  # fmt: skip


def masks(setting: str, degree: int = 2) -> dict[str, Any]:
    """Take two micro-batches forward and backward; return where each kind of dropout left zeros, on this rank."""
    import torch

    from smp_train import train_utils
    from smp_train.data.batch import Batch

    with group() as (ranks, device):
        args, backend, spec = built(
            ranks, device, **SPLIT, tensor_parallel_degree=degree, activation_checkpointing=setting
        )
        model: Any = backend.build(backend.check(spec, seq_len=args.max_context_width), seed=args.seed)
        seen: dict[str, list[Any]] = {"embedding": [], "layer": []}
        model.gpt_neox.emb_dropout.register_forward_hook(lambda module, args, out: seen["embedding"].append(out == 0))
        layers = model.gpt_neox.layers
        for layer in layers:
            layer.post_attention_dropout.register_forward_hook(lambda module, args, out: seen["layer"].append(out == 0))
        train_utils.seed_for(backend, args, 1)
        ids = torch.randint(spec.config.vocab_size, (1, args.max_context_width), generator=torch.Generator())
        for _ in range(2):
            backend.loss(model, Batch(ids, ids))[0].backward()
        return seen


@pytest.mark.slow
@pytest.mark.parametrize("setting", core(["none", "full"], lambda setting: setting == "full"))
def test_tensor_ranks_drop_alike_what_they_share_and_independently_what_they_split(setting: str) -> None:
    (alone,) = harness.run(masks, 1, setting, 1)
    one, other = harness.run(masks, 2, setting)
    assert bool((alone["embedding"][0] == one["embedding"][0]).all()), "of whole sequences, as one process has them"
    for ours, theirs in zip(one["embedding"], other["embedding"], strict=True):
        assert bool((ours == theirs).all()), "every rank has the whole embedding"
    assert not bool((one["embedding"][0] == one["embedding"][1]).all()), "micro-batches differ"
    drawn = one["layer"] + other["layer"]
    for index, mask in enumerate(drawn):
        assert 0.3 < float(mask.float().mean()) < 0.7
        for later in drawn[index + 1 :]:
            same = float((mask == later).float().mean())
            repeated = setting == "full" and same == 1  # the backward pass computes the layer again
            assert repeated or same < 0.6
    if setting == "full":  # two layers and two micro-batches, each computed twice, by each rank
        assert len({bytes(mask.flatten().tolist()) for mask in drawn}) == len(drawn) // 2


def draws(degrees: dict[str, int]) -> list[int]:
    """Return a number drawn at the start of each of two steps, on this rank."""
    import torch

    from smp_train import train_utils

    with group() as (ranks, device):
        args, backend, _ = built(ranks, device, **degrees)
        numbers = []
        for step in (1, 2):
            train_utils.seed_for(backend, args, step)
            numbers.append(int(torch.randint(1 << 40, ())))
        return numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "streams"), [("context_parallel_degree", [0, 1, 2, 3]), ("tensor_parallel_degree", [0, 0, 1, 1])]
)
def test_ranks_with_tokens_of_their_own_draw_from_their_own_stream(degree: str, streams: list[int]) -> None:
    found = harness.run(draws, 4, {degree: 2})
    assert [found.index(numbers) for numbers in found] == [streams.index(stream) for stream in streams]
    assert all(first != second for first, second in found)
