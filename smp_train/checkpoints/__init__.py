"""Checkpoints: one tree for all ranks, committed by a marker, verified when found, loaded on any mesh."""

from smp_train.checkpoints.discovery import Checkpoint, find, open_checkpoint
from smp_train.checkpoints.manager import CheckpointManager
from smp_train.checkpoints.manifest import RunId, folder_name
from smp_train.checkpoints.state import create_optimizer_state, gather_state
from smp_train.checkpoints.target import Policy
from smp_train.models.hub_names import canonical_name

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Policy",
    "RunId",
    "canonical_name",
    "create_optimizer_state",
    "find",
    "folder_name",
    "gather_state",
    "open_checkpoint",
]
