"""Losses of the routers of a mixture of experts, and the load of its most used expert.

`smp_train.train_utils.train_step` adds the loss to the cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_train.errors import ConfigError
from smp_train.losses import IGNORE_INDEX

if TYPE_CHECKING:
    from smp_train.arguments import Arguments


@dataclass(frozen=True)
class RouterLoss:
    """The loss that is added to the cross entropy.

    Let each layer have E experts and each token use k of them; let f be the share of a layer's tokens that each expert
    gets (the shares' sum is k), and P its mean probability. ``balance`` E / k sum(f P) plus ``z`` mean(logsumexp(
    logits)^2), summed over layers, is the sum of Megatron Core's ``aux_loss`` and z-loss (Switch Transformer, Fedus et
    al. 2021; ST-MoE, Zoph et al. 2022). Without ``by_layer``, the loss is ``balance`` E sum(f P) with f and P over all
    layers, as in transformers.

    f, P and the means are taken over one micro-batch of all ranks, without padding.
    """

    balance: float
    z: float = 0.0
    by_layer: bool = True


def selected(args: Arguments, config: Any) -> RouterLoss | None:
    """Return the loss that the flags select or, without ``--moe 1``, the model's configuration; None for no loss."""
    if args.moe:
        balance = args.moe_aux_loss_coeff if args.moe_load_balancing == "aux_loss" else 0.0
        return RouterLoss(balance, args.moe_z_loss_coeff)
    if getattr(config, "output_router_logits", False):
        return RouterLoss(config.router_aux_loss_coef, by_layer=False)
    return None


def unpadded(input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return a mask ``[batch, seq]`` that is 0 for padding: ids of 0 without a label, at the right end of a row."""
    used = (input_ids != 0) | (labels != IGNORE_INDEX)
    return used.flip(1).int().cummax(dim=1).values.flip(1)


class Routers:
    """Records the logits of a model's routers in a forward pass, and computes their loss."""

    def __init__(self, model: Any, loss: RouterLoss) -> None:
        """Hook the routers of a Hugging Face model. Raises `ConfigError` if transformers does not expose them."""
        recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
        kind, self._index = getattr(recorder, "target_class", None), getattr(recorder, "index", None)
        routers = [module for module in model.modules() if kind is not None and type(module) is kind]
        if not routers:
            raise ConfigError(
                f"a router loss (--moe 1, or output_router_logits in config.json): transformers does not expose the "
                f"routers of {model.config.model_type}; give --moe 0, and set output_router_logits to false"
            )
        self._loss, self._used = loss, int(model.config.num_experts_per_tok)
        self._seen: list[Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._see)

    @torch.compiler.disable
    def _see(self, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        if self._seen is not None:  # None while activation checkpointing repeats the forward pass
            self._seen.append(output[self._index])  # type: ignore[index]

    def start(self) -> None:
        """Begin a forward pass with gradients; call `finish` after it."""
        self._seen = []

    def forget(self) -> None:
        """End a forward pass that failed."""
        self._seen = None

    def finish(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the loss, and two figures over all ranks: the loss, and the load.

        The load is the tokens of the most used expert over the tokens it would have if all experts were used equally,
        in the most uneven layer. Takes one all-reduce of a few numbers per layer and expert; the host does not wait.

        Args:
            mask: ``[batch, seq]`` of the tokens that pass this rank's routers, 0 for padding.
        """
        seen, self._seen = self._seen or [], None
        weight = mask.flatten().float().unsqueeze(1)
        by_layer = []
        for logits in (layer_logits.float() for layer_logits in seen):
            probabilities = logits.softmax(dim=1)
            experts = probabilities.detach().topk(self._used, dim=1).indices
            selected = torch.zeros_like(probabilities).scatter_(1, experts, 1.0)
            squares = logits.logsumexp(dim=1, keepdim=True).square()
            by_layer.append(torch.cat([(value * weight).sum(dim=0) for value in (selected, probabilities, squares)]))
        # ``[layers, 2 experts + 1]``: tokens of each expert, probabilities, squares. Tokens that n tensor ranks see
        # count n times in every sum, so ratios hold, and each rank has an n-th of the gradient.
        local = torch.stack(by_layer)
        everywhere = torch.cat([local.detach().flatten(), weight.sum().unsqueeze(0)])
        dist.all_reduce(everywhere)
        whole, count = everywhere[:-1].view_as(local), everywhere[-1].clamp(min=1)
        number = (local.shape[1] - 1) // 2
        shares = whole[:, :number] / count
        load = shares.max() * number / self._used
        local_loss, whole_loss = (self._loss_of(shares, sums[:, number:] / count) for sums in (local, whole))
        return local_loss, torch.stack([whole_loss, load])

    def _loss_of(self, shares: Tensor, means: Tensor) -> Tensor:
        """Return the loss from the experts' shares and from the means of probabilities and squares, each by layer."""
        probabilities, squares = means[:, :-1], means[:, -1]
        if self._loss.by_layer:
            balance = (shares * probabilities).sum() / self._used
        else:
            balance = (shares.mean(dim=0) * probabilities.mean(dim=0)).sum()
        return self._loss.balance * shares.shape[1] * balance + self._loss.z * squares.sum()
