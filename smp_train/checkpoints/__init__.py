"""Checkpoints: one tree for all ranks, committed by a marker, verified when found, loaded on any mesh."""

from smp_train.checkpoints.discovery import Checkpoint, find, open_checkpoint
from smp_train.checkpoints.manager import CheckpointManager
from smp_train.checkpoints.manifest import RunId
from smp_train.checkpoints.state import gather_state
from smp_train.checkpoints.target import Policy

__all__ = ["Checkpoint", "CheckpointManager", "Policy", "RunId", "find", "gather_state", "open_checkpoint"]
