"""A mixture of experts, of which each expert rank holds a part: every rank's tokens go to every expert rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state_handler import state
from ..tensor_parallel.collectives import Gather, Scale, SumOwn, average_gradients


class MoELayer(nn.Module):
    """In place of Mixtral's sparse block.

    Args:
        router: ``[experts, hidden]``.
        inwards: Gate and up products of this rank's experts, ``[experts / degree, 2 * intermediate, hidden]``.
        outwards: Their down products, ``[experts / degree, hidden, intermediate]``.
        per_token: Experts of each token.
        plain: Whether the layer returns its output alone, as in transformers 5, or with the router's logits.
    """

    def __init__(self, router: Tensor, inwards: Tensor, outwards: Tensor, per_token: int, plain: bool) -> None:
        super().__init__()
        for name, value in (("router", router), ("inwards", inwards), ("outwards", outwards)):
            # Not by attribute, which init_empty_weights turns to meta: the first ranks hold weights that were read.
            self._parameters[name] = nn.Parameter(value)
        self.per_token, self.plain = per_token, plain

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        shape = hidden.shape
        tokens = hidden.reshape(-1, shape[-1])
        if state.ep_size > 1:
            average_gradients(("router",), self)
        logits = F.linear(tokens, self.router)
        weights, chosen = logits.float().softmax(-1).topk(self.per_token, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        share = torch.zeros_like(logits).scatter(1, chosen, weights)
        # FSDP averages over ranks of one expert rank, and these gradients come from all of them.
        inwards, outwards = (Scale.apply(each, 1 / state.ep_size) for each in (self.inwards, self.outwards))
        everyone, shares = Gather.apply(tokens, "expert", 0), Gather.apply(share, "expert", 0)
        first = state.ep_rank * len(inwards)
        out = torch.zeros_like(everyone)
        for index in range(len(inwards)):
            gate, up = F.linear(everyone, inwards[index]).chunk(2, dim=-1)
            out = out + shares[:, first + index, None] * F.linear(F.silu(gate) * up, outwards[index])
        own = SumOwn.apply(out, "expert", 0).reshape(shape)
        return own if self.plain else (own, logits)


def of_block(block: nn.Module, config: object) -> MoELayer:
    """Return the layer of this expert rank in place of a Mixtral block of transformers 4 or 5."""
    experts = block.experts
    if isinstance(experts, nn.ModuleList):  # transformers 4
        inwards = torch.stack([torch.cat([each.w1.weight, each.w3.weight]) for each in experts])
        outwards = torch.stack([each.w2.weight for each in experts])
    else:
        inwards, outwards = experts.gate_up_proj, experts.down_proj
    if len(inwards) % state.ep_size:
        raise ValueError(f"{len(inwards)} experts do not divide by expert_parallel_degree {state.ep_size}")
    own = [each.detach().chunk(state.ep_size)[state.ep_rank].clone() for each in (inwards, outwards)]
    plain = not isinstance(experts, nn.ModuleList)
    return MoELayer(block.gate.weight.detach().clone(), *own, config.num_experts_per_tok, plain)  # type: ignore
