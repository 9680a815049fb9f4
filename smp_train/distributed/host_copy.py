"""Copies of a state (nested dictionaries of tensors) in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from smp_train.distributed.dtensor import DTensor, local_tensor
from smp_train.distributed.host_memory import pinned_bytes


class Stager:
    """Copies states to host buffers, which it reuses for the next state."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], Tensor] = {}

    def begin(self, state: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return a copy of ``state``, and a function that completes it: call that before the next optimizer step.

        Trained parameters and their optimizer state, which only an optimizer step changes, are copied by that function.
        All other tensors, such as the model's buffers, are copied at once: the next forward pass may change them.
        """
        trained = (state.get("optim") or {}).get("state") or {}
        copy: dict[str, Any] = {}
        later: list[tuple[Tensor, Tensor]] = []
        seen = set()
        for path, value in leaves(state):
            if isinstance(value, Tensor):
                seen.add(path)
                source = local_tensor(value)
                buffer = self._buffer(path, source)
                if path[0] == "optim" or path[-1] in trained:
                    later.append((buffer, source))
                else:
                    buffer.copy_(source)
                value = DTensor(buffer, value._spec, requires_grad=False) if isinstance(value, DTensor) else buffer
            put(copy, path, value)
        for path in set(self._buffers) - seen:
            del self._buffers[path]
        ready = None
        if any(source.is_cuda for _, source in later):
            ready = torch.cuda.Event()
            ready.record()
        return copy, lambda: _copy(later, ready)

    def _buffer(self, path: tuple[str, ...], source: Tensor) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            self._buffers[path] = buffer
        return buffer


@torch.no_grad()
def _copy(pairs: list[tuple[Tensor, Tensor]], ready: Any) -> None:
    if ready is None:
        for buffer, source in pairs:
            buffer.copy_(source)
        return
    stream = torch.cuda.Stream(pairs[0][1].device)
    stream.wait_event(ready)  # the last optimizer step may still be running
    with torch.cuda.stream(stream):
        for buffer, source in pairs:
            buffer.copy_(source, non_blocking=True)
    stream.synchronize()


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (keys, value) of each leaf of nested dictionaries."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set ``value`` at the nested keys ``path``."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def local_bytes(state: dict[str, Any], *, pinned: bool = False) -> int:
    """Return the bytes of host buffers for this rank's tensors; ``pinned`` counts all tensors as a GPU's."""
    parts = [local_tensor(value) for _, value in leaves(state)]
    tensors = [value for value in parts if isinstance(value, Tensor)]
    return sum(pinned_bytes(t.nbytes) if pinned or t.is_cuda else t.nbytes for t in tensors)
