"""A folder that a model is written to as Hugging Face has it, on a file system or in S3."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from smp_train import storage
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.hugging_face import ADAPTER_FILE, CONFIG_FILE
from smp_train.models.weight_files import INDEXES, weight_files
from smp_train.storage import Storage
from smp_train.storage.paths import Place, names_in, place

SCRATCH = ".partial"
"""Sub-folder in which a model is written before it replaces another one."""
OF_A_MODEL = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)")
"""Names that transformers gives to weights it writes; other files are not part of the model and stay."""
OPENS = (CONFIG_FILE, ADAPTER_FILE)
"""Files without which a model, or an adapter, does not open. transformers opens an adapter before a model beside it."""
OF_A_TOKENIZER = frozenset({
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
})  # fmt: skip
"""Files of tokenizers: one left over from an earlier tokenizer would be read together with the new one's."""
OF_AN_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")


@contextmanager
def writing(location: str | os.PathLike[str], replace: bool = False) -> Iterator[Storage]:
    """Yield a folder to write a model to, which is at ``location`` when the context is left without an error.

    Raises `ConfigError` where a model is there and ``replace`` is not set. Where it is, the new model is written to a
    sub-folder and its files are renamed once it is whole: there must be room for both. The folder itself is not
    replaced: it may be a mount point (SageMaker's ``/opt/ml/model``), S3 has no rename, and what is no part of the
    model stays.
    """
    there, folder = place(location), storage.at(location)
    with _explained(there):
        names = set(names_in(there))
        held = [name for name in (*OPENS, *INDEXES) if name in names] + weight_files(there)
    if not held:
        yield folder
        return
    if not replace:
        raise ConfigError(f"{there} holds a model already; give another folder, or replace it with --overwrite 1")
    with _explained(there):
        old = _files_of_the_model(there, names)
        folder.delete_folder(SCRATCH)
    try:
        yield storage.at(f"{folder.location}/{SCRATCH}")
    except BaseException:
        with contextlib.suppress(OSError, CheckpointError):
            folder.delete_folder(SCRATCH)
        raise
    with _explained(there):
        # The file without which the folder does not open is removed first and written last: a kill in between leaves no
        # folder that opens with wrong weights, and the next export completes it.
        new = sorted(folder.files(SCRATCH), key=lambda name: (name in OPENS, name))
        if "tokenizer_config.json" in new:  # which every tokenizer has
            old += sorted(names & OF_A_TOKENIZER)
        for name in old:
            if name in OPENS or name not in new:
                folder.delete(name)
        for name in new:
            folder.move(f"{SCRATCH}/{name}", name)
        folder.delete_folder(SCRATCH)


def _files_of_the_model(there: Place, names: set[str]) -> list[str]:
    """Return the names of a model's files: those it opens by, then weights, then indexes of weights."""
    found = {name for name in names if OF_A_MODEL.fullmatch(name)}
    found |= {name for name in names if ADAPTER_FILE in names and OF_AN_ADAPTER.fullmatch(name)}
    for index in names & set(INDEXES):
        with contextlib.suppress(ValueError, KeyError, AttributeError):
            found |= names & set(json.loads((there / index).read_text(encoding="utf-8"))["weight_map"].values())
    return [name for name in (*OPENS, *sorted(found), *INDEXES) if name in names]


@contextmanager
def _explained(where: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to {where}: {error.strerror or error}; give another folder") from None


def check_writable(location: str | os.PathLike[str], flag: str) -> None:
    """Prove that files can be written to ``location``, which ``flag`` gave, and removed; else `CheckpointError`."""
    probe = f".probe-{uuid.uuid4().hex[:8]}"
    try:
        folder = storage.at(location)
        put(folder, probe, b"smp-train\n")
        folder.delete(probe)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"--{flag}: {error}") from None


@contextmanager
def stream(folder: Storage, name: str, size: int) -> Iterator[BinaryIO]:
    """Yield a stream into a file of about ``size`` bytes, which is there when the context ends without an error."""
    with _explained(f"{folder.location}/{name}"), folder.writer(name, size) as file:
        yield file


def put(folder: Storage, name: str, data: bytes) -> None:
    """Write a small file."""
    with stream(folder, name, len(data)) as file:
        file.write(data)


def put_made(folder: Storage, make: Callable[[str], Any]) -> None:
    """Write the files that ``make`` writes to a folder of this machine, that which a model opens by last."""
    with tempfile.TemporaryDirectory() as made:
        make(made)
        files = [path for path in Path(made).rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (path.name in OPENS, path.name)):
            put(folder, path.relative_to(made).as_posix(), path.read_bytes())
