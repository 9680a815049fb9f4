"""Context parallelism: each rank holds a part of every sequence, and gathers keys and values for attention.

The sequence is split into twice as many pieces as there are ranks; rank r takes pieces r and 2 * degree - 1 - r. Early
pieces attend to little and late ones to much, so every rank has the same work. Keys and values of the whole sequence
are gathered in each layer, and their gradients are reduce-scattered: the all-gather form of Llama 3 (The Llama 3 Herd
of Models, 2024, section 3.3.2), exact on any device, in place of a ring, which torch has for CUDA kernels only.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.attention.bias import CausalBias, CausalVariant

from smp_train.distributed.degrees import check_model
from smp_train.distributed.host import older
from smp_train.errors import ConfigError
from smp_train.models.attention import causal_alone

ATTENTION = "smp_train_context"
OLDEST_TRANSFORMERS = "4.54"  # from here on, a model's attention can be replaced after it is built

BY_LENGTH = frozenset({"dynamic", "longrope", "su"})
"""Rotary embeddings of transformers that depend on the largest position in the batch."""

WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "position_embeddings"})
"""Tensors that transformers passes to every kernel and sdpa ignores."""


def check(degree: int, seq_len: int, attn_implementation: str, config: Any) -> None:
    """Raise `ConfigError` for a model, sequence length or kernel that context parallelism cannot split."""
    if degree == 1:
        return
    against = causal_alone(config)
    if against is not None:
        raise ConfigError(
            f"--context_parallel_degree {degree}: {against}; use --hybrid_shard_degree, or --tensor_parallel_degree "
            "where it is available"
        )
    scaled = _rope_types(config) & BY_LENGTH
    if scaled:
        raise ConfigError(
            f"--context_parallel_degree {degree}: the rotary embedding of this {config.model_type} ({min(scaled)}) "
            "depends on the length of the sequence, which a rank sees a part of; use --hybrid_shard_degree"
        )
    if older(version("transformers"), OLDEST_TRANSFORMERS):
        needed = f"transformers {OLDEST_TRANSFORMERS} or newer, this is {version('transformers')}"
        raise ConfigError(f"--context_parallel_degree {degree} needs {needed}; upgrade transformers")
    check_model({}, seq_len=seq_len, context=degree)
    if attn_implementation != "sdpa":
        raise ConfigError(
            f"--context_parallel_degree {degree} computes attention with sdpa; --attn_implementation "
            f"{attn_implementation} cannot be used with it"
        )


def _last_of(queries: int, keys: int) -> CausalBias:
    """Return torch's `causal_lower_right`, but without its unused tensor, which takes 8 bytes per pair of tokens."""
    bias = torch.Tensor._make_subclass(CausalBias, torch.empty(0))
    CausalBias.__init__(bias, CausalVariant.LOWER_RIGHT, queries, keys)
    return bias


def _rope_types(config: Any) -> set[str]:
    """Return the types of the model's rotary embeddings; some models have one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {kind.get("rope_type") or kind.get("type") or "default" for kind in kinds}


class ContextSplit:
    """One context rank's pieces of each sequence, and attention from them to the whole sequence."""

    def __init__(self, mesh: DeviceMesh, seq_len: int) -> None:
        self.mesh = mesh
        self.degree, rank = mesh.size(), mesh.get_local_rank()
        self.piece = seq_len // (2 * self.degree)
        self.pieces = (rank, 2 * self.degree - 1 - rank)
        self._causal = {end: _last_of(self.piece, end) for end in map(self._end, self.pieces)}
        """Causal mask of each piece, by the piece's end in the whole sequence.

        Selective checkpointing's dispatch modes would not let torch make them during a forward pass.
        """

    def apply(self, model: Any) -> None:
        """Let every layer of ``model``, which must have causal attention only, use the split attention."""
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, self.attend)
        model.set_attn_implementation(ATTENTION)

    def split(self, sequence: Tensor) -> Tensor:
        """Return this rank's pieces of ``[batch, seq]``, joined."""
        first, second = (sequence[:, p * self.piece : (p + 1) * self.piece] for p in self.pieces)
        return torch.cat([first, second], dim=1)

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in the whole sequence, int64 ``[1, seq / degree]``."""
        return self.split(torch.arange(2 * self.degree * self.piece, device=device).unsqueeze(0))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attend causally from this rank's tokens to the whole sequence, with the signature that transformers calls.

        ``query`` is ``[batch, heads, seq / degree, head_dim]``, and so are ``key`` and ``value`` with their own number
        of heads; the result is ``[batch, seq / degree, heads, head_dim]``. ``sliding_window`` is the number of tokens
        that a token attends to. Raises `ConfigError` for a mask, or a tensor that might change the result.
        """
        tensors = {name for name, value in kwargs.items() if isinstance(value, Tensor)} - WITHOUT_EFFECT
        if attention_mask is not None or tensors:
            raise ConfigError(
                f"--context_parallel_degree: {type(module).__name__} computes attention with "
                f"{', '.join(sorted(tensors)) or 'a mask of its own'}, which cannot be split"
            )
        key, value = self._gather(key), self._gather(value)
        outputs = []
        groups = query.shape[1] // key.shape[1]
        for part, piece in zip(query.chunk(2, dim=2), self.pieces, strict=True):
            end = self._end(piece)
            mask = self._mask(end, sliding_window, query.device)
            keys, values = key[:, :, :end], value[:, :, :end]
            repeated = groups > 1 and not isinstance(mask, CausalBias)
            if repeated:
                # Only cuDNN supports grouped heads with a mask; torch's fallback would store all attention scores.
                keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
            output = F.scaled_dot_product_attention(
                part, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling,
                enable_gqa=groups > 1 and not repeated,
            )  # fmt: skip
            outputs.append(output)
        return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None

    def _end(self, piece: int) -> int:
        return (piece + 1) * self.piece

    def _gather(self, part: Tensor) -> Tensor:
        """Return keys or values of the whole sequence, in order; the gradient is summed and scattered."""
        pieces = DTensor.from_local(part.contiguous(), self.mesh, [Shard(2)], run_check=False)
        whole = pieces.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        chunks = whole.chunk(2 * self.degree, dim=2)
        # Rank r holds pieces r and 2 * degree - 1 - r: they are chunks 2r and 2r + 1.
        order = [2 * p for p in range(self.degree)] + [2 * p + 1 for p in reversed(range(self.degree))]
        return torch.cat([chunks[index] for index in order], dim=2)

    def _mask(self, end: int, window: int | None, device: torch.device) -> Any:
        """Return the mask from the tokens of the piece that ends at ``end`` to the first ``end`` keys."""
        if window is None or window >= end:
            return self._causal[end]
        keys = torch.arange(end, device=device)
        tokens = keys[-self.piece :].unsqueeze(1)
        allowed = keys <= tokens
        if window is not None:
            allowed &= keys > tokens - window
        return allowed
