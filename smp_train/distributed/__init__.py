"""Where am I: which launcher started this process, which rank it is, and how the ranks meet.

`detect` reads the environment and imports no torch; `start` and `stop` make and end the process group;
`together` turns a failure of one rank into the same failure of all, and `any_rank` asks all of them one question.
"""

from smp_train.distributed.environment import Runtime, detect, expand_hostlist, is_sagemaker, smp_installed
from smp_train.distributed.group import (
    any_rank,
    exchange,
    is_main,
    largest,
    rank,
    start,
    start_attempted,
    stop,
    together,
    world_size,
)

__all__ = [
    "Runtime",
    "any_rank",
    "detect",
    "exchange",
    "expand_hostlist",
    "is_main",
    "is_sagemaker",
    "largest",
    "rank",
    "smp_installed",
    "start",
    "start_attempted",
    "stop",
    "together",
    "world_size",
]
