"""The tokenizer of a model, read from the folder of its weights or of its data, and kept in its checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smp_train.models.hugging_face import load_tokenizer
from smp_train.storage.paths import on_this_machine, place, temporary

SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = frozenset({
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
})  # fmt: skip


@contextmanager
def open_tokenizer(location: str) -> Iterator[Any]:
    """Yield the tokenizer of a folder, of a tokenizer.json, or of a name on the hub; files may be in S3."""
    with on_this_machine(location) as local_copy:  # for the whole context: to save, some tokenizers copy their files
        yield load_tokenizer(local_copy)


def tokenizer_files(location: str, chat_template: str | None = None) -> dict[str, bytes]:
    """Return the tokenizer's files by name, as transformers saves them. Raises `ConfigError` if it cannot be opened.

    The file ``chat_template`` replaces the tokenizer's own chat template.
    """
    with open_tokenizer(location) as tokenizer:
        if chat_template is not None:
            tokenizer.chat_template = place(chat_template).read_text(encoding="utf-8")
        return saved_files(tokenizer.save_pretrained)


def saved_files(save: Callable[[str], Any]) -> dict[str, bytes]:
    """Return by name the small files that ``save`` writes to a folder."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextmanager
def folder_of(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a temporary folder with a tokenizer's files; errors name it "tokenizer of the checkpoint"."""
    with temporary("of the checkpoint") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        yield folder


@contextmanager
def tokenizer_from(files: Mapping[str, bytes]) -> Iterator[Any]:
    """Yield the tokenizer of `tokenizer_files`, or None without files."""
    with folder_of(files) as folder:
        yield load_tokenizer(folder) if files else None


def set_end_tokens(config: Any, files: Mapping[str, bytes]) -> None:
    """Set the first and the last token of a text, in a model's configuration, to the tokenizer's tokens, if known."""
    with tokenizer_from(files) as tokenizer:
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id


def adds_chat_template(files: Mapping[str, bytes], model: Mapping[str, bytes]) -> bool:
    """Return whether ``files`` are the model's tokenizer, by its vocabulary, with a chat template."""
    with tokenizer_from(files) as tokenizer, tokenizer_from(model) as model_tokenizer:
        has_template = getattr(tokenizer, "chat_template", None) is not None
        return has_template and tokenizer.get_vocab() == model_tokenizer.get_vocab()


def tokenizer_folder(weights: str | None) -> str | None:
    """Return the folder of ``weights`` if it holds a tokenizer."""
    if weights is None:
        return None
    path = place(weights)
    folder = path if path.is_dir() else path.parent
    return str(folder) if (folder / SETTINGS).is_file() else None


def tokenizer_folder_of_data(folders: Sequence[str]) -> str | None:
    """Return the first folder with a tokenizer among folders of prepared data and their parents."""
    candidates = (tokenizer_folder(name) or tokenizer_folder(str(place(name).parent)) for name in folders)
    return next((folder for folder in candidates if folder is not None), None)
