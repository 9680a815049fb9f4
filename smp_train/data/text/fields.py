"""What of a record is a document: a text, a chat, or a prompt with its completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TEXT, MESSAGES, PROMPT, COMPLETION = "text", "messages", "prompt", "completion"

Document = str | list[dict[str, Any]] | tuple[str, str]
"""A text, the turns of a chat, or a prompt with its completion; an empty text where there is nothing to train on."""


@dataclass(frozen=True)
class Fields:
    """The fields (or columns) of a record that make a document."""

    names: tuple[str, ...] = (TEXT,)
    """One, of texts or chats, or two, of prompts and completions."""
    chat: bool = False

    @property
    def kind(self) -> str:
        """What the documents are, for messages."""
        return "chats" if self.chat else "prompts with completions" if len(self.names) == 2 else "text"

    @property
    def answers(self) -> bool:
        """True of chats and of prompts with completions: each is a row of its own, and only the answers count."""
        return self.chat or len(self.names) == 2

    def document(self, values: Sequence[Any]) -> Document:
        """Return the document of a record, given the values of its fields. Raises ValueError: reason; what to do."""
        for value in values:
            if isinstance(value, ValueError):  # a text that is not UTF-8, or a line that is no record
                raise value
        if self.chat:
            return _turns(values[0], self.names[0])
        texts = [_text(value, name) for value, name in zip(values, self.names, strict=True)]
        if len(texts) == 1:
            return texts[0] if texts[0].strip() else ""
        if not texts[1].strip():
            raise ValueError(f"{self.names[1]} is empty: nothing to learn; remove the record")
        return texts[0], texts[1]


TEXTS = Fields()
"""Texts in the field of that name."""


def texts_of(document: Document) -> list[str]:
    """Return all texts in a document."""
    if isinstance(document, str):
        return [document]
    if isinstance(document, tuple):
        return list(document)
    return [str(turn.get("content", "")) for turn in document]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'no "{name}" string in this record; set --text_column')
    return _without_nul(value)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is a NUL; is it text? remove it")
    return text


def _turns(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise ValueError(f'no "{name}" list of turns in this record; set --text_column')
    if not value:
        raise ValueError(f"{name} is empty: nothing to learn; remove the record")
    turns = []
    for number, given in enumerate(value):
        # Tables have all fields in all turns, and null where a turn has none.
        turn = {key: part for key, part in given.items() if part is not None} if isinstance(given, dict) else {}
        for field in ("role", "content"):
            if not isinstance(turn.get(field), str) and not (field == "content" and turn.get("tool_calls")):
                raise ValueError(f'{name}[{number}] has no "{field}" string; write each turn as {{"role", "content"}}')
        _without_nul(turn.get("content") or "")
        turns.append(turn)
    return turns
