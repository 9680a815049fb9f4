"""The tokenizer that goes with a model: found beside its weights or its data, kept in its checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smp_train.models.hugging_face import load_tokenizer
from smp_train.storage.paths import on_this_machine, place

SETTINGS = "tokenizer_config.json"


@contextmanager
def opened(location: str) -> Iterator[Any]:
    """Yield the tokenizer at a location: a folder, a tokenizer.json, or a name on the hub; folders also in S3."""
    with on_this_machine(location) as here:  # until it is saved: some tokenizers copy their files
        yield load_tokenizer(here)


def tokenizer_files(location: str, chat_template: str | None = None) -> dict[str, bytes]:
    """Return by name the files with which transformers opens the tokenizer. Raises `ConfigError` where it cannot.

    ``chat_template`` is a file with the template that takes the place of the tokenizer's own.
    """
    with opened(location) as found, tempfile.TemporaryDirectory() as folder:
        if chat_template is not None:
            found.chat_template = place(chat_template).read_text(encoding="utf-8")
        found.save_pretrained(folder)
        paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def from_files(files: Mapping[str, bytes]) -> Iterator[Any]:
    """Yield the tokenizer of `tokenizer_files`; None of no files."""
    with written(files) as folder:
        yield load_tokenizer(folder) if files else None


def set_ends(config: Any, files: Mapping[str, bytes]) -> None:
    """Set the tokens that begin and end a text, in a model's configuration, to the tokenizer's, if it has them."""
    with from_files(files) as found:
        if found is not None and found.eos_token_id is not None:
            config.bos_token_id, config.eos_token_id = found.bos_token_id, found.eos_token_id


@contextmanager
def written(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a temporary folder that holds the files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder


def beside(weights: str | None) -> str | None:
    """Return the folder of ``weights`` where a tokenizer lies there."""
    if weights is None:
        return None
    there = place(weights)
    folder = there if there.is_dir() else there.parent
    return str(folder) if (folder / SETTINGS).is_file() else None


def beside_data(folders: Sequence[str]) -> str | None:
    """Return where the tokenizer of prepared data lies: in the folder of rows or the one above, alike for all."""
    found = {beside(name) or beside(str(place(name).parent)) for name in folders}
    return found.pop() if len(found) == 1 else None
