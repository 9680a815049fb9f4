"""Steps of building a model on SMP: weights, transform, FSDP1, activation checkpointing and offloading.

Arguments and their values are those of SMP's own scripts (AWS documentation of SMP v2, "Delayed parameter
initialization", "Fine-tuning", "Activation checkpointing").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from smp_train import distributed, losses
from smp_train.arguments import checkpointing
from smp_train.backends import smp_choices, smp_library
from smp_train.backends.smp_fp8 import Fp8
from smp_train.checkpoints.pretrained import load_weights
from smp_train.errors import ConfigError, one_line
from smp_train.models import build
from smp_train.models.initialization import initialise
from smp_train.parallel.layer_selection import chosen

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

OWN = ("llama", "mistral", "mixtral", "gpt_neox")
"""Model types of transformers that SMP has its own implementation of."""


def give_weights(model: nn.Module, weights: str | None, *, delayed: bool, seed: int) -> bool:
    """Fill the model on the host on ranks that need it whole; return whether this rank does; collective.

    Rank 0 reads pretrained ``weights``, which FSDP broadcasts.
    """
    reads = weights is not None and dist.get_rank() == 0
    real = not delayed or reads
    with distributed.together("loading the weights"):
        if real:
            build.materialise(model, "cpu")
            if weights is None:
                initialise(model, seed)
            elif reads:
                with distributed.alone():
                    load_weights(model, weights)
    if weights is not None:
        dist.barrier()
    return real


def transform(library: Any, model: nn.Module, args: Arguments, *, from_rank0: bool, real: bool) -> tuple[Any, type]:
    """Return SMP's own implementation of ``model``, and the class of its layers; collective.

    Raises `ConfigError` where SMP rejects the model, or where this release does not have a requested feature.
    """
    options: dict[str, Any] = {"config": None, "load_state_dict_from_rank0": from_rank0}
    if args.moe:
        options["config"] = smp_library.moe_config(args, reads_weights=from_rank0 and dist.get_rank() == 0)
    with distributed.together("transforming the model"):
        if args.context_parallel_degree > 1:
            options |= smp_library.context_options(library, args)
        around = _without_weights() if args.moe and not real else nullcontext()
        try:
            with around:
                model = library.transform(model, **options)
        except (MemoryError, torch.cuda.OutOfMemoryError):
            raise
        except Exception as failure:
            config: Any = model.config
            kind = config.model_type
            advice = "; SMP's own implementation is there for Llama, Mistral, Mixtral and GPT-NeoX" * (kind not in OWN)
            raise ConfigError(
                f"torch.sagemaker.transform refuses {kind} with {_asked_by(args)}: {one_line(failure)}{advice}"
            ) from failure
    module = smp_library.part("tensor_parallel.transformer", "SMP's own implementation")
    layer = getattr(module, "TransformerLayer", None) or module.TETransformerLayer
    return model, layer


def _asked_by(args: Arguments) -> str:
    """Return the given flags that select SMP's own implementation."""
    degrees = [f"{kind}_parallel_degree" for kind in ("tensor", "context", "expert")]
    given = [f"--{name} {getattr(args, name)}" for name in degrees if getattr(args, name) > 1]
    given += [f"--{name} 1" for name in ("moe", "use_smp_implementation") if getattr(args, name)]
    return " ".join(given)


def _without_weights() -> AbstractContextManager[Any]:
    """Return a context that builds modules on meta; experts name a device, which overrides that of torch's context."""
    try:
        from accelerate import init_empty_weights
    except ImportError as failure:
        raise ConfigError(
            "--moe 1 with --delayed_param 1 needs accelerate's init_empty_weights; pip install accelerate"
        ) from failure
    context: AbstractContextManager[Any] = init_empty_weights()
    return context


def wrap(
    model: Any, args: Arguments, *, layer: type, initialise_module: Callable[[nn.Module], None] | None,
    from_rank0: bool, real: bool, device: torch.device,
) -> Any:  # fmt: skip
    """Wrap the model, in float32, in FSDP1 with the arguments of SMP's scripts; SMP supplies the process groups.

    Modules of class ``layer`` are FSDP units. ``initialise_module`` fills a module's own parameters (None: SMP does),
    unless this rank's are allocated already (``real``) or rank 0's are broadcast (``from_rank0``).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def wrapped(reduce_dtype: torch.dtype) -> Any:
        initialiser: Any = None
        if not real:
            maker = smp_library.part("delayed_param", "--delayed_param 1").DelayedParamIniter
            initialiser = maker(model, initialise_module) if initialise_module is not None else maker(model)
        precision = None
        if args.computes_in_bf16(gpu=True):
            precision = fsdp.MixedPrecision(torch.bfloat16, reduce_dtype=reduce_dtype, buffer_dtype=torch.float32)
        complete = nullcontext()
        if initialiser is not None and not from_rank0:
            complete = initialiser.validate_params_and_buffers_inited()
        with complete:
            wrapper: Any = fsdp.FullyShardedDataParallel  # SMP's version also takes post_param_init_fn
            return wrapper(
                model, auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer}),
                mixed_precision=precision, sharding_strategy=fsdp.ShardingStrategy[args.sharding_strategy.upper()],
                backward_prefetch=fsdp.BackwardPrefetch[args.backward_fetch_policy.upper()],
                forward_prefetch=args.forward_prefetch, limit_all_gathers=args.limit_all_gathers,
                device_id=torch.cuda.current_device() if device.type == "cuda" else None, use_orig_params=True,
                param_init_fn=None if initialiser is None else initialiser.get_param_init_fn(),
                post_param_init_fn=None if initialiser is None else initialiser.get_post_param_init_fn(),
                sync_module_states=from_rank0,
            )  # fmt: skip

    root = smp_choices.wrap(wrapped) if args.computes_in_bf16(gpu=True) else wrapped(torch.float32)
    smp_choices.move_rotary_caches(root, device)
    return root


def checkpoint(root: nn.Module, args: Arguments, layer: type, fp8: Fp8 | None) -> None:
    """Apply activation checkpointing to decoder layers.

    Reentrant, as SMP's offloading and flash attention require. With FP8, Transformer Engine's, which preserves scales;
    with FP8 and experts, that for attention and torch's non-reentrant for the experts.
    """
    share, _ = checkpointing.read(args.activation_checkpointing)
    if not share:
        return
    layers = [module for module in root.modules() if isinstance(module, layer)]
    wanted = [layers[index] for index in chosen(len(layers), share)]
    if fp8 is None:
        _apply(root, wanted, reentrant=True)
    elif not args.moe:
        _apply(root, wanted, reentrant=False, checkpoint_fn=fp8.checkpoint())
    else:
        experts = smp_library.part("moe.moe_layer", "--moe 1").MoELayer
        if args.moe_fp8_checkpoint_attn:
            _apply(root, _inside(wanted, fp8.attention), reentrant=False, checkpoint_fn=fp8.checkpoint())
        if args.moe_fp8_checkpoint_moe:
            _apply(root, _inside(wanted, experts), reentrant=False)


def _inside(layers: list[nn.Module], kind: type) -> list[nn.Module]:
    return [module for each in layers for module in each.modules() if isinstance(module, kind)]


def _apply(root: nn.Module, modules: list[nn.Module], *, reentrant: bool, checkpoint_fn: Any = None) -> None:
    ids = {id(module) for module in modules}
    kind = wrappers.CheckpointImpl.REENTRANT if reentrant else wrappers.CheckpointImpl.NO_REENTRANT
    options = {} if checkpoint_fn is None else {"checkpoint_fn": checkpoint_fn}
    wrappers.apply_activation_checkpointing(
        root,
        checkpoint_wrapper_fn=functools.partial(wrappers.checkpoint_wrapper, checkpoint_impl=kind, **options),
        check_fn=lambda module: id(module) in ids,
    )


def chunk_loss(model: Any) -> None:
    """Make the model's forward return the summed loss, without the full logits, when targets are given."""
    stock = model.forward

    def forward(*inputs: Any, targets: Tensor | None = None, **options: Any) -> Any:
        if targets is None:
            return stock(*inputs, **options)
        hidden = model.base_model(*inputs, use_cache=False, **options).last_hidden_state
        head = model.get_output_embeddings()
        return losses.linear_cross_entropy_sum(hidden, head.weight, targets, bias=head.bias)

    model.forward = forward


class ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass; scales the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        """Return the value."""
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times the factor."""
        return gradient * ctx.factor, None
