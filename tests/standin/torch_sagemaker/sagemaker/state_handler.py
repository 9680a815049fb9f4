"""The state object: degrees, ranks and groups.

Ranks, outermost first: replica, shard, expert, tensor; context ranks are the fastest part of the shard dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests import standin


class Ranker:
    """Which ranks hold the same shards."""

    def __init__(self, state: State) -> None:
        self._state = state

    def get_rep_rank(self, rank: int) -> int:
        return rank // (self._state.inner * self._state.shard)

    def get_rep_groups(self) -> list[list[int]]:
        size = self._state.inner * self._state.shard
        return [list(range(first, self._state.world_size, size)) for first in range(size)]


class State:
    """Everything `init` settles."""

    def __init__(self) -> None:
        self.ready = False
        self.groups: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.split_parameters: dict[str, int] = {}

    def reset(self) -> None:
        """Forget the degrees, ranks and groups."""
        self.__init__()  # type: ignore[misc]

    def configure(self, config: dict[str, Any]) -> None:
        if not dist.is_initialized():
            raise RuntimeError("init_process_group must come before torch.sagemaker.init")
        if self.ready and config == self.config and dist.get_world_size() == self.world_size:
            return
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        tensor, expert, context = (config[f"{name}_parallel_degree"] for name in ("tensor", "expert", "context"))
        shard, world = config["hybrid_shard_degree"], self.world_size
        self.inner = tensor * expert
        assert not shard or world % (self.inner * shard) == 0, "the program refuses what does not divide"
        self.__dict__.update(config)
        self.config = dict(config)
        # 0 is stock PyTorch's business, but with tensor parallelism the largest possible.
        self.native = self.inner == 1 and shard <= 1
        self.shard = shard or world // self.inner
        self.tp_size, self.ep_size, self.cp_size = tensor, expert, context
        self.tp_rank = self.rank % tensor
        self.ep_rank = self.rank // tensor % expert
        self.shard_rank = self.rank // self.inner % self.shard
        self.cp_rank = self.shard_rank % context
        # What tensor and expert ranks have of their own differs between them.
        self.generator = torch.Generator().manual_seed(config["random_seed"] + self.tp_rank + self.ep_rank)
        # Tensor ranks hold the same experts here.
        self.expert_generator = torch.Generator().manual_seed(config["random_seed"] + self.ep_rank)
        self.ranker = Ranker(self)
        self.ready = True
        sizes = {"tensor": (1, tensor), "expert": (tensor, expert), "context": (self.inner, context),
                 "shard": (self.inner, self.shard),
                 "replica": (self.inner * self.shard, world // (self.inner * self.shard))}  # fmt: skip
        self.groups = {kind: self._make(step, count) for kind, (step, count) in sizes.items()}

    def _make(self, step: int, count: int) -> Any:
        """Return this rank's group of ``count`` ranks that are ``step`` apart; collective."""
        own = None
        for first in (r for r in range(self.world_size) if r // step % count == 0):
            ranks = [first + step * index for index in range(count)]
            group = dist.new_group(ranks)
            if self.rank in ranks:
                own = group
        return own

    def group(self, kind: str) -> Any:
        """Return this rank's ``tensor``, ``expert``, ``context``, ``shard`` or ``replica`` group."""
        if not self.ready:
            raise RuntimeError("torch.sagemaker.init has not been called")
        return self.groups[kind]

    def split_dim(self, name: str) -> int | None:
        """Return the dimension along which tensor or expert ranks cut a parameter; None where all have the same."""
        for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "inner."):
            name = name.replace(wrapper, "")
        return next((dim for end, dim in self.split_parameters.items() if name.endswith(end)), None)

    @property
    def tp_process_group(self) -> Any:
        return None if self.native else self.group("tensor")

    @property
    def world_process_group(self) -> Any:
        if not self.ready:
            raise RuntimeError("torch.sagemaker.init has not been called")
        return dist.group.WORLD

    def get_rng_state_tracker(self) -> Any:
        standin.record("get_rng_state_tracker")
        return None


state = State()
