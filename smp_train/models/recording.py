"""Construction of a model with parameters on the meta device, recording how its code initializes them.

Parameters move to meta as they are registered, so that a model of any size can be built; buffers stay real. Factory
calls and in-place operations on parameters, in constructors and in ``_init_weights``, are recorded instead of executed.
The record is the parameter's `Program`; `smp_train.models.initialization` replays it on the part that a rank holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Step(NamedTuple):
    """An operation on a parameter, or on a view of it."""

    op: str
    """Name of the in-place operation ("normal_", "fill_", "mul_", ...), or "constant" for given values."""
    args: tuple[Any, ...] = ()
    """Positional arguments after the tensor."""
    kwargs: Mapping[str, Any] = MappingProxyType({})
    view: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """(offset, sizes, strides) of the view in the parameter; None for the whole parameter."""


Program = list[Step]

FACTORIES: dict[str, Step | None] = {
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty")),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), Step("fill_", (0.0,))),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), Step("fill_", (1.0,))),
    "rand": Step("uniform_", (0.0, 1.0)),
    "randn": Step("normal_", (0.0, 1.0)),
}
"""The step that a factory function's result begins with; None: its memory stays uninitialized."""
RANDOM = {"normal_", "uniform_", "trunc_normal_"}
OVERWRITES = RANDOM | {"fill_", "constant"}
"""Operations whose result does not depend on the former values."""
POINTWISE = {"mul_", "add_", "sub_", "div_", "neg_", "abs_", "clamp_", "clamp_min_", "clamp_max_", "sqrt_"}
"""Operations that give the same bits on every device and for every part of a tensor."""
REPLAYABLE = OVERWRITES | POINTWISE
SKIPPED_ON_META = {"_no_grad_trunc_normal_": "trunc_normal_"} | {
    name: name for name in ("orthogonal_", "sparse_", "dirac_", "eye_")
}
"""Functions of `torch.nn.init` that do nothing on meta, and the operation to record. All but the first need the whole
tensor and cannot be replayed."""
PROGRAMS = "_smp_train_initial_weights"
"""Attribute of a model that holds its programs, by parameter name."""


class Recorder(TorchDispatchMode):
    """Records the program of every storage created while active; skips operations on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        # The weak reference prevents another storage at the same address, but does not keep the memory.
        self._programs: dict[int, tuple[StorageWeakRef, Program]] = {}

    def program(self, tensor: Tensor) -> Program | None:
        """Return the program of the tensor's storage, None for a storage that was created before recording."""
        return self._programs.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def assign(self, tensor: Tensor, program: Program) -> None:
        """Set the program of the tensor's storage."""
        storage = tensor.untyped_storage()
        self._programs[storage._cdata] = (StorageWeakRef(storage), program)

    def write(self, tensor: Tensor, op: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> bool:
        """Record an in-place operation; return False for a storage that was created before recording."""
        program = self.program(tensor)
        if program is None:
            return False
        whole = _is_whole(tensor)
        if op == "zero_":
            op, args = "fill_", (0.0,)
        elif op == "copy_":
            op, args = ("constant", (_values(args[0], tensor),)) if whole and not args[0].is_meta else ("copy", ())
        elif op in ("normal_", "uniform_"):
            args = args + (0.0, 1.0)[len(args) :]
        args = tuple(a.item() if isinstance(a, Tensor) and a.dim() == 0 and not a.is_meta else a for a in args)
        options = {key: value for key, value in (kwargs or {}).items() if key != "generator"}
        view = None if whole else (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        if whole and op in OVERWRITES:
            program.clear()
        program.append(Step(op, args, options, view))
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
            target = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(target, Tensor):
                continue
            if position > 0:
                self.write(target, name)  # an out= argument, which cannot be replayed
            elif self.write(target, name, tuple(args[1:]), kwargs) and target.is_meta:
                return target
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and (name in FACTORIES or name in ("full", "full_like")):
            step = FACTORIES[name] if name in FACTORIES else Step("fill_", (args[1],))
            self.assign(out, [] if step is None else [step])
        return out


def _is_whole(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _values(source: Tensor, target: Tensor) -> Tensor:
    """Return a copy of ``source`` in float64 on the CPU, with the shape of ``target``."""
    return source.detach().to("cpu", torch.float64).expand(target.shape).contiguous().clone()


def _to_meta(recorder: Recorder, param: nn.Parameter) -> nn.Parameter:
    program = recorder.program(param)
    alone = _is_whole(param) and param.is_contiguous()
    if program is None or not alone or any(step.op not in REPLAYABLE for step in program):
        # The constructor computed the values. They are kept, which takes little memory in all known models.
        program = [Step("constant", (_values(param, param),))]
    meta = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)
    meta.__dict__.update(param.__dict__)
    recorder.assign(meta, program)
    return meta


def construct_on_meta(construct: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``construct`` builds, with its parameters on meta and their programs attached."""
    recorder, register = Recorder(), nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param if param is None or param.is_meta else _to_meta(recorder, param))

    def recording(name: str, op: str) -> Callable[..., Tensor]:
        original: Callable[..., Tensor] = getattr(nn.init, name)

        def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return tensor if tensor.is_meta and recorder.write(tensor, op, args) else original(tensor, *args, **kwargs)

        return record

    functions: dict[str, Any] = {name: recording(name, op) for name, op in SKIPPED_ON_META.items()}
    # transformers 5 has its own references to torch's functions.
    references = getattr(sys.modules.get("transformers.initialization"), "TORCH_INIT_FUNCTIONS", {})
    referenced = {name: function for name, function in functions.items() if name in references}
    with ExitStack() as patches:
        patches.enter_context(patch.object(nn.Module, "register_parameter", register_on_meta))
        patches.enter_context(patch.multiple(nn.init, **functions))
        patches.enter_context(patch.dict(references, referenced))
        patches.enter_context(recorder)
        model = construct()
    model.__dict__[PROGRAMS] = {name: list(recorder.program(param) or []) for name, param in model.named_parameters()}
    return model
