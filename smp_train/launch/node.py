"""One node of a run, the environment of its workers, and the failure that ends a run. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smp_train.distributed.environment import GENERATION, LAUNCH
from smp_train.distributed.host import cores

# Variables left by an outer launcher or by a container's hooks; every worker gets new values.
STALE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", GENERATION,
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One node of a run. Every node of the run has ``processes`` ranks, which are numbered node by node.

    Spare nodes come after the run's ``nodes`` and have no ranks until they replace a lost node.
    """

    processes: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    spares: int = 0
    patience: float = 0.0
    """Seconds that a lost node may take to return, or to be started again, if no spare node is left."""

    def environment(self, rank: int, environ: Mapping[str, str], world_size: int | None = None) -> dict[str, str]:
        """Return the environment of any rank of the run: ``environ`` with torchrun's variables for ``rank``.

        ``world_size`` is the present number of ranks, if it has changed.
        """
        world_size = world_size or self.nodes * self.processes
        inherited = {name: value for name, value in environ.items() if name not in STALE}
        inherited.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self.processes // 2)))
        return inherited | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(rank // self.processes),
            "GROUP_WORLD_SIZE": str(world_size // self.processes),
            "ROLE_NAME": LAUNCH,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @property
    def first_rank(self) -> int:
        """Rank of this node's first process."""
        return self.node_rank * self.processes


@dataclass(frozen=True)
class Failure:
    """The worker that failed first on this node; ``code`` is 128 + N for signal N."""

    rank: int
    node: str
    code: int
    cause: str

    def line(self) -> str:
        """Return the line to search logs for."""
        return f"LAUNCH-FAIL node={self.node} rank={self.rank} rc={self.code} cause={self.cause}"
