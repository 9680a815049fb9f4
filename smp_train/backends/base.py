"""The seam: all that the training program may ask of whatever spreads the model over devices.

`train_lib` never asks which backend it has. What a backend cannot do, it refuses by name, in its constructor or in
`Backend.check`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smp_train.checkpoints.saver import Saver
from smp_train.models.traits import check_loss

if TYPE_CHECKING:
    from smp_train.models.resolve import ModelSpec


@dataclass(frozen=True)
class Topology:
    """Where this rank stands: which share of the data it reads, and with whom it shares the model."""

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
    """One way of spreading a model over the ranks of the initialised process group."""

    name: str
    checkpoint_type: str = "async_sharded"
    """How checkpoints are written where nothing is said."""
    topology: Topology
    draws = "from"
    """Completes "initial weights: drawn ... seed N"."""

    def check(self, spec: ModelSpec, *, seq_len: int) -> None:
        """Raise `ConfigError` for a model, or a sequence length in tokens, that cannot be trained as asked.

        Called on every rank before the data is opened, and before `build`.
        """
        check_loss(spec.config)

    @abstractmethod
    def build(self, spec: ModelSpec, *, seed: int, seq_len: int, initial: bool = True) -> nn.Module:
        """Return the model ready to train: spread over the ranks, its weights initialised or loaded.

        Without ``initial`` the weights are left unset, for `load_state` to fill: what a run started from need not be
        there when it resumes. `check` comes first, and only what it cannot know is refused here.
        """

    def check_rows(self, attention_mask: Tensor | None, samples: Sequence[str]) -> None:  # noqa: B027
        """Raise `DataError` for a batch just read, on the host, that cannot be computed; not collective.

        ``attention_mask`` is int64 ``[batch, seq]`` or None, ``samples`` what each row is called, or nothing.
        """

    @abstractmethod
    def loss_sum(
        self,
        model: nn.Module,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the forward pass and return this rank's summed loss over its counted tokens, a float32 scalar.

        Args:
            model: What `build` returned.
            input_ids: int64 ``[batch, seq]`` on the device.
            labels: int64 ``[batch, seq]``, not shifted, -100 where a token is not counted.
            attention_mask: int64 ``[batch, seq]``, or None when every token is attended to.
            position_ids: int64 ``[batch, seq]``, starting again at 0 at each of several documents packed in a row, of
                which none attends to another; None when every row is one document. Never beside a mask.
        """

    @abstractmethod
    def accumulation(self, model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch's forward and backward pass; ``last`` closes the global batch."""

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """Scale gradients to a global 2-norm of at most ``max_norm`` (0: leave them) and return the norm before."""

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Tell whether a parameter of the built model decays: matrices do, norms and biases do not."""
        return parameter.ndim >= 2

    @abstractmethod
    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return ``values``, on the device, summed over all ranks that hold different tokens; collective."""

    @property
    def saver(self) -> Saver:
        """How what `state_dict` returns is written and read; known once the model is built."""
        return Saver()

    def full_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Return the whole model on rank 0's host, under Hugging Face names, and nothing on the others; collective.

        None where checkpoints have these names already, and nobody needs to hold the model.
        """
        return None

    @abstractmethod
    def state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return parameters and optimizer state, sharded, under Hugging Face parameter names; collective."""

    @abstractmethod
    def load_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Callable[[dict[str, Any]], None]
    ) -> None:
        """Restore model and optimizer from what ``read`` fills into a dictionary like `state_dict`'s; collective."""
