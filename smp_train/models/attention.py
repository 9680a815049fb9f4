"""Attention of the native backend: without a mask if causal attention suffices, and without waiting for the device.

For the kernels that it knows, transformers checks in every forward pass whether positions restart, which reads a number
back from the device. It also gives padded and packed rows a dense mask, which rules out causal kernels. A kernel that
is registered under another name gets ``attention_mask`` unchanged if that is None or has four dimensions. Here it is

- None: causal attention. Padding on the right changes nothing that is counted;
- bool ``[batch, 1, seq, seq]``: True where a token attends to another;
- int32 ``[1, 1, longest, documents + 1]``: the documents' bounds, in the rows of the batch joined end to end. Dimension
  2 holds copies; its size is the longest document, because a number would be compiled in as a constant.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.models.hugging_face import transformers_major
from smp_train.models.traits import causal, same_document

try:
    from torch.nn.attention import varlen
except ImportError:
    varlen = None  # type: ignore[assignment]

_OPTIONS = frozenset(inspect.signature(varlen.varlen_attn).parameters if varlen is not None else ())
_GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _OPTIONS else {}
"""Options of `varlen_attn` for fewer key-value heads than query heads; torch 2.11 needs no option."""
LARGEST_HEAD = 256
"""Largest head size of `varlen_attn`; sizes are multiples of 8."""
NAME = "smp_train"
"""Name of `attend` among transformers' attention functions."""
KNOWN = frozenset(
    {
        "arcee", "cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox",
        "granite", "helium", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi", "phi3",
        "qwen2", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
    }
)  # fmt: skip
"""Model types of transformers in which only causal attention mixes tokens, at most with a sliding window that is passed
to the kernel. Other models have attention sinks, special masks, convolutions or recurrent states."""

logger = logging.getLogger("smp_train.models")


def causal_alone(config: Any) -> str | None:
    """Return None if only causal attention mixes tokens, with or without a window, else the reason against it."""
    if config.model_type not in KNOWN:
        return f"a {config.model_type} is not known to have causal attention alone"
    if getattr(config, "use_bidirectional_attention", None):
        return f"use_bidirectional_attention of this {config.model_type} is set"
    if getattr(config, "attn_logit_softcapping", None):
        return f"attn_logit_softcapping of this {config.model_type} is set, for which sdpa has no kernel"
    return None


class Attention:
    """A model's attention: the arguments of ``forward`` for rows with padding or several documents."""

    def __init__(self, model: Any, device: torch.device, *, half: bool, packed: bool, compiled: bool) -> None:
        """Register `attend` for a model built with sdpa, unless it would be wrong for the model.

        Args:
            model: A causal language model of transformers, on meta or not.
            device: The device that computes.
            half: Whether it computes in bfloat16 or float16.
            packed: Whether rows may hold several documents.
            compiled: Whether the layers are compiled.
        """
        self.model, self.packed, self.compiled = model, packed, compiled
        self.by_bounds = False
        """Whether documents are given by their bounds rather than by a mask."""
        if model.config._attn_implementation != "sdpa":
            return
        reason = causal_alone(model.config)
        if transformers_major() < 5:
            reason = "transformers 5 has an interface for others"
        if reason is not None:
            logger.info("Attention: with transformers' masks, as %s", reason)
        else:
            from transformers import AttentionInterface

            AttentionInterface.register(NAME, attend)
            model.set_attn_implementation(NAME)
            reason = _against_bounds(model.config, device, half=half)
            self.by_bounds = reason is None
        if packed and reason is not None:
            logger.info("Attention: packed rows take a dense mask, so each layer computes twice the scores: %s", reason)

    def inputs(
        self, input_ids: Tensor, position_ids: Tensor | None, documents: tuple[Tensor, int] | None
    ) -> dict[str, Any]:
        """Return further arguments of ``forward`` for the tensors of a `Batch`. Never waits for the device."""
        config: Any = self.model.config
        rows, seq = input_ids.shape
        windowed = self.by_bounds and (getattr(config, "sliding_window", None) or seq) < seq
        if position_ids is None and (windowed or (self.packed and self.compiled)):
            # Sliding windows have a kernel only with bounds, and another kind of mask would compile the layers again.
            position_ids = torch.arange(seq, device=input_ids.device).repeat(rows, 1)
            documents = torch.arange(0, (rows + 1) * seq, seq, dtype=torch.int32, device=input_ids.device), seq
        if position_ids is None:
            return {"attention_mask": None}
        if config._attn_implementation == NAME:
            if documents is None or not self.by_bounds:
                return {"attention_mask": same_document(position_ids), "position_ids": position_ids}
            # torch.compile treats the sizes 0 and 1 as constants.
            bounds = documents[0].expand(1, 1, max(documents[1], 2), -1)
            if self.compiled:
                torch._dynamo.mark_dynamic(bounds, (2, 3))
            return {"attention_mask": bounds, "position_ids": position_ids}
        # transformers derives the mask from positions that restart.
        inputs: dict[str, Any] = {"position_ids": position_ids}
        if documents is not None and config._attn_implementation.startswith("flash") and causal_alone(config) is None:
            # The kernel needs only an upper bound. Rounding it up to a power of two keeps recompilations few.
            bounds, longest = documents[0], 1 << (documents[1] - 1).bit_length()
            if self.compiled:
                torch._dynamo.mark_dynamic(bounds, 0)
            inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            inputs |= {"max_length_q": longest, "max_length_k": longest}
        return inputs


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend causally, with the signature that transformers calls.

    Args:
        module: The attention layer.
        query: ``[batch, heads, seq, head_dim]``.
        key: ``[batch, kv_heads, keys, head_dim]``; with a cache there are more keys than queries.
        value: Like ``key``.
        attention_mask: See the module's docstring.
        dropout: Dropout probability of attention weights.
        scaling: Factor of the scores; by default one over the root of head_dim.
        sliding_window: Tokens that a token attends to, itself included; None for all.
        kwargs: Other arguments that transformers passes to its sdpa kernel.

    Returns:
        ``[batch, seq, heads, head_dim]``, and None.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    keys = key.shape[2]
    if sliding_window is not None and sliding_window >= keys:
        sliding_window = None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        return _attend_within_bounds(query, key, value, attention_mask, scaling, sliding_window), None
    if sliding_window is not None:
        earlier = keys - query.shape[2]
        near = causal(query.shape[2], query.device, earlier=earlier).triu(earlier + 1 - sliding_window)
        attention_mask = near if attention_mask is None else attention_mask & near
    # transformers repeats keys and values if there is a mask, because few kernels take groups of heads with a mask.
    output: Tensor = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )[0]
    return output, None


def _attend_within_bounds(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    rows, _, seq, _ = query.shape
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    ends, longest = bounds[0, 0, 0], bounds.shape[2]
    back = -1 if window is None else window - 1
    output: Tensor = varlen.varlen_attn(  # type: ignore[assignment]
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(back, 0), **_GROUPS
    )
    return output.unflatten(0, (rows, seq))


def _against_bounds(config: Any, device: torch.device, *, half: bool) -> str | None:
    """Return why `varlen_attn` cannot take documents by their bounds, None if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return "attention over documents of several lengths needs a GPU of compute capability 8.0"
    if "window_size" not in _OPTIONS:
        return f"torch {torch.__version__} has no attention over documents of several lengths; 2.11 has"
    if not half:
        return "attention over documents of several lengths needs --bf16 1"
    dropout = max(getattr(config, name, None) or 0 for name in ("attention_dropout", "attn_pdrop"))
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dropout or head > LARGEST_HEAD or head % 8:
        return f"attention over documents of several lengths has no dropout ({dropout}) and no heads of {head}"
    return None
