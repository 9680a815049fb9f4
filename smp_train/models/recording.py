"""Construction of a model with parameters on the meta device, and recording of their initialization.

Parameters move to meta as they are registered, so a model of any size can be built; buffers stay real. Every factory
call and in-place operation on a parameter, by the constructor or by ``_init_weights``, is recorded and not executed.
The record is the parameter's `Program`, which `smp_train.models.initialization` replays on the part that a rank holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Step:
    """One operation on a parameter, or on a view of it."""

    op: str
    """Name of the in-place operation ("normal_", "fill_", "mul_", ...) or "constant" for given values."""
    args: tuple[Any, ...] = ()
    """After the tensor, by position."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    view: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """(offset, sizes, strides) within the parameter, None for the whole of it."""


Program = list[Step]

# Operation that fills the result of a factory function; None: its memory stays uninitialised.
FACTORIES: dict[str, Step | None] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty")),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), Step("fill_", (0.0,))),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), Step("fill_", (1.0,))),
    "rand": Step("uniform_", (0.0, 1.0)),
    "randn": Step("normal_", (0.0, 1.0)),
}
# Operations whose result does not depend on the former values.
OVERWRITES = {"normal_", "uniform_", "trunc_normal_", "fill_", "constant"}
# Pointwise operations that give the same bits on every device and for every part of a tensor.
POINTWISE = {"mul_", "add_", "sub_", "div_", "neg_", "abs_", "clamp_", "clamp_min_", "clamp_max_", "sqrt_"}
REPLAYABLE = OVERWRITES | POINTWISE

# Attribute of a model that holds its programs, by parameter name.
PROGRAMS = "_smp_train_initial_weights"


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(tensor: Tensor, whole: int) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    if tensor.numel() == whole:
        return None
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


class Recorder(TorchDispatchMode):
    """Records the program of every storage created while active; skips operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        # The weak reference prevents reuse of a storage's address and does not keep its memory.
        self._programs: dict[int, tuple[StorageWeakRef, Program]] = {}

    def program(self, tensor: Tensor) -> Program | None:
        """Return the program of the storage of ``tensor``, None for one that was created elsewhere."""
        known = self._programs.get(_key(tensor))
        return known[1] if known else None

    def assign(self, tensor: Tensor, program: Program) -> None:
        """Set the program of the storage of ``tensor``."""
        self._programs[_key(tensor)] = (StorageWeakRef(tensor.untyped_storage()), program)

    def write(
        self, tensor: Tensor, op: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> bool:
        """Record an in-place operation; return False for a storage that was created elsewhere."""
        program = self.program(tensor)
        if program is None:
            return False
        if op == "zero_":
            op, args = "fill_", (0.0,)
        elif op == "copy_":
            source = args[0]
            if source.is_meta:
                op, args = "unknown copy", ()
            else:
                values = source.detach().to("cpu", torch.float64).expand(tensor.shape).contiguous()
                op, args = "constant", (values.clone(),)
        elif op in ("normal_", "uniform_"):
            args = args + (0.0, 1.0)[len(args) :]
        args = tuple(a.item() if isinstance(a, Tensor) and a.dim() == 0 and not a.is_meta else a for a in args)
        kept = {k: v for k, v in (kwargs or {}).items() if k != "generator"}
        whole = tensor.untyped_storage().nbytes() // tensor.element_size()
        step = Step(op, args, kept, _view(tensor, whole))
        if step.view is None and step.op in OVERWRITES:
            program.clear()
        program.append(step)
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                if position == 0 and isinstance(written, Tensor):
                    recorded = self.write(written, name, tuple(args[1:]), kwargs)
                    if recorded and written.is_meta:
                        return written
                elif isinstance(written, Tensor):  # an out= argument cannot be replayed
                    self.write(written, name)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            if name in ("full", "full_like"):
                self.assign(out, [Step("fill_", (args[1],))])
            elif name in FACTORIES:
                step = FACTORIES[name]
                self.assign(out, [] if step is None else [step])
        return out


def _to_meta(recorder: Recorder, param: nn.Parameter) -> nn.Parameter:
    known = recorder.program(param)
    alone = param.untyped_storage().nbytes() == param.numel() * param.element_size() and param.is_contiguous()
    if known is None or not alone or any(step.op not in REPLAYABLE for step in known):
        # Computed by the constructor: small in all known models, so the values are kept.
        known = [Step("constant", (param.detach().to("cpu", torch.float64, copy=True),))]
    meta = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)
    meta.__dict__.update(param.__dict__)
    recorder.assign(meta, known)
    return meta


# Initializers that need the whole tensor, or that torch skips for meta tensors without an operation to record.
NOT_IN_PARTS = ("orthogonal_", "sparse_", "dirac_", "eye_")


def construct_on_meta(construct: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``construct`` builds, its parameters on meta and their programs attached."""
    recorder, init = Recorder(), nn.init
    register, truncated = nn.Module.register_parameter, init._no_grad_trunc_normal_

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param if param is None or param.is_meta else _to_meta(recorder, param))

    def record_truncated(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        if tensor.is_meta and recorder.write(tensor, "trunc_normal_", (mean, std, a, b)):
            return tensor
        return truncated(tensor, mean, std, a, b, generator=generator)

    def recording(name: str) -> Callable[..., Tensor]:
        original: Callable[..., Tensor] = getattr(init, name)

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return tensor if tensor.is_meta and recorder.write(tensor, name) else original(tensor, *args, **kwargs)

        return record

    recorded = {name: recording(name) for name in NOT_IN_PARTS}
    # transformers 5 keeps its own references to torch's functions.
    kept = getattr(sys.modules.get("transformers.initialization"), "TORCH_INIT_FUNCTIONS", {})
    with (
        _replaced(vars(nn.Module), {"register_parameter": register_on_meta}, partial(setattr, nn.Module)),
        _replaced(vars(init), recorded | {"_no_grad_trunc_normal_": record_truncated}, partial(setattr, init)),
        _replaced(kept, {name: each for name, each in recorded.items() if name in kept}, kept.__setitem__),
        recorder,
    ):
        model = construct()
    model.__dict__[PROGRAMS] = {name: list(recorder.program(param) or []) for name, param in model.named_parameters()}
    return model


@contextmanager
def _replaced(names: Mapping[str, Any], by: dict[str, Any], give: Callable[[str, Any], object]) -> Iterator[None]:
    """Context in which ``names`` have other values, given to them by ``give``."""
    before = {name: names[name] for name in by}
    for name, value in by.items():
        give(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            give(name, value)
