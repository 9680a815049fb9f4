"""Steps of building a model on SMP: weights, transform, FSDP1, activation checkpointing and offloading, FP8.

Arguments and their values are taken from SMP's own scripts (AWS documentation of SMP v2, "Delayed parameter
initialization", "Fine-tuning", "Activation checkpointing", "Mixed precision training").
"""

from __future__ import annotations

import functools
import importlib
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
from smp_train.checkpoints.pretrained import load_weights
from smp_train.errors import ConfigError, one_line
from smp_train.models import build
from smp_train.models.initialization import initialise

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

SMP_MODELS = ("llama", "mistral", "mixtral", "gpt_neox")
"""Model types of transformers that SMP has its own implementation of."""
OLDEST_FP8_CAPABILITY = (9, 0)
"""Hopper, the first GPUs on which SMP supports FP8 (its documentation, "Mixed precision training")."""


def give_weights(
    model: nn.Module, weights: str | None, *, delayed: bool, seed: int, draws_on: torch.device
) -> bool:  # fmt: skip
    """Fill the whole model in host memory on ranks that need it; return whether this rank does; collective.

    Rank 0 reads pretrained ``weights``, which FSDP broadcasts.
    """
    reads = weights is not None and dist.get_rank() == 0
    real = not delayed or reads
    with distributed.together("loading the weights"):
        if real:
            build.materialise(model, "cpu")
            if weights is None:
                initialise(model, seed, draws_on)
            elif reads:
                with distributed.alone():
                    load_weights(model, weights)
    if weights is not None:
        dist.barrier()
    return real


def transform(library: Any, model: nn.Module, args: Arguments, *, from_rank0: bool, real: bool) -> tuple[Any, type]:
    """Return SMP's own implementation of ``model``, and the class of its layers; collective.

    Raises `ConfigError` if SMP rejects the model.
    """
    options: dict[str, Any] = {"config": None, "load_state_dict_from_rank0": from_rank0}
    if args.moe:
        options["config"] = moe_config(args, reads_weights=from_rank0 and dist.get_rank() == 0)
    if args.context_parallel_degree > 1:
        options["cp_comm_type"] = args.cp_comm_type
    with distributed.together("transforming the model"):
        try:
            with _without_weights() if args.moe and not real else nullcontext():
                model = library.transform(model, **options)
        except (MemoryError, torch.cuda.OutOfMemoryError, ConfigError):
            raise
        except Exception as failure:
            config: Any = model.config
            advice = "; SMP's own implementation is there for Llama, Mistral, Mixtral and GPT-NeoX"
            raise ConfigError(
                f"torch.sagemaker.transform refuses {config.model_type} with {_transforming_flags(args)}: "
                f"{one_line(failure)}{advice * (config.model_type not in SMP_MODELS)}"
            ) from failure
    return model, smp_library.part("tensor_parallel.transformer", "SMP's own implementation").TransformerLayer


def _transforming_flags(args: Arguments) -> str:
    """Return the given flags that select SMP's own implementation."""
    degrees = [name for name in smp_library.DEGREES[:3] if getattr(args, name) > 1]
    switches = [name for name in ("moe", "use_smp_implementation") if getattr(args, name)]
    return " ".join(f"--{name} {int(getattr(args, name))}" for name in degrees + switches)


def moe_config(args: Arguments, *, reads_weights: bool) -> Any:
    """Return the configuration of SMP's mixture of experts from the flags; collective."""
    options: dict[str, Any] = {
        "smp_moe": True,
        "random_seed": smp_library.random_seed(args),
        "moe_load_balancing": args.moe_load_balancing,
        "global_token_shuffle": bool(args.global_token_shuffle),
        "moe_all_to_all_dispatcher": bool(args.moe_all_to_all_dispatcher),
    }
    if reads_weights:
        options["use_cpu_initialization"] = True  # the loaded weights are on the host
    coefficients = {name: getattr(args, name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")}
    return smp_choices.moe_config(smp_library.part("moe.moe_config", "--moe 1").MoEConfig, options, coefficients)


def _without_weights() -> AbstractContextManager[Any]:
    """Return a context that builds modules on meta; experts name a device, which overrides torch's own context."""
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

    Modules of class ``layer`` are FSDP units. ``initialise_module`` fills a module's own parameters (None: SMP fills
    them). It is not needed if this rank's parameters are already allocated (``real``) or come from rank 0
    (``from_rank0``).
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


class Fp8:
    """Transformer Engine's contexts, for one SMP state."""

    def __init__(self, args: Arguments, state: Any, device: torch.device) -> None:
        """Raises `ConfigError` for an older GPU, or without Transformer Engine."""
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_FP8_CAPABILITY:
            raise ConfigError(
                f"--fp8 1 needs a GPU of the Hopper generation (H100) or newer, this is a "
                f"{torch.cuda.get_device_name(device)}; use --bf16 1"
            )
        try:
            self._engine = importlib.import_module("transformer_engine.pytorch")
            recipe = importlib.import_module("transformer_engine.common.recipe")
        except ImportError as failure:
            raise ConfigError(
                f"--fp8 1 with --backend smp computes through Transformer Engine, which cannot be imported: {failure}; "
                "run in SMP's container, or leave --fp8 out"
            ) from failure
        self._state = state
        self._recipe = recipe.DelayedScaling(
            fp8_format=recipe.Format.HYBRID,
            amax_history_len=args.fp8_amax_history_len,
            amax_compute_algo=args.fp8_amax_compute_algo,
        )

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass, whose scales are reduced over all ranks."""
        context: AbstractContextManager[None] = self._engine.fp8_autocast(
            enabled=True, fp8_recipe=self._recipe, fp8_group=self._state.world_process_group
        )
        return context

    @property
    def attention(self) -> type:
        """Transformer Engine's attention module."""
        module: type = importlib.import_module("transformer_engine.pytorch.attention").MultiheadAttention
        return module

    def checkpoint(self) -> Any:
        """Return Transformer Engine's activation checkpointing function, which preserves FP8 scales."""
        return functools.partial(
            self._engine.checkpoint, distribute_saved_activations=False, tp_group=self._state.tp_process_group,
            get_rng_state_tracker=self._state.get_rng_state_tracker, use_reentrant=False,
        )  # fmt: skip


def checkpoint(root: nn.Module, args: Arguments, layer: type, fp8: Fp8 | None) -> None:
    """Apply activation checkpointing to decoder layers.

    It is torch's reentrant implementation, as SMP's offloading and flash attention require. With FP8 it is Transformer
    Engine's, which preserves scales; with FP8 and experts, the experts use torch's non-reentrant implementation.
    """
    share, _ = checkpointing.read(args.activation_checkpointing)
    if not share:
        return
    layers = [module for module in root.modules() if isinstance(module, layer)]
    checkpointed = [layers[index] for index in checkpointing.evenly_spaced(len(layers), share)]
    if fp8 is None:
        _apply(root, checkpointed, reentrant=True)
    elif not args.moe:
        _apply(root, checkpointed, reentrant=False, checkpoint_fn=fp8.checkpoint())
    else:
        experts = smp_library.part("moe.moe_layer", "--moe 1").MoELayer
        if args.moe_fp8_checkpoint_attn:
            _apply(root, _inside(checkpointed, fp8.attention), reentrant=False, checkpoint_fn=fp8.checkpoint())
        if args.moe_fp8_checkpoint_moe:
            _apply(root, _inside(checkpointed, experts), reentrant=False)


def _inside(layers: list[nn.Module], kind: type) -> list[nn.Module]:
    return [module for layer in layers for module in layer.modules() if isinstance(module, kind)]


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
