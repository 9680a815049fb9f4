"""What the records of a data set are: token rows, text, chats, or prompts with completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """The kind of a data set's records, and the fields that hold them."""

    name: str
    """``tokens``, ``text``, ``chats`` or ``completions``."""
    fields: tuple[str, ...]
    """Fields (or columns) that are read, the required ones first."""
    style: str = ""
    """``sharegpt`` for turns with from and value, ``alpaca`` for instruction, input and output; else empty."""

    @property
    def plural(self) -> str:
        """Return the name of the records for messages, such as "prompts with completions"."""
        raise NotImplementedError

    @property
    def answers_only(self) -> bool:
        """Return whether only answers carry loss: true of chats and of prompts with completions."""
        return self.name in ("chats", "completions")


def kind_of_record(record: Mapping[str, Any], column: str | None, where: str) -> Kind:
    """Return the kind of a record by its fields, or by --text_column.

    Raises ConfigError where two kinds are possible, DataError for preference pairs and for records of no known kind.
    """
    raise NotImplementedError
