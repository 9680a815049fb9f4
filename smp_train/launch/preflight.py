"""What can be known of a run before it has a GPU: whether its model fits, what its GPUs cannot do, what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from smp_train.arguments import Resolved
from smp_train.errors import ConfigError
from smp_train.launch.instances import Instance
from smp_train.models.resolve import presets

WIDTHS = ("vocab_size", "hidden_width", "num_layers", "intermediate_size", "num_key_value_heads", "num_local_experts")
STATE_BYTES = 16
"""Per parameter: weight, gradient and Adam's two moments in float32."""
CHECKPOINT_BYTES = 12
"""Per parameter: weight and Adam's two moments in float32."""
NO_FP8 = ("A100", "A10G")  # before compute capability 8.9
GATED = ("meta-llama/", "mistralai/Mixtral", "mistralai/Mistral-7B-v0.3", "google/gemma")
LOCAL_DISKS = ("ext2/ext3", "xfs", "btrfs", "tmpfs", "overlayfs")


def parameters(resolved: Resolved) -> int | None:
    """Return the number of parameters of the model where a preset tells it, else None."""
    args = resolved.args
    if args.hf_pretrained_model_name_or_dir or any(resolved.given(name) for name in WIDTHS):
        return None
    preset = presets().get((str(args.model_type), str(args.model_size).lower()))
    return preset.parameters if preset else None


def check(resolved: Resolved, instance: Instance | None, world_size: int) -> None:
    """Refuse what ``world_size`` GPUs of ``instance`` cannot do; None (no GPU, or unknown) can do everything.

    Raises:
        ConfigError: with the setting to change.
    """
    args = resolved.args
    if instance is None:
        return
    if args.fp8 and instance.gpu in NO_FP8:
        raise ConfigError(
            f"--fp8 1: the {instance.gpu} of {instance.name} has no FP8; take p5 or later, or leave it out"
        )
    count = parameters(resolved)
    if count is None or args.cpu_offload:
        return
    tensor = args.tensor_parallel_degree * args.expert_parallel_degree
    replicated = args.sharding_strategy == "no_shard"
    shards = 1 if replicated else (args.hybrid_shard_degree or world_size // tensor)
    gigabytes = STATE_BYTES * count / (shards * tensor) / 1e9
    if gigabytes > instance.gpu_memory_gb:
        raise ConfigError(
            f"weights, gradients and optimizer of this model ({count / 1e9:.1f} B parameters) take {gigabytes:.0f} GB "
            f"on each GPU, spread over {shards * tensor}; the {instance.gpu} of {instance.name} has "
            f"{instance.gpu_memory_gb} GB: "
            + (
                "raise --hybrid_shard_degree"
                if shards * tensor < world_size
                else "take more nodes, a larger instance type, or --cpu_offload 1"
            )
        )


def lacks(resolved: Resolved, environ: Mapping[str, str]) -> list[str]:
    """Return what this run will ask for and not find, as far as this machine tells."""
    names = (resolved.args.hf_pretrained_model_name_or_dir, resolved.args.pretrained_model_name)
    model = next((str(name) for name in names if name and str(name).startswith(GATED)), None)
    home = Path(environ.get("HF_HOME") or Path(environ.get("HOME", "/")) / ".cache/huggingface")
    if model is None or os.path.isdir(model) or environ.get("HF_TOKEN") or (home / "token").exists():
        return []
    return [f"{model} is gated and there is no Hugging Face token here: `hf auth login`, or set HF_TOKEN"]


def places(resolved: Resolved, folder: str, nodes: int) -> list[str]:
    """Return what is wrong with the run folder's disk: too small for two checkpoints, or not shared by nodes."""
    found = []
    count = parameters(resolved)
    free = shutil.disk_usage(folder).free
    if count and free < 2 * CHECKPOINT_BYTES * count:
        found.append(
            f"{folder}: {free / 1e9:.0f} GB are free, and two checkpoints of this model take "
            f"{2 * CHECKPOINT_BYTES * count / 1e9:.0f} GB; a new one is complete before an old one goes"
        )
    if nodes > 1:
        asked = subprocess.run(
            ["stat", "--file-system", "--format=%T", folder], capture_output=True, text=True, check=False
        )
        kind = asked.stdout.strip()
        if kind in LOCAL_DISKS:
            found.append(
                f"{folder}: is on a local disk ({kind}); {nodes} nodes need a file system that all of them mount"
            )
    return found
