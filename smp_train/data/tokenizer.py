"""Loads tokenizers from a folder, a file, S3 or the hub, trains them, and finds their end token."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.distributed.host import cores
from smp_train.errors import ConfigError, first_line
from smp_train.models.hugging_face import asking_hub, load_tokenizer, refuse_sentencepiece, trust_code
from smp_train.storage.paths import on_this_machine

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|im_end|>")


@lru_cache(maxsize=4)
def load_with_end(name: str, eos_token: str | None, *, special_as_text: bool) -> tuple[Tokenizer, int]:
    """Return a tokenizer and the id of its end token; ``special_as_text`` reads special tokens in a text as text."""
    with on_this_machine(name) as location:
        tokenizer = load(location)
        _, end = end_token(tokenizer, eos_token, location)
    tokenizer.encode_special_tokens = special_as_text
    return tokenizer, end


def load(name: str) -> Tokenizer:
    """Return a fast tokenizer from a ``tokenizer.json``, a folder, or a name on the hub. Raises ConfigError."""
    from tokenizers import Tokenizer

    path = Path(name)
    refuse_sentencepiece(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        if path.is_dir() and not file.exists():
            return backend(load_tokenizer(name), name)
        with nullcontext() if file.exists() else asking_hub():
            tokenizer: Tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(f"--tokenizer {name}: cannot be loaded ({first_line(error)})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def load_for_chats(name: str, trusted: bool) -> Any:
    """Return transformers' tokenizer, which has the chat template. Raises ConfigError."""
    if trusted:
        trust_code(True)
    with on_this_machine(name) as location:
        tokenizer = load_tokenizer(location)
    backend(tokenizer, name)
    return tokenizer


def backend(tokenizer: Any, name: str) -> Tokenizer:
    """Return the fast tokenizer within transformers' tokenizer, without padding. Raises ConfigError for a slow one."""
    fast: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise ConfigError(f"--tokenizer {name}: has no fast form; convert it to a tokenizer.json")
    fast.no_padding()
    fast.no_truncation()
    return fast


def spread_tokenizing(processes: int) -> None:
    """Give each of ``processes`` on this machine its share of the cores; call it before the first text is tokenized."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cores() // processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def end_token(tokenizer: Tokenizer, name: str | None, location: str | None = None) -> tuple[str, int]:
    """Return the token that ends a document, and its id: ``name``, the token of ``location``, or a well-known token."""
    declared: object = None
    path = Path(location or "")
    with suppress(OSError, ValueError, AttributeError):
        config = (path.parent if path.is_file() else path) / "tokenizer_config.json"
        declared = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if location else None
    declared = declared.get("content") if isinstance(declared, dict) else declared
    for token in [declared, *KNOWN_ENDS] if name is None else [name]:
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            return str(token), number
    tried = f"--eos_token {name}" if name is not None else " ".join(KNOWN_ENDS)
    raise ConfigError(f"{tried}: the tokenizer has no such token; name its end token with --eos_token")


def train(
    documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), min_frequency: int = 0
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most ``vocab_size`` entries, which can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = list(dict.fromkeys([END, *special_tokens]))
    if vocab_size < 256 + len(special):
        raise ConfigError(
            f"--train_tokenizer {vocab_size}: 256 bytes, {END} and --special_tokens need {256 + len(special)}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, min_frequency=min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer
