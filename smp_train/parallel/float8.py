"""Linear layers computed in 8-bit floating point, through torchao, on GPUs that have the instructions."""

from __future__ import annotations

import torch
from torch import nn

from smp_train.errors import ConfigError, one_line

OLDEST_CAPABILITY = (9, 0)
"""Compute capability of Hopper, the oldest GPUs with FP8 matrix products."""
MULTIPLE = 16
"""Both dimensions of a weight must be a multiple of this in an FP8 matrix product (torchao, float8 training)."""


def check(device: torch.device) -> None:
    """Raise `ConfigError` where ``--fp8 1`` cannot run: wrong device, or torchao missing or unusable."""
    if device.type != "cuda":
        raise ConfigError("--fp8 1 needs a GPU of the Hopper generation (H100) or newer, and this run is on the CPU")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        raise ConfigError(
            f"--fp8 1 needs a GPU of the Hopper generation (H100) or newer, and {torch.cuda.get_device_name(device)} "
            f"has compute capability {capability[0]}.{capability[1]}; use --bf16 1"
        )
    try:
        apply([nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, device="meta"))])
    except Exception as problem:  # a release that was built for a different torch may raise anything
        raise ConfigError(
            f"--fp8 1: torchao cannot convert a linear layer of torch {torch.__version__}: {one_line(problem)}; "
            "pip install torchao, in the release that its authors list for this torch"
        ) from problem


def convertible(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose dimensions FP8 products accept."""
    return isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)


def apply(layers: list[nn.Module]) -> int:
    """Let the linear layers inside the decoder ``layers`` compute in FP8, and return their number.

    Each tensor is scaled by its current largest value (torchao's dynamic scaling). Embedding and head, where FP8 costs
    the most accuracy, are outside the decoder layers and do not change. Fused expert weights and GPT-2's ``Conv1D`` do
    not change either, because they are no ``nn.Linear``. Parameters keep their names and precision.
    """
    from torchao.float8 import convert_to_float8_training

    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=lambda module, name: convertible(module))
    return sum(convertible(module) for layer in layers for module in layer.modules())
