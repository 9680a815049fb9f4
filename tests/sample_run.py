"""A run of FSDP1 that saves as the SMP v2 sample does, on stock PyTorch: a program for the container's versions.

``python -m tests.sample_run JSON``: a list of runs, which `main` carries out one after another.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests import harness
from tests.smp import NATIVE, train_on_smp
from tests.smp_trees import whole
from tests.training import NO_MODEL
from tests.versions import FAMILIES, SMALL

STEPS = 2


def options(family: str, **changes: Any) -> dict[str, Any]:
    """Return the flags of a run of this package that has the sample's model."""
    fixed = {"num_layers": 2, "max_steps": STEPS, "model_type": family}
    return {**NO_MODEL, **SMALL, **FAMILIES[family], "tie_word_embeddings": None, **fixed, **changes}


def write(command_line: list[str], folder: str, kind: str, shards: int, orig: bool) -> None:
    """Train on this rank, save as ``--checkpoint_type kind``, and save the whole state beside, as ``truth.pt``."""
    from torch.distributed import fsdp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers import AutoModelForCausalLM

    from smp_train import arguments, distributed
    from smp_train.models.resolve import resolve

    FSDP = fsdp.FullyShardedDataParallel
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=300)
    args = arguments.parse(command_line).args
    config = resolve(args).config
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    layer = next(type(m) for m in plain.modules() if type(m).__name__.endswith(("DecoderLayer", "NeoXLayer")))
    groups = [dist.new_group(list(range(at, at + shards))) for at in range(0, ranks.world_size, shards)]
    replicas = [dist.new_group(list(range(at, ranks.world_size, shards))) for at in range(shards)]
    model: Any = FSDP(
        plain, process_group=(groups[ranks.rank // shards], replicas[ranks.rank % shards]),
        sharding_strategy=fsdp.ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer}),
        device_id=torch.device("cpu"), use_orig_params=orig,
    )  # fmt: skip
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(ranks.rank)
    for _ in range(STEPS):
        ids = torch.randint(0, config.vocab_size, (2, 16))
        model(input_ids=ids, labels=ids)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    content = {
        "scheduler": {"num_iters": STEPS}, "cli_args": {"train_batch_size": 2}, "model_config": config,
        "total_steps": STEPS, "resume_from_sequence_number": 2 * STEPS,
    }  # fmt: skip
    place = Path(folder) / f"{args.model_type}-{STEPS}steps"
    place.mkdir(parents=True, exist_ok=True)
    hooks = with_global_ranks(model) if kind == "local" else without_hooks()
    with FSDP.state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT), hooks:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **content}
    if kind == "local":
        torch.save(state, place / f"{ranks.rank}.pt")
    elif ranks.rank < shards:  # replicas write the same
        _save_state_dict(state, FileSystemWriter(place / f"tp0_ep0_fsdp{model.rank}"), no_dist=True)
    weights, moments = whole(model, optimizer)
    if ranks.rank == 0:
        truth = {f"model.{name}": value for name, value in weights.items()}
        for name, values in moments.items():
            truth |= {f"optim.state.{name}.{what}": value for what, value in values.items()}
        torch.save(truth, Path(folder) / "truth.pt")
    dist.barrier()
    distributed.stop()


def weight_decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups as the sample does: no decay of biases and of the norms that it knows."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    decay: list[Any] = []
    rest: list[Any] = []
    for module in model.modules():
        own = [(name, p) for name, p in module.named_parameters(recurse=False)]
        norm = isinstance(module, torch.nn.LayerNorm | LlamaRMSNorm)
        for biases in (False, True):
            for name, p in own:
                if (name == "bias") is biases and not any(p is each for each in (*decay, *rest)):
                    (rest if norm or biases else decay).append(p)
    return [{"params": decay}, {"params": rest, "weight_decay": 0.0}]


def without_hooks() -> Any:
    """Return a context in which FSDP1's local state dict is what it holds: SMP's own local kind has no collectives."""
    from torch.distributed.fsdp import _state_dict_utils as utils

    def post(module: Any, fsdp_state: Any, state_dict: Any, prefix: str) -> Any:
        return state_dict

    nothing = {"_local_pre_state_dict_hook": mock.Mock(), "_local_post_state_dict_hook": post}
    return mock.patch.multiple(utils, **nothing)


def with_global_ranks(model: Any) -> Any:
    """Return a context in which FSDP1's local state dict works in each of several shard groups.

    Stock FSDP1 gives the rank in the group where ShardedTensor wants the global one, and raises in all but the first.
    """
    from torch.distributed.fsdp import _state_dict_utils as utils

    made = utils.Shard.from_tensor_and_offsets
    first = dist.get_global_rank(model.process_group, 0)

    def shard(tensor: torch.Tensor, offsets: list[int], rank: int) -> Any:
        return made(tensor, offsets, first + rank)

    return mock.patch.object(utils.Shard, "from_tensor_and_offsets", shard)


def main() -> None:
    """Carry out what the command line asks for."""
    for what, world, *given in json.loads(sys.argv[1]):
        harness.run({"write": write, "resume": train_on_smp}[what], world, *given)


if __name__ == "__main__":
    assert not NATIVE
    main()
