"""Ranks: their launcher, their meeting, their layout over the dimensions of parallelism, and their agreement.

`detect` reads the launcher's variables, `start` and `stop` make and end the process group, and `gather` turns a failure
of one rank into a failure of all. Only `device_profile`, `dtensor`, `host_copy` and `to_host` import torch
at import.
"""

from smp_train.distributed.agree import (
    ALL_RANKS,
    alone,
    any_rank,
    from_main,
    gather,
    largest,
    on_main,
    rank,
    together,
    world_size,
)
from smp_train.distributed.environment import Runtime, detect, expand_hostlist, is_sagemaker, smp_installed
from smp_train.distributed.group import renumbered, start, start_attempted, started, stop
from smp_train.distributed.long_work import finish_together

__all__ = [
    "ALL_RANKS", "Runtime", "alone", "any_rank", "detect", "expand_hostlist", "finish_together", "from_main", "gather",
    "is_sagemaker", "largest", "on_main", "rank", "renumbered", "smp_installed", "start", "start_attempted", "started",
    "stop", "together", "world_size",
]  # fmt: skip
