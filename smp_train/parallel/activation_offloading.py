"""Activation offloading: host memory holds activations between a layer's forward and backward pass.

What autograd saves inside a decoder layer (its input alone, where the layer is checkpointed) is copied to the host
while the layers after it compute, and is loaded ``horizon`` layers ahead of the backward pass. The unit is the
*storage* behind saved tensors, moved in one flat copy: tensors that shared a storage share one again, with the same
strides, as compiled code requires.

Stays on the device: parameters and buffers (FSDP2 owns the memory behind the first), inputs without a gradient, which
all layers share (masks, rotary tables), storages below `MIN_BYTES`, and everything of the last ``horizon`` layers,
which the backward pass needs first.
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
"""A smaller storage stays: copying it costs more than its memory saves."""


class Lane:
    """The stream of copies between device and host: a side stream on CUDA; on a CPU, copies run in line.

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

    def wait(self, mark: Any) -> None:
        """Make work queued from here on wait for a copy; the host does not wait."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


class HostPool:
    """Host buffers, page-locked for CUDA, reused from step to step.

    A buffer is a few blocks of sizes that torch's allocator of page-locked memory does not round up. The pool never
    holds more bytes than were in use at its peak: before it allocates beyond that, it frees unused blocks of other
    sizes. (torch's allocator keeps page-locked ones for the next of their size.)
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self.pin_memory = pin_memory
        self.held = self.in_use = self.most = 0
        """Bytes of all blocks, of those in use, and the largest `in_use` so far."""
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> list[Tensor]:
        """Return uint8 blocks of at least ``size`` bytes together, by `pinned_blocks`, the largest first."""
        sizes = pinned_blocks(size)
        self.in_use += sum(sizes)
        self.most = max(self.most, self.in_use)
        return [self._free[each].pop() if self._free.get(each) else self._allocate(each) for each in sizes]

    def _allocate(self, size: int) -> Tensor:
        for other in sorted(self._free, reverse=True):
            while self._free[other] and self.held + size > self.most:
                self._free[other].pop()
                self.held -= other
        self.held += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin_memory)

    def give(self, blocks: Iterable[Tensor]) -> None:
        """Return a buffer to the pool."""
        for block in blocks:
            self.in_use -= block.numel()
            self._free.setdefault(block.numel(), []).append(block)


class Stored:
    """One storage of the device with its copy in host memory; lives as long as autograd holds a tensor on it."""

    def __init__(self, source: Tensor, lane: Lane, pool: HostPool) -> None:
        """Register ``source``, all bytes of a storage (uint8)."""
        self.lane, self.pool = lane, pool
        self.size = source.numel()
        self.on_device: Tensor | None = source
        self.buffer: list[Tensor] = []
        self.mark: Any = None

    def send(self) -> None:
        """Start copying out; the device copy stays until `leave`."""
        assert self.on_device is not None
        self.buffer = self.pool.take(self.size)
        for block, part in self._parts(self.on_device):
            self.mark = self.lane.copy(block, part)

    def leave(self) -> None:
        """Release the device memory once the copy to the host is done."""
        self._wait()
        self.on_device = None

    def load(self) -> None:
        """Start copying back, unless the bytes are on the device."""
        if self.on_device is None:
            self.on_device = torch.empty(self.size, dtype=torch.uint8, device=self.lane.device)
            for block, part in self._parts(self.on_device):
                self.mark = self.lane.copy(part, block)

    def get(self) -> Tensor:
        """Return the bytes on the device, ready for computation."""
        self.load()
        self._wait()
        assert self.on_device is not None
        return self.on_device

    def _parts(self, on_device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (of the buffer, of the device) what belongs together, of the same size."""
        start = 0
        for block in self.buffer:
            part = on_device[start : start + block.numel()]
            yield block[: part.numel()], part
            start += block.numel()

    def _wait(self) -> None:
        self.lane.wait(self.mark)  # the last copy, behind the others in the lane
        self.mark = None

    def __del__(self) -> None:
        # A copy may still be running (the graph was dropped): device memory must not be released before it ends.
        self._wait()
        self.pool.give(self.buffer)


class Packed:
    """Autograd's stand-in for a saved tensor: its storage and its place in it."""

    def __init__(self, stored: Stored, tensor: Tensor) -> None:
        self.stored, self.dtype = stored, tensor.dtype
        self.layout = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def tensor(self) -> Tensor:
        """Return the tensor, on the device."""
        source = self.stored.get()
        return torch.empty(0, dtype=self.dtype, device=source.device).set_(source.untyped_storage(), *self.layout)


class LayerPass:
    """What one decoder layer saves in one forward pass."""

    def __init__(self, offload: Offload, previous: LayerPass | None, *, away: bool, staying: Iterable[Tensor]) -> None:
        self.offload, self.previous, self.away = offload, previous, away
        self.staying: set[int] = set()
        self.keep(staying)
        # Strong references during the forward pass, so that no other storage can reuse an address.
        self.fresh: dict[int, Stored] = {}
        self.stored: list[weakref.ref[Stored]] = []
        self.announced = False

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Leave these on the device."""
        self.staying |= {_storage_id(plain) for plain in map(self.offload.plain, tensors) if plain is not None}

    def pack(self, tensor: Tensor) -> Tensor | Packed:
        """Hook for a tensor that autograd saves: register it for offloading, or return it to stay on the device."""
        if isinstance(tensor, DTensor):  # between the blocks of a tensor group; autograd wants its mesh back with it
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
        """Hook for a tensor the backward pass needs: start loading the next ``horizon`` layers; return this one."""
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
        """Start the copies to the host at the end of the layer's forward pass; from here on only autograd holds them.

        Not earlier, because the layer may still write to a storage after one of its tensors was saved.
        """
        for stored in self.fresh.values():
            stored.send()
        self.stored = [weakref.ref(stored) for stored in self.fresh.values()]
        self.fresh = {}

    def alive(self) -> Iterator[Stored]:
        """Yield what was copied to the host and autograd still holds."""
        for reference in self.stored:
            if (stored := reference()) is not None:
                yield stored


class Offload:
    """Offloading of the activations of one model's decoder layers."""

    def __init__(self, lane: Lane, pool: HostPool, profile: DeviceProfile, *, horizon: int) -> None:
        self.lane, self.pool, self.profile, self.horizon = lane, pool, profile, horizon
        self._latest: LayerPass | None = None
        self._running: LayerPass | None = None

    def around(self, layer: nn.Module, *, first: bool, away: bool) -> Callable[..., Any]:
        """Return the layer's forward with saved tensors intercepted, and with ``away`` sent to the host."""
        forward = layer.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            shared = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and not x.requires_grad)
            staying = (*layer.parameters(), *layer.buffers(), *shared)
            this = LayerPass(self, None if first else self._latest, away=away, staying=staying)
            self._running = this
            with torch.autograd.graph.saved_tensors_hooks(this.pack, this.unpack):
                output = forward(*args, **kwargs)
            self._running = None
            this.close()
            # The previous layer's device-to-host copy overlapped this forward; release its device memory.
            for stored in self._latest.alive() if self._latest is not None else ():
                stored.leave()
            self._latest = this
            return output

        return offloaded

    def plain(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor whose memory holds the values, or None for tensor types that are not offloaded."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        return tensor if type(tensor) in self.profile.offloadable and tensor.layout == torch.strided else None

    def keep_parameters(self, module: nn.Module) -> None:
        """Keep on the device the parameters of a part of a layer that are gathered only when it runs."""
        forward = module.forward

        def kept(*args: Any, **kwargs: Any) -> Any:
            if self._running is not None:
                self._running.keep(module.parameters())
            return forward(*args, **kwargs)

        module.forward = kept


def apply(
    layers: list[nn.Module], *, device: torch.device, horizon: int, lane: Lane | None = None,
    units: Iterable[nn.Module] = (), profile: DeviceProfile | None = None,
) -> Offload:  # fmt: skip
    """Send the activations of the decoder ``layers`` to host memory between forward and backward pass.

    Call it after activation checkpointing, so that a checkpointed layer's input is what is sent, and before sharding.
    Without gradients (validation) nothing is kept and nothing sent.

    Args:
        layers: The decoder layers in the order they run.
        device: Where the model computes.
        horizon: While a layer's backward pass runs, the activations of this many layers before it are on the device or
            on their way; at least 1. The last ``horizon`` layers' are never sent.
        lane: Where copies run.
        units: Modules inside layers whose parameters are sharded apart from their layer's.
        profile: Of the device; by default, of ``device``.
    """
    pool = HostPool(pin_memory=device.type == "cuda")
    offload = Offload(lane or Lane(device), pool, profile or profile_of(device), horizon=horizon)
    for index, layer in enumerate(layers):
        away = index < len(layers) - horizon
        layer.forward = offload.around(layer, first=index == 0, away=away)
    for module in units:
        offload.keep_parameters(module)
    return offload


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
