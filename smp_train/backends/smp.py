"""Backend for SMP v2: FSDP1 under ``torch.sagemaker``, in the order that SMP's documentation prescribes.

Imports only what torch 2.4.1 to 2.5.1 and transformers 4.44.2, of SMP's last containers, provide.
"""

from __future__ import annotations

import importlib
import logging
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.optim import Optimizer

from smp_train import losses
from smp_train.arguments import checkpointing
from smp_train.backends import smp_choices, smp_model, smp_state
from smp_train.backends.base import Backend, MetaModel, RouterTerm, Topology
from smp_train.checkpoints.saver import Saver
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.degrees import Degrees, check_model_on_smp
from smp_train.errors import ConfigError
from smp_train.models import build
from smp_train.models.hub_names import canonical_name
from smp_train.models.hub_state import gather_state
from smp_train.models.initialization import drawing_device, module_initialiser
from smp_train.models.smp_names import HubModel, Ranks
from smp_train.models.traits import can_chunk, check_loss, check_packed, split_sizes

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.data.batch import Batch
    from smp_train.distributed import Runtime
    from smp_train.models.hugging_face import ModelSpec

logger = logging.getLogger("smp_train.smp")


class SmpBackend(Backend):
    """SMP's hybrid sharding, tensor, context and expert parallelism, and activation offloading."""

    name = "smp"
    checkpoint_type = "sharded"  # as in AWS's sample

    def __init__(
        self, args: Arguments, ranks: Runtime, device: torch.device, degrees: Degrees, library: Any
    ) -> None:  # fmt: skip
        """Use SMP as started by `smp_library.start`. Raises `ConfigError` for unsupported settings."""
        refuse(args)
        self.args, self.device, self.degrees, self.library = args, device, degrees, library
        self.transforms = transforms(args)
        self.draws = "by SMP, from" if self.transforms else "from"
        self.state = library.state
        tensor, context = degrees.tensor, degrees.context
        # Ranks of one sample are adjacent, tensor ranks innermost; expert ranks read different samples.
        self.topology = Topology(
            device=device,
            dp_rank=degrees.data_rank(ranks.rank), dp_size=degrees.data_parallel,
            tp_rank=int(self.state.tp_rank) if tensor > 1 else 0, tp_size=tensor,
            cp_rank=int(self.state.cp_rank) if context > 1 else 0, cp_size=context,
            mesh={name: getattr(degrees, name) for name in ("replicate", "shard", "expert", "context", "tensor")},
        )  # fmt: skip
        self._fp8 = smp_model.Fp8(args, self.state, device) if args.fp8 else None
        self._root: Any = None
        self._chunked, self._whole_logits = False, True
        self._matrices: set[str] = set()
        self._names: set[str] = set()
        self._tree: smp_state.Tree | None = None
        self._hub: HubModel | None = None
        """The model on the hub, if this model is SMP's own implementation of it."""

    def check(self, spec: ModelSpec, *, seq_len: int) -> MetaModel:
        """See `Backend.check`."""
        check_loss(spec.config)
        check_packed(spec.config, self.args.short)
        refuse_model(spec.config, self.args)
        if self.transforms:
            check_model_on_smp(
                split_sizes(spec.config), seq_len=seq_len, tensor=self.degrees.tensor, context=self.degrees.context,
                expert=self.degrees.expert,
            )  # fmt: skip
        spec.config.delayed_param = self.args.delayed_param
        return MetaModel(spec, seq_len, build.build_meta(spec, attn_implementation=self.args.attn_implementation))

    def build(self, meta: MetaModel, *, seed: int, initial: bool = True) -> nn.Module:
        """Transform, shard, checkpoint and offload, in the order of SMP's own scripts."""
        args, spec = self.args, meta.spec
        model: Any = meta.model
        weights = spec.pretrained if initial else None
        draws_on = drawing_device(self.device)
        real = smp_model.give_weights(model, weights, delayed=args.delayed_param, seed=seed, draws_on=draws_on)
        initialise_module = None if self.transforms else module_initialiser(model, seed, draws_on)
        layer = type(build.decoder_layers(model)[0][1])
        # SMP draws from torch's generators, which are seeded equally on all ranks so that replicas are equal.
        random.seed(seed)
        torch.manual_seed(seed)
        if self.transforms:
            hub_shapes = {name: tuple(value.shape) for name, value in gather_state(model)["model"].items()}
            self._hub = HubModel.from_config(spec.config, hub_shapes)
            self._names = {canonical_name(name) for name, _ in model.named_parameters()}
            model, layer = smp_model.transform(self.library, model, args, from_rank0=weights is not None, real=real)
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ConfigError(f"{name} is {parameter.dtype}: SMP's mixed precision wants float32 parameters")
        # FSDP1 flattens parameters: their shapes are known before wrapping only.
        shapes = {canonical_name(name): tuple(p.shape) for name, p in model.named_parameters()}
        self._matrices = {name for name, shape in shapes.items() if len(shape) >= 2}
        self._chunked = bool(args.chunked_loss) and not self.transforms and can_chunk(model)
        if self._chunked:
            smp_model.chunk_loss(model)
        self._root = smp_model.wrap(
            model, args, layer=layer, initialise_module=initialise_module, from_rank0=weights is not None, real=real,
            device=self.device,
        )  # fmt: skip
        dist.barrier()
        smp_model.checkpoint(self._root, args, layer, self._fp8)
        wrapped = wrappers.offload_wrapper(self._root) if args.sm_activation_offloading else self._root
        self._tree = smp_state.Tree(self._root, list(shapes), sharded=self._is_sharded(), device=self.device)
        if self._hub is not None:
            vocabulary = int(spec.config.vocab_size)
            self._whole_logits = smp_choices.whole_logits(self._root, self.topology, meta.seq_len, vocabulary)
        refused = [f"{name} ({cause})" for name, cause in smp_choices.refusals.items() if cause]
        logger.info("Calls of SMP in the form of AWS's sample: %s", ", ".join(refused) or "none")
        return wrapped

    def _is_sharded(self) -> bool:
        """Return whether FSDP shards parameters; warn if the flags ask for another number of ranks."""
        whole = self._root.sharding_strategy is fsdp.ShardingStrategy.NO_SHARD
        ranks = 1 if whole else int(self._root.process_group.size())
        if ranks != self.degrees.sharded:
            logger.warning(
                "SMP shards parameters over %d ranks, not over the %d of --hybrid_shard_degree and "
                "--sharding_strategy", ranks, self.degrees.sharded, extra=ALL_RANKS,
            )  # fmt: skip
        return ranks > 1

    @property
    def saver(self) -> Saver:
        """See `Backend.saver`. Tensor and expert ranks hold different parameters: each rank has its own tree."""
        expert_rank = int(self.state.ep_rank) if self.degrees.expert > 1 else 0
        ranks = Ranks(self.topology.tp_rank, self.degrees.tensor, expert_rank, self.degrees.expert)
        return Saver(self._hub, ranks, ranks.folder if max(ranks.tensors, ranks.experts) > 1 else "")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, RouterTerm | None]:
        """See `Backend.loss`. SMP's own models add their router loss themselves.

        FSDP1 averages gradients over all ranks that are not tensor peers, but the loss is a sum. So the gradient is
        multiplied by the number of ranks in that average.
        """
        input_ids, targets = batch.input_ids, losses.shift(batch.labels)
        if self.topology.cp_size > 1:
            input_ids, targets = self._piece(input_ids), self._piece(targets)
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": None}
        if batch.position_ids is not None:
            inputs = {"input_ids": input_ids, "position_ids": batch.position_ids}
        if self.transforms:
            counted = (targets != losses.IGNORE_INDEX).sum()
            if not self._whole_logits:  # a mean over no token is NaN, even times 0
                inputs["labels"] = torch.where(counted > 0, batch.labels, input_ids)
            with self._fp8.forward() if self._fp8 is not None else nullcontext():
                output = model(**inputs)
            if self._whole_logits:
                loss = losses.cross_entropy_sum(output["logits"], targets)
            else:  # a mean over the counted tokens
                loss = output["loss"].float() * counted
        elif self._chunked:
            loss = model(**inputs, targets=targets)
        else:
            loss = losses.cross_entropy_sum(model(**inputs, use_cache=False).logits, targets)
        averaged_over = dist.get_world_size() // self.topology.tp_size
        return smp_model.ScaleGradient.apply(loss, float(averaged_over)), None

    def _piece(self, sequence: Tensor) -> Tensor:
        """Return this rank's part of ``[batch, seq]``: pieces r and 2 * degree - 1 - r of 2 * degree."""
        pieces = sequence.chunk(2 * self.topology.cp_size, dim=1)
        rank = self.topology.cp_rank
        return torch.cat([pieces[rank], pieces[-1 - rank]], dim=1)

    def begin_micro_batch(self, model: nn.Module, *, last: bool) -> None:
        """Reduce gradients to shards in each micro-batch, as FSDP does by default: no rank holds them whole."""

    def clip_grad_norm(self, model: nn.Module, max_norm: float, optimizer: Optimizer) -> Tensor:
        """See `Backend.clip_grad_norm`; on the FSDP root, as SMP accepts an offloading wrapper only from 2.8 on."""
        clip = importlib.import_module("torch.sagemaker.grad_norm").clip_grad_norm_
        norm: Tensor = clip(self._root, max_norm if max_norm > 0 else math.inf)
        return norm

    def sum_over_data(self, values: Tensor) -> Tensor:
        """See `Backend.sum_over_data`: tensor ranks hold equal values, which count once."""
        dist.all_reduce(values)
        return values.div_(self.topology.tp_size)

    def decays(self, name: str, parameter: Tensor) -> bool:
        """See `Backend.decays`; dimensions were recorded before FSDP1 flattened the parameters."""
        return canonical_name(name) in self._matrices

    def full_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """See `Backend.full_weights`; also None if SMP does not translate its names."""
        if self._hub is None:
            return None
        # On a CPU, offloading would return tensors that FSDP frees on leaving the context.
        whole = fsdp.FullStateDictConfig(offload_to_cpu=self.device.type != "cpu", rank0_only=True)
        with fsdp.FullyShardedDataParallel.state_dict_type(self._root, fsdp.StateDictType.FULL_STATE_DICT, whole):
            weights: dict[str, Tensor] = self._root.state_dict()
        weights = {canonical_name(name): value for name, value in weights.items()}
        return weights if smp_choices.is_translated(weights, self._names) else None

    def state_dict(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """See `Backend.state_dict`."""
        assert self._tree is not None, "build comes first"
        return self._tree.gather(optimizer)

    def load_state(self, model: nn.Module, optimizer: Optimizer, read: Callable[[dict[str, Any]], None]) -> None:
        """See `Backend.load_state`."""
        assert self._tree is not None, "build comes first"
        self._tree.load(optimizer, read)


def transforms(args: Arguments) -> bool:
    """Return whether SMP's own implementation of the model is used."""
    return bool(
        args.use_smp_implementation
        or args.moe
        or max(args.tensor_parallel_degree, args.context_parallel_degree, args.expert_parallel_degree) > 1
    )


def refuse(args: Arguments) -> None:
    """Raise `ConfigError` for settings that SMP does not support, alone or together."""
    transformed, (share, per_operation) = transforms(args), checkpointing.read(args.activation_checkpointing)
    tensor, context, expert = args.tensor_parallel_degree, args.context_parallel_degree, args.expert_parallel_degree
    smp = "with --backend smp"
    refusals = (
        (args.use_torch_compile,
         f"--use_torch_compile 1 {smp}: SMP's containers do not compile FSDP1 models; use --backend native"),
        (args.cpu_offload, f"--cpu_offload 1 {smp}: SMP has no offloading of parameters; use --backend native"),
        (args.recovery != "off",
         f"--recovery {args.recovery} {smp}: FSDP1's groups cannot be replaced; use --backend native"),
        (args.lora_rank is not None, f"--lora_rank {smp}: SMP has no adapters; use --backend native"),
        (args.prompt is not None, f"--prompt {smp}: put it through the checkpoint, by smp-train generate"),
        (expert > 1 and not args.moe, f"--expert_parallel_degree {expert} needs --moe 1, SMP's own experts"),
        (expert > 1 and context > 1,
         "--context_parallel_degree and --expert_parallel_degree cannot both be above 1 on SMP"),
        (tensor > 1 and args.hybrid_shard_degree == 1 and args.distributed_backend == "smddp",
         "--distributed_backend smddp with --tensor_parallel_degree above 1 and --hybrid_shard_degree 1: SMP does that "
         "over nccl only; give --distributed_backend nccl, or another shard degree"),
        (args.fp8 and not transformed,
         f"--fp8 1 {smp} needs SMP's own implementation; give --use_smp_implementation 1"),
        (args.fp8 and args.sm_activation_offloading,
         "--fp8 1 and --sm_activation_offloading 1 do not go together on SMP, which offloads what reentrant "
         "checkpointing keeps and FP8 has another; give one of them"),
        (per_operation,
         f"--activation_checkpointing selective:op {smp}: SMP checkpoints whole layers; use full"),
        (args.sm_activation_offloading and not share,
         f"--sm_activation_offloading 1 {smp} needs checkpointing; give --activation_checkpointing full"),
        (args.short == "pack" and transformed,
         "--short pack with SMP's own implementation of models, which takes no positions; use --short concat or pad"),
    )  # fmt: skip
    for refused, message in refusals:
        if refused:
            raise ConfigError(message)


def refuse_model(config: Any, args: Arguments) -> None:
    """Raise `ConfigError` for settings that SMP does not support with a sliding window."""
    window = getattr(config, "sliding_window", None)
    if config.model_type != "mistral" or window is None:
        return
    for name, used in (("fp8", args.fp8), ("context_parallel_degree", args.context_parallel_degree > 1)):
        if used:
            raise ConfigError(
                f"a Mistral with a sliding window of {window} tokens with --{name} {int(getattr(args, name))}: SMP has "
                f"not both; leave --{name} out, take a model without a window, or use --backend native"
            )
