"""Tensor parallelism of Llama-like models: column and row parallel products over plain collectives.

What comes out has other parameter names than transformers' model, as SMP's has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests import standin

from ..state_handler import state

SUPPORTED = ("llama", "mistral")
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")


class _Copy(torch.autograd.Function):
    """The same input on every tensor rank; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=state.group("tensor"))
        return gradient


class _Sum(torch.autograd.Function):
    """Partial results added up over the tensor ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.contiguous().clone()
        dist.all_reduce(value, group=state.group("tensor"))
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class ColumnParallel(nn.Module):
    """A part of the rows of a weight, ``[out / degree, in]``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(_Copy.apply(value), self.weight)


class RowParallel(nn.Module):
    """A part of the columns of a weight, ``[out, in / degree]``."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, value: Tensor) -> Tensor:
        return _Sum.apply(F.linear(value, self.weight))


class TransformerLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


TETransformerLayer = TransformerLayer


class TransformerLMHead(nn.Module):
    """The whole model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lm = model
        self.config: Any = model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> dict:
        standin.record("forward", shape=tuple(input_ids.shape), labels=labels is not None)
        logits = self.lm(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return found

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm.lm_head.weight = self.lm.model.embed_tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ColumnParallel | RowParallel):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1:  # a norm, which transformers 4 leaves as it was constructed
                    nn.init.ones_(parameter)
            self.lm._init_weights(module)


def transform(
    model: nn.Module,
    device: Any = None,
    dtype: Any = None,
    config: Any = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: Any = None,
) -> nn.Module:
    """Return the tensor-parallel model; see the contract, section 2."""
    if not state.ready:
        raise RuntimeError("torch.sagemaker.init has not been called")
    if cp_comm_type is not None and standin.version < (2, 6):
        raise TypeError("transform() got an unexpected keyword argument 'cp_comm_type'")
    if cp_comm_type not in (None, "p2p", "all_gather"):
        raise ValueError(f"cp_comm_type {cp_comm_type!r}")
    kind: str = model.config.model_type
    if kind not in SUPPORTED:
        raise NotImplementedError(f"transform does not support {kind}")
    if config is not None and type(config).__name__ != "MoEConfig":
        raise TypeError("config must be a MoEConfig")
    meta = any(p.is_meta for p in model.parameters())
    standin.record(
        "transform", model=kind, meta=meta, load_state_dict_from_rank0=load_state_dict_from_rank0, dtype=dtype,
        device=device,
    )  # fmt: skip
    if load_state_dict_from_rank0:
        if state.rank == 0 and meta:
            raise RuntimeError("load_state_dict_from_rank0 needs real weights on rank 0")
        _share_with_first_tensor_group(model)
    elif not meta:
        raise RuntimeError("this stand-in makes new weights on the meta device only")
    _split(model)
    return TransformerLMHead(model)


def _share_with_first_tensor_group(model: nn.Module) -> None:
    """Send rank 0's weights to the ranks that shard them with it; the others' stay on meta."""
    if state.rank >= state.tp_size:
        state.group("tensor")
        return
    group = state.group("tensor")
    for child in model.modules():
        for name, param in child._parameters.items():
            if param is not None:
                value = torch.empty(param.shape, dtype=param.dtype) if param.is_meta else param.data
                dist.broadcast(value, 0, group=group)
                child._parameters[name] = nn.Parameter(value)
    if model.config.tie_word_embeddings:
        model.tie_weights()  # type: ignore[operator]


def _split(model: Any) -> None:
    state.split_parameters = set()
    for index, layer in enumerate(model.model.layers):
        for path, child in list(layer.named_modules()):
            name = path.rpartition(".")[2]
            if name in COLUMN + ROW:
                weight, dim = child.weight, 0 if name in COLUMN else 1
                if weight.shape[dim] % state.tp_size:
                    raise ValueError(f"{path} does not divide by tensor_parallel_degree {state.tp_size}")
                part = weight.detach().chunk(state.tp_size, dim)[state.tp_rank].clone()
                new = (ColumnParallel if name in COLUMN else RowParallel)(part)
                parent = layer.get_submodule(path.rpartition(".")[0])
                setattr(parent, name, new)
                state.split_parameters.add(f"layers.{index}.inner.{path}.weight")
        attention = layer.self_attn
        for heads in ("num_heads", "num_key_value_heads"):  # transformers 4
            if hasattr(attention, heads):
                setattr(attention, heads, getattr(attention, heads) // state.tp_size)
        if hasattr(attention, "hidden_size") and hasattr(attention, "num_heads"):
            attention.hidden_size = attention.hidden_size // state.tp_size
        model.model.layers[index] = TransformerLayer(layer)
