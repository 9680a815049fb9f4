"""Chats as rows of tokens, through the tokenizer's chat template; only the assistant's turns carry loss."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np

from smp_train.data.kinds import SYSTEM, TOOLS, Kind
from smp_train.data.readers import Record, not_utf8
from smp_train.data.source import Problem, Row
from smp_train.data.text import Span, answer_row, object_of, string, tokens_in_spans, without_nul
from smp_train.data.time_limit import LimitExceeded, limited
from smp_train.errors import ConfigError, one_line
from smp_train.storage.paths import place as open_path

ASSISTANT = "assistant"
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT,
    "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
MAX_TURNS = 512
"""Most turns of a chat whose template does not mark answers: each answer takes two more renderings of the chat."""
RENDER_SECONDS, RENDER_BYTES = 20.0, 2 << 30
"""CPU time and memory for one chat: a template may loop without end."""
MAX_CHARACTERS = 64 << 20
SHOWN = 300
"""Characters of a template's own message that are shown."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
"""The function by which templates write today's date."""
TODAY = datetime(2024, 7, 26)
"""The date that templates write: always the same, so that a resumed run trains on the same tokens."""
FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f"|replace('%{code}', '{TODAY.strftime('%' + code)}')" for code in (*"dbBmyYaAHMS", "-d", "-m"))
    + " -}}{%- endmacro %}\n"  # templates are compiled with trim_blocks, which drops this line's end
)
"""Prepended to a template that asks for the date: replaces `CLOCK`."""


@dataclass(frozen=True)
class Chat:
    """A chat, as transformers' `apply_chat_template` takes it."""

    turns: list[dict[str, Any]]
    """``role``, ``content`` (a text, or parts of type text), and other fields of the template, such as tool calls."""
    tools: list[dict[str, Any]] | None = None


class Chats:
    """Makes rows of chats.

    An answer is the text that the template marks by ``{% generation %}``, else the text that an assistant's turn adds
    to the rendering of the turns before it with the generation prompt. A token partly in an answer carries loss.

    Args:
        tokenizer: of transformers, fast.
        kind: names the fields of a record.
        name: of the tokenizer, for messages.
        chat_template: a file that replaces the tokenizer's template.

    Raises ConfigError if the tokenizer has no template, or it does not compile.
    """

    def __init__(self, tokenizer: Any, kind: Kind, name: str, chat_template: str | None = None) -> None:
        self._tokenizer, self._kind = tokenizer, kind
        self.template = compiled_template(tokenizer, name, chat_template)
        """Text of the template."""
        self._marked = bool(GENERATION.search(self.template))

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, or the problem with it."""
        rows: list[Row | Problem | None] = []
        while len(rows) < len(records):
            try:
                with limited(RENDER_SECONDS, RENDER_BYTES) as renew:
                    for record in records[len(rows) :]:
                        renew()
                        rows.append(self._row(record))
            except (LimitExceeded, MemoryError):
                rows.append(
                    Problem(
                        f"the chat template takes more than {RENDER_SECONDS:.0f} s or {RENDER_BYTES >> 30} GiB; does "
                        "it loop? correct the template"
                    )
                )
        return rows

    def _row(self, record: Record) -> Row | Problem:
        try:
            chat = chat_of(object_of(record), self._kind)
            if self._marked:
                return answer_row(*self._marked_tokens(chat))
            text = self._text(chat)
            self._check_parts(chat, text)
            encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            return answer_row(encoding.ids, tokens_in_spans(encoding.offsets, self._answers(chat, text)))
        except ValueError as error:
            return Problem(one_line(error))

    def _marked_tokens(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a chat, and which of them the template marks as generated."""
        if any(isinstance(turn.get("content"), list) for turn in chat.turns):
            self._check_parts(chat, self._text(chat))
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        tokens = self._render(chat, **options, tokenizer_kwargs={"verbose": False})
        return list(tokens["input_ids"]), np.array(tokens["assistant_masks"], dtype=bool)

    def _check_parts(self, chat: Chat, text: str) -> None:
        """Raise ValueError where a template wrote a list of parts as Python shows it."""
        if any(isinstance(turn.get("content"), list) and str(turn["content"]) in text for turn in chat.turns):
            raise ValueError("the chat template knows no content in parts; make it one string")

    def _answers(self, chat: Chat, text: str) -> list[Span]:
        """Return the spans of the assistant's turns in the text of a chat. Raises ValueError."""
        if len(chat.turns) > MAX_TURNS:
            raise ValueError(
                f"its {len(chat.turns)} turns are more than {MAX_TURNS}; divide it, or give a template with "
                "{% generation %} (--chat_template)"
            )
        spans = []
        for number, turn in enumerate(chat.turns):
            if turn["role"] != ASSISTANT:
                continue
            if number == 0:
                raise ValueError(
                    "the first turn is the assistant's, so the chat template does not show where it begins; put a "
                    "turn before it, or give a template with {% generation %} (--chat_template)"
                )
            question = self._text(replace(chat, turns=chat.turns[:number]), add_generation_prompt=True)
            answered = self._text(replace(chat, turns=chat.turns[: number + 1]))
            if not (text.startswith(answered) and answered.startswith(question)):
                raise ValueError(
                    f"the chat template writes turn {number + 1} in another way when turns follow, so the answer has "
                    "no fixed position; give a template with {% generation %} (--chat_template)"
                )
            spans.append((len(question), len(answered)))
        if not spans:
            raise ValueError("no turn of the assistant: nothing to learn; remove the record")
        return spans

    def _text(self, chat: Chat, **options: Any) -> str:
        text = str(self._render(chat, **options))
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"the chat template writes more than {MAX_CHARACTERS} characters; correct the template")
        return text

    def _render(self, chat: Chat, **options: Any) -> Any:
        options = {"chat_template": self.template, "tokenize": False, "tools": chat.tools, **options}
        try:
            return self._tokenizer.apply_chat_template(chat.turns, **options)
        except (LimitExceeded, MemoryError):
            raise
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses it ({one_line(error)[:SHOWN]}); correct the turns") from None


def compiled_template(tokenizer: Any, name: str, chat_template: str | None) -> str:
    """Return the text of the chat template, after a trial rendering. Raises ConfigError."""
    from jinja2 import TemplateSyntaxError

    if chat_template is not None:
        try:
            tokenizer.chat_template = open_path(chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat_template {chat_template}: cannot be read ({one_line(error)})") from None
    if not tokenizer.chat_template:
        raise ConfigError(
            f"--tokenizer {name}: has no chat template, and the data holds chats; give --chat_template FILE"
        )
    location = chat_template or name
    try:
        template = str(tokenizer.get_chat_template())
    except ValueError as error:  # several templates without a default
        raise ConfigError(f"{location}: {one_line(error)}; give one with --chat_template FILE") from None
    template = FIXED_CLOCK + template if CLOCK in template else template
    try:
        with limited(RENDER_SECONDS, RENDER_BYTES):
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat template of {location}: line {error.lineno}: {one_line(error)}; correct it") from None
    except Exception:  # the template may refuse this chat and accept the data's chats
        pass
    return template


def chat_of(fields: dict[str, Any], kind: Kind) -> Chat:
    """Return the chat in a record. Raises ValueError: "reason; what to do"."""
    name = kind.fields[0]
    turns = fields.get(name)
    if not isinstance(turns, list):
        raise ValueError(f'no "{name}" list of turns in this record; set --text_column')
    if not turns:
        raise ValueError(f"{name} is empty: nothing to learn; remove the record")
    turns = [_without_nulls(turn) if isinstance(turn, dict) else turn for turn in turns]
    if kind.style == "sharegpt":
        turns = [_from_sharegpt(turn, f"{name}[{number}]") for number, turn in enumerate(turns)]
        if fields.get(SYSTEM):
            turns.insert(0, {"role": "system", "content": string(fields, SYSTEM)})
    for number, turn in enumerate(turns):
        _check_turn(turn, f"{name}[{number}]")
    chat = Chat(turns, _tools(fields.get(TOOLS)))
    for text in _strings([{**turn, "role": None} for turn in chat.turns] + (chat.tools or [])):
        without_nul(text)
    return chat


def _from_sharegpt(turn: Any, turn_name: str) -> dict[str, Any]:
    """Return a turn with ``from`` and ``value`` as one with ``role`` and ``content``."""
    speaker = turn.get("from") if isinstance(turn, dict) else None
    if not isinstance(speaker, str) or not isinstance(turn.get("value"), str):
        raise ValueError(f'{turn_name} has no "from" or no "value" string; write each turn as {{"from", "value"}}')
    if speaker not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise ValueError(f"{turn_name}: from is {speaker[:40]!r}, not one of {known}; rename it, or remove the record")
    return {"role": SHAREGPT_ROLES[speaker], "content": turn["value"]}


def _check_turn(turn: Any, turn_name: str) -> None:
    """Raise ValueError for a turn without role or content, or with parts that are not text."""
    turn = turn if isinstance(turn, dict) else {}
    content = turn.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            shown = str(part.get("type") if isinstance(part, dict) else part)[:40]
            raise ValueError(
                f'{turn_name}: content[{number}] is {shown!r}; write text parts as {{"type": "text", "text": ...}}; '
                "remove records with other parts, as only text is trained on"
            )
    if not isinstance(turn.get("role"), str):
        raise ValueError(f'{turn_name} has no "role" string; write each turn as {{"role", "content"}}')
    if not isinstance(content, str | list) and not turn.get("tool_calls"):
        raise ValueError(f'{turn_name} has no "content" string; write each turn as {{"role", "content"}}')


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str):  # JSON in a string, as in data sets for TRL, whose tools have different fields
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value or "null")
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise ValueError(f'"{TOOLS}" is no list of objects, nor JSON of one; write them as transformers takes them')
    return _without_nulls(value) or None


def _without_nulls(value: Any) -> Any:
    """Return a value without nulls: in tables all turns and all tools have all fields, null where unused."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, UnicodeDecodeError):
        raise ValueError(not_utf8(value))
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
