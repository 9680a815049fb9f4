"""Ranks of a process group."""

from typing import Any

import torch.distributed as dist


def get_global_ranks(process_group: Any) -> list[int]:
    """Return the global ranks of ``process_group``."""
    return list(dist.get_process_group_ranks(process_group))
