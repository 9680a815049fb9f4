"""Checks of a run before it has a GPU: memory, capabilities of the GPUs, data, disks, tokens."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.distributed.degrees import before_launch, check_model
from smp_train.errors import ConfigError
from smp_train.launch.command import ask
from smp_train.launch.instances import Instance
from smp_train.models.flops import STATE_BYTES
from smp_train.models.resolve import presets, settled_flags

WIDTHS = ("vocab_size", "hidden_width", "num_layers", "intermediate_size", "num_key_value_heads", "num_local_experts")
CHECKPOINT_BYTES = 12
"""Per parameter: weight and Adam's two moments in float32."""
NO_FP8 = ("A100", "A10G")  # before compute capability 8.9
GATED = ("meta-llama/", "mistralai/Mixtral", "mistralai/Mistral-7B-v0.3", "google/gemma")
PLUGIN_PLACES = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/opt/amazon/aws-ofi-nccl", "/opt/aws-ofi-nccl/install")
LOCAL_DISKS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs")


def parameters(resolved: Resolved) -> int | None:
    """Return the number of parameters of a preset, None for other models."""
    args = resolved.args
    if args.hf_pretrained_model_name_or_dir or any(resolved.given(name) for name in WIDTHS):
        return None
    preset = presets().get((str(args.model_type), str(args.model_size).lower()))
    return preset.parameters if preset else None


def check(resolved: Resolved, instance: Instance | None, nodes: int, processes: int) -> None:
    """Refuse a run that ``nodes`` with ``processes`` GPUs of ``instance`` (None: unknown) each cannot do."""
    args = resolved.args
    settled = settled_flags(args)  # an unknown preset is known to be one here
    divides(resolved, settled)
    if instance is None:
        return
    if args.fp8 and instance.gpu in NO_FP8:
        raise ConfigError(
            f"--fp8 1: the {instance.gpu} of {instance.name} has no FP8; take p5 or later, or leave it out"
        )
    count, over = parameters(resolved) or 0, sharing(resolved, nodes, processes)
    gigabytes = STATE_BYTES * count / over / 1e9
    if gigabytes > instance.gpu_memory_gb and args.memory_check and not args.cpu_offload:
        remedy = "take more nodes, a larger instance type, or --cpu_offload 1"
        raise ConfigError(
            f"weights, gradients and optimizer of this model ({count / 1e9:.1f} B parameters) take {gigabytes:.0f} GB "
            f"on each GPU, spread over {over}; the {instance.gpu} of {instance.name} has "
            f"{instance.gpu_memory_gb} GB: {remedy if over == nodes * processes else 'raise --hybrid_shard_degree'}; "
            "--memory_check 0 launches all the same"
        )


def sharing(resolved: Resolved, nodes: int, processes: int) -> int:
    """Return how many GPUs share weights, gradients and optimizer; the most of what each possible backend does."""
    return max(degrees.sharing for degrees in before_launch(resolved.args, nodes * processes, processes))


def memory(resolved: Resolved, instance: Instance | None, nodes: int, processes: int) -> list[str]:
    """Return a line about the memory of the model's states on each GPU; none where it is unknown."""
    count, over = parameters(resolved), sharing(resolved, nodes, processes)
    if count is None or instance is None or resolved.args.cpu_offload:
        return []
    return [
        f"weights, gradients and optimizer ({count / 1e9:.1f} B parameters): {STATE_BYTES * count / over / 1e9:.1f} of "
        f"the {instance.gpu_memory_gb} GB of each {instance.gpu}, spread over {over}; activations come on top, "
        "which `smp-train plan` counts"
    ]


def missing_token(resolved: Resolved, environ: Mapping[str, str], *, home: bool = True) -> list[str]:
    """Warn of a gated model without a token; ``home``: the run has this home folder."""
    names = (resolved.args.hf_pretrained_model_name_or_dir, resolved.args.pretrained_model_name)
    model = next((str(name) for name in names if name and str(name).startswith(GATED)), None)
    if model is None or os.path.isdir(model) or environ.get("HF_TOKEN"):
        return []
    if not home:
        return [f"{model} is gated, and a container sees no login of this home folder: set HF_TOKEN"]
    folder = Path(environ.get("HF_HOME") or Path(environ.get("HOME", "/")) / ".cache/huggingface")
    if (folder / "token").exists():
        return []
    return [f"{model} is gated and there is no Hugging Face token here: `hf auth login`, or set HF_TOKEN"]


def nccl_plugin(environ: Mapping[str, str]) -> str | None:
    """Return the file of NCCL's EFA plugin (aws-ofi-nccl), where this machine or image has it."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [f"{place}/{below}" for below in ("lib*", "lib*/*") for place in PLUGIN_PLACES]
    found = (path for folder in folders for path in sorted(glob.glob(f"{folder}/libnccl-net*.so*")))
    return next(found, None)


def missing_plugin(instance: Instance) -> list[str]:
    """Warn of EFA adapters that NCCL has no plugin for."""
    if nccl_plugin(os.environ):
        return []
    return [
        f"no EFA plugin for NCCL here (libnccl-net*.so of aws-ofi-nccl): {instance.name} has {instance.efa} adapters, "
        "and nodes would reach each other through TCP; take an image that has it (docker_build.sh), or install it"
    ]


def divides(resolved: Resolved, settled: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse degrees that do not divide the model, where flags or a preset give its widths.

    ``settled`` is what `settled_flags` says of the flags that were not given.
    """
    args = resolved.args
    tensor, context, expert = args.tensor_parallel_degree, args.context_parallel_degree, args.expert_parallel_degree
    if not settled or max(tensor, context, expert) == 1:
        return

    def width(name: str) -> int:
        given = getattr(args, name, None)
        return int(given if given is not None else settled.get(name, (0, ""))[0] or 0)

    experts = width("num_local_experts")
    # A size of 0 is one that the family does not have, and divides by everything.
    sizes = {
        "attention heads": width("num_heads"),
        "key-value heads": width("num_key_value_heads"),
        "tokens of vocabulary": width("vocab_size"),
        "columns of the feed-forward layer": 0 if experts else width("intermediate_size"),
    }
    sizes |= {"experts": experts} if experts else {}
    check_model(sizes, seq_len=width("max_context_width"), tensor=tensor, context=context, expert=expert)


def data(args: Any) -> list[tuple[str, str]]:
    """Return (flag, folder) of the data that flags name on a file system, without the weights of a blend."""
    folders = {"training_dir": args.training_dir or [], "test_dir": [args.test_dir] if args.test_dir else []}
    local = [(flag, folder) for flag, named in folders.items() for folder in named if "://" not in folder]
    return [(flag, one if Path(one).exists() else re.sub(r":[0-9.eE+-]+$", "", one)) for flag, one in local]


def check_data(args: Any) -> None:
    """Refuse folders of data that are not there, or empty; `ConfigError` names them."""
    for flag, folder in data(args):
        if not Path(folder).exists():
            raise ConfigError(f"--{flag} {folder}: no such folder")
        if Path(folder).is_dir() and not any(os.scandir(folder)):
            raise ConfigError(f"--{flag} {folder}: is empty; `smp-train prepare` makes shards")


def places(resolved: Resolved, nodes: int, needed: Sequence[str] = ()) -> list[str]:
    """Warn of disks that are too small for a run's checkpoints, or that its nodes do not share.

    ``needed`` are further files and folders that every node has to see.
    """
    args = resolved.args
    own = [folder for folder in args.checkpoint_dir if "://" not in folder and not folder.startswith(NODE_LOCAL)]
    size = 2 * CHECKPOINT_BYTES * (parameters(resolved) or 0)
    free = {folder: shutil.disk_usage(existing(folder)).free for folder in own}
    found = [
        f"{folder}: {free[folder] / 1e9:.0f} GB are free, and two checkpoints of this model take {size / 1e9:.0f} GB; "
        "a new one is complete before an old one goes"
        for folder in own
        if free[folder] < size
    ]
    local: dict[str, list[str]] = {}
    for path in dict.fromkeys(filter(None, [args.run_dir, *own, *needed])) if nodes > 1 else ():
        local.setdefault(file_system(existing(path)), []).append(path)
    return found + [
        f"{', '.join(names)}: on a local disk ({kind}) of this machine; the nodes need a file system that all of them "
        "mount"
        for kind, names in local.items()
        if kind in LOCAL_DISKS
    ]


def existing(path: str | Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    path = Path(path).absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def file_system(path: str | Path) -> str:
    """Return the kind of file system that ``path`` is on, such as lustre or ext2/ext3; "" where it is unknown."""
    code, kind = ask("stat", "--file-system", "--format=%T", str(path))
    return "" if code else kind
