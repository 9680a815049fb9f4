"""The tokenizer of a model, read from the folder of its weights or of its data, and kept in its checkpoints."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.models.hugging_face import load_tokenizer
from smp_train.storage.paths import on_this_machine, place, temporary

SETTINGS = "tokenizer_config.json"
TOKENIZER_FILES = frozenset({
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
})  # fmt: skip

logger = logging.getLogger(__name__)


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
    """Return whether ``files`` are the model's tokenizer with a chat template; warn of a different vocabulary."""
    with tokenizer_from(files) as tokenizer, tokenizer_from(model) as model_tokenizer:
        if getattr(tokenizer, "chat_template", None) is None:
            return False
        same: bool = tokenizer.get_vocab() == model_tokenizer.get_vocab()
    if not same:
        logger.warning("The data's tokenizer has another vocabulary than the model's, which goes into the checkpoints")
    return same


def tokenizer_folder(weights: str | None) -> str | None:
    """Return the folder of ``weights`` if it holds a tokenizer."""
    if weights is None:
        return None
    path = place(weights)
    folder = path if path.is_dir() else path.parent
    return str(folder) if (folder / SETTINGS).is_file() else None


def tokenizer_folder_of_data(folders: Sequence[str]) -> str | None:
    """Return the first folder with a tokenizer among folders of prepared data and their parents.

    If the tokenizers differ, it logs a warning and returns None.
    """
    candidates = (tokenizer_folder(name) or tokenizer_folder(str(place(name).parent)) for name in folders)
    locations = list(dict.fromkeys(folder for folder in candidates if folder is not None))
    for folder in locations[1:]:
        if not _are_equal(folder, locations[0]):
            logger.warning(
                "The tokenizers of %s and %s differ, so checkpoints are written without either; give one of them: "
                "--tokenizer %s or --tokenizer %s", locations[0], folder, locations[0], folder,
            )  # fmt: skip
            return None
    return locations[0] if locations else None


def _are_equal(folder: str, other: str) -> bool:
    try:
        return tokenizer_files(folder) == tokenizer_files(other)
    except ConfigError:  # one of them cannot be read
        return False
