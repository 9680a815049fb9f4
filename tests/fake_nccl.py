"""A process that believes it has GPUs, and an NCCL that is gloo under NCCL's name: process groups as on GPUs, on a CPU.

Everything of torch is its own, but for NCCL's class and a few questions to CUDA. An operation that would allocate on a
GPU fails.
"""

from __future__ import annotations

from typing import Any


class Options:
    """What torch sets on NCCL's options: attributes of any name."""

    _timeout: Any = None


def install(rank: int, devices: int) -> None:
    """Replace NCCL and CUDA in this process, which ends without putting them back."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    alive = []

    class FakeNCCL(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, options: Any, device: Any = None) -> None:
            for_gloo = dist.ProcessGroupGloo._Options()
            for_gloo._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
            for_gloo._timeout = options._timeout
            super().__init__(store, rank, size, for_gloo)
            self.made_with = options
            alive.append(self)  # C++ keeps it, but forgets its class

        options = property(lambda self: self.made_with)
        supports_splitting = True  # as NCCL's: torch splits a group that is bound to a device
        Options = Options

        def eager_connect_single_device(self, device: Any) -> None: ...
        def perform_nocolor_split(self, device: Any) -> None: ...
        def comm_split_count(self) -> int:
            return 0

    c10d.ProcessGroupNCCL = c10d.ProcessGroupNCCL2 = dist.ProcessGroupNCCL = FakeNCCL
    c10d._NCCL_AVAILABLE = True
    device = torch.device("cuda", rank)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: True
    torch.cuda.device_count = lambda: devices
    torch.cuda.current_device = lambda: rank
    torch.cuda.set_device = lambda device: None
    torch._C._get_accelerator = lambda *args: device
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *args, **kwargs: device
