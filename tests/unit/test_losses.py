"""The loss as a sum: what is counted, and the chunked head against the whole one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from smp_train import losses
from smp_train.parallel import compile


def batch(dtype: torch.dtype = torch.float32, vocab: int = 300) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 50, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (3, 50), generator=generator)
    labels[:, 5:9] = losses.IGNORE_INDEX
    labels[2] = losses.IGNORE_INDEX
    return hidden, weight, bias, labels


def gradients(loss: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss / 7, inputs))


def test_sum_is_the_mean_times_the_count() -> None:
    hidden, weight, bias, labels = batch()
    logits = F.linear(hidden, weight, bias)
    mean = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    total = losses.cross_entropy_sum(logits, losses.shift(labels))
    torch.testing.assert_close(total, mean * (labels[:, 1:] != losses.IGNORE_INDEX).sum())


def test_nothing_counted_is_zero_with_zero_gradient_and_a_frozen_head_has_none() -> None:
    hidden, weight, _, labels = batch()
    loss = losses.linear_cross_entropy_sum(hidden, weight, torch.full_like(labels, losses.IGNORE_INDEX))
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(loss, (hidden, weight)))
    loss = losses.linear_cross_entropy_sum(hidden, weight.detach(), losses.shift(labels))
    assert gradients(loss, (hidden,))[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_of_the_loss_serve_every_number_of_tokens(dtype: torch.dtype) -> None:
    from torch._dynamo.utils import counters

    kernels = compile.loss_kernels("aot_eager")
    counters.clear()
    for rows in (3, 2, 1):
        hidden, weight, bias, labels = batch(dtype)
        inputs, targets = (hidden, weight, bias), losses.shift(labels[:rows])
        found = [
            losses.linear_cross_entropy_sum(hidden[:rows], weight, targets, bias=bias, chunk=64, kernels=of)
            for of in (losses.EAGER, kernels)
        ]
        assert torch.equal(*found)
        for eager, compiled in zip(*(gradients(one, inputs) for one in found), strict=True):
            assert torch.equal(eager, compiled)
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("chunk", [1, 17, 64, 1000, None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_chunked_head_equals_the_whole_one(chunk: int | None, with_bias: bool) -> None:
    hidden, weight, bias, labels = batch()
    targets = losses.shift(labels)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    whole = losses.cross_entropy_sum(F.linear(hidden, weight, bias if with_bias else None), targets)
    chunked = losses.linear_cross_entropy_sum(hidden, weight, targets, bias=bias if with_bias else None, chunk=chunk)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    for ours, theirs in zip(gradients(chunked, inputs), gradients(whole, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_chunked_head_in_bfloat16_is_as_good_as_the_whole_one() -> None:
    hidden, weight, _, labels = batch(torch.bfloat16)
    targets = losses.shift(labels)
    exact = losses.cross_entropy_sum(hidden.double() @ weight.double().T, targets)
    whole = losses.cross_entropy_sum(hidden @ weight.T, targets)
    chunked = losses.linear_cross_entropy_sum(hidden, weight, targets, chunk=16)
    assert abs(chunked - exact) <= 1.1 * abs(whole - exact) + 1e-3
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients(chunked, (hidden, weight)))


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, _, labels = batch()
    loss = losses.linear_cross_entropy_sum(hidden, weight, losses.shift(labels))
    torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        torch.autograd.grad(loss, (hidden, weight))
