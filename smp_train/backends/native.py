"""Backend for stock PyTorch: FSDP2 and DTensor on a device mesh of GPUs or CPUs."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from smp_train import losses
from smp_train.arguments import checkpointing
from smp_train.backends.base import Backend, MetaModel, RouterTerm, Topology
from smp_train.checkpoints.pretrained import load_weights
from smp_train.distributed import rank
from smp_train.distributed.agree import ALL_RANKS
from smp_train.distributed.degrees import advice_for_nodes, check_model, plan
from smp_train.distributed.device_profile import DeviceProfile, profile_of
from smp_train.errors import ConfigError
from smp_train.models import build
from smp_train.models.attention import Attention
from smp_train.models.hub_state import gather_state
from smp_train.models.initialization import drawing_device, initialise
from smp_train.models.lora import is_adapter
from smp_train.models.traits import can_chunk, check_experts, check_packed, number_of_experts, split_sizes
from smp_train.parallel import (
    activation_checkpointing,
    activation_offloading,
    compile,
    context_parallel,
    expert_parallel,
    float8,
    fsdp,
    grad_norm,
    loss_head,
    mesh,
    rebind,
    router_loss,
    tensor_parallel,
)
from smp_train.progress import Progress

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.data.batch import Batch
    from smp_train.distributed import Runtime
    from smp_train.models.hugging_face import ModelSpec

logger = logging.getLogger("smp_train.native")


class NativeBackend(Backend):
    """FSDP2 and DTensor."""

    name = "native"

    def __init__(
        self, args: Arguments, ranks: Runtime, device: torch.device, profile: DeviceProfile | None = None
    ) -> None:  # fmt: skip
        """Create the mesh; collective. Raises `ConfigError` for unsupported settings.

        Args:
            args: The run's flags.
            ranks: The run's ranks.
            device: This rank's device.
            profile: The device's profile; a plan passes the profile of the device that it plans for.
        """
        self.profile = profile or profile_of(device)
        if args.fp8:
            float8.check(device)
        self.compiled = compile.enabled(
            args.use_torch_compile, device=device, backend=args.torch_compile_backend,
            training=not args.evaluate_only,
        )  # fmt: skip
        if args.fp8 and not self.compiled:
            logger.warning("--fp8 1 without compilation is slower than bf16; give --use_torch_compile 1")
        if args.lora_rank is not None and (
            max(args.tensor_parallel_degree, args.expert_parallel_degree) > 1 or args.fp8
        ):  # fmt: skip
            raise ConfigError(
                "--lora_rank needs --tensor_parallel_degree 1, --expert_parallel_degree 1 and --fp8 0; adapters are "
                "not split"
            )
        self.args, self.local_world_size = args, ranks.local_world_size
        self.custom_loss: losses.Loss | None = None
        self.cpu_offload = args.cpu_offload and device.type != "cpu"
        self.bf16 = args.computes_in_bf16(gpu=self.profile.device_type != "cpu")
        if args.prompt and (max(args.tensor_parallel_degree, args.context_parallel_degree) > 1 or self.cpu_offload):
            raise ConfigError(
                "--prompt needs --tensor_parallel_degree 1, --context_parallel_degree 1 and --cpu_offload 0; put it "
                "through the checkpoint, by smp-train generate"
            )
        if args.cpu_offload != self.cpu_offload:
            logger.info("--cpu_offload 1 has no effect: on a CPU everything is in host memory")
        self.offload: activation_offloading.Offload | None = None
        self.degrees = degrees = plan(args, ranks.world_size, ranks.local_world_size, smp=False)
        self.mesh = mesh.Mesh(degrees, device.type)
        self.draws_on = drawing_device(device)
        self.context: context_parallel.ContextSplit | None = None
        self.routers: router_loss.Routers | None = None
        self.attention: Attention | None = None
        self.topology = Topology(
            device=device,
            dp_rank=degrees.data_rank(ranks.rank), dp_size=degrees.data_parallel,
            tp_rank=self.mesh.tensor.get_local_rank(), tp_size=degrees.tensor,
            cp_rank=self.mesh.context.get_local_rank(), cp_size=degrees.context,
            mesh=dict(zip(self.mesh.root.mesh_dim_names or (), self.mesh.root.shape, strict=True)),
        )  # fmt: skip

    def check(self, spec: ModelSpec, *, seq_len: int) -> MetaModel:
        """See `Backend.check`. Splits the model over expert and tensor ranks: refuses parameters without a rule."""
        args, degrees, config = self.args, self.degrees, spec.config
        tokens = args.train_batch_size * seq_len // (degrees.context * degrees.tensor)
        advice = advice_for_nodes(degrees, self.local_world_size, tokens)
        if advice and self.topology.device.type == "cuda" and not args.evaluate_only:
            logger.warning("%s", advice, extra=ALL_RANKS)
        check_experts(config)
        check_packed(config, self.args.short)
        context_parallel.check(degrees.context, seq_len, args.attn_implementation, config)
        tensor_parallel.check(config, degrees.tensor, seq_len // degrees.context)
        self._refuse_breaks(config)
        activation_checkpointing.check(args.activation_checkpointing, config.model_type, compiled=self.compiled)
        if args.moe and not number_of_experts(config):
            raise ConfigError(f"--moe 1: a {config.model_type} has no experts; give --moe 0")
        if degrees.expert > 1:
            check_model(split_sizes(config), seq_len=seq_len, tensor=degrees.tensor, expert=degrees.expert)
        built = spec
        if getattr(config, "output_router_logits", False):
            # transformers would keep the router logits, and compute its own router loss from this rank's tokens.
            built = replace(spec, config=copy.deepcopy(config))
            built.config.output_router_logits = False
        model = build.build_meta(built, attn_implementation=args.attn_implementation)
        layers = build.decoder_layers(model)
        experts: dict[nn.Module, list[nn.Module]] = {}
        if self.mesh.experts is not None:
            experts = expert_parallel.distribute(layers, self.mesh.experts, self.profile)
        if degrees.tensor > 1:
            tensor_parallel.apply(model, layers, self.mesh.tensor)
        return MetaModel(spec, seq_len, model, experts)

    def _refuse_breaks(self, config: Any) -> None:
        """Turn compilation off if each layer has a graph break in a checkpoint; raise `ConfigError` if a flag asks."""
        setting, loss = self.args.activation_checkpointing, router_loss.selected(self.args, config)
        has_break = self.degrees.expert > 1 or loss is not None
        if not (has_break and self.compiled and checkpointing.read(setting)[1]):
            return
        if self.args.use_torch_compile:
            raise ConfigError(
                f"--activation_checkpointing {setting} with --expert_parallel_degree above 1 or a router loss needs "
                "--use_torch_compile 0: a checkpoint that they break is not compiled; or use full"
            )
        logger.info("Compilation: off (experts or their routers break it inside a checkpoint)")
        self.compiled = False

    def use_loss(self, loss: losses.Loss) -> None:
        """See `Backend.use_loss`."""
        self.custom_loss = loss

    def build(self, meta: MetaModel, *, seed: int, initial: bool = True) -> nn.Module:
        """Continue with the split model: apply the other transformations, allocate this rank's part, fill the weights.

        The order matters: expert and tensor parallelism (in `check`), context parallelism, FP8 linear layers,
        activation checkpointing, compilation (of the checkpointed forward), activation offloading (around compiled
        code), sharding, weights.
        """
        args, spec, model = self.args, meta.spec, meta.model
        device = self.topology.device
        layers = [layer for _, layer in build.decoder_layers(model)]
        if self.degrees.context > 1:
            self.context = context_parallel.ContextSplit(self.mesh.context, meta.seq_len)
            self.context.apply(model)
        else:
            packed = args.short == "pack"
            self.attention = Attention(model, device, half=self.bf16, packed=packed, compiled=self.compiled)
        router_term = router_loss.selected(args, spec.config)
        if router_term is not None:
            self.routers = router_loss.Routers(model, router_term)
        if args.fp8:
            logger.info("FP8: %d linear layers", float8.apply(layers))
        self._checkpoint_and_compile(layers)
        chunked = args.chunked_loss and self.custom_loss is None and can_chunk(model)
        if self.custom_loss is None and chunked != args.chunked_loss:
            logger.info(
                "--chunked_loss 1 has no effect: the head of a %s is not known to be one product, so the loss takes "
                "all logits", spec.config.model_type,
            )  # fmt: skip
        if args.sm_activation_offloading:
            horizon = args.activation_loading_horizon
            units = itertools.chain.from_iterable(meta.experts.values())
            self.offload = activation_offloading.Offload(
                layers, device=device, horizon=horizon, units=units, profile=self.profile
            )
            if horizon >= len(layers):
                logger.info("--activation_loading_horizon %d covers all layers: none is offloaded", horizon)
        fsdp.shard(
            model, layers, self.mesh.parameters, param_dtype=torch.bfloat16 if self.bf16 else None,
            reshard_after_forward=args.sharding_strategy not in mesh.KEEP_UNSHARDED_STRATEGIES,
            forward_prefetch=args.forward_prefetch, cpu_offload=self.cpu_offload,
            experts=meta.experts, experts_mesh=self.mesh.parameters_of_experts,
        )  # fmt: skip
        tensor = self.mesh.tensor if self.degrees.tensor > 1 else None
        loss_head.attach(
            model, chunked=chunked, tensor=tensor, loss=self.custom_loss or losses.cross_entropy_sum,
            kernels=compile.loss_kernels(args.torch_compile_backend) if self.compiled else losses.EAGER,
            profile=self.profile,
        )  # fmt: skip
        self._allocate(model)
        self._fill(model, spec, seed, initial=initial)
        return model

    def _fill(self, model: nn.Module, spec: ModelSpec, seed: int, *, initial: bool) -> None:
        if spec.lora is not None:  # checkpoints of such a model hold the adapters alone
            initialise(model, seed, self.draws_on, only=is_adapter)
        elif not initial:
            return
        if spec.pretrained is None:
            initialise(model, seed, self.draws_on)
        else:
            with Progress(f"Reading {spec.pretrained}, rank 0's part", unit="B", shown=rank() == 0) as progress:
                load_weights(model, spec.pretrained, progress.set_count)

    def _allocate(self, model: nn.Module) -> None:
        device = self.topology.device
        build.materialise(model, device, parameters="cpu" if self.cpu_offload else device)

    def _checkpoint_and_compile(self, layers: list[nn.Module]) -> None:
        """Checkpoint and compile the layers.

        Usually the compiled code contains the checkpoint. For whole layers that are split over ranks, the checkpoint
        contains the compiled code: AOTAutograd cannot save a mesh across a checkpoint inside compiled code (torch 2.13:
        "expected all tensors_saved_with_vc_check to be Tensors"), and a graph break there leaves a layer uncompiled.
        """
        args = self.args
        split = max(self.degrees.tensor, self.degrees.expert) > 1 or self.routers is not None
        outside = split and not checkpointing.read(args.activation_checkpointing)[1]
        if outside and self.compiled:
            compile.apply(layers, backend=args.torch_compile_backend)
        count = activation_checkpointing.apply(layers, args.activation_checkpointing)
        if not count and args.activation_checkpointing != checkpointing.NONE:
            logger.info(
                "--activation_checkpointing %s chooses none of %d layers: none is checkpointed",
                args.activation_checkpointing, len(layers),
            )  # fmt: skip
        if not outside and self.compiled:
            compile.apply(layers, backend=args.torch_compile_backend)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, RouterTerm | None]:
        """See `Backend.loss`."""
        input_ids, targets = batch.input_ids, losses.shift(batch.labels)
        if self.context is not None:
            input_ids, targets = self.context.split(input_ids), self.context.split(targets)
            inputs: dict[str, Any] = {"position_ids": self.context.positions(input_ids.device)}
        else:
            assert self.attention is not None
            inputs = self.attention.inputs(input_ids, batch.position_ids, batch.documents)
        if self.routers is None or not torch.is_grad_enabled():
            return model.loss_sum(input_ids, targets, **inputs), None  # type: ignore[operator]
        not_padding = router_loss.unpadded(batch.input_ids, batch.labels)
        self.routers.start()
        loss: Tensor = model.loss_sum(input_ids, targets, **inputs)  # type: ignore[operator]
        return loss, RouterTerm(*self.routers.finish(self._seen_by_routers(not_padding)))

    def _seen_by_routers(self, mask: Tensor) -> Tensor:
        """Return the columns of a mask ``[batch, seq]`` for the tokens that pass this rank's routers."""
        if self.context is not None:
            mask = self.context.split(mask)
        if self.mesh.experts is not None:  # with expert parallelism, tensor ranks split the sequence
            mask = mask.chunk(self.topology.tp_size, dim=1)[self.topology.tp_rank]
        return mask

    def begin_micro_batch(self, model: nn.Module, *, last: bool) -> None:
        """See `Backend.begin_micro_batch`."""
        fsdp.accumulate(model, last=last)

    def clip_grad_norm(self, model: nn.Module, max_norm: float, optimizer: Optimizer) -> Tensor:
        """See `Backend.clip_grad_norm`."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = grad_norm.global_norm(gradients, "cpu" if self.cpu_offload else self.profile.device_type)
        # The attribute that `torch.amp.GradScaler` sets: the fused kernel divides gradients by it.
        optimizer.grad_scale = grad_norm.divisor(max_norm, norm) if max_norm > 0 else None  # type: ignore[attr-defined]
        return norm

    def sum_over_data(self, values: Tensor) -> Tensor:
        """See `Backend.sum_over_data`."""
        dist.all_reduce(values, group=self.mesh.loss_group())
        return values

    def rebind(self, model: nn.Module) -> None:
        """See `Backend.rebind`."""
        rebind.rebind(model, self.mesh)
        if self.routers is not None:
            self.routers.forget()

    def replica_group(self) -> dist.ProcessGroup:
        """See `Backend.replica_group`."""
        return self.mesh.root.get_group("replicate")

    def state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """See `Backend.state_dict`."""
        return gather_state(model, optimizer)

    def load_state(self, model: nn.Module, optimizer: Optimizer, read: Callable[[dict[str, Any]], None]) -> None:
        """See `Backend.load_state`; reads directly into the tensors of the model and the optimizer."""
        read(gather_state(model, optimizer))
