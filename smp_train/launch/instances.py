"""GPUs, network adapters and memory by instance type, from one data file with its sources."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from smp_train.arguments.values import nearest
from smp_train.errors import ConfigError

PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
"""File with the instance type of an EC2 machine."""
TABLE = Path(__file__).with_name("instances.json")


@dataclass(frozen=True)
class Instance:
    """One EC2 instance type.

    ``gpu_memory_gb`` is the memory of one GPU, in 10^9 bytes; ``host_memory_gib`` the instance's, in 2^30; ``efa``
    counts Elastic Fabric Adapters; ``network_gbit_s`` is the rate of all adapters together, 10^9 bits; ``rdma``: GPUs
    read and write through the adapters without the host; ``min_cuda`` is the oldest CUDA release that knows the GPU.
    """

    name: str
    gpus: int
    gpu: str
    gpu_memory_gb: int
    host_memory_gib: int
    efa: int
    network_gbit_s: int
    rdma: bool
    arch: str
    min_cuda: str
    note: str = ""

    @property
    def gpu_bytes(self) -> int:
        """Memory of one GPU by the vendor's number; a driver reports this or more."""
        return self.gpu_memory_gb * 10**9

    @property
    def most_gpu_bytes(self) -> int:
        """Upper bound of what a driver reports, which is up to 7 % above 10^9 bytes per GB (H100, 80 GB: 85.5e9)."""
        return self.gpu_memory_gb << 30


@dataclass(frozen=True)
class Machines:
    """The machines of a run: instance type (None: unknown), number, and processes on each (0: one per GPU)."""

    instance: Instance | None
    nodes: int
    processes: int

    @property
    def world_size(self) -> int:
        """Processes of the whole run; 0: not known yet."""
        return self.nodes * self.processes


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU in 10^9 bytes per second, and the reached fractions of its peak; sources are in the table."""

    memory_gb_s: float
    link_gb_s: float
    host_gb_s: float
    products: float
    attention: float


def gpu_of(instance: Instance) -> Gpu | None:
    """Return the rates of an instance's GPUs; None if they are unknown."""
    row = json.loads(TABLE.read_text(encoding="utf-8"))["gpus"].get(f"{instance.gpu} {instance.gpu_memory_gb}")
    return None if row is None else Gpu(**row)


def release(version: str) -> tuple[int, ...]:
    """Return a release such as 12.4 as a tuple of numbers, which can be compared."""
    return tuple(int(part) for part in version.split("."))


@functools.cache
def instances() -> dict[str, Instance]:
    """Return the table by name, without the prefix ``ml.``."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["instances"]
    return {name: Instance(name, **row) for name, row in rows.items()}


def this_machine() -> Instance | None:
    """Return the instance type of this machine; None if the table does not have it."""
    try:
        return instances().get(PRODUCT.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return None


def find(name: str) -> Instance:
    """Return an instance type by name, with or without ``ml.``; `ConfigError` names the nearest type."""
    plain = name.removeprefix("ml.")
    if re.match(r"(trn|inf)\d", plain):
        raise ConfigError(
            f"--instance_type {name}: AWS Trainium and Inferentia are not supported; take a type with NVIDIA GPUs, "
            "such as p5.48xlarge"
        )
    if plain not in instances():
        hint = nearest(plain, instances()) or f"; known are {', '.join(instances())}"
        raise ConfigError(f"--instance_type {name}: not in the table of instance types{hint}")
    return instances()[plain]
