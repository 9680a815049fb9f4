"""Checkpoints as the SMP v2 sample scripts write them, made with a stand-in for `torch.sagemaker`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper

from smp_train.models.hub_names import canonical_name, hub_names
from tests.smp import install

State = dict[str, torch.Tensor]


def run_of(command_line: list[str]) -> Any:
    """Set a run up on this rank, resume, train, and return it; nothing is closed."""
    from contextlib import ExitStack

    from smp_train import arguments, distributed, train_lib
    from smp_train.build_run import build_run

    ranks = distributed.detect()
    resolved = arguments.parse(command_line)
    arguments.validate(resolved.args, ranks.world_size)
    device = distributed.start(ranks, distributed_backend=resolved.args.distributed_backend, timeout_seconds=600)
    run = build_run(resolved, ranks, device, ExitStack())
    train_lib.resume(run)
    return run


def write(command_line: list[str], folder: str, kind: str = "sharded", form: str = "tp{tp}_ep{ep}") -> State:
    """Train on this rank of SMP, write a checkpoint as the sample does, and return its tensors by transformers' names.

    ``form`` is what the sub-folder of this rank's tree is called.
    """
    install()
    from smp_train import train_lib

    run = run_of(command_line)
    train_lib.fit(run)
    KINDS[kind](run.model, run.optimizer, Path(folder), form, content(run))
    return held(run)


def take_up_on_smp(command_line: list[str]) -> tuple[int, State]:
    """Resume on this rank of SMP and return (step, weights and moments as transformers has them)."""
    install()
    run = run_of(command_line)
    return run.progress.step, held(run)


def held(run: Any) -> State:
    """Return the weights and moments of a run on SMP by transformers' names, whole."""
    from torch.sagemaker.tensor_parallel.transformer import translated

    weights, moments = whole(run.model, run.optimizer)
    renamed = translated if run.backend.transforms else dict
    found = {f"model.{name}": value for name, value in renamed(weights).items()}
    for what in ("exp_avg", "exp_avg_sq"):
        values = renamed({name: state[what] for name, state in moments.items()})
        found |= {f"{what}.{name}": value for name, value in values.items()}
    return {name: value.clone() for name, value in found.items()}


def content(run: Any) -> dict[str, Any]:
    """Return what the sample stores beside model and optimizer."""
    args = run.args
    return {
        "scheduler": {"start_lr": args.lr, "warmup_iter": 0, "num_iters": run.progress.step, "decay_style": "cosine",
                      "end_iter": 4, "min_lr": 0.0},
        "cli_args": {"train_batch_size": args.train_batch_size, "lr": args.lr, "model_type": args.model_type,
                     "num_heads": args.num_heads, "rotary_emb_base": args.rotary_emb_base or 10000},
        "model_config": run.spec.config,
        "num_params": 1,
        "total_steps": run.progress.step,
        "epoch": 0,
        "start_train_path_index": 0,
        "resume_from_sequence_number": run.progress.step * args.train_batch_size,
    }  # fmt: skip


def whole(model: Any, optimizer: Any) -> tuple[State, dict[str, State]]:
    """Return this tensor rank's parameters and moments, gathered over its shard group, under saved names."""
    state = _state(model, optimizer, {})

    def full(value: Any) -> torch.Tensor:
        if not hasattr(value, "local_shards"):
            return value
        parts: list[Any] = [None] * model.process_group.size()
        own = [shard.tensor.clone() for shard in value.local_shards()]
        torch.distributed.all_gather_object(parts, own, group=model.process_group)
        return torch.cat([each for part in parts for each in part])

    weights = {canonical_name(name): full(value) for name, value in state["model"].items()}
    moments = {
        canonical_name(name): {what: full(value) for what, value in values.items()}
        for name, values in state["optimizer"]["state"].items()
    }
    return weights, moments


def _tree_of(tsm: Any, form: str) -> str:
    state = tsm.state
    names = {"tp": state.tp_rank, "ep": state.ep_rank, "tps": state.tp_size, "eps": state.ep_size}
    return form.format(**names, fsdp=state.shard_rank)


def _state(model: Any, optimizer: Any, content: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed.fsdp as fsdp

    FSDP = fsdp.FullyShardedDataParallel
    with FSDP.state_dict_type(model, fsdp.StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), **content}


def _write_tree(state: dict[str, Any], folder: Path, group: Any) -> None:
    """Write a DCP tree by the ranks of ``group``, which its first rank coordinates."""
    init = _DistWrapper.__init__
    counts_in_group = "global_coordinator_rank" in inspect.getsource(init)

    def coordinated(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)  # torch 2.5 compares a rank of the group with one of the world
        self.is_coordinator = torch.distributed.get_rank() == self.coordinator_rank

    if not counts_in_group:
        _DistWrapper.__init__ = coordinated
    first = 0 if counts_in_group else min(torch.distributed.get_process_group_ranks(group))
    try:
        _save_state_dict(state, dcp.FileSystemWriter(folder), group, first, False, dcp.DefaultSavePlanner())
    finally:
        _DistWrapper.__init__ = init


def _sharded(model: Any, optimizer: Any, folder: Path, form: str, content: dict[str, Any]) -> None:
    import torch.sagemaker as tsm

    state = _state(model, optimizer, content)
    if tsm.state.ranker.get_rep_rank(tsm.state.rank) == 0:
        _write_tree(state, folder / _tree_of(tsm, form), model.process_group)
    torch.distributed.barrier()


def _local(model: Any, optimizer: Any, folder: Path, form: str, content: dict[str, Any]) -> None:
    import torch.sagemaker as tsm

    groups = [torch.distributed.new_group(ranks) for ranks in tsm.state.ranker.get_rep_groups()]
    (replicas,) = [group for group in groups if group != torch.distributed.GroupMember.NON_GROUP_MEMBER]
    _write_tree(_state(model, optimizer, content), folder / f"{_tree_of(tsm, form)}_fsdp{model.rank}", replicas)
    torch.distributed.barrier()


def _full(model: Any, optimizer: Any, folder: Path, form: str, content: dict[str, Any]) -> None:
    import torch.distributed.fsdp as fsdp

    config = fsdp.FullStateDictConfig(rank0_only=True, offload_to_cpu=True)
    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
        torch.save({canonical_name(name): value for name, value in state.items()}, folder / "pytorch_model.bin")
        content["model_config"].save_pretrained(folder)
    torch.distributed.barrier()


def _files(model: Any, optimizer: Any, folder: Path, form: str, content: dict[str, Any]) -> None:
    import torch.distributed.fsdp as fsdp

    with fsdp.FullyShardedDataParallel.state_dict_type(model, fsdp.StateDictType.LOCAL_STATE_DICT):
        weights = {_name_in_transformers_4(model, name): value for name, value in model.state_dict().items()}
    state = {"model": weights, "optimizer": _grouped_as_theirs(model, optimizer), **content}
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()


def _name_in_transformers_4(model: Any, name: str) -> str:
    """Return a whole parameter's name in the sample's container; transformers 5 has `lm_head` for `embed_out`."""
    (tensor,) = hub_names(model).tensors_of(canonical_name(name), ())
    return tensor.name


def _grouped_as_theirs(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer whose parameters go as the sample gives them: no decay of norms and biases."""
    named = list(model.named_parameters())
    rest = [(n, p) for n, p in named if n.endswith("bias") or "norm" in n.split(".")[-2]]
    decay = [(n, p) for n, p in named if all(p is not other for _, other in rest)]
    state = {number: optimizer.state[p] for number, (_, p) in enumerate(decay + rest)}
    groups = [list(range(len(decay))), list(range(len(decay), len(named)))]
    return {"state": state, "param_groups": [{"params": group, "lr": 1.0} for group in groups]}


KINDS: dict[str, Callable[..., None]] = {"sharded": _sharded, "local": _local, "full": _full, "files": _files}


def take_up(command_line: list[str], **environ: str) -> tuple[int, int, State]:
    """Resume on this rank and return (step, samples read, weights and moments as transformers has them)."""
    os.environ.update(environ)
    run = run_of(command_line)
    found: State = {}
    for name, parameter in run.model.named_parameters():
        name = canonical_name(name)
        state = run.optimizer.state[parameter]
        values = {"model": parameter, **{what: state[what] for what in ("exp_avg", "exp_avg_sq") if what in state}}
        for what, value in values.items():
            found[f"{what}.{name}"] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return run.progress.step, run.progress.consumed, found


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {os.path.relpath(path, folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def config_of(checkpoint: Path) -> dict[str, Any]:
    """Return the model's configuration, as one of our checkpoints has it."""
    config: dict[str, Any] = json.loads((checkpoint / "meta.json").read_text())["model_config"]
    return config
