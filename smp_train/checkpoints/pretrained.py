"""Starting from weights: a Hugging Face folder, one file, or a checkpoint of this program or of another's DCP."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import nn

from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.find import locate, open_verified
from smp_train.checkpoints.state import gather_state
from smp_train.errors import CheckpointError
from smp_train.models.hf_weights import load_pretrained
from smp_train.storage import normal
from smp_train.storage.paths import place


def load_weights(
    model: nn.Module, location: str, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Fill a materialised model with the weights at ``location``, each rank reading its own part. Collective.

    ``location`` is a Hugging Face folder or a weight file (see `load_pretrained`), a checkpoint of ours or a folder
    of them (the newest committed one, which must be intact), or a folder that `torch.distributed.checkpoint` wrote, all
    also in S3. Optimizer state that lies beside the weights is not read. ``on_progress`` is called with the bytes done
    and in all, where they are weight files. Raises `CheckpointError` on every rank when any rank failed.
    """
    path = place(location)
    what = f"cannot read weights from {path}"
    kind = on_main(what, lambda: kind_of(path))
    if kind == "ours":
        found = open_verified(path)
        if "adapter" in found.meta:
            raise CheckpointError(
                f"{found.path} holds adapters alone; start from what smp-train checkpoint export --merge 1 makes of it"
            )
        found.load(gather_state(model, base=True))
    elif kind == "aws":
        trees = aws.find_checkpoint(os.fspath(path), model.config, strict=True)
        assert trees is not None
        trees.load(gather_state(model, base=True))
    else:
        gather(what, lambda: load_pretrained(model, path, on_progress))


def kind_of(location: str | os.PathLike[str]) -> str:
    """Return whether there are checkpoints of ``ours``, of SMP's sample (``aws``), or ``files``. Not collective."""
    if locate(location).kind in ("checkpoint", "run", "runs"):
        return "ours"
    return "aws" if aws.checkpoint_names(normal(location)) or aws.has_trees(normal(location)) else "files"
