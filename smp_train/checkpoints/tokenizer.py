"""The tokenizer that goes with a model: found beside its weights or its data, kept in its checkpoints."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smp_train.checkpoints.model_folder import OF_A_TOKENIZER
from smp_train.models.hugging_face import load_tokenizer
from smp_train.storage.paths import names_in, on_this_machine, place, temporary

SETTINGS = "tokenizer_config.json"
DECISIVE = OF_A_TOKENIZER - {SETTINGS}

logger = logging.getLogger(__name__)


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
    """Yield a temporary folder that holds the files, those of a checkpoint for failures in the body."""
    with temporary("the checkpoint's tokenizer", called="((--)?tokenizer )?") as folder:
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
    """Return where the tokenizer of prepared data lies: in a folder of rows or the one above.

    Of several the first, if all are alike; else none, with a warning.
    """
    found = [there for name in folders if (there := beside(name) or beside(str(place(name).parent))) is not None]
    other = next((one for one in found[1:] if one != found[0] and _decisive(one) != _decisive(found[0])), None)
    if other is not None:
        logger.warning(
            "The tokenizers of %s and %s differ, and checkpoints are written without that of the data; give one of "
            "them, --tokenizer %s or --tokenizer %s", found[0], other, found[0], other,
        )  # fmt: skip
        return None
    return found[0] if found else None


def _decisive(folder: str) -> tuple[list[tuple[str, bytes]], Any]:
    """Return what decides which tokens a tokenizer makes of a text or a chat: its files, and those of its settings."""
    there = place(folder)
    settings: Any = (there / SETTINGS).read_text(encoding="utf-8")
    with suppress(ValueError, AttributeError):  # the loader refuses such a file with its reason
        settings = {key: v for key, v in json.loads(settings).items() if key.endswith(("_token", "chat_template"))}
    return [(name, (there / name).read_bytes()) for name in names_in(there) if name in DECISIVE], settings


def speaks_for(files: Mapping[str, bytes], model: Mapping[str, bytes]) -> bool:
    """Return whether the tokenizer of a model's data takes the place of the model's own: a chat template is with it.

    Not one with another vocabulary, with a warning.
    """
    with from_files(files) as found, from_files(model) as own:
        if getattr(found, "chat_template", None) is None:
            return False
        same: bool = found.get_vocab() == own.get_vocab()
    if not same:
        logger.warning(
            "The tokenizer of the data has another vocabulary than that of the model, which goes into the checkpoints"
        )
    return same
