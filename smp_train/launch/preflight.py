"""Checks of a run before it has a GPU: memory, FP8, degrees, data, disks, tokens, NCCL's plugin."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from smp_train.arguments import Resolved
from smp_train.arguments.sources import is_hub_name, read_weights
from smp_train.arguments.validation import prompts_only, runs_natively
from smp_train.distributed.degrees import before_launch, check_model, check_model_on_smp
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.errors import ConfigError
from smp_train.launch.command import ask
from smp_train.launch.flags import shared_folders
from smp_train.launch.instances import Instance, Machines
from smp_train.models.resolve import preset_of, settled_flags
from smp_train.models.state_memory import (
    CHECKPOINT_BYTES,
    GIB,
    STATE_BYTES,
    check_state,
    fewest_parameters,
    settled_width,
)

NO_FP8 = ("A100", "A10G")  # their compute capability is below 8.9
GATED = ("meta-llama/", "mistralai/Mixtral", "mistralai/Mistral-7B-v0.3", "google/gemma")
PLUGIN_PLACES = ("/opt/amazon/ofi-nccl", "/opt/aws-ofi-nccl", "/opt/amazon/aws-ofi-nccl", "/opt/aws-ofi-nccl/install")
LOCAL_DISKS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs")


def check(resolved: Resolved, machines: Machines) -> None:
    """Refuse a run that its machines cannot do."""
    args, instance = resolved.args, machines.instance
    settled = settled_flags(args)  # refuses an unknown preset
    check_degrees(resolved, settled)
    if instance is None:
        return
    if args.fp8 and instance.gpu in NO_FP8:
        raise ConfigError(
            f"--fp8 1: the {instance.gpu} of {instance.name} has no FP8; take p5 or later, or leave it out"
        )
    _check_state(
        resolved, machines.world_size, machines.processes,
        where=f"on each {instance.gpu} of {instance.name}, which has at most",
        memory=None if args.cpu_offload else instance.most_gpu_bytes,
    )  # fmt: skip


def check_host(resolved: Resolved, processes: int, on_host: int) -> None:
    """Refuse a run of ``processes``, ``on_host`` of them here, if this machine has no GPU and too little memory.

    Needs no torch, so that a model far too large is refused at once. GPUs of this machine, and models of checkpoints,
    are checked when the run is built.
    """
    if resolved.args.distributed_backend == "gloo" or not may_have_gpus():
        _check_state(
            resolved, processes, on_host,
            where=f"for the {on_host} process{'es' * (on_host > 1)} of {socket.gethostname()}, which has",
            memory=free_host_bytes(), on_host=on_host,
        )  # fmt: skip


def _check_state(resolved: Resolved, world_size: int, local_world_size: int, **memory: Any) -> None:
    args = resolved.args
    if prompts_only(args):
        return
    # A checkpoint to resume from may hold adapters to weights from elsewhere.
    adapted = args.resume_from_checkpoint and (args.hf_pretrained_model_name_or_dir or args.finetune)
    preset = preset_of(args)
    warning = check_state(
        args, fewest_parameters(args), name=preset.name if preset else "the model",
        frozen=bool(args.evaluate_only or args.lora_rank is not None or adapted), processes=world_size,
        sharing=sharing(resolved, world_size, local_world_size), **memory,
    )  # fmt: skip
    if warning:
        print(f"smp-train: warning: {warning}", file=sys.stderr)


def may_have_gpus() -> bool:
    """Return whether this machine has CUDA's driver library, without which torch sees no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def sharing(resolved: Resolved, world_size: int, local_world_size: int) -> int:
    """Return how many ranks share weights, gradients and optimizer, on the possible backend that shares most."""
    return max(degrees.sharing for degrees in before_launch(resolved.args, world_size, local_world_size))


def memory(resolved: Resolved, machines: Machines) -> list[str]:
    """Return a line about the memory of the model's states on each GPU; nothing if it is unknown."""
    preset, instance = preset_of(resolved.args), machines.instance
    if preset is None or instance is None or resolved.args.cpu_offload:
        return []
    count, over = preset.parameters, sharing(resolved, machines.world_size, machines.processes)
    return [
        f"weights, gradients and optimizer ({count / 1e9:.1f} B parameters): {STATE_BYTES * count / over / GIB:.2f} of "
        f"the {instance.gpu_bytes / GIB:.2f} GiB of each {instance.gpu}, spread over {over}; activations come on top, "
        "which `smp-train plan` counts"
    ]


def missing_token(resolved: Resolved, environ: Mapping[str, str], *, home: bool = True) -> list[str]:
    """Warn of a gated model without a token; ``home`` is False if the run does not see this home folder."""
    names = (resolved.args.hf_pretrained_model_name_or_dir, resolved.args.pretrained_model_name)
    model = next((str(name) for name in names if name and str(name).startswith(GATED)), None)
    if model is None or os.path.isdir(model) or environ.get("HF_TOKEN"):
        return []
    if not home:
        return [f"{model} is gated, and a container sees no login of this home folder: set HF_TOKEN"]
    if (hugging_face_home(environ) / "token").exists():
        return []
    return [f"{model} is gated and there is no Hugging Face token here: `hf auth login`, or set HF_TOKEN"]


def hugging_face_home(environ: Mapping[str, str]) -> Path:
    """Return Hugging Face's folder, which has the token of a login."""
    return Path(environ.get("HF_HOME") or Path(environ.get("HOME", "/")) / ".cache/huggingface")


def nccl_plugin(environ: Mapping[str, str]) -> str | None:
    """Return the file of NCCL's EFA plugin (aws-ofi-nccl); None if this machine or image lacks it."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [f"{root}/{pattern}" for pattern in ("lib*", "lib*/*") for root in PLUGIN_PLACES]
    files = (path for folder in folders for path in sorted(glob.glob(f"{folder}/libnccl-net*.so*")))
    return next(files, None)


def missing_plugin(instance: Instance) -> list[str]:
    """Warn if NCCL has no plugin for the instance's EFA adapters."""
    if nccl_plugin(os.environ):
        return []
    return [
        f"no EFA plugin for NCCL here (libnccl-net*.so of aws-ofi-nccl): {instance.name} has {instance.efa} adapters, "
        "and nodes would reach each other through TCP; take an image that has it (docker_build.sh), or install it"
    ]


def check_degrees(resolved: Resolved, settled: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse degrees that do not divide the model, if flags or a preset give its widths.

    ``settled`` is the result of `settled_flags`: values of the flags that were not given.
    """
    args = resolved.args
    tensor, context, expert = args.tensor_parallel_degree, args.context_parallel_degree, args.expert_parallel_degree
    if not settled or max(tensor, context, expert) == 1:
        return
    width = partial(settled_width, args, settled)
    experts = width("num_local_experts")
    # 0 stands for a width that the family lacks; every degree divides it.
    sizes = {
        "attention heads": width("num_heads"),
        "key-value heads": width("num_key_value_heads"),
        "tokens of vocabulary": width("vocab_size"),
        "columns of the feed-forward layer": 0 if experts else width("intermediate_size"),
    }
    sizes |= {"experts": experts} if experts else {}
    check = check_model if runs_natively(args) else check_model_on_smp
    check(sizes, seq_len=width("max_context_width"), tensor=tensor, context=context, expert=expert)


def data_folders(args: Any) -> list[tuple[str, str]]:
    """Return (flag, folder) of the data that flags name on a file system, without the weights of a blend."""
    sources = {"training_dir": args.training_dir, "dataset": args.dataset, "test_dir": [args.test_dir or ""]}
    folders = [(flag, read_weights([text])[0][0]) for flag, texts in sources.items() for text in texts or () if text]
    return [(flag, folder) for flag, folder in folders if "://" not in folder and not is_hub_name(folder)]


def check_data(args: Any) -> None:
    """Refuse folders of data that do not exist, or are empty; `ConfigError` names them."""
    for flag, folder in data_folders(args):
        if not Path(folder).exists():
            raise ConfigError(f"--{flag} {folder}: no such folder")
        if Path(folder).is_dir() and not any(os.scandir(folder)):
            raise ConfigError(f"--{flag} {folder}: is empty; `smp-train prepare` makes shards")


def disk_warnings(resolved: Resolved, nodes: int, needed: Sequence[str] = ()) -> list[str]:
    """Warn of disks that are too small for a run's checkpoints, or that its nodes do not share.

    ``needed`` are further files and folders that every node must see.
    """
    folders = shared_folders(resolved.args)
    size = 2 * CHECKPOINT_BYTES * fewest_parameters(resolved.args)
    free = {folder: shutil.disk_usage(existing(folder)).free for folder in folders}
    warnings = [
        f"{folder}: {free[folder] / 1e9:.0f} GB are free, and two checkpoints of this model take {size / 1e9:.0f} GB; "
        "a new one is complete before an old one goes"
        for folder in folders
        if free[folder] < size
    ]
    by_kind: dict[str, list[str]] = {}
    for path in dict.fromkeys(filter(None, [resolved.args.run_dir, *folders, *needed])) if nodes > 1 else ():
        by_kind.setdefault(file_system(existing(path)), []).append(path)
    return warnings + [
        f"{', '.join(paths)}: on a local disk ({kind}) of this machine; the nodes need a file system that all of them "
        "mount"
        for kind, paths in by_kind.items()
        if kind in LOCAL_DISKS
    ]


def existing(path: str | Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    path = Path(path).absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def file_system(path: str | Path) -> str:
    """Return the kind of file system of a path, such as lustre or ext2/ext3; "" if it is unknown."""
    code, kind = ask("stat", "--file-system", "--format=%T", str(path))
    return "" if code else kind.strip()
