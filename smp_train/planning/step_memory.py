"""Two training steps on one rank: bytes of live tensors by phase and use. Tensors are real or fake."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from smp_train import train_utils
from smp_train.arguments import Arguments
from smp_train.backends.base import Backend
from smp_train.data.batch import Batch
from smp_train.distributed.dtensor import DTensor
from smp_train.models.build import decoder_layers
from smp_train.planning.work import WorkCounter


class Use:
    """Uses of memory."""

    PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED = "parameters", "gradients", "optimizer", "gathered parameters"
    ACTIVATIONS, TEMPORARIES = "activations", "temporaries of the backward pass"
    HEAD, COMMUNICATION, HOST = "head and loss", "communication buffers", "host"
    UNCOUNTED = ""


class Part:
    """Parts of a step."""

    FORWARD, LOSS, BACKWARD, UPDATE = "forward", "head", "backward", "update"


Phase = tuple[str, int]
"""Part of the step and index of the layer, which is negative if counted from the end. All layers between the `EDGE`
first and the `EDGE` last layers share one phase."""
EDGE = 2
"""Layers at either end whose memory differs from the rest: gathered before the first, or not freed after the last."""
MICRO_BATCHES = 2
"""At most two micro-batches are stepped: the last, and one that represents all earlier micro-batches."""

ALLOCATORS = (
    ("_fsdp_collectives.py", Use.COMMUNICATION), ("_fsdp_param_group.py", Use.COMMUNICATION),
    ("_fsdp_param.py", Use.GATHERED), ("_functional_collectives.py", Use.COMMUNICATION),
    ("smp_train/losses.py", Use.HEAD), ("activation_offloading.py:take", Use.HOST), ("adamw.py", Use.OPTIMIZER),
    ("adam.py", Use.OPTIMIZER), ("_sharding_prop.py", Use.UNCOUNTED),
)  # fmt: skip
"""Use of the memory that a file, or one of its functions, allocates; the innermost caller of an operation decides.

DTensor computes shapes with fake tensors of the whole size, which take no memory: these are `Use.UNCOUNTED`."""


class LiveMemory(TorchDispatchMode):
    """Counts each storage from the operation that returns it until it is freed.

    Memory that a kernel allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_operation: Callable[..., None] | None = None
        """Called with the phase, operation, arguments and result of each operation."""
        self.live: Counter[str] = Counter()
        """Bytes by use."""
        self.peaks: dict[Any, Counter[str]] = {}
        """By phase, `live` at its largest sum on the device. The maximum of `Use.HOST` is kept separately."""
        self.phase: Any = None
        self.in_backward = self.in_head = False
        self._known: dict[int, tuple[int, str, Any]] = {}
        self._resize: Callable[..., Any] | None = None

    def enter(self, phase: Any) -> None:
        """Begin or continue a phase."""
        self.phase = phase
        self.note_peak()

    def count_as(self, use: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors under this use, instead of any earlier use."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            self._count(local.untyped_storage(), use)

    def __enter__(self) -> Any:
        """Also watch storages being resized: FSDP2 frees and allocates gathered parameters that way."""
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._known:
                self._count(storage, self._known[storage._cdata][1])
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        """Stop counting."""
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        super().__exit__(*failure)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of its results; a DTensor is counted by its local tensor."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if (use := self._use()) == Use.UNCOUNTED:
            return result
        if self.on_operation is not None:
            self.on_operation(self.phase, func, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            plain = isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor)
            if plain and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._count(storage, use)
        return result

    def _use(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            use = _use_of_code(frame.f_code)
            if use is not None:
                return use
            frame = frame.f_back
        return Use.HEAD if self.in_head else Use.TEMPORARIES if self.in_backward else Use.ACTIVATIONS

    def _count(self, storage: Any, use: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        else:
            self.live[known[1]] -= known[0]
            reference = known[2]
        self._known[key] = (size, use, reference)
        self.live[use] += size
        self.note_peak()

    def _forget(self, key: int) -> None:
        size, use, _ = self._known.pop(key)
        self.live[use] -= size

    def note_peak(self) -> None:
        """Update the largest sums of this phase."""
        peak = self.peaks.setdefault(self.phase, Counter())
        host = max(peak[Use.HOST], self.live[Use.HOST])
        if on_device(self.live) > on_device(peak):
            peak.clear()
            peak.update(self.live)
        peak[Use.HOST] = host


@cache
def _use_of_code(code: CodeType) -> str | None:
    """Return the use of the memory that a function allocates; None if `ALLOCATORS` does not list it."""
    for allocator, use in ALLOCATORS:
        file, _, function = allocator.partition(":")
        if code.co_filename.endswith(file) and function in ("", code.co_name):
            return use
    return None


def on_device(live: Counter[str]) -> int:
    """Return the bytes that are on the device."""
    return live.total() - live[Use.HOST]


def peaks(
    args: Arguments, backend: Backend, model: nn.Module, *, seq_len: int, counter: WorkCounter | None = None
) -> dict[Phase, Counter[str]]:  # fmt: skip
    """Return the largest bytes of live tensors in two steps of this rank, by phase and use; collective.

    The first update allocates the optimizer's state, so later steps are like the second.

    Args:
        args: Settings of the run.
        backend: The backend that built the model.
        model: The model, with real parameters, or with fake parameters inside their fake mode.
        seq_len: Tokens per row.
        counter: Counts the work of the second step.
    """
    optimizer = train_utils.build_optimizer(args, backend, model)
    device = backend.topology.device
    live = LiveMemory()
    handles = _enter_phases(model, live)

    def before_update(*_: object) -> None:
        _count_gradients(model, live)
        live.enter((Part.UPDATE, 0))

    optimizer.register_step_pre_hook(before_update)
    try:
        with live:
            live.enter((Part.FORWARD, 0))
            live.count_as(Use.PARAMETERS, model.parameters())
            live.count_as(Use.PARAMETERS, model.buffers())
            for second in (False, True):
                batches = MicroBatches(args, seq_len, counter)
                if second and counter is not None:
                    live.on_operation = counter.add
                train_utils.train_step(
                    backend, model, optimizer, batches, tokens=torch.ones((), dtype=torch.int64, device=device),
                    lr=args.lr, max_grad_norm=args.grad_clip, skip_update=torch.zeros((), device=device),
                )  # fmt: skip
                live.on_operation, live.in_backward = None, False
                live.enter((Part.FORWARD, 0))
                states = (value for state in optimizer.state.values() for value in state.values())
                live.count_as(Use.OPTIMIZER, (value for value in states if isinstance(value, Tensor)))
    finally:
        for handle in handles:
            handle.remove()
    return live.peaks


class MicroBatches(list[Batch]):
    """A rank's micro-batches; while one runs, the counter knows how many it stands for."""

    def __init__(self, args: Arguments, seq_len: int, counter: WorkCounter | None) -> None:
        self.planned, self.counter = args.gradient_accumulation_steps, counter
        shape = (args.train_batch_size, seq_len)
        batches = min(args.gradient_accumulation_steps, MICRO_BATCHES)
        super().__init__(Batch(ids, ids) for ids in torch.zeros(batches, *shape, dtype=torch.int64))

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(super().__iter__()):
            if self.counter is not None:
                self.counter.times = 1 if index == len(self) - 1 else self.planned - 1
            yield batch


def _count_gradients(model: nn.Module, live: LiveMemory) -> None:
    """Count the outputs of reductions as gradients, no longer as communication buffers."""
    live.count_as(Use.GRADIENTS, (parameter.grad for parameter in model.parameters() if parameter.grad is not None))


def _enter_phases(model: nn.Module, live: LiveMemory) -> list[Any]:
    """Register hooks on layers and head that enter each phase; return their handles."""
    layers = [layer for _, layer in decoder_layers(model)]
    count = len(layers)

    def enter(part: str, index: int) -> None:
        live.in_backward, live.in_head = part == Part.BACKWARD, part == Part.LOSS
        live.enter((part, index if index < EDGE else max(index - count, -EDGE - 1)))
        if live.in_backward:
            _count_gradients(model, live)

    def before_layer(index: int, *_: Any) -> None:
        enter(Part.FORWARD, index)

    def after_layer(index: int, _module: Any, _inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(lambda _: enter(Part.BACKWARD, index))
        if index == count - 1:
            enter(Part.LOSS, 0)

    handles: list[Any] = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(before_layer, index)))
        handles.append(layer.register_forward_hook(partial(after_layer, index)))
    return handles
