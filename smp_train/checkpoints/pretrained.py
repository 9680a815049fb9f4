"""Load weights to start from: a Hugging Face folder, a weight file, a checkpoint, or another program's DCP tree."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import nn

from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.find import locate, open_verified
from smp_train.errors import CheckpointError
from smp_train.models.hf_weights import load_pretrained
from smp_train.models.hub_state import gather_state
from smp_train.models.weight_files import weight_files
from smp_train.storage.paths import place


def load_weights(
    model: nn.Module, location: str, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Fill a materialised model with the weights at ``location``, each rank reading its own part. Collective.

    ``location`` is a checkpoint, a run's folder (its newest checkpoint is verified and loaded), a checkpoint of AWS's
    sample, or what `load_pretrained` reads. It may be in S3. For weight files, ``on_progress`` gets the bytes done and
    the total bytes. Raises `CheckpointError` on every rank when any rank failed.
    """
    path = place(location)
    action = f"cannot read weights from {path}"
    kind = on_main(action, lambda: kind_of(path))
    if kind == "ours":
        checkpoint = open_verified(path)
        if "adapter" in checkpoint.meta:
            raise CheckpointError(
                f"{checkpoint.path} holds adapters alone; start from the model that smp-train checkpoint export "
                "--merge 1 writes"
            )
        checkpoint.load(gather_state(model, base=True))
    elif kind == "aws" and (sample := aws.find_checkpoint(os.fspath(path), model.config, strict=True)):
        sample.load(gather_state(model, base=True))
    else:
        gather(action, lambda: load_pretrained(model, path, on_progress))


def kind_of(location: str | os.PathLike[str]) -> str:
    """Return whether a location holds checkpoints (``ours``), SMP's sample checkpoints (``aws``) or ``files``."""
    kind = locate(location).kind
    if kind in ("checkpoint", "run") or (kind == "runs" and not weight_files(place(location))):
        return "ours"
    return "aws" if aws.checkpoint_paths(os.fspath(location)) else "files"
