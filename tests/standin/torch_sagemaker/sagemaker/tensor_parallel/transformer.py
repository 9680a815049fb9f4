"""SMP's own implementation of some models: tensor, expert and context parallelism by plain collectives.

What comes out has other parameter names than transformers' model, as SMP's has.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests import standin

from ..context_parallel.attention import over_context, positions
from ..moe.moe_layer import MoELayer, of_block
from ..state_handler import state
from .collectives import Copy, Sum, average_gradients, gathered

SUPPORTED = ("gpt_neox", "llama", "mistral", "mixtral")
# GPT-NeoX's queries, keys and values are one product, head by head: its parts are whole heads.
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "query_key_value", "dense_h_to_4h")
ROW = ("o_proj", "down_proj", "dense", "dense_4h_to_h")
BLOCKS = ("mlp", "block_sparse_moe")


class _Parallel(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        for name, value in (("weight", weight), ("bias", bias)):
            self._parameters[name] = None if value is None else nn.Parameter(value)  # as in MoELayer


class ColumnParallel(_Parallel):
    """A part of the rows of a weight, ``[out / degree, in]``, and of its bias."""

    def forward(self, value: Tensor) -> Tensor:
        return F.linear(Copy.apply(value, "tensor"), self.weight, self.bias)


class RowParallel(_Parallel):
    """A part of the columns of a weight, ``[out, in / degree]``, and the whole bias."""

    def forward(self, value: Tensor) -> Tensor:
        out = Sum.apply(F.linear(value, self.weight), "tensor")
        return out if self.bias is None else out + self.bias


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
        with over_context() if state.cp_size > 1 else nullcontext():
            return self.inner(*args, **kwargs)


class TransformerLMHead(nn.Module):
    """The whole model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.lm = model
        self.config: Any = model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> dict:
        standin.record("forward", shape=tuple(input_ids.shape), labels=labels is not None, fp8=standin.fp8_group)
        assert attention_mask is None, "the causal mask is implied, and any other undocumented"
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if state.cp_size > 1:
            length = input_ids.shape[1]
            inputs["position_ids"] = positions(length).to(input_ids.device).unsqueeze(0)
            # Any mask, so that transformers derives none from the positions: `over_context` has its own.
            inputs["attention_mask"] = torch.zeros(len(input_ids), 1, length, length)
        logits = self.lm(**inputs, use_cache=False).logits
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return found

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm.get_output_embeddings().weight = self.lm.get_input_embeddings().weight

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a module's own parameters: what ranks split by ``random_seed``, the rest by torch's seed."""
        std = self.config.initializer_range
        if isinstance(module, ColumnParallel | RowParallel | MoELayer):
            for name, parameter in module.named_parameters(recurse=False):
                if name == "bias":
                    nn.init.zeros_(parameter)
                elif name == "router":
                    nn.init.normal_(parameter, std=std)
                else:
                    generator = state.expert_generator if isinstance(module, MoELayer) else state.generator
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        else:
            for parameter in module.parameters(recurse=False):
                if parameter.ndim == 1:  # a norm, which transformers 4 leaves as it was constructed
                    nn.init.ones_(parameter)
            self.lm._init_weights(module)


def transform(
    model: nn.Module, device: Any = None, dtype: Any = None, config: Any = None,
    load_state_dict_from_rank0: bool = False, cp_comm_type: Any = None,
) -> nn.Module:  # fmt: skip
    """Return SMP's own implementation of the model; see the contract, section 2."""
    if not state.ready:
        raise RuntimeError("torch.sagemaker.init has not been called")
    kind: str = model.config.model_type
    if kind not in SUPPORTED:
        raise NotImplementedError(f"transform does not support {kind}")
    if (kind == "mixtral") != (config is not None):
        raise ValueError("Mixtral, and it alone, is transformed with a MoEConfig here")
    meta = any(p.is_meta for p in model.parameters())
    standin.record(
        "transform", model=kind, meta=meta, load_state_dict_from_rank0=load_state_dict_from_rank0, dtype=dtype,
        device=device, config=config, cp_comm_type=cp_comm_type,
        empty=nn.Module.register_parameter.__name__ == "register_empty_parameter",
    )  # fmt: skip
    if load_state_dict_from_rank0:
        if state.rank == 0 and meta:
            raise RuntimeError("load_state_dict_from_rank0 needs real weights on rank 0")
        _share_with_first_ranks(model)
    state.split_parameters = {}
    if state.tp_size > 1:
        _split(model)
    if config is not None:
        from transformer_engine.pytorch.attention import MultiheadAttention

        for layer in model.base_model.layers:
            layer.self_attn = MultiheadAttention(layer.self_attn)
            name = next(each for each in BLOCKS if hasattr(layer, each))
            setattr(layer, name, of_block(getattr(layer, name), model.config))
            if state.ep_size > 1:
                state.split_parameters |= {f"{name}.inwards": 0, f"{name}.outwards": 0}
    if state.ep_size > 1:
        for module in model.modules():
            if module._parameters and not isinstance(module, MoELayer):
                module.register_forward_pre_hook(partial(average_gradients, tuple(module._parameters)))
    layers: Any = model.base_model.layers
    for index, layer in enumerate(layers):
        layers[index] = TransformerLayer(layer)
    made = TransformerLMHead(model)
    if not meta and not load_state_dict_from_rank0:
        for module in made.modules():
            made._init_weights(module)  # those that the model had are not kept
    return made


def _share_with_first_ranks(model: nn.Module) -> None:
    """Send rank 0's weights to the ranks that hold what makes up a layer with it; the others' stay on meta."""
    if state.rank >= state.inner or state.inner == 1:
        return
    group = state.group("tensor" if state.tp_size > 1 else "expert")
    for child in model.modules():
        for name, param in child._parameters.items():
            if param is not None:
                value = torch.empty(param.shape, dtype=param.dtype) if param.is_meta else param.data
                dist.broadcast(value, 0, group=group)
                # Not by the module's own way, which init_empty_weights turns to meta.
                child._parameters[name] = nn.Parameter(value)
    if model.config.tie_word_embeddings:
        model.tie_weights()  # type: ignore[operator]


def _split(model: Any) -> None:
    for layer in model.base_model.layers:
        for path, child in list(layer.named_modules()):
            name = path.rpartition(".")[2]
            if name in COLUMN + ROW:
                weight, dim = child.weight, 0 if name in COLUMN else 1
                if weight.shape[dim] % state.tp_size:
                    raise ValueError(f"{path} does not divide by tensor_parallel_degree {state.tp_size}")
                part = weight.detach().chunk(state.tp_size, dim)[state.tp_rank].clone()
                bias = None if child.bias is None else child.bias.detach().clone()
                if bias is not None and dim == 0:
                    bias = bias.chunk(state.tp_size)[state.tp_rank].clone()
                    state.split_parameters[f".{path}.bias"] = 0
                new = (ColumnParallel if name in COLUMN else RowParallel)(part, bias)
                setattr(layer.get_submodule(path.rpartition(".")[0]), name, new)
                state.split_parameters[f".{path}.weight"] = dim
        attention = layer.attention if hasattr(layer, "attention") else layer.self_attn
        for size in ("num_heads", "num_key_value_heads", "num_attention_heads", "hidden_size"):  # transformers 4
            if hasattr(attention, size):
                setattr(attention, size, getattr(attention, size) // state.tp_size)


def translated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return SMP's parameters, of which each tensor or expert rank holds its part, as Hugging Face has them."""
    found = {}
    for name, value in weights.items():
        dim = state.split_dim(name)
        if dim is not None:
            value = gathered(value, "tensor" if state.tp_size > 1 else "expert", dim)
        found |= _experts(re.sub(r"^lm\.|\.inner(?=\.)", "", name), value)
    return found


def _experts(name: str, value: Tensor) -> dict[str, Tensor]:
    layer, _, last = name.rpartition(".")
    if last == "router":
        return {f"{layer}.gate.weight": value}
    if last not in ("inwards", "outwards"):
        return {name: value}
    if layer.endswith("mlp"):  # transformers 5
        return {f"{layer}.experts.{'gate_up_proj' if last == 'inwards' else 'down_proj'}": value}
    named = {}
    for index, each in enumerate(value):
        parts = zip(("w1", "w3"), each.chunk(2), strict=True) if last == "inwards" else [("w2", each)]
        named |= {f"{layer}.experts.{index}.{part}.weight": tensor for part, tensor in parts}
    return named
