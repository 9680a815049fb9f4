"""Parts of the training loop: optimizer groups, the seed of a step, one training step, one evaluation.

Nothing synchronizes with the device unless its docstring says so.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_train import distributed
from smp_train.backends.base import Backend
from smp_train.data.batch import Batch
from smp_train.data.indexed import ValidationData
from smp_train.distributed import heartbeat
from smp_train.distributed.to_host import ToHost
from smp_train.errors import DataError
from smp_train.parallel.optimizer import ShardedAdamW

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

READ_TOGETHER = 16
"""Validation batches read between two checks that no rank has failed or was asked to stop."""
LARGEST = 3.4028234e38
"""The largest float32: finite numbers are not above it, infinity is, and nan compares with nothing."""


class Limits(NamedTuple):
    """The largest loss and gradient norm of a step that are no spikes."""

    loss: float = LARGEST
    grad_norm: float = LARGEST


NO_LIMITS = Limits()
"""Limits that only a value that is not finite exceeds."""


def build_optimizer(args: Arguments, backend: Backend, model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters, with weight decay on those that `Backend.decays` selects.

    The kernel is fused: one per group instead of thousands.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decay if backend.decays(name, parameter) else no_decay).append(parameter)
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    return ShardedAdamW(
        [group for group in groups if group["params"]], lr=args.lr, betas=(args.beta1, args.beta2),
        eps=args.adam_epsilon, fused=True,
    )  # fmt: skip


def seed_step(seed: int, step: int, stream: int) -> None:
    """Seed every generator as a pure function of the run's seed, the step, and the rank's ``stream``.

    A resume draws the same dropout without saved generator state. Ranks with the same ``stream`` draw the same numbers.
    """
    mixed = _mix(_mix(_mix(seed) ^ step) ^ stream)
    random.seed(mixed)
    torch.manual_seed(mixed & (2**63 - 1))


def seed_for(backend: Backend, args: Arguments, step: int) -> None:
    """Seed this rank's generators for the update after ``step``.

    Tensor ranks start alike, as each has the whole embedding; in their layers `sequence.separate_dropout` gives each
    rank another stream. Context ranks hold different tokens.
    """
    topology = backend.topology
    stream = topology.dp_rank * topology.cp_size + topology.cp_rank
    seed_step(args.seed, step, 0 if args.same_seed else stream)


def _mix(value: int) -> int:
    """Return SplitMix64's finaliser (Steele, Lea and Flood, 2014): nearby inputs give unrelated seeds."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


class Ballot(NamedTuple):
    """What a rank votes on in a step; in the sum over all ranks, of the global batch."""

    tokens: int
    """Counted tokens."""
    stop: int = 0
    """Number of ranks that were asked to stop."""
    failed: int = 0
    """Number of ranks that could not read their data."""
    remaining: int = 0
    """Number of ranks that have samples after this step."""
    truncated: int = 0
    """Number of truncated rows (--long truncate)."""
    truncated_targets: int = 0
    """Number of tokens with loss that were cut off truncated rows."""


class Vote:
    """The all-reduce of all ranks' `Ballot`s, once per step.

    It lets a stop or a failure on one rank reach every rank within the step, so that no rank waits in a collective
    alone. The token count stays on the device. The rest is copied to the host asynchronously and read after the whole
    step is queued, so that the device is never idle.
    """

    def __init__(self, backend: Backend, ballot: Ballot) -> None:
        """Cast this rank's vote; collective."""
        device = backend.topology.device
        if not _counts_its_rows(backend):
            ballot = ballot._replace(tokens=0, truncated=0, truncated_targets=0)
        values = torch.tensor(ballot, dtype=torch.int64)
        if device.type == "cuda":
            values = values.pin_memory().to(device, non_blocking=True)
        dist.all_reduce(values)
        sums = dict(zip(Ballot._fields, values, strict=True))
        self.tokens, self._read = sums["tokens"].clamp(min=1), ToHost(values)
        """Divisor of the loss on the device: counted tokens of the global batch, at least 1."""
        self.skip_update = ((sums["failed"] > 0) | (sums["tokens"] == 0)).float()
        """float32 scalar on the device: 1 if a rank failed or no token counts, else 0."""

    def outcome(self) -> Ballot:
        """Return the sum of all ballots; waits for the sum, not for the step."""
        return Ballot(*map(int, self._read.tolist()))


@dataclass
class StepResult:
    """Results of a step: float32 scalars on the device, of all ranks unless noted."""

    loss: Tensor
    """This rank's share of the global mean loss, in nats per token; the shares' sum over ranks is the mean loss."""
    mean_loss: Tensor
    grad_norm: Tensor
    """Global 2-norm of the gradient before clipping."""
    exceeded: Tensor
    """Above 0 if the loss or the gradient norm exceeds its limit or is not finite."""
    not_finite: Tensor
    """Above 0 if the loss or the gradient norm is not finite."""
    rejected: Tensor
    """Above 0 if this step's own loss or gradient norm forbids its update: `exceeded` or `not_finite`."""
    router: Tensor | None = None
    """`RouterTerm.figures`, the mean over micro-batches."""

    def to_host(self) -> ToHost:
        """Queue the copy of the values of `StepNumbers` to the host."""
        values = torch.stack([self.mean_loss, self.grad_norm, self.exceeded, self.not_finite])
        return ToHost(values if self.router is None else torch.cat([values, self.router]))


class StepNumbers(NamedTuple):
    """A step's results on the host."""

    loss: float
    """Mean loss of the global batch, in nats per token."""
    grad_norm: float
    exceeded: bool
    not_finite: bool
    router: dict[str, float]
    """Router loss and expert load by their names in ``metrics.jsonl``; empty for a model without a router loss."""

    @classmethod
    def read(cls, copy: ToHost) -> StepNumbers:
        """Return the numbers of `StepResult.to_host`. Waits for the step's backward pass, not for what came after."""
        loss, grad_norm, exceeded, not_finite, *router = copy.tolist()
        figures = dict(zip(("router_loss", "expert_load"), router, strict=False))
        return cls(loss, grad_norm, exceeded > 0, not_finite > 0, figures)


def train_step(
    backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Sequence[Batch], *,
    tokens: Tensor, lr: float, max_grad_norm: float, skip_update: Tensor | None = None, limits: Limits = NO_LIMITS,
    reject_exceeded: bool = False, commit: Callable[[Tensor], object] | None = None,
) -> StepResult:  # fmt: skip
    """Make one update from this rank's micro-batches of one global batch, the same number on every rank.

    Args:
        backend: The backend that built the ``model``.
        model: The model.
        optimizer: The optimizer of the model's parameters.
        micro_batches: This rank's part of the global batch.
        tokens: Number of counted tokens of the *global* batch, a scalar on the device.
        lr: Learning rate of this update.
        max_grad_norm: Clip the global gradient norm to this; 0 does not clip.
        skip_update: A scalar on the device; above 0 skips the update. A loss or norm that is not finite always does.
        limits: Limits of loss and gradient norm.
        reject_exceeded: Skip the update also if loss or norm exceeds its limit.
        commit: Sums a tensor over all ranks, in place; the last collective before the update. By default an all-reduce.
    """
    device = backend.topology.device
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    total: Tensor | None = None
    figures: Tensor | None = None
    for index, batch in enumerate(micro_batches):
        heartbeat.enter(heartbeat.FORWARD)
        backend.begin_micro_batch(model, last=index == len(micro_batches) - 1)
        loss_sum, router = backend.loss(model, batch.to(device))
        loss = loss_sum / tokens
        heartbeat.enter(heartbeat.BACKWARD)
        if router is None:
            loss.backward()
        else:
            (loss + router.share / len(micro_batches)).backward()
            term = router.figures / len(micro_batches)
            figures = term if figures is None else figures + term
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a step has at least one micro-batch"
    heartbeat.enter(heartbeat.CLIP)
    grad_norm = backend.clip_grad_norm(model, max_grad_norm, optimizer).to(device)  # on the host with --cpu_offload
    mean_loss, exceeded, not_finite = _compare(backend, total, grad_norm, limits, commit)
    heartbeat.enter(heartbeat.UPDATE)
    rejected = exceeded if reject_exceeded else not_finite
    skipped = rejected if skip_update is None else rejected + skip_update
    # The attribute that `torch.amp.GradScaler` sets: the fused kernel reads it on the device and skips the update at 1.
    # With --cpu_offload 1 the optimizer runs on the host; copying here waits for the value, its own copy would not.
    optimizer.found_inf = (skipped > 0).float().to(optimizer.param_groups[0]["params"][0].device)  # type: ignore[attr-defined]
    optimizer.step()
    return StepResult(total, mean_loss, grad_norm, exceeded, not_finite, rejected, figures)


def _compare(
    backend: Backend, share: Tensor, grad_norm: Tensor, limits: Limits, commit: Callable[[Tensor], object] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss and the flags `exceeded` and `not_finite` of a `StepResult`; collective.

    ``commit`` sums three numbers over all ranks, so that all ranks decide alike.
    """
    if backend.topology.tp_rank > 0:  # tensor ranks have the same tokens
        share = torch.zeros_like(share)
    # Negated comparisons, because nan must count as exceeding a limit, too.
    flags = [~(grad_norm <= limits.grad_norm), ~(grad_norm <= NO_LIMITS.grad_norm)]
    values = torch.stack([share, *(flag.to(share.dtype) for flag in flags)])
    (commit or dist.all_reduce)(values)
    mean_loss, above, not_finite = values.unbind()
    return mean_loss, above + ~(mean_loss <= limits.loss), not_finite + ~(mean_loss <= NO_LIMITS.loss)


class PendingStep(NamedTuple):
    """A step whose numbers are being copied to the host."""

    step: int
    first: int
    """Position of the step's first sample in the data order."""
    consumed: int
    """Position after the step's last sample."""
    tokens: int
    """Counted tokens from the start of the run to the end of the step."""
    logged: bool
    batches: Sequence[Batch]
    """This rank's micro-batches."""
    result: StepResult
    copy: ToHost
    """The copy that `StepNumbers.read` reads."""


COLLECT_EVERY = 50
"""Steps, or batches of a validation, between two collections of cyclic garbage."""


@contextmanager
def garbage_collected_together() -> Iterator[None]:
    """Disable automatic collection in the body; freeze objects allocated before it.

    With transformers loaded a collection takes 0.1 to 0.3 s. If each rank collected at its own time, some rank would
    delay the others in nearly every step; `collect_garbage` lets all ranks collect after the same step.
    """
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_garbage(step: int) -> None:
    """Collect cyclic garbage if ``step``, or the number of the batch, is a multiple of `COLLECT_EVERY`.

    Outside `garbage_collected_together` this does nothing, since Python collects garbage by itself.
    """
    if step % COLLECT_EVERY == 0 and not gc.isenabled():
        gc.collect()


@torch.no_grad()
def evaluate(backend: Backend, model: nn.Module, batches: Iterable[Batch]) -> tuple[float, int]:
    """Return the mean loss, in nats per counted token, and these tokens, over the batches of all ranks.

    Collective, synchronizes.

    Every rank must pass the same number of batches; batches without counted tokens add nothing.
    """
    was_training = model.training
    model.eval()
    device = backend.topology.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    try:
        for index, batch in enumerate(batches, 1):
            collect_garbage(index)
            sums[0] += backend.loss(model, batch.to(device))[0].double()
            sums[1] += batch.counted_tokens() * _counts_its_rows(backend, among_tensor_ranks=False)
    finally:
        model.train(was_training)
    loss, tokens = backend.sum_over_data(sums).tolist()
    if tokens == 0:
        raise DataError("the validation data has no counted token; is --max_context_width too short?")
    return float(loss / tokens), int(tokens)


def read_together(
    data: ValidationData, task: str, before_agreeing: Callable[[], None] = lambda: None
) -> Iterator[Batch]:
    """Yield the batches of this rank; every `READ_TOGETHER` batches, all ranks agree that none has failed.

    Args:
        data: This rank's part.
        task: Names the work in the failure, as in `distributed.together`.
        before_agreeing: Called before each agreement; may be collective.
    """
    batches = data.batches()
    for _ in range(0, len(data), READ_TOGETHER):
        before_agreeing()
        with distributed.together(task):
            next_batches = list(islice(batches, READ_TOGETHER))
        yield from next_batches


def _counts_its_rows(backend: Backend, *, among_tensor_ranks: bool = True) -> bool:
    """Return True on one rank of each group that reads the same rows, so that tokens are counted once.

    `Backend.sum_over_data` leaves tensor ranks out of its sum; there every tensor rank counts.
    """
    topology = backend.topology
    return topology.cp_rank == 0 and (topology.tp_rank == 0 or not among_tensor_ranks)
