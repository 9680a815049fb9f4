"""Losses of the routers of a mixture of experts, and how evenly these spread the tokens."""

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
    """What is added to the cross entropy.

    With E experts of which a token takes k, f the shares of a layer's tokens that each expert gets (k in all), and P
    the mean probabilities: ``balance`` E / k sum(f P) plus ``z`` mean(logsumexp(logits)^2), summed over layers, is the
    sum of Megatron Core's ``aux_loss`` and z-loss (Switch Transformer, Fedus et al. 2021; ST-MoE, Zoph et al. 2022).
    Without ``by_layer`` it is transformers' ``balance`` E sum(f P), with f and P of all layers together.

    f, P and the means are of one micro-batch of all ranks, without padding.
    """

    balance: float
    z: float = 0.0
    by_layer: bool = True


def chosen(args: Arguments, config: Any) -> RouterLoss | None:
    """Return the loss that the flags or, without ``--moe 1``, the model's configuration ask for."""
    if args.moe:
        balance = args.moe_aux_loss_coeff if args.moe_load_balancing == "aux_loss" else 0.0
        return RouterLoss(balance, args.moe_z_loss_coeff)
    if getattr(config, "output_router_logits", False):
        return RouterLoss(config.router_aux_loss_coef, by_layer=False)
    return None


def unpadded(input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return a mask ``[batch, seq]``, 0 for padding, of rows padded on the right: ids of 0 that have no label."""
    used = (input_ids != 0) | (labels != IGNORE_INDEX)
    return used.flip(1).int().cummax(dim=1).values.flip(1)


class Routers:
    """The routers of a model; computes their loss from what they decide in a forward pass of training."""

    def __init__(self, model: Any, loss: RouterLoss) -> None:
        """Watch the routers of a Hugging Face model. Raises `ConfigError` where it has none that transformers knows."""
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
        if self._seen is not None:  # not in a checkpoint's second forward pass
            self._seen.append(output[self._index])  # type: ignore[index]

    def start(self) -> None:
        """Begin a forward pass with gradients; call `finish` behind it."""
        self._seen = []

    def finish(self, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the loss, and two figures of all ranks: the loss, and the load.

        The load is the share of tokens of a layer's most used expert over that of an even spread, of the most uneven
        layer. One all-reduce of a few numbers per layer and expert; the host does not wait.

        Args:
            mask: ``[batch, seq]``, 0 for padding, of the tokens that this rank's routers see; None without padding.
        """
        seen, self._seen = self._seen or [], None
        weight = torch.ones_like(seen[0][:, 0]) if mask is None else mask.flatten()
        weight = weight.float().unsqueeze(1)
        by_layer = []
        for logits in (each.float() for each in seen):
            shares = logits.softmax(dim=1)
            experts = shares.detach().topk(self._used, dim=1).indices
            taken = torch.zeros_like(shares).scatter_(1, experts, 1.0)
            squares = logits.logsumexp(dim=1, keepdim=True).square()
            each = (taken, shares, squares)
            by_layer.append(torch.cat([(value * weight).sum(dim=0) for value in each]))
        # ``[layers, 2 experts + 1]``: tokens taken, probabilities, squares. What several tensor ranks see counts as
        # often in each sum, and each of these ranks has its part of the gradient.
        local = torch.stack(by_layer)
        count = weight.sum()
        everywhere = torch.cat([local.detach().flatten(), count.unsqueeze(0)])
        dist.all_reduce(everywhere)
        whole, count = everywhere[:-1].view_as(local), everywhere[-1].clamp(min=1)
        number = (local.shape[1] - 1) // 2
        shares = whole[:, :number] / count
        load = shares.max() * number / self._used
        share, all_of_it = (self._of(shares, sums[:, number:] / count) for sums in (local, whole))
        return share, torch.stack([all_of_it, load])

    def _of(self, shares: Tensor, means: Tensor) -> Tensor:
        """Return the loss by the shares ``[layers, experts]``, and by the means of probabilities and of the squares."""
        probabilities, squares = means[:, :-1], means[:, -1]
        if self._loss.by_layer:
            balance = (shares * probabilities).sum() / self._used
        else:
            balance = (shares.mean(dim=0) * probabilities.mean(dim=0)).sum()
        return self._loss.balance * shares.shape[1] * balance + self._loss.z * squares.sum()
