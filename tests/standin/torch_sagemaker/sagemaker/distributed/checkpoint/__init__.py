"""SMP's own savers and loaders, from 2.5 on."""

from tests import standin

if standin.version < (2, 5):
    raise ImportError("torch.sagemaker.distributed.checkpoint came with SMP 2.5")
