"""Bytes of live tensors, by what they are for and by the phase of a step, of real tensors or of fake ones."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED = "parameters", "gradients", "optimizer", "gathered parameters"
ACTIVATIONS, BACKWARD = "activations", "temporaries of the backward pass"
HEAD, COMMUNICATION, HOST, NOTHING = "head and loss", "communication buffers", "host", ""

ALLOCATORS = (
    ("_fsdp_collectives.py", COMMUNICATION), ("_fsdp_param_group.py", COMMUNICATION), ("_fsdp_param.py", GATHERED),
    ("_functional_collectives.py", COMMUNICATION), ("smp_train/losses.py", HEAD),
    ("activation_offloading.py:take", HOST), ("adamw.py", OPTIMIZER), ("adam.py", OPTIMIZER),
    ("_sharding_prop.py", NOTHING),
)  # fmt: skip
"""What an operation is for, by the end of the name of the file (and the function) that calls it, innermost first.

DTensor finds out shapes with fake tensors of the whole size: such operations are for `NOTHING`, and not counted."""


class LiveMemory(TorchDispatchMode):
    """Counts the storages behind the results of all operations until they are freed, once each.

    Not seen: what a kernel allocates and frees inside itself, which no tensor holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Callable[..., None] | None = None
        """Called with phase, operation, arguments and result of each operation, where it is set."""
        self.live: Counter[str] = Counter()
        """Bytes by what they are for."""
        self.peaks: dict[Any, Counter[str]] = {}
        """By phase: `live` when its sum without `HOST` was largest; and of `HOST`, the largest."""
        self.phase: Any = None
        self.in_backward = self.in_head = False
        self._known: dict[int, tuple[int, str, Any]] = {}
        self._resize: Callable[..., Any] | None = None

    def enter(self, phase: Any) -> None:
        """Begin a phase; an earlier one of that name goes on."""
        self.phase = phase
        self._note_peak()

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Count ``tensors`` as ``kind``, also those counted as something else until now."""
        for tensor in tensors:
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            self._count(local.untyped_storage(), kind)

    def __enter__(self) -> Any:
        """Also watch storages that are resized, as FSDP2 frees and allocates gathered parameters."""
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
        """Run an operation and count the storages of its results; of DTensors, those of their local parts."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if (kind := self._kind()) == NOTHING:
            return result
        if self.count is not None:
            self.count(self.phase, func, args, kwargs or {}, result)
        for tensor in tree_leaves(result):
            plain = isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor)
            if plain and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._count(storage, kind)
        return result

    def _kind(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            kind = _kind_of_code(frame.f_code)
            if kind is not None:
                return kind
            frame = frame.f_back
        return HEAD if self.in_head else BACKWARD if self.in_backward else ACTIVATIONS

    def _count(self, storage: Any, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            reference = weakref.ref(storage, lambda _: self._forget(key))
        else:
            self.live[known[1]] -= known[0]
            reference = known[2]
        self._known[key] = (size, kind, reference)
        self.live[kind] += size
        self._note_peak()

    def _forget(self, key: int) -> None:
        size, kind, _ = self._known.pop(key)
        self.live[kind] -= size

    def _note_peak(self) -> None:
        peak = self.peaks.setdefault(self.phase, Counter())
        host = max(peak[HOST], self.live[HOST])
        if on_device(self.live) > on_device(peak):
            peak.clear()
            peak.update(self.live)
        peak[HOST] = host


@cache
def _kind_of_code(code: CodeType) -> str | None:
    """Return the kind of memory that a function allocates by `ALLOCATORS`; None for any other function."""
    for allocator, kind in ALLOCATORS:
        file, _, function = allocator.partition(":")
        if code.co_filename.endswith(file) and function in ("", code.co_name):
            return kind
    return None


def on_device(live: Counter[str]) -> int:
    """Return the bytes that are on the device."""
    return live.total() - live[HOST]
