"""Mixtures of experts, from 2.3 on."""

from tests import standin

if standin.version < (2, 3):
    raise ImportError("torch.sagemaker.moe came with SMP 2.3")
