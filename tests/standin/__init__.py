"""A stand-in for SMP v2's `torch.sagemaker`, written from its public contract; real training over gloo inside.

``install()`` makes ``import torch.sagemaker`` work in this process; its calls are written to `journal`. With
``tests/standin/site`` and the repository on PYTHONPATH, and SMP_STANDIN_INSTALL set, every Python process has it,
torchrun's too. Tests use it through `tests.smp`, where the variable SMP_STANDIN can name another stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "torch_sagemaker"
ENGINE = Path(__file__).parent / "engine"

journal: list[tuple[str, dict[str, Any]]] = []
"""(what was called, with what), in order, on this rank."""
fp8_group: str | None = None
"""What agrees on FP8 scales just now."""


def record(what: str, **facts: Any) -> None:
    """Add one entry to the journal, and its name to ``rank-<rank>`` in the folder SMP_STANDIN_JOURNAL, if it is set."""
    journal.append((what, facts))
    folder = os.environ.get("SMP_STANDIN_JOURNAL")
    if folder:
        with Path(folder, f"rank-{os.environ.get('RANK', '0')}").open("a") as file:
            file.write(f"{what}\n")


def install() -> None:
    """Make `torch.sagemaker` of SMP 2.8, the last release, importable in this process, and patch FSDP as it does."""
    import torch

    from tests.standin import patches

    if str(HERE) not in torch.__path__:
        torch.__path__.append(str(HERE))
    if importlib.util.find_spec("transformer_engine") is None:
        sys.path.append(str(ENGINE))
    importlib.invalidate_caches()
    patches.apply()
