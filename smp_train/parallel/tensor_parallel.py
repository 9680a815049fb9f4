"""Tensor parallelism with DTensor: every matrix of a layer is split between the ranks of the tensor mesh.

Between the blocks (attention, feed-forward) activations are split along the sequence: norms, residuals and dropout work
on ``seq / degree`` tokens. A block gathers the whole sequence, works on its share of heads or of the inner width, and
scatters its summed output. The embedding and the head are split along the vocabulary.

Which matrices are split by columns and which by rows is what the model's own ``base_model_tp_plan`` says. Fused
query-key-value matrices of GPT-NeoX are laid out head by head, so that a split by columns is a split by heads.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from smp_train.errors import ConfigError
from smp_train.parallel.mesh import divisors

SEQUENCE = 1
"""The dimension of hidden states ``[batch, seq, width]`` that is split between blocks."""


def check(config: Any, degree: int, seq_len: int) -> None:
    """Raise `ConfigError`, naming the degrees that would work, where ``degree`` does not divide the model.

    Key-value heads are not replicated: fewer of them than ranks are refused.
    """
    if degree == 1:
        return
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"--tensor_parallel_degree {degree}: transformers has no plan for splitting a {config.model_type}; use "
            "--hybrid_shard_degree instead"
        )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "tokens of vocabulary": config.vocab_size,
        "tokens of context": seq_len,
    }
    experts = getattr(config, "num_local_experts", None)
    if experts:
        sizes["experts"] = experts
    else:
        sizes["columns of the feed-forward layer"] = config.intermediate_size
    fitting = [d for d in divisors(sizes["attention heads"]) if all(size % d == 0 for size in sizes.values())]
    for name, size in sizes.items():
        if size % degree:
            raise ConfigError(
                f"--tensor_parallel_degree {degree} does not divide the {size} {name} of this model; "
                f"use one of {fitting}"
            )


def apply(model: Any, layers: list[tuple[str, nn.Module]], mesh: DeviceMesh) -> None:
    """Split ``model``, its parameters on the meta device, over the one-dimensional ``mesh``, in place.

    Args:
        model: A Hugging Face causal LM whose configuration carries a ``base_model_tp_plan``.
        layers: Its decoder layers, as (qualified name, module).
        mesh: The tensor mesh.

    Raises:
        ConfigError: A parameter of the model is reached by no rule: the model computes in a way not known here.
    """
    ties = _tied_names(model)
    base = model.base_model
    plan: dict[str, str] = model.config.base_model_tp_plan
    inner = [name.removeprefix(f"{model.base_model_prefix}.") for name, _ in layers]
    for name, (_, layer) in zip(inner, layers, strict=True):
        _split_layer(layer, name, plan, mesh)
    layers[0][1].register_forward_pre_hook(_scatter_sequence(mesh), with_kwargs=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    holds_layers = inner[0].partition(".")[0]
    for name, child in base.named_children():
        if child is not embedding and name != holds_layers and list(child.parameters()):
            parallelize_module(child, mesh, SequenceParallel(use_local_output=True))
    parallelize_module(head, mesh, ColwiseParallel(input_layouts=Shard(SEQUENCE), output_layouts=Replicate()))
    for first, others in ties:
        for other in others:
            owner, _, leaf = other.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, model.get_parameter(first))
    stray = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if stray:
        raise ConfigError(
            f"--tensor_parallel_degree: {stray[0]} of this {model.config.model_type} is reached by no rule; "
            "use --hybrid_shard_degree instead"
        )


def _split_layer(layer: nn.Module, name: str, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Split one decoder layer by ``plan``, whose patterns are relative to the base model."""
    styles: dict[str, ParallelStyle] = {}
    experts: str | None = None
    for child_name, _ in layer.named_modules():
        style = _style_of(f"{name}.{child_name}", plan)
        if style == "colwise":
            styles[child_name] = ColwiseParallel()
        elif style == "rowwise":
            styles[child_name] = RowwiseParallel(output_layouts=Shard(SEQUENCE))
        elif style == "moe_tp_experts":
            experts = child_name
    blocks = {child_name.rpartition(".")[0] for child_name in styles}
    for block in blocks:
        layer.get_submodule(block).register_forward_pre_hook(_gather_sequence(mesh), with_kwargs=True)
    if experts is not None:
        moe = experts.rpartition(".")[0]
        _deal_experts(layer.get_submodule(moe), layer.get_submodule(experts), mesh)
        blocks.add(moe)
    for child_name, child in layer.named_children():
        if child_name not in blocks and list(child.parameters()):
            styles[child_name] = SequenceParallel(use_local_output=True)
    parallelize_module(layer, mesh, styles)


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _tied_names(model: nn.Module) -> list[tuple[str, list[str]]]:
    """Return, for each parameter that has several names, the first and the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(first, others) for first, *others in names.values() if others]


Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def _on_hidden_states(change: Callable[[Tensor], Tensor]) -> Hook:
    """Make a hook that changes a module's hidden states, which some models pass by position and some by name."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def _scatter_sequence(mesh: DeviceMesh) -> Hook:
    """Keep this rank's part of the sequence; the embedding's output is whole, for masks and positions to be right."""

    def scatter(hidden: Tensor) -> Tensor:
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(SEQUENCE)]).to_local()

    return _on_hidden_states(scatter)


def _gather_sequence(mesh: DeviceMesh) -> Hook:
    """Give a block the whole sequence, as a DTensor: its projections' gradients are added up and scattered once."""

    def gather(hidden: Tensor) -> Tensor:
        part = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE)], run_check=False)
        return part.redistribute(placements=[Replicate()])

    return _on_hidden_states(gather)


def gather_hidden(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence of hidden states split along it, as a plain tensor for work that is split over ranks.

    The gradient that comes back is taken as one summand of the true one: it is added up and scattered.
    """
    part = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE)], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _deal_experts(moe: nn.Module, experts: Any, mesh: DeviceMesh) -> None:
    """Deal a mixture's experts out over the ranks: each rank routes every token, and computes those of its experts.

    Splitting whole experts rather than each expert's matrices keeps the fused gate-and-up matrix in one piece.
    """
    degree, rank = mesh.size(), mesh.get_local_rank()
    share = experts.num_experts // degree
    first = rank * share
    gate = next(child for child in moe.children() if child is not experts)

    def split(module: nn.Module, placement: Replicate | Shard) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))

    split(experts, Shard(0))
    split(gate, Replicate())
    experts.num_experts = share
    # transformers' own mark: its grouped products then zero what they leave unset for experts of other ranks.
    experts._is_expert_parallel = True
    # The router's weight is whole on every rank, but each rank sees the gradient of its own experts only.
    _compute_on_local_parameters(gate, [Partial()])
    _compute_on_local_parameters(experts, None)

    def keep_own(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = args
        own = (index >= first) & (index < first + share)
        # `share` is one past the last expert: the number that transformers passes over.
        return hidden, torch.where(own, index - first, share), torch.where(own, weights, 0.0)

    experts.register_forward_pre_hook(keep_own)

    def gather(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _on_hidden_states(lambda hidden: gather_hidden(hidden, mesh))(module, args, kwargs)

    def scatter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        partial = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Shard(SEQUENCE)]).to_local()

    moe.register_forward_pre_hook(gather, with_kwargs=True)
    moe.register_forward_hook(scatter)


def _compute_on_local_parameters(module: nn.Module, grad_placements: list[Any] | None) -> None:
    """Let a module's own forward see plain tensors where its parameters are DTensors."""
    forward = module.forward

    def with_local(*args: Any, **kwargs: Any) -> Any:
        stored = module._parameters
        module._parameters = {
            key: value.to_local(grad_placements=grad_placements) if isinstance(value, DTensor) else value
            for key, value in stored.items()
        }
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters = stored

    module.forward = with_local
