"""Interface between the training loop and a parallelism library.

`train_lib` does not depend on which backend it has. A backend refuses unsupported settings by name in its constructor,
unsupported models in `Backend.check`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_train.checkpoints.saver import Saver
from smp_train.errors import ConfigError
from smp_train.losses import Loss

if TYPE_CHECKING:
    from smp_train.models.resolve import ModelSpec


@dataclass(frozen=True)
class Topology:
    """Device of this rank, and its ranks in the data, tensor and context groups."""

    device: torch.device
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    cp_rank: int
    cp_size: int
    mesh: dict[str, int]
    """Name and size of every dimension of the mesh, outermost first, for the log and `run.json`."""


class Backend(ABC):
    """A parallelism library, used on all ranks of the initialised process group."""

    name: str
    checkpoint_type: str = "async_sharded"
    """Default of --checkpoint_type."""
    topology: Topology
    compiled = False
    """Whether the model is compiled, during the first step."""
    draws = "from"
    """Completes "initial weights: drawn ... seed N"."""

    @abstractmethod
    def check(self, spec: ModelSpec, *, seq_len: int) -> None:
        """Raise `ConfigError` for a model or a sequence length (in tokens) that the settings cannot train.

        Called on every rank before `build` and before the data is opened.
        """

    def use_loss(self, loss: Loss) -> None:
        """Compute ``loss`` in place of the cross entropy; before `build`. Raises `ConfigError` where it cannot."""
        raise ConfigError(
            f"loss: the {self.name} backend computes its own; leave loss out, or give --backend native outside of SMP"
        )

    @abstractmethod
    def build(self, spec: ModelSpec, *, seed: int, seq_len: int, initial: bool = True) -> nn.Module:
        """Return the model ready for training: sharded, its weights initialised or loaded. `check` comes first.

        Without ``initial`` the weights are left uninitialised, for `load_state`: pretrained weights that a run started
        from may be gone when it resumes.
        """

    @abstractmethod
    def loss_sum(
        self, model: nn.Module, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None,
        documents: tuple[Tensor, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the forward pass and return this rank's summed loss over its counted tokens, a float32 scalar.

        Args:
            model: What `build` returned.
            input_ids: int64 ``[batch, seq]`` on the device; padding is on the right, so that no token attends to it.
            labels: int64 ``[batch, seq]``, not shifted, -100 for tokens without loss.
            position_ids: int64 ``[batch, seq]``, restarting at 0 for each of several documents packed in a row, which
                do not attend to each other; None when every row is one document.
            documents: With ``position_ids``, `Batch.documents` on the device; they say the same.
        """

    def router_loss(self) -> tuple[Tensor, Tensor] | None:
        """Return what the last `loss_sum` in training adds to the mean loss, None for a model without a router loss.

        It is this rank's share, which has gradients, and two figures of all ranks: the whole of it, and the load of the
        most used expert over an even one (`smp_train.parallel.router_loss`).
        """
        return None

    @abstractmethod
    def accumulation(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward pass; ``last``: of the global batch."""

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, max_norm: float, optimizer: Optimizer) -> Tensor:
        """Clip gradients to a global 2-norm of ``max_norm`` (0: no clipping) and return the norm before; collective.

        A backend may leave the scaling to the next step of ``optimizer``, whose fused kernel does it on reading them.
        """

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Return whether weight decay applies to a parameter: to matrices, not to norms and biases."""
        return parameter.ndim >= 2

    @abstractmethod
    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return ``values``, on the device, summed over all ranks that hold different tokens; collective."""

    @property
    def saver(self) -> Saver:
        """How the state dict is written and read; valid after `build`."""
        return Saver()

    def full_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the whole model on rank 0's host under Hugging Face names, nothing on other ranks; collective.

        None where checkpoints use these names, so that export does not need the model in memory.
        """
        return None

    @abstractmethod
    def state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return sharded parameters and optimizer state under Hugging Face parameter names; collective."""

    @abstractmethod
    def load_state(self, model: nn.Module, optimizer: Optimizer, read: Callable[[dict[str, Any]], None]) -> None:
        """Restore model and optimizer: ``read`` fills a state dict as that of `state_dict` in place; collective."""
