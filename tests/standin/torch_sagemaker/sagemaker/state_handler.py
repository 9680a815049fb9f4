"""The state object: degrees, ranks and groups.

Ranks, outermost first: replica, shard, expert, tensor; context ranks are the fastest part of the shard dimension.
"""

from __future__ import annotations

from typing import Any

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
        self.reset()

    def reset(self) -> None:
        self.ready = False
        self._groups: dict[str, Any] = {}

    def configure(self, config: dict[str, Any]) -> None:
        if not dist.is_initialized():
            raise RuntimeError("init_process_group must come before torch.sagemaker.init")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.__dict__.update(config)
        tensor, expert, context = (config[f"{name}_parallel_degree"] for name in ("tensor", "expert", "context"))
        shard, world = config["hybrid_shard_degree"], self.world_size
        self.inner = tensor * expert
        for name, degree in (("tensor", tensor), ("expert", expert), ("context", context)):
            if not 1 <= degree <= world or world % degree:
                raise ValueError(f"{name}_parallel_degree {degree} does not fit {world} ranks")
        if not 0 <= shard <= world or world % (self.inner * max(shard, 1)):
            raise ValueError(f"hybrid_shard_degree {shard} does not fit {world} ranks")
        if context > 1 and shard and context > shard:
            raise ValueError(f"context_parallel_degree {context} is above hybrid_shard_degree {shard}")
        if config["activation_loading_horizon"] < 1:
            raise ValueError("activation_loading_horizon must be at least 1")
        # 0 is stock PyTorch's business, but with tensor parallelism the largest possible.
        self.native = self.inner == 1 and shard <= 1
        self.shard = shard or world // self.inner
        self.tp_size, self.ep_size, self.cp_size = tensor, expert, context
        self.tp_rank = self.rank % tensor
        self.ep_rank = self.rank // tensor % expert
        self.shard_rank = self.rank // self.inner % self.shard
        self.cp_rank = self.shard_rank % context
        self.ranker = Ranker(self)
        self.ready = True
        self._groups = {}

    def group(self, kind: str) -> Any:
        """Return this rank's ``tensor``, ``shard`` or ``replica`` group; collective on first use."""
        if not self.ready:
            raise RuntimeError("torch.sagemaker.init has not been called")
        if kind not in self._groups:
            step = {"tensor": 1, "shard": self.inner, "replica": self.inner * self.shard}[kind]
            count = {"tensor": self.tp_size, "shard": self.shard}.get(kind, self.world_size // step)
            firsts = [r for r in range(self.world_size) if r // step % count == 0]
            for first in firsts:
                ranks = [first + step * index for index in range(count)]
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    self._groups[kind] = group
        return self._groups[kind]

    @property
    def tp_process_group(self) -> Any:
        return None if self.native else self.group("tensor")

    @property
    def rep_rank_process_group(self) -> Any:
        return None if self.native else self.group("replica")

    @property
    def world_process_group(self) -> Any:
        return dist.group.WORLD

    def get_rng_state_tracker(self) -> Any:
        standin.record("get_rng_state_tracker")
        return None


state = State()
