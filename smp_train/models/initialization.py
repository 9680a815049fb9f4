"""Initial weights by the model's own ``_init_weights``: the same bits on every mesh and world size.

Every rank draws each parameter whole, one at a time, from the seed and the parameter's name, and keeps the elements
that it holds. The model's code runs on a second model, on meta but for the drawn parameter: it has no wrappers and no
shards. Kinds of devices, and releases of torch and transformers, draw different numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from smp_train.distributed.agree import gather, rank
from smp_train.distributed.dtensor import local_tensor, part_of
from smp_train.errors import SmpTrainError
from smp_train.models.hub_names import attached, canonical_name, hub_names
from smp_train.models.lora import is_adapter
from smp_train.models.meta import CONSTRUCT, construct_on_meta
from smp_train.progress import Progress

SMALL = 1 << 18
"""Elements of the largest parameter that keeps its constructor's value if ``_init_weights`` does not set it."""


def drawing_device(device: torch.device) -> torch.device:
    """Return the device to draw on: this rank's, or the CPU if the ranks' GPUs, and so their numbers, differ.

    Collective on GPUs.
    """
    if device.type != "cuda":
        return device
    names = gather("naming the GPUs", lambda: torch.cuda.get_device_name(device))
    return device if len(set(names)) == 1 else torch.device("cpu")


def initialise(
    model: nn.Module, seed: int, device: torch.device | None = None, *, only: Callable[[str], bool] = lambda name: True
) -> None:
    """Fill every parameter of a model made by `build_meta` and materialised.

    Args:
        model: Its parameters are plain tensors or DTensors (Shard, Replicate, _StridedShard), wrapped or not.
        seed: Any integer.
        device: The device to draw on; None for each parameter's own.
        only: Whether to fill a parameter, by its canonical name.

    Raises:
        SmpTrainError: a parameter that the model's code does not initialise, or only from other parameters.
    """
    drawing = _Drawing(model, seed)
    named = [(canonical_name(name), param) for name, param in model.named_parameters() if only(canonical_name(name))]
    total = sum(param.numel() for _, param in named)
    with torch.no_grad(), Progress("Drawing initial weights", total, "numbers", rank() == 0) as progress:
        for name, param in named:
            drawing.fill(name, param, device)
            progress.update(param.numel())


def module_initialiser(model: nn.Module, seed: int, device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that fills a module's own parameters, whole and materialised, as `initialise` would.

    It is for FSDP1's ``param_init_fn``, which materialises one module at a time. Create it before wrapping. Of tied
    parameters, only the first is filled; the caller ties all others to it.
    """
    drawing = _Drawing(model, seed)
    prefixes = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    first = {name for name, _ in model.named_parameters()}

    @torch.no_grad()
    def initialise_module(module: nn.Module) -> None:
        for key, param in module.named_parameters(recurse=False):
            name = prefixes[id(module)] + key
            if name in first:
                drawing.fill(canonical_name(name), param, device)

    return initialise_module


class _Drawing:
    """Draws the parameters of one model."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._construct, self._names, self._seed = attached(model, CONSTRUCT), hub_names(model), seed
        if self._construct is None:
            raise SmpTrainError("this model was not made by build_meta: how to initialise it is not known")

    @cached_property
    def _plain(self) -> tuple[Any, dict[str, Tensor]]:
        """The model without wrappers, on meta, and the values that constructors gave to small parameters."""
        with _seeded(self._seed, ""), _MarkUnset():
            model = construct_on_meta(self._construct, larger_than=SMALL)
        values = {name: param.detach() for name, param in model.named_parameters() if not param.is_meta}
        return model.to("meta"), {name: value for name, value in values.items() if not _is_unset(value)}

    def fill(self, name: str, param: Tensor, device: torch.device | None) -> None:
        """Fill this rank's part of a parameter with a canonical name."""
        local = local_tensor(param)
        if local.is_meta:
            raise SmpTrainError(f"parameter {name} is still on the meta device; call materialise first")
        device = device or local.device
        whole = nn.Parameter(torch.full(tuple(param.shape), math.nan, dtype=param.dtype, device=device))
        init_weights = _init_adapter if is_adapter(name) else partial(_init_weights, *self._plain)
        try:
            # By its first name on the hub, which releases of transformers do not change.
            with _seeded(self._seed, self._names.tensors_of(name, param.shape)[0].name):
                init_weights(name, whole)
        except NotImplementedError as failure:  # from a tensor on meta
            raise SmpTrainError(f"{name}: its initialization reads other parameters; start from weights") from failure
        if _is_unset(whole):
            raise SmpTrainError(f"nothing in the model's code initialises parameter {name}; start from weights")
        indices = enumerate(part_of(param).indices)
        parts = ((dim, index.to(device)) for dim, index in indices if len(index) < param.shape[dim])
        local.copy_(reduce(lambda tensor, part: tensor.index_select(*part), parts, whole.detach()))


def _init_adapter(name: str, whole: nn.Parameter) -> None:
    """Initialise a parameter as peft does."""
    if ".lora_A." in name:
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
    else:
        nn.init.zeros_(whole)


def _init_weights(model: Any, values: Mapping[str, Tensor], name: str, whole: nn.Parameter) -> None:
    """Initialise a parameter as transformers does: by its module, then by the modules around that, outwards.

    Args:
        model: The model without wrappers, on meta.
        values: The values that constructors gave to small parameters.
        name: The parameter's name in ``model``.
        whole: The parameter.
    """
    from transformers import PreTrainedModel

    owner, _, key = name.rpartition(".")
    calls: list[Callable[[], None]] = []
    init_weights = model._init_weights
    for module in accumulate(owner.split(".") if owner else (), getattr, initial=model):
        init_weights = module._init_weights if isinstance(module, PreTrainedModel) else init_weights
        calls.insert(0, partial(init_weights, module))
    on_meta, module._parameters[key] = module._parameters[key], whole
    for call in calls:
        call()
    if _is_unset(whole) and name in values:
        whole.copy_(values[name])
    elif _is_unset(whole) and hasattr(module, "reset_parameters"):  # torch's modules call it when they are made
        for call in (module.reset_parameters, *calls):
            call()
    module._parameters[key] = on_meta


class _MarkUnset(TorchDispatchMode):
    """Fills the memory of a small tensor with NaN if it is allocated without values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name and out.is_floating_point() and out.numel() <= SMALL:
            out.fill_(math.nan)
        return out


def _is_unset(tensor: Tensor) -> bool:
    return bool(tensor.sum().isnan())  # makes no tensor of this size


@contextmanager
def _seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's generators from a seed and a name; on exit, restore those of the CPU and of this rank's GPU."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(int.from_bytes(digest, "little"))
        yield
