"""The backend for SMP v2: FSDP1 under ``torch.sagemaker``, in the order its documentation prescribes.

Runs on torch 2.4.1 to 2.5.1 with transformers 4.44.2, the last containers of SMP, as on today's versions: nothing that
those lack is imported here.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_train import losses, runtime
from smp_train.arguments import checkpointing
from smp_train.backends import smp_library, smp_state
from smp_train.backends.base import Backend, Topology
from smp_train.errors import ConfigError
from smp_train.models import build
from smp_train.models.heads import can_chunk
from smp_train.models.hf_weights import load_pretrained
from smp_train.models.initialization import canonical_name, initialise, module_initialiser
from smp_train.models.packing import packed_inputs

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.models.resolve import ModelSpec
    from smp_train.runtime import Runtime

logger = logging.getLogger("smp_train.smp")

WITHOUT = {
    "context_parallel_degree": "context parallelism through SMP",
    "expert_parallel_degree": "expert parallelism through SMP",
}
"""Degrees of SMP that this backend does not set above 1."""


class SmpBackend(Backend):
    """SMP's hybrid sharding, tensor parallelism and activation offloading."""

    name = "smp"

    def __init__(self, args: Arguments, ranks: Runtime, device: torch.device, library: Any) -> None:
        """Take over SMP, started by `smp_library.start`. Raises `ConfigError` for what this backend cannot do."""
        refuse(args)
        self.args, self.device, self.library = args, device, library
        self.transforms = args.tensor_parallel_degree > 1 or args.use_smp_implementation
        self.state = library.state
        rank, world = ranks.rank, ranks.world_size
        tensor = args.tensor_parallel_degree
        self.shard = self._shard_degree(world // tensor, ranks.local_world_size)
        self.topology = Topology(
            device=device,
            dp_rank=rank // tensor,
            dp_size=world // tensor,
            tp_rank=rank % tensor,
            tp_size=tensor,
            cp_rank=0,
            cp_size=1,
            mesh={"replicate": world // tensor // self.shard, "shard": self.shard, "context": 1, "tensor": tensor},
        )
        self._root: Any = None
        self._chunked = False
        self._matrices: set[str] = set()
        self._tree: smp_state.Tree | None = None

    def _shard_degree(self, ranks: int, per_node: int) -> int:
        """Return over how many ranks a parameter is cut, as SMP settles it (its reference, ``hybrid_shard_degree``)."""
        degree = self.args.hybrid_shard_degree or 0
        if degree:
            return degree
        if self.args.tensor_parallel_degree > 1:
            return ranks
        if self.args.sharding_strategy == "no_shard":
            return 1
        return min(per_node, ranks) if "hybrid" in self.args.sharding_strategy else ranks

    def build(self, spec: ModelSpec, *, seed: int, seq_len: int, initial: bool = True) -> nn.Module:
        """Build, transform, shard, checkpoint and offload: the canonical order of SMP's own scripts."""
        args = self.args
        weights = spec.pretrained if initial else None
        delayed = args.delayed_param
        spec.config.delayed_param = delayed
        model: Any = build.build_meta(spec, attn_implementation=args.attn_implementation)
        real = not delayed or (weights is not None and dist.get_rank() == 0)
        with runtime.together("loading the weights"):
            if real:
                build.materialise(model, "cpu")
                if weights is None:
                    initialise(model, seed)
                elif dist.get_rank() == 0:
                    load_pretrained(model, weights)
        if weights is not None:
            dist.barrier()
        own = None if self.transforms else module_initialiser(model, seed)
        layer_class = type(build.decoder_layers(model)[0][1])
        if self.transforms:
            model, layer_class = self._transform(model, from_rank0=weights is not None)
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigError(f"{name} is {parameter.dtype}: SMP's mixed precision wants float32 parameters")
        self._matrices = {canonical_name(name) for name, p in model.named_parameters() if p.ndim >= 2}
        names = [canonical_name(name) for name, _ in model.named_parameters()]
        self._chunked = bool(args.chunked_loss) and not self.transforms and can_chunk(model)
        if self._chunked:
            _chunk_loss(model)
        self._root = self._shard(
            model, layer_class, own=own, delayed=delayed, from_rank0=weights is not None, real=real
        )
        dist.barrier()
        self._checkpoint(self._root, layer_class)
        wrapped = self._root
        if args.sm_activation_offloading:
            from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

            wrapped = wrappers.offload_wrapper(self._root)
        place = f"tp{self.state.tp_rank}" if self.topology.tp_size > 1 else None
        self._tree = smp_state.Tree(self._root, names, sharded=self.shard > 1, device=self.device, place=place)
        return wrapped

    def _transform(self, model: nn.Module, *, from_rank0: bool) -> tuple[Any, type]:
        from importlib import import_module

        options: dict[str, Any] = {"load_state_dict_from_rank0": from_rank0}
        with runtime.together("transforming the model"):
            try:
                model = self.library.transform(model, config=None, **options)
            except Exception as failure:
                raise ConfigError(
                    f"torch.sagemaker.transform refuses this model: {smp_library.reason(failure)}; SMP's own "
                    "implementation is there for Llama, Mistral, Mixtral and GPT-NeoX"
                ) from failure
        transformer = import_module("torch.sagemaker.tensor_parallel.transformer")
        layer = getattr(transformer, "TransformerLayer", None) or transformer.TETransformerLayer
        return model, layer

    def _shard(
        self, model: Any, layer_class: type, *, own: Any, delayed: bool, from_rank0: bool, real: bool
    ) -> Any:
        """Wrap in FSDP1 with the arguments of SMP's scripts; SMP supplies the groups."""
        import torch.distributed.fsdp as fsdp
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        args = self.args
        initialiser: Any = None
        if delayed and not real:
            from importlib import import_module

            maker = import_module("torch.sagemaker.delayed_param").DelayedParamIniter
            initialiser = maker(model, own) if own is not None else maker(model)
        precision = None
        if args.bf16:
            precision = fsdp.MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
            )
        whole = nullcontext()
        if initialiser is not None and not from_rank0:
            whole = initialiser.validate_params_and_buffers_inited()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with whole:
            wrap: Any = fsdp.FullyShardedDataParallel  # SMP's own takes post_param_init_fn too
            return wrap(
                model,
                auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer_class}),
                mixed_precision=precision,
                sharding_strategy=_strategy(fsdp.ShardingStrategy, args.sharding_strategy),
                backward_prefetch=fsdp.BackwardPrefetch[args.backward_fetch_policy.upper()],
                forward_prefetch=args.forward_prefetch,
                limit_all_gathers=args.limit_all_gathers,
                device_id=torch.cuda.current_device() if self.device.type == "cuda" else None,
                use_orig_params=True,
                param_init_fn=None if initialiser is None else initialiser.get_param_init_fn(),
                post_param_init_fn=None if initialiser is None else initialiser.get_post_param_init_fn(),
                sync_module_states=from_rank0,
            )

    def _checkpoint(self, root: nn.Module, layer_class: type) -> None:
        """Checkpoint decoder layers; the reentrant form, which SMP's offloading and flash attention need."""
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

        from smp_train.parallel.spread import chosen

        share, _ = checkpointing.read(self.args.activation_checkpointing)
        if not share:
            return
        layers = [module for module in root.modules() if isinstance(module, layer_class)]
        wanted = {id(layers[index]) for index in chosen(len(layers), share)}
        wrappers.apply_activation_checkpointing(
            root,
            checkpoint_wrapper_fn=functools.partial(
                wrappers.checkpoint_wrapper, checkpoint_impl=wrappers.CheckpointImpl.REENTRANT
            ),
            check_fn=lambda module: id(module) in wanted,
        )

    def loss_sum(
        self,
        model: nn.Module,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """See `Backend.loss_sum`.

        FSDP1 averages gradients over the ranks it shards and replicates over, where the loss is a sum: the gradient is
        scaled back on its way in.
        """
        targets = losses.shift(labels)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            inputs = {"input_ids": input_ids, **packed_inputs(self._root.module, position_ids)}
        if self.transforms:
            loss = losses.cross_entropy_sum(model(**inputs)["logits"], targets)
        elif self._chunked:
            loss = model(**inputs, targets=targets)
        else:
            loss = losses.cross_entropy_sum(model(**inputs, use_cache=False).logits, targets)
        scaled: Tensor = _ScaleGradient.apply(loss, float(self.topology.dp_size))
        return scaled

    @contextmanager
    def accumulation(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """See `Backend.accumulation`: gradients are reduced to shards each time, so that no rank holds a whole one."""
        yield

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """See `Backend.clip_grad_norm`; the root is given without its offloading, which SMP takes from 2.8 on only."""
        from importlib import import_module

        clip = import_module("torch.sagemaker.grad_norm").clip_grad_norm_
        norm: Tensor = clip(self._root, max_norm if max_norm > 0 else math.inf)
        return norm

    def sum_over_data(self, values: Tensor) -> Tensor:
        """See `Backend.sum_over_data`: tensor peers hold the same values, and count once."""
        dist.all_reduce(values)
        return values.div_(self.topology.tp_size)

    def decays(self, name: str, parameter: Tensor) -> bool:
        """See `Backend.decays`; FSDP1 shows each rank one-dimensional pieces, so dimensions were noted before."""
        return canonical_name(name) in self._matrices

    def state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `Backend.state_dict`."""
        assert self._tree is not None, "build comes first"
        return self._tree.gather(optimizer)

    def load_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Callable[[dict[str, Any]], None]
    ) -> None:
        """See `Backend.load_state`."""
        assert self._tree is not None, "build comes first"
        self._tree.load(optimizer, read)


def refuse(args: Arguments) -> None:
    """Raise `ConfigError` for settings that the native backend has and this one has not."""
    for name, what in WITHOUT.items():
        if getattr(args, name) > 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: {what} is not available; use --backend native")
    for name, why in (
        ("fp8", "FP8 through SMP's Transformer Engine is not available"),
        ("use_torch_compile", "SMP's containers do not compile FSDP1 models"),
        ("cpu_offload", "SMP has no offloading of parameters"),
    ):
        if getattr(args, name):
            raise ConfigError(f"--{name} 1 with --backend smp: {why}; use --backend native")
    share, per_operation = checkpointing.read(args.activation_checkpointing)
    if per_operation:
        raise ConfigError(
            "--activation_checkpointing selective:op with --backend smp: SMP checkpoints whole layers; use full"
        )
    if args.sm_activation_offloading and not share:
        raise ConfigError(
            "--sm_activation_offloading 1 with --backend smp needs checkpointing; give --activation_checkpointing full"
        )
    if args.short == "pack" and (args.tensor_parallel_degree > 1 or args.use_smp_implementation):
        raise ConfigError(
            "--short pack with SMP's own implementation of models, which takes no positions; use --short concat or pad"
        )
    if args.tensor_parallel_degree > 1 and args.save_final_model:
        raise ConfigError(
            "--save_final_model 1 with --backend smp and --tensor_parallel_degree above 1: SMP renames parameters; "
            "use --backend native, or leave it out"
        )


def _strategy(strategies: Any, name: str) -> Any:
    known = {
        "full_shard": strategies.FULL_SHARD,
        "hybrid_shard": strategies.HYBRID_SHARD,
        "shard_grad_op": strategies.SHARD_GRAD_OP,
        "_hybrid_shard_zero2": strategies._HYBRID_SHARD_ZERO2,
        "no_shard": strategies.NO_SHARD,
    }
    return known[name]


def _chunk_loss(model: Any) -> None:
    """Let the model's forward pass return the summed loss where targets are given, without the full logits."""
    stock = model.forward

    def forward(*inputs: Any, targets: Tensor | None = None, **options: Any) -> Any:
        if targets is None:
            return stock(*inputs, **options)
        hidden = model.base_model(*inputs, use_cache=False, **options).last_hidden_state
        head = model.get_output_embeddings()
        return losses.linear_cross_entropy_sum(hidden, head.weight, targets, bias=head.bias)

    model.forward = forward


class _ScaleGradient(torch.autograd.Function):
    """The value as it is, its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
