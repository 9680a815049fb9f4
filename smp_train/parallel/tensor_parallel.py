"""Tensor parallelism with DTensor: every matrix of a layer is split between the ranks of the tensor mesh.

Between the blocks (attention, feed-forward) activations are split along the sequence: norms, residuals and dropout work
on ``seq / degree`` tokens. A block gathers the whole sequence, works on its share of heads or of the inner width, and
scatters its summed output. The embedding and the head are split along the vocabulary.

The model's ``base_model_tp_plan`` in transformers determines which matrices are split by columns and which by rows.
Fused query-key-value matrices of GPT-NeoX are laid out head by head, so a split by columns is a split by heads.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from smp_train.distributed.degrees import check_model
from smp_train.errors import ConfigError
from smp_train.models.traits import split_sizes
from smp_train.parallel import expert_parallel, local_parameters
from smp_train.parallel.sequence import SEQUENCE, gather_whole, scatter_whole, separate_dropout, wait_for_output

STYLES = frozenset({"colwise", "rowwise", "moe_tp_experts", "replicated_with_grad_allreduce"})
"""The implemented styles of a tensor-parallel plan."""


def check(config: Any, degree: int, seq_len: int) -> None:
    """Raise `ConfigError` for a model that cannot be split over ``degree`` ranks, ``seq_len`` tokens on each."""
    if degree == 1:
        return
    if not getattr(config, "base_model_tp_plan", None):
        raise ConfigError(
            f"--tensor_parallel_degree {degree}: transformers has no plan for splitting a {config.model_type}; use "
            "--hybrid_shard_degree instead"
        )
    if getattr(config, "router_jitter_noise", 0):
        raise ConfigError(
            f"--tensor_parallel_degree {degree}: router_jitter_noise {config.router_jitter_noise} of this "
            f"{config.model_type} would differ between the ranks that share a token; set it to 0 in config.json"
        )
    check_model(split_sizes(config), seq_len=seq_len, tensor=degree)


def apply(model: Any, layers: list[tuple[str, nn.Module]], mesh: DeviceMesh) -> None:
    """Split a Hugging Face causal LM on the meta device, in place, over the one-dimensional tensor mesh.

    ``layers`` are its decoder layers as (qualified name, module). Raises `ConfigError` if the model's plan has an
    unknown style, or does not cover a parameter.
    """
    try:
        _apply(model, layers, mesh)
    except UnknownSplit as cause:
        name, problem = cause.args
        raise ConfigError(
            f"--tensor_parallel_degree {mesh.size()}: {name} of this {model.config.model_type} {problem}; use "
            "--hybrid_shard_degree instead"
        ) from cause


class UnknownSplit(Exception):
    """The name of a module or parameter that cannot be split, and the reason."""


def _apply(model: Any, layers: list[tuple[str, nn.Module]], mesh: DeviceMesh) -> None:
    ties = _tied_names(model)
    base = model.base_model
    plan: dict[str, str] = model.config.base_model_tp_plan
    inner = [name.removeprefix(f"{model.base_model_prefix}.") for name, _ in layers]
    for name, (_, layer) in zip(inner, layers, strict=True):
        _split_layer(layer, name, plan, mesh)
    layers[0][1].register_forward_pre_hook(scatter_whole(mesh), with_kwargs=True)
    separate_dropout([layer for _, layer in layers], mesh)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    holds_layers = inner[0].partition(".")[0]
    for name, child in base.named_children():
        if child is not embedding and name != holds_layers and list(child.parameters()):
            parallelize_module(child, mesh, _by_tokens(child, name))
    parallelize_module(head, mesh, ColwiseParallel(input_layouts=Shard(SEQUENCE), output_layouts=Replicate()))
    for first, tied_names in ties:
        for name in tied_names:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, model.get_parameter(first))
    stray = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if stray:
        raise UnknownSplit(stray[0], NO_RULE)


NO_RULE = "is reached by no rule for splitting it"


def _split_layer(layer: nn.Module, name: str, plan: dict[str, str], mesh: DeviceMesh) -> None:
    """Split one decoder layer by ``plan``, whose patterns are relative to the base model."""
    styles: dict[str, ParallelStyle] = {}
    mixtures: dict[str, nn.Module] = {}
    for child_name, child in layer.named_modules():
        style = _style_of(f"{name}.{child_name}", plan)
        if style is not None and style not in STYLES:
            raise UnknownSplit(child_name, f"is split as {style} in transformers' plan, which is not available")
        if style == "colwise":
            styles[child_name] = ColwiseParallel()
            _divides(child, child_name, "out_features", mesh.size())
        elif style == "rowwise":
            styles[child_name] = RowwiseParallel(output_layouts=Shard(SEQUENCE))
            _divides(child, child_name, "in_features", mesh.size())
        elif style == "replicated_with_grad_allreduce":
            _repeat(child, child_name, mesh)
        elif style == "moe_tp_experts":
            mixtures[child_name.rpartition(".")[0]] = child
    blocks = {child_name.rpartition(".")[0] for child_name in styles}
    for moe, stacked in mixtures.items():
        try:
            # Expert parallelism has already distributed the experts.
            distributed = any(isinstance(parameter, DTensor) for parameter in stacked.parameters())
            split = expert_parallel.repeat_router if distributed else expert_parallel.distribute_experts
            split(layer.get_submodule(moe), stacked, mesh)
        except ValueError as cause:
            raise UnknownSplit(moe, str(cause)) from cause
    for block in blocks:
        layer.get_submodule(block).register_forward_pre_hook(gather_whole(mesh), with_kwargs=True)
        layer.get_submodule(block).register_forward_hook(wait_for_output)
    for child_name, child in layer.named_children():
        if child_name not in blocks | mixtures.keys() and list(child.parameters()):
            styles[child_name] = _by_tokens(child, child_name)
    parallelize_module(layer, mesh, styles)


def _style_of(name: str, plan: dict[str, str]) -> str | None:
    """Return the style of a module; a star in a plan's pattern stands for one number or name."""
    parts = name.split(".")
    for pattern, style in plan.items():
        patterns = pattern.split(".")
        if len(patterns) == len(parts) and all(w in ("*", p) for w, p in zip(patterns, parts, strict=True)):
            return style
    return None


def _divides(module: Any, name: str, dimension: str, degree: int) -> None:
    size = getattr(module, dimension, None)
    if size is None:
        raise UnknownSplit(name, f"is a {type(module).__name__}, which is not split")
    if size % degree:
        raise UnknownSplit(name, f"has {size} {dimension.partition('_')[0]}puts, which {degree} does not divide")


def _by_tokens(module: nn.Module, name: str) -> ParallelStyle:
    """Return the style of a norm: each rank has all weights, and normalises its part of the sequence."""
    for key, parameter in module.named_parameters():
        if "." in key or parameter.ndim > 1:
            raise UnknownSplit(f"{name}.{key}", NO_RULE)
    return SequenceParallel(use_local_output=True)


def _repeat(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Replicate a norm inside a block on every rank; each rank computes only its heads' part of the gradient."""
    _by_tokens(module, name)
    local_parameters.distribute(module, mesh, Replicate())
    local_parameters.compute_on_local(module, [Partial()])


def _tied_names(model: nn.Module) -> list[tuple[str, list[str]]]:
    """Return the first name and the further names of each parameter with several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [(first, further) for first, *further in names.values() if further]
