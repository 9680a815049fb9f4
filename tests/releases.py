"""What tests need of the installed transformers, which `make test-torch-versions` changes from release to release."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from smp_train.distributed.host import older
from smp_train.models.hugging_face import transformers_major
from smp_train.models.traits import OLDEST_TRANSFORMERS_OF_EXPERTS
from smp_train.parallel.context_parallel import OLDEST_TRANSFORMERS

TRANSFORMERS_5 = transformers_major() >= 5
needs_transformers_5 = pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has other interfaces")
IN_FLOAT32: dict[str, Any] = {"dtype" if TRANSFORMERS_5 else "torch_dtype": "float32"}
"""Argument of `from_pretrained`."""


def need_model(model_type: str) -> None:
    """Skip a test of a model type that this transformers does not have."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def need(*names: str) -> None:
    """Skip a test of a mixture (``mixtral``, ``ep...``) or of context parallelism (``cp...``) it lacks."""
    experts, context = (any(part in name for name in names for part in parts) for parts in (("mixtral", "ep"), ("cp",)))
    for needed, oldest in ((experts, OLDEST_TRANSFORMERS_OF_EXPERTS), (context, OLDEST_TRANSFORMERS)):
        if needed and older(transformers.__version__, oldest):
            pytest.skip(f"{' '.join(names)} needs transformers {oldest}")
