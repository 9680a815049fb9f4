"""Next-token cross entropy as a sum over counted tokens.

A sum, because the mean is taken once over the counted tokens of the global batch: loss and gradient then do not depend
on how that batch is split over ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from smp_train.arguments.program_inputs import qualified_name
from smp_train.distributed.device_profile import DeviceProfile, profile_of
from smp_train.errors import ConfigError, SmpTrainError, one_line

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of float32 logits ``[batch, seq, vocab]`` and targets of `shift`; returns the sum over counted tokens."""
IGNORE_INDEX = -100
"""Label of a token without loss; the default of `torch.nn.functional.cross_entropy`."""


def shift(labels: Tensor) -> Tensor:
    """Return the targets of ``labels``: position ``t`` predicts token ``t + 1``; the last position predicts nothing.

    Labels are shifted rather than logits: slicing the logits would copy the largest tensor of the step.
    """
    targets = torch.full_like(labels, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    return targets


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross entropy, in nats, of ``logits``.

    Args:
        logits: ``[batch, seq, vocab]`` in any floating dtype; the soft-max is taken in float32.
        targets: int64 ``[batch, seq]`` from `shift`, `IGNORE_INDEX` where a token is not counted.

    Returns:
        A scalar float32 tensor; zero, with a gradient of zero, when nothing is counted.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def check_sum(loss: Loss, vocab_size: int, device: torch.device, *, split: bool = False) -> None:
    """Raise `ConfigError` unless a loss is a sum over counted tokens, tried on two rows of random logits.

    A mean would weigh tokens by their rows, micro-batches and ranks. If ranks ``split`` sequences (context
    parallelism), the loss of a token must not depend on its position or its neighbours either.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, vocab_size, generator=generator).to(device).requires_grad_()
    targets = torch.randint(vocab_size, (2, 6), generator=generator).to(device)
    targets[:, -1], targets[0, :2] = IGNORE_INDEX, IGNORE_INDEX
    uncounted_changed = torch.where(targets.unsqueeze(2) == IGNORE_INDEX, 1 - 2 * logits.detach(), logits)
    name, rows, tokens = f"loss: {qualified_name(loss)}", slice(0, 2), slice(None)

    def value(rows: slice = rows, tokens: slice = tokens, logits: Tensor = logits, *, counted: bool = True) -> float:
        expected = targets[rows, tokens] if counted else torch.full_like(targets[rows, tokens], IGNORE_INDEX)
        result = loss(logits[rows, tokens], expected)
        if not isinstance(result, Tensor) or result.ndim or (counted and not result.requires_grad):
            raise ConfigError(f"{name} returns no scalar tensor that depends on the logits; return a sum over tokens")
        return float(result.detach())

    try:
        whole, parts, nothing = value(), (value(slice(0, 1)), value(slice(1, 2))), value(counted=False)
        unchanged = value(logits=uncounted_changed)
        halves = (value(tokens=slice(0, 3)), value(tokens=slice(3, 6))) if split else parts
    except SmpTrainError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"{name}: {type(problem).__name__}: {one_line(problem)}; it takes logits, float32 [batch, seq, vocab], and "
            f"targets, int64 [batch, seq], {IGNORE_INDEX} where a token is not counted"
        ) from problem
    if not math.isclose(whole, sum(parts), rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"{name} is {whole:.5g} of two rows and {parts[0]:.5g} and {parts[1]:.5g} of each alone; return the sum "
            "over counted tokens, not a mean: the run divides by the tokens of the global batch"
        )
    if not math.isclose(whole, sum(halves), rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"{name} is {whole:.5g} of whole sequences and {halves[0]:.5g} and {halves[1]:.5g} of their halves; set "
            "--context_parallel_degree 1: with more, each rank has a part of a sequence"
        )
    if nothing != 0 or not math.isclose(unchanged, whole, rel_tol=1e-3, abs_tol=1e-6):
        raise ConfigError(
            f"{name} counts tokens whose target is {IGNORE_INDEX}; leave them out, and return 0 where all are"
        )


CHUNK_ELEMENTS = 1 << 25
"""Logits in a chunk of `linear_cross_entropy_sum` on a CPU: 128 MiB in float32."""
CHUNK_ELEMENTS_CUDA = 1 << 28
"""Logits in a chunk on a GPU, where each chunk reads the whole weight and its gradient: 512 MiB in bfloat16."""


def chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Return how many tokens pass through the head at a time.

    On a GPU the number is a multiple of 256, which fills the tiles of a product, and at least 1,024: below some 300
    FLOP per byte (H100: 989 TFLOP/s by 3.35 TB/s) a product waits for the weight that it reads.
    """
    if device_type == "cuda":
        return max(1024, CHUNK_ELEMENTS_CUDA // vocab_size // 256 * 256)
    return max(64, CHUNK_ELEMENTS // vocab_size)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return each row's log-sum-exp in float32, of logits ``[tokens, vocab]``."""
    return logits.float().logsumexp(dim=1)


def softmax(logits: Tensor, normalizer: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``exp(logits - normalizer)`` as ``dtype``, computed in float32; float32 logits are overwritten.

    Args:
        logits: ``[tokens, vocab]``.
        normalizer: float32 ``[tokens]``; an infinite one gives a row of zeros.
        dtype: The result's dtype.
    """
    return logits.float().sub_(normalizer.unsqueeze(1)).exp_().to(dtype)


class Kernels(NamedTuple):
    """The functions that `linear_cross_entropy_sum` applies to each logit."""

    log_sum_exp: Callable[[Tensor], Tensor] = log_sum_exp
    softmax: Callable[[Tensor, Tensor, torch.dtype], Tensor] = softmax
    fused: bool = False
    """Whether the functions are compiled: they store no intermediate result, so logits keep the product's dtype."""


EAGER = Kernels()


def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk: int | None = None,
    group: dist.ProcessGroup | None = None, kernels: Kernels = EAGER, profile: DeviceProfile | None = None,
) -> Tensor:  # fmt: skip
    """Return `cross_entropy_sum` of ``hidden @ weight.T + bias``, without holding all logits.

    Tokens pass through the head in chunks. A chunk's gradients are computed while its logits are in memory: logits are
    neither kept for the backward pass nor recomputed. Extra memory is one chunk of logits and one gradient of the
    weight in float32. (torch 2.13's ``linear_cross_entropy`` does the same, but it is slower on a CPU, and supports
    neither a split vocabulary nor compilation.)

    Args:
        hidden: ``[batch, seq, width]``, the last hidden states.
        weight: ``[vocab, width]``, in the dtype of the product.
        targets: int64 ``[batch, seq]`` from `shift`, `IGNORE_INDEX` where a token is not counted.
        bias: ``[vocab]`` or None.
        chunk: Tokens of a chunk; by default `chunk_tokens`.
        group: Ranks that split the vocabulary evenly, in order of rank: ``weight`` and ``bias`` are this rank's part;
            hidden states, targets and result are the same on all ranks. The gradient of the hidden states is this
            rank's summand of the true gradient.
        kernels: Compiled forms of `log_sum_exp` and `softmax`.
        profile: The device's profile; by default, that of the hidden states' device.

    Returns:
        A scalar float32 tensor.
    """
    profile = profile or profile_of(hidden.device)
    size = chunk or chunk_tokens(weight.shape[0], profile.device_type)
    loss: Tensor = _ChunkedHead.apply(
        hidden.flatten(0, 1), weight, bias, targets.flatten(), size, group, kernels, profile
    )
    return loss


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int,
        group: dist.ProcessGroup | None, kernels: Kernels, profile: DeviceProfile,
    ) -> Tensor:  # fmt: skip
        first = 0 if group is None else group.rank() * weight.shape[0]
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in profile.loss_chunks(hidden.shape[0], chunk):
            part = hidden[start : start + chunk]
            target = targets[start : start + chunk]
            logits = torch.nn.functional.linear(part, weight, bias)
            if not kernels.fused:
                logits = logits.float()
            counted = target != IGNORE_INDEX
            is_local = (target >= first) & (target < first + weight.shape[0])
            index = (target - first).masked_fill(~is_local, 0).unsqueeze(1)
            local_scores = scores = logits.gather(1, index).squeeze(1).float() * is_local
            normalizer = kernels.log_sum_exp(logits)
            if group is not None:
                normalizer, scores = _over_vocabulary(normalizer, scores, group)
            total += ((normalizer - scores) * counted).sum()
            if not (wants_hidden or wants_weight or wants_bias):
                continue
            # d loss / d logits = softmax - one-hot, and zero for a token that is not counted.
            normalizer = normalizer.masked_fill(~counted, math.inf)
            slope = kernels.softmax(logits, normalizer, weight.dtype)
            at_target = (local_scores - normalizer).expm1() * counted
            slope.scatter_(1, index, torch.where(is_local, at_target.to(slope.dtype), slope[:, 0]).unsqueeze(1))
            if grad_bias is not None:
                grad_bias += slope.sum(dim=0, dtype=torch.float32)
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                _add_product(grad_weight, slope.T, part, profile)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a chunked loss has one backward pass: its gradients are scaled in place")
        scaled: list[Tensor | None] = []
        for value, dtype in zip(ctx.gradients, ctx.types, strict=True):
            if value is not None:
                value = torch.mul(value, grad, out=value if value.dtype == dtype else value.new_empty(0, dtype=dtype))
            scaled.append(value)
        ctx.gradients = None
        return (*scaled, None, None, None, None, None)


def _over_vocabulary(normalizer: Tensor, scores: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return each token's log-sum-exp and target's logit over the whole vocabulary, given each rank's.

    ``scores`` is zero on ranks whose part of the vocabulary lacks the target.
    """
    highest = normalizer.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(normalizer - highest).exp_(), scores])
    dist.all_reduce(sums, group=group)
    return highest + sums[0].log(), sums[1]


def _add_product(total: Tensor, left: Tensor, right: Tensor, profile: DeviceProfile) -> None:
    """Add ``left @ right`` to the float32 ``total`` without rounding the product to the factors' dtype."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif profile.adds_to_float32(left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
