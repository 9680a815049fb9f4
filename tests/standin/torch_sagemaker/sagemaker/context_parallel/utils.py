"""Context parallelism of models that are not transformed."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests import standin


def setup_transformer_engine_cp_groups(model: nn.Module, cp_global_ranks: list[int], cp_process_group: Any) -> None:
    """Note the call: this stand-in has no Transformer Engine attention outside transformed models."""
    standin.record("setup_transformer_engine_cp_groups", ranks=list(cp_global_ranks))
