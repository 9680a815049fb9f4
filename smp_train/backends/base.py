"""Interface between the training loop and a parallelism library.

`train_lib` works with any backend. A backend refuses unsupported settings by name in its constructor, and unsupported
models in `Backend.check`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_train.checkpoints.saver import Saver
from smp_train.distributed.degrees import Degrees
from smp_train.errors import ConfigError
from smp_train.losses import Loss

if TYPE_CHECKING:
    from smp_train.data.batch import Batch
    from smp_train.models.hugging_face import ModelSpec


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


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device that the backend can train; `Backend.check` makes it, `Backend.build` uses it up."""

    spec: ModelSpec
    seq_len: int
    """Tokens of a row."""
    model: nn.Module
    experts: Mapping[nn.Module, list[nn.Module]] = field(default_factory=dict)
    """For each decoder layer, the modules whose experts are distributed over expert ranks."""


class RouterTerm(NamedTuple):
    """The loss that the routers of a mixture of experts add to the mean loss of a micro-batch."""

    share: Tensor
    """This rank's share of the router loss, a scalar with gradients."""
    figures: Tensor
    """float32 [2], over all ranks: the router loss, and the load of the most used expert over an even load."""


class Backend(ABC):
    """A parallelism library, used on all ranks of the initialised process group."""

    name: str
    checkpoint_type: str = "async_sharded"
    """Default of --checkpoint_type."""
    degrees: Degrees
    """The layout of the run's ranks."""
    topology: Topology
    compiled = False
    """Whether the model is compiled; the first step compiles it."""
    draws = "from"
    """The missing word in the log line "initial weights: drawn ... seed N"."""

    @abstractmethod
    def check(self, spec: ModelSpec, *, seq_len: int) -> MetaModel:
        """Return the model on the meta device, for one `build`; ``seq_len`` is in tokens.

        Raises `ConfigError` for a model or a length that the settings cannot train. All ranks call it before they open
        the data.
        """

    def use_loss(self, loss: Loss) -> None:
        """Compute ``loss`` instead of the cross entropy; call it before `build`. Raises `ConfigError` if it cannot."""
        raise ConfigError(
            f"loss: the {self.name} backend computes its own; leave loss out, or give --backend native outside of SMP"
        )

    @abstractmethod
    def build(self, meta: MetaModel, *, seed: int, initial: bool = True) -> nn.Module:
        """Return the model ready for training: sharded, its weights initialised or loaded.

        Without ``initial`` the weights are left uninitialised, for `load_state`: the pretrained weights that a run
        started from may be gone when the run resumes.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, RouterTerm | None]:
        """Run the forward pass and return the summed loss over this rank's counted tokens, a float32 scalar.

        The second value is None without gradients, and for a model without a router loss.

        Args:
            model: The model that `build` returned.
            batch: A micro-batch of this rank on the device.
        """

    @abstractmethod
    def begin_micro_batch(self, model: nn.Module, *, last: bool) -> None:
        """Prepare a micro-batch's forward and backward pass; ``last`` marks the last micro-batch of the step."""

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, max_norm: float, optimizer: Optimizer) -> Tensor:
        """Clip gradients to a global 2-norm of ``max_norm`` (0: no clipping); return the norm before; collective.

        A backend may leave the scaling to the next step of ``optimizer``, whose fused kernel scales as it reads them.
        """

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Return whether weight decay applies to a parameter: to matrices, not to norms and biases."""
        return parameter.ndim >= 2

    @abstractmethod
    def sum_over_data(self, values: Tensor) -> Tensor:
        """Return ``values``, on the device, summed over all ranks that hold different tokens; collective."""

    def rebind(self, model: nn.Module) -> None:
        """Form the mesh's groups again and bind ``model`` to them, after its ranks have met again; collective.

        The state of the interrupted step is discarded, except gradients that this rank has already reduced. Raises
        `ConfigError` if the backend cannot replace groups.
        """
        raise ConfigError(f"--recovery in_place: the {self.name} backend cannot replace groups; use --recovery off")

    def replica_group(self) -> dist.ProcessGroup:
        """Return the ranks that hold the same part of the state as this rank; called only after `rebind`."""
        raise NotImplementedError

    @property
    def saver(self) -> Saver:
        """The object that writes and reads the state dict; valid after `build`."""
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
        """Restore model and optimizer: ``read`` fills, in place, the result of `state_dict`; collective."""
