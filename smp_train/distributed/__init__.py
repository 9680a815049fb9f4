"""Ranks: which launcher started them, how they meet, who shares what, and how they agree.

`detect` reads the launcher's environment; `start` and `stop` make and end the process group; `agree` turns a failure of
one rank into a failure of all; `degrees` lays ranks out over the dimensions of parallelism. Nothing here imports torch
at import but `dtensor`.
"""

from smp_train.distributed.agree import (
    ALL_RANKS,
    alone,
    any_rank,
    exchange,
    gather,
    largest,
    on_main,
    rank,
    together,
    world_size,
)
from smp_train.distributed.environment import Runtime, detect, expand_hostlist, is_sagemaker, smp_installed
from smp_train.distributed.group import start, start_attempted, started, stop
from smp_train.distributed.long_work import finish_together

__all__ = [
    "ALL_RANKS", "Runtime", "alone", "any_rank", "detect", "exchange", "expand_hostlist",
    "finish_together", "gather", "is_sagemaker",
    "largest", "on_main", "rank", "smp_installed", "start", "start_attempted", "started", "stop", "together",
    "world_size",
]  # fmt: skip
