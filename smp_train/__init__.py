"""One training program for Hugging Face language models: on SMP v2, on stock PyTorch, or with no GPU at all.

From Python: `train`, `evaluate`, `generate`, `load_model` (docs/python.md). They import torch when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_train.api import evaluate, generate, load_model, train

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "generate", "load_model", "train"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("smp_train.api"), name)
