"""What of a record is a document: a text, a chat, or a prompt with its completion."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

TEXT, MESSAGES, PROMPT, COMPLETION = "text", "messages", "prompt", "completion"
TOOLS = "tools"
"""Field beside the turns of a chat, with what the assistant may call."""


@dataclass(frozen=True)
class Chat:
    """A chat, as `apply_chat_template` of transformers takes it."""

    turns: list[dict[str, Any]]
    """``role``, ``content`` (a text, or parts of type text), and what else the template reads, such as tool calls."""
    tools: list[dict[str, Any]] | None = None


Document = str | Chat | tuple[str, str]
"""A text, a chat, or a prompt with its completion; an empty text where there is nothing to train on."""


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

    def columns(self, there: Collection[str]) -> list[str]:
        """Return which of the fields that are ``there`` are read, in the order that `document` takes them."""
        return [*self.names, *({TOOLS} & set(there) if self.chat else ())]

    def document(self, values: Sequence[Any]) -> Document:
        """Return the document of a record, given the values of its fields. Raises ValueError: reason; what to do."""
        for value in values:
            if isinstance(value, ValueError):  # a text that is not UTF-8, or a line that is no record
                raise value
        if self.chat:
            return _chat(values[0], values[1] if len(values) > 1 else None, self.names[0])
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
    return list(document) if isinstance(document, tuple) else list(_strings(document))


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings within what a chat says, its roles and the names of fields left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Chat):
        yield from _strings([{**turn, "role": None} for turn in value.turns] + (value.tools or []))
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f'no "{name}" string in this record; set --text_column')
    return _without_nul(value)


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is a NUL; is it text? remove it")
    return text


def _chat(value: Any, tools: Any, name: str) -> Chat:
    if not isinstance(value, list):
        raise ValueError(f'no "{name}" list of turns in this record; set --text_column')
    if not value:
        raise ValueError(f"{name} is empty: nothing to learn; remove the record")
    turns = [_turn(given, f"{name}[{number}]") for number, given in enumerate(value)]
    if isinstance(tools, str):  # as in data sets for TRL, whose tools have not all the same fields
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools or "null")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f'"{TOOLS}" is no list of objects, nor JSON of one; write them as transformers takes them')
    chat = Chat(turns, _given(tools) or None)
    for text in _strings(chat):
        _without_nul(text)
    return chat


def _turn(given: Any, where: str) -> dict[str, Any]:
    turn: dict[str, Any] = _given(given) if isinstance(given, dict) else {}
    content = turn.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            shown = str(kind)[:40]
            raise ValueError(f"{where}: content[{number}] is {shown!r}; only text is trained on: remove the record")
    wanted = {"role": isinstance(turn.get("role"), str), "content": isinstance(content, str | list)}
    for field, fine in wanted.items():
        if not fine and not (field == "content" and turn.get("tool_calls")):
            raise ValueError(f'{where} has no "{field}" string; write each turn as {{"role", "content"}}')
    return turn


def _given(value: Any) -> Any:
    """Return a value without nulls: tables have all fields in all turns and tools, and null where one has none."""
    if isinstance(value, dict):
        return {key: _given(part) for key, part in value.items() if part is not None}
    return [_given(part) for part in value] if isinstance(value, list) else value
