"""Kinds of state dicts, and how often to save."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


class SMStateDictType(enum.Enum):
    """What SMP adds to torch's kinds."""

    SM_LOCAL_STATE_DICT = "sm_local_state_dict"


@contextmanager
def sm_state_dict_type(
    model: Any, type: Any, state_dict_config: Any = None, optim_state_dict_config: Any = None
) -> Iterator[None]:
    """Let ``model.state_dict()`` return the kind ``type``; the local one is torch's sharded one here."""
    kind = type if isinstance(type, StateDictType) else StateDictType.SHARDED_STATE_DICT
    with FSDP.state_dict_type(model, kind, state_dict_config, optim_state_dict_config):
        yield


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Give every parameter the state that its first step would, and change nothing."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p in optimizer.state for p in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = None if skip_empty_param and p.numel() == 0 else torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


@dataclass
class _Interval:
    interval: int = -1


def compute_auto_checkpoint_interval(
    step_durations: list[float],
    step_ckpt_durations: list[float],
    ckpt_preprocessing_durations: list[float],
    ckpt_io_durations: list[float],
) -> _Interval:
    """Return after how many steps the next save no longer waits for the one before."""
    if not (step_durations and ckpt_io_durations):
        return _Interval()
    return _Interval(max(1, round(statistics.mean(ckpt_io_durations) / statistics.mean(step_durations))))
