"""Write a model to a folder as Hugging Face's libraries read it, on a file system or in S3.

A model never overwrites another one. The files of an existing model are first moved to a sub-folder ``previous-<n>``,
because a mount point (SageMaker's ``/opt/ml/model``) and a prefix in S3 cannot be renamed.
No library opens a folder without config.json or adapter_config.json, so these are moved first and written last. A
process that is killed in between therefore leaves no folder that opens with wrong or mixed weights.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import BinaryIO

from smp_train import storage
from smp_train.checkpoints.hf.card import CARD_FILE, is_our_card
from smp_train.errors import CheckpointError, ConfigError, SmpTrainError
from smp_train.models.hugging_face import ADAPTER_FILE, CONFIG_FILE, GENERATION_FILE
from smp_train.models.tokenizer import TOKENIZER_FILES
from smp_train.models.weight_files import INDEXES, NOT_MODEL_FILES, PICKLED, SAFETENSORS
from smp_train.storage import Storage
from smp_train.storage.paths import names_in, place

ENTRY_FILES = (CONFIG_FILE, ADAPTER_FILE)
"""Files that libraries need to open a model or an adapter."""
MOVING = ".moving"
"""File that is in ``previous-<n>`` while other files are moved there."""
_PREVIOUS = re.compile(r"previous-(\d{1,9})")

logger = logging.getLogger(__name__)


class ModelFolder:
    """The files of a new model. `ENTRY_FILES` wait in ``entry_files`` until all other files are written."""

    def __init__(self, folder: Storage) -> None:
        self.folder = folder
        self.entry_files: dict[str, bytes] = {}
        self.written: list[str] = []

    @contextmanager
    def stream(self, name: str, size: int) -> Iterator[BinaryIO]:
        """Yield a stream into a file of about ``size`` bytes. The file exists once the context ends without error."""
        self.written.append(name)
        with _errors_named(f"{self.folder.location}/{name}"), self.folder.writer(name, size) as file:
            yield file

    def put_all(self, files: Mapping[str, bytes]) -> None:
        """Write small files, except for entry files, which are held back."""
        for name, data in files.items():
            if name in ENTRY_FILES:
                self.entry_files[name] = data
                continue
            with self.stream(name, len(data)) as file:
                file.write(data)


@contextmanager
def new_model(location: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[ModelFolder]:
    """Yield the folder of a new model at ``location``; it can be opened once the context ends without an error.

    Raises `ConfigError` if a model, or part of one, is there already. With ``overwrite`` the existing model's files are
    moved to a sub-folder ``previous-<n>``. Files that are not part of a model stay. If the context ends with an error,
    the new files are deleted.
    """
    folder = storage.open_storage(location)
    with _errors_named(folder.location):
        names = _existing_model(location)
        if names and not overwrite:
            remedy = "give another folder, or move that model to a sub-folder with --overwrite 1"
            raise ConfigError(f"{folder.location} holds a model already; {remedy}")
        _move_aside(folder, names)
    model = ModelFolder(folder)
    try:
        yield model
        for name, data in model.entry_files.items():
            with model.stream(name, len(data)) as file:
                file.write(data)
    except BaseException:
        with suppress(OSError, SmpTrainError):
            for name in reversed(model.written):
                folder.delete(name)
        raise


def _existing_model(location: str | os.PathLike[str]) -> list[str]:
    """Return the names of a model's files in the order to move them: entry files, small files, weights, indexes.

    After an interruption, the weights or an index still show that the small files next to them belong to a model.
    """
    folder = place(location)
    names = names_in(folder)
    weights = [n for n in names if n.endswith((SAFETENSORS, *PICKLED)) and not n.startswith(NOT_MODEL_FILES)]
    if not weights and not {*ENTRY_FILES, *INDEXES}.intersection(names):
        return []
    small = [name for name in names if name in TOKENIZER_FILES or name == GENERATION_FILE]
    small += [CARD_FILE] if CARD_FILE in names and is_our_card((folder / CARD_FILE).read_bytes()) else []
    return [name for name in (*ENTRY_FILES, *small, *weights, *INDEXES) if name in names]


def _move_aside(folder: Storage, names: list[str]) -> None:
    """Move files to a new sub-folder ``previous-<n>``, or complete an interrupted move to the last such sub-folder."""
    numbers = [int(match[1]) for name in folder.level()[1] if (match := _PREVIOUS.fullmatch(name))]
    number = max(numbers, default=0)
    interrupted = folder.exists(f"previous-{number}/{MOVING}")
    if not names and not interrupted:
        return
    # Entry files move first, so one in both folders means that somebody wrote another model after the interruption.
    another = any(folder.exists(f"previous-{number}/{name}") for name in names if name in ENTRY_FILES)
    previous = f"previous-{number}" if interrupted and not another else f"previous-{number + 1}"
    folder.put(f"{previous}/{MOVING}", b"")
    for name in names:
        folder.move(name, f"{previous}/{name}")
    folder.delete(f"{previous}/{MOVING}")
    logger.warning("%s held a model, which is now in %s/%s", folder.location, folder.location, previous)


@contextmanager
def _errors_named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to {path}: {error.strerror or error}; give another folder") from None
