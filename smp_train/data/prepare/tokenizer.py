"""The tokenizer of a preparation: loaded by path or name, or trained on the documents themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smp_train.errors import ConfigError
from smp_train.models.hugging_face import asking_hub, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "<|im_end|>")


def train(
    documents: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), min_frequency: int = 0
) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` entries: GPT-2's scheme, which can write any text.

    ``special_tokens`` and the end token are never split; pairs that occur ``min_frequency`` times are merged.
    """
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


def load(name: str) -> Tokenizer:
    """Load a ``tokenizer.json``, a folder with one, or a tokenizer of the Hugging Face hub by name."""
    from tokenizers import Tokenizer

    path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    tokenizer: Any
    try:
        if path.exists():
            tokenizer = Tokenizer.from_file(str(path))
        elif Path(name).is_dir():
            # Of a SentencePiece or older tokenizer transformers makes a fast one.
            tokenizer = getattr(load_tokenizer(name), "backend_tokenizer", None)
            if tokenizer is None:
                raise ConfigError(f"--tokenizer {name}: has no fast form; convert it to a tokenizer.json")
        else:
            with asking_hub():
                tokenizer = Tokenizer.from_pretrained(name)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--tokenizer {name}: cannot be loaded ({str(error).splitlines()[0]})") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    loaded: Tokenizer = tokenizer
    return loaded


def encode(tokenizer: Tokenizer, texts: list[str], end: int) -> list[np.ndarray]:
    """Return the tokens of each text with the end token behind them, uint32; none of an empty text."""
    # Since 0.20: faster, as it leaves out offsets into the text, which are not needed here.
    batch = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
    encoded = batch(texts, add_special_tokens=False)
    return [
        np.array([*encoding.ids, end] if text else [], dtype=np.uint32)
        for text, encoding in zip(texts, encoded, strict=True)
    ]


def end_token(tokenizer: Tokenizer, given: str | None, folder: str | None = None) -> tuple[str, int]:
    """Return the token that ends a document, with its id: as given, the folder's own, or a well-known one."""
    declared: object = None
    where = Path(folder or "")
    config = (where.parent if where.is_file() else where) / "tokenizer_config.json"
    if folder and config.is_file():
        declared = json.loads(config.read_text()).get("eos_token")
        declared = declared.get("content") if isinstance(declared, dict) else declared
    for token in [given] if given is not None else [declared, *KNOWN_ENDS]:
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            return str(token), number
    if given is not None:
        raise ConfigError(f"--eos_token {given}: the tokenizer has no such token")
    raise ConfigError(f"the tokenizer has none of {' '.join(KNOWN_ENDS)}; name its end token with --eos_token")
