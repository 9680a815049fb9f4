"""Activation offloading: host memory holds activations between a layer's forward and backward pass.

The tensors that autograd saves inside a decoder layer (only the layer's input, if the layer is checkpointed) are copied
to the host while the next layers compute, and are loaded ``horizon`` layers ahead of the backward pass. A copy moves a
whole *storage*: tensors that shared a storage share one again, with the same strides, as compiled code requires.

These tensors stay on the device: parameters (FSDP2 owns their memory) and buffers; inputs without a gradient, which all
layers share (masks, rotary tables); storages below `MIN_BYTES`; and all tensors of the last ``horizon`` layers, which
the backward pass needs first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from smp_train.distributed.device_profile import DeviceProfile, profile_of
from smp_train.distributed.host_memory import pinned_blocks

MIN_BYTES = 1024
"""A smaller storage stays on the device: copying it costs more than its memory saves."""


class Lane:
    """The stream of copies between device and host: a side stream on CUDA; on a CPU, copies run at once.

    One stream serves both directions: forward passes only copy out, backward passes only copy in, and the order within
    the stream makes the reuse of host buffers safe.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Start a copy after all work queued on the device so far; return an event for `wait`."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the work that is queued after this call wait for a copy; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


class HostPool:
    """Host buffers, page-locked for CUDA, reused from step to step.

    A buffer consists of a few blocks, whose sizes torch's allocator of page-locked memory does not round up. The pool
    never holds more bytes than were in use at its peak: it first frees unused blocks of a different size. (torch's
    allocator keeps freed page-locked blocks for later requests of their size.)
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self.pin_memory = pin_memory
        self.allocated = self.in_use = self.peak = 0
        """Bytes of all blocks, bytes of the blocks in use, and the largest `in_use` so far."""
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> list[Tensor]:
        """Return uint8 blocks that together hold ``size`` bytes, largest first; `pinned_blocks` gives their sizes."""
        sizes = pinned_blocks(size)
        self.in_use += sum(sizes)
        self.peak = max(self.peak, self.in_use)
        return [self._free[block].pop() if self._free.get(block) else self._allocate(block) for block in sizes]

    def _allocate(self, size: int) -> Tensor:
        for unused in sorted(self._free, reverse=True):
            while self._free[unused] and self.allocated + size > self.peak:
                self._free[unused].pop()
                self.allocated -= unused
        self.allocated += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin_memory)

    def give(self, blocks: Iterable[Tensor]) -> None:
        """Return a buffer to the pool."""
        for block in blocks:
            self.in_use -= block.numel()
            self._free.setdefault(block.numel(), []).append(block)


class Stored:
    """A storage on the device with its copy in host memory; lives as long as autograd holds one of its tensors."""

    def __init__(self, source: Tensor, lane: Lane, pool: HostPool) -> None:
        """Register ``source``, all bytes of a storage (uint8)."""
        self.lane, self.pool = lane, pool
        self.size = source.numel()
        self.on_device: Tensor | None = source
        self.buffer: list[Tensor] = []
        self.last_copy: Any = None
        """Event of the newest copy; the lane has finished all earlier copies by then."""

    def send(self) -> None:
        """Start copying out; the device copy stays until `leave`."""
        assert self.on_device is not None
        self.buffer = self.pool.take(self.size)
        for block, part in self._parts(self.on_device):
            self.last_copy = self.lane.copy(block, part)

    def leave(self) -> None:
        """Release the device memory once the copy to the host is done."""
        self._wait()
        self.on_device = None

    def load(self) -> None:
        """Start copying back, unless the bytes are on the device."""
        if self.on_device is None:
            self.on_device = torch.empty(self.size, dtype=torch.uint8, device=self.lane.device)
            for block, part in self._parts(self.on_device):
                self.last_copy = self.lane.copy(part, block)

    def get(self) -> Tensor:
        """Return the bytes on the device, ready for computation."""
        self.load()
        self._wait()
        assert self.on_device is not None
        return self.on_device

    def _parts(self, on_device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs: a block of the host buffer, and the slice of the device tensor that it is a copy of."""
        start = 0
        for block in self.buffer:
            part = on_device[start : start + block.numel()]
            yield block[: part.numel()], part
            start += block.numel()

    def _wait(self) -> None:
        self.lane.wait(self.last_copy)
        self.last_copy = None

    def __del__(self) -> None:
        # After a dropped graph a copy may still be running: device memory must not be released before it ends.
        self._wait()
        self.pool.give(self.buffer)


class Packed:
    """The object that autograd saves instead of a tensor: the tensor's storage and layout."""

    def __init__(self, stored: Stored, tensor: Tensor) -> None:
        self.stored, self.dtype = stored, tensor.dtype
        self.layout = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> Tensor:
        """Return the tensor, on the device."""
        source = self.stored.get()
        return torch.empty(0, dtype=self.dtype, device=source.device).set_(source.untyped_storage(), *self.layout)


class LayerPass:
    """The tensors that one decoder layer saves in one forward pass."""

    def __init__(self, offload: Offload, previous: LayerPass | None, *, away: bool, staying: Iterable[Tensor]) -> None:
        self.offload, self.previous, self.away = offload, previous, away
        self.staying: set[int] = set()
        self.keep(staying)
        self.fresh: dict[int, Stored] = {}
        """Storages by address, during the forward pass: the references keep addresses from being reused."""
        self.stored: list[weakref.ref[Stored]] = []
        self.announced = False

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave these tensors on the device."""
        self.staying |= {_storage_id(plain) for plain in map(self.offload.plain, tensors) if plain is not None}

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Hook for a tensor that autograd saves: register it for offloading, or return it to stay on the device."""
        if isinstance(tensor, DTensor):  # from a tensor-parallel block; the backward pass also needs its mesh
            return tensor
        plain = self.offload.plain(tensor)
        if not self.away or plain is None or plain.device != self.offload.lane.device:
            return tensor
        storage = plain.untyped_storage()
        key = _storage_id(plain)
        if storage.nbytes() < MIN_BYTES or key in self.staying:
            return tensor
        if key not in self.fresh:
            source = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(storage)
            self.fresh[key] = Stored(source, self.offload.lane, self.offload.pool)
        return Packed(self.fresh[key], plain)

    def unpack(self, packed: Tensor | Packed) -> Tensor:
        """Hook that returns a tensor for the backward pass, and starts loading the next ``horizon`` layers."""
        if not self.announced:
            self.announced = True
            layer: LayerPass | None = self
            for _ in range(self.offload.horizon + 1):
                if layer is not None:
                    for stored in layer.alive():
                        stored.load()
                    layer = layer.previous
        return packed.tensor() if isinstance(packed, Packed) else packed

    def close(self) -> None:
        """Start the copies to the host; from now on only autograd holds references to the storages.

        Called at the end of the layer's forward pass, because the layer may write to a storage after autograd has saved
        one of the storage's tensors.
        """
        for stored in self.fresh.values():
            stored.send()
        self.stored = [weakref.ref(stored) for stored in self.fresh.values()]
        self.fresh = {}

    def alive(self) -> Iterator[Stored]:
        """Yield the offloaded storages that autograd still holds."""
        for reference in self.stored:
            if (stored := reference()) is not None:
                yield stored


class Offload:
    """Keeps the activations of the decoder ``layers`` in host memory between forward and backward pass.

    Make it after activation checkpointing, so that only a checkpointed layer's input is offloaded, and before sharding.
    Without gradients (validation) nothing is offloaded.

    Args:
        layers: The decoder layers, in order.
        device: The device that computes.
        horizon: Number of layers, at least 1, that are loaded ahead of the backward pass. The last ``horizon`` layers
            are never offloaded.
        lane: The stream for copies.
        units: Modules inside layers that FSDP2 gathers separately from their layer.
        profile: The profile of ``device``, if already known.
    """

    def __init__(
        self, layers: list[nn.Module], *, device: torch.device, horizon: int, lane: Lane | None = None,
        units: Iterable[nn.Module] = (), profile: DeviceProfile | None = None,
    ) -> None:  # fmt: skip
        self.horizon, self.lane, self.profile = horizon, lane or Lane(device), profile or profile_of(device)
        self.pool = HostPool(pin_memory=device.type == "cuda")
        self._latest: LayerPass | None = None
        self._running: LayerPass | None = None
        for index, layer in enumerate(layers):
            layer.forward = self._around(layer, first=index == 0, away=index < len(layers) - horizon)
        for module in units:
            self._keep_parameters(module)

    def _around(self, layer: nn.Module, *, first: bool, away: bool) -> Callable[..., Any]:
        """Return the layer's forward with saved tensors intercepted, and offloaded if ``away``."""
        forward = layer.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad)
            staying = (*layer.parameters(), *layer.buffers(), *shared)
            this = LayerPass(self, None if first else self._latest, away=away, staying=staying)
            self._running = this
            try:
                with torch.autograd.graph.saved_tensors_hooks(this.pack, this.unpack):
                    output = forward(*args, **kwargs)
            finally:
                self._running = None
            this.close()
            # The previous layer was copied to the host during this forward pass: release its device memory.
            for stored in self._latest.alive() if self._latest is not None else ():
                stored.leave()
            self._latest = this
            return output

        return offloaded

    def plain(self, tensor: Tensor) -> Tensor | None:
        """Return the plain tensor that holds the values, or None for tensor types that are not offloaded."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        return tensor if type(tensor) in self.profile.offloadable and tensor.layout == torch.strided else None

    def _keep_parameters(self, module: nn.Module) -> None:
        """Keep a module's parameters on the device although FSDP2 gathers them later than their layer's."""
        forward = module.forward

        def keeping(*args: Any, **kwargs: Any) -> Any:
            if self._running is not None:
                self._running.keep(module.parameters())
            return forward(*args, **kwargs)

        module.forward = keeping


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
