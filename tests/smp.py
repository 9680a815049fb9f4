"""Runs on a stand-in for `torch.sagemaker`, as the tests of the SMP backend need them.

The stand-in is the module that the environment variable SMP_STANDIN names: it has ``install()`` and ``journal``.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from smp_train.distributed.host import OLDEST, older
from smp_train.errors import SmpTrainError
from tests import harness
from tests.training import NO_MODEL, SAMPLE, alike, flags, numbers, train  # noqa: F401

NEEDS_NATIVE = f"the native backend needs torch {OLDEST['torch']}"
NATIVE = not older(torch.__version__, OLDEST["torch"])
Journal = list[tuple[str, dict[str, str]]]

DATA = {"use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 4096, "max_context_width": 64}
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "moe": 1}
NEOX = {"model_type": "gpt_neox", "num_key_value_heads": None}


def install() -> Any:
    """Install the stand-in in this process, and return it."""
    library = importlib.import_module(os.environ.get("SMP_STANDIN", "tests.standin"))
    library.install()
    return library


def train_on_smp(command_line: list[str], **environ: str) -> Journal:
    """Train on this rank with the stand-in installed, and return its journal."""
    os.environ.update(environ)
    library = install()
    assert train(command_line) == 0
    return [(what, {key: repr(value) for key, value in facts.items()}) for what, facts in library.journal]


def smp(folder: Path, **changes: Any) -> list[str]:
    """Return the command line of a tiny run on SMP."""
    return flags(folder, backend="smp", **{**DATA, **changes})


def train_alone(command_line: list[str]) -> None:
    """Train on one process: natively, or on SMP where torch is its container's and older than the native backend."""
    if NATIVE:
        harness.run(train, 1, command_line)
    else:
        harness.run(train_on_smp, 1, [*command_line, "--backend=smp"])


def pretrained_folder(folder: Path, **model: Any) -> Path:
    """Make a Hugging Face folder with weights below ``folder``, and return it."""
    settings = {"vocab_size": 4096, "save_final_model": 1, "model_dir": folder / "model", "seed": 5, **model}
    train_alone(flags(folder, max_steps=1, **settings))
    return folder / "model"


def tuned(pretrained: Path) -> dict[str, Any]:
    """Return the flags of a run that starts from a Hugging Face folder."""
    return {"hf_pretrained_model_name_or_dir": pretrained, **NO_MODEL}


def refusal_of(command_line: list[str], installed: bool, **environ: str) -> str:
    """Train on this rank, with the stand-in ``installed`` or not, and return why it stopped."""
    os.environ.update(environ)
    if installed:
        install()
    try:
        train(command_line)
    except SmpTrainError as error:
        return str(error)
    return "it trained"
