"""Initial weights: each rank draws its own part, with the same values on every mesh and world size.

The value of an element depends only on the seed, and on the element's name and index on the Hugging Face hub. It does
not depend on the layout in memory, which differs between versions of transformers (`smp_train.models.hub_names`). The
model's constructor and ``_init_weights`` decide the distribution (`smp_train.models.recording`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from smp_train.distributed.agree import rank
from smp_train.distributed.dtensor import Part, local_tensor, part_of
from smp_train.errors import SmpTrainError
from smp_train.models import counter_random
from smp_train.models.hub_names import HubTensor, attached, canonical_name, hub_names
from smp_train.models.recording import OVERWRITES, PROGRAMS, RANDOM, REPLAYABLE, Program, Step
from smp_train.progress import Progress

CPU_CHUNK = 1 << 15
"""Elements drawn at a time on a CPU: about ten float64 temporaries of this size fit a core's cache."""
DEVICE_CHUNK = 1 << 24
"""Elements drawn at a time on a GPU, which needs large kernels."""


def initialise(
    model: nn.Module, seed: int, *, chunk: int | None = None, only: Callable[[str], bool] = lambda name: True
) -> int:
    """Fill every parameter of a model made by `build_meta` and materialised; return how many numbers were drawn.

    Args:
        model: Its parameters are plain tensors or DTensors (Shard, Replicate, _StridedShard), wrapped or not.
        seed: Any integer.
        chunk: Elements computed at a time, which affects speed and memory only.
        only: Whether to fill a parameter, by its canonical name.

    Raises:
        SmpTrainError: a parameter without a recorded initialization, or whose initialization needs the whole tensor.
    """
    initialiser = _Initialiser(model, seed, chunk)
    drawn, total = 0, sum(local_tensor(param).numel() for param in model.parameters())
    with torch.no_grad(), Progress("Drawing initial weights, rank 0's", total, "numbers", rank() == 0) as progress:
        for name, param in model.named_parameters():
            if only(canonical_name(name)):
                drawn += initialiser.fill(canonical_name(name), param)
                progress.update(local_tensor(param).numel())
    return drawn


def module_initialiser(model: nn.Module, seed: int) -> Callable[[nn.Module], None]:
    """Return a function that fills a module's own parameters, whole and on a device, as `initialise` would.

    It is for FSDP1's ``param_init_fn``, which materialises one module at a time. Create it before wrapping. Of tied
    parameters, only the first is filled; the caller ties all others to it.
    """
    initialiser = _Initialiser(model, seed)
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    first = {name for name, _ in model.named_parameters()}

    @torch.no_grad()
    def initialise_module(module: nn.Module) -> None:
        for key, param in module.named_parameters(recurse=False):
            name = prefixes[id(module)] + key
            if name in first:
                initialiser.fill(name, param)

    return initialise_module


class _Initialiser:
    """Replays the programs of one model."""

    def __init__(self, model: nn.Module, seed: int, chunk: int | None = None) -> None:
        self._programs: dict[str, Program] | None = attached(model, PROGRAMS)
        self._names, self._seed, self._chunk = hub_names(model), seed, chunk
        if self._programs is None:
            raise SmpTrainError("this model was not made by build_meta: how to initialise it is not known")

    def fill(self, name: str, param: Tensor) -> int:
        """Fill this rank's part of a parameter with a canonical name; return how many numbers were drawn."""
        program = (self._programs or {}).get(name) or []
        _check(name, program)
        if param.is_meta:
            raise SmpTrainError(f"parameter {name} is still on the meta device; call materialise first")
        tensors = self._names.tensors_of(name, param.shape)
        if len(tensors) > 1 and any(step.view is not None or step.op == "constant" for step in program):
            tensors = (HubTensor(name, tuple(param.shape)),)  # the program refers to the whole parameter
        local, part = local_tensor(param), part_of(param)
        if tuple(local.shape) != part.local_shape:
            raise SmpTrainError(f"parameter {name}: holds {tuple(local.shape)}, its placements say {part.local_shape}")
        blocks = ((tensor.name, tensor.within(part)) for tensor in tensors)
        return sum(self._draw(local[block[0]], block[1], program, hub_name) for hub_name, block in blocks if block)

    def _draw(self, local: Tensor, part: Part, program: Program, name: str) -> int:
        """Fill the elements of the hub's tensor ``name`` that this rank holds; return how many numbers were drawn."""
        if len(program) == 1 and program[0].op == "fill_":
            local.fill_(program[0].args[0])
            return 0
        drawn, device = 0, local.device
        rows = local.view(-1, local.shape[-1]) if local.dim() else local.view(1, 1)
        chunk = self._chunk or (CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK)
        for target, index in _chunks(rows, part, chunk) if local.numel() else ():
            values = torch.zeros(1, dtype=torch.float64, device=device).expand(index.numel())
            ordinal = 0
            for step in program:
                values = _apply(step, values, index.view(-1), counter_random.stream_key(self._seed, name, ordinal))
                ordinal += step.op in RANDOM
            drawn += index.numel() * ordinal
            target.copy_(values.view(index.shape))
        return drawn


def _check(name: str, program: Program) -> None:
    if not program:
        raise SmpTrainError(f"nothing in the model's code initialises parameter {name}")
    bad = [step.op for step in program if step.op not in REPLAYABLE]
    if bad or program[0].op not in OVERWRITES or program[0].view is not None:
        problem = bad[0] if bad else f"{program[0].op} on unset memory"
        raise SmpTrainError(f"{name}: its initialization ({problem}) cannot be drawn in parts; start from weights")


def _chunks(rows: Tensor, part: Part, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (block of the local matrix, its flat indices in the whole parameter), about ``chunk`` elements each."""
    starts, offsets = (x.to(rows.device) for x in part.runs())
    width = min(len(offsets), chunk)
    height = max(1, chunk // width)
    for top in range(0, len(starts), height):
        for left in range(0, len(offsets), width):
            index = starts[top : top + height, None] + offsets[None, left : left + width]
            yield rows[top : top + height, left : left + width], index


def _apply(step: Step, values: Tensor, index: Tensor, key: int) -> Tensor:
    """Return the ``values`` of the elements at ``index`` after one step."""
    inside = None if step.view is None else _inside(index, *step.view)
    if inside is not None and not bool(inside.any()):
        return values
    if step.op == "normal_":
        mean, std = step.args
        new = counter_random.normal(key, index).mul_(std).add_(mean)
    elif step.op == "uniform_":
        low, high = step.args
        new = counter_random.uniform(key, index).mul_(high - low).add_(low)
    elif step.op == "trunc_normal_":
        new = _truncated(step, key, index)
    elif step.op == "fill_":
        new = torch.full_like(values, step.args[0])
    elif step.op == "constant":
        new = step.args[0].flatten().to(index.device)[index]
    else:
        new = getattr(values.clone(), step.op)(*step.args, **step.kwargs)
    return new if inside is None else torch.where(inside, new, values)


def _truncated(step: Step, key: int, index: Tensor) -> Tensor:
    """Draw from a normal distribution truncated to [a, b], by inversion."""
    mean, std, a, b = step.args
    low, high = (statistics.NormalDist().cdf((end - mean) / std) for end in (a, b))
    # If [a, b] is wide, its ends' probabilities round to 0 and 1, whose quantiles are infinite: clamp them to the ends.
    quantile = torch.special.ndtri(counter_random.uniform(key, index).mul_(high - low).add_(low))
    return quantile.mul_(std).add_(mean).clamp_(a, b)


def _inside(index: Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return which flat indices of a contiguous tensor lie in a view of it, made by narrow or select."""
    remainder = index - offset
    inside = remainder >= 0
    for stride, size in sorted(zip(strides, sizes, strict=True), reverse=True):
        position = remainder // stride
        inside &= position < size
        remainder = remainder - position * stride
    return inside & (remainder == 0)
