"""Chats, and prompts with completions, as rows of tokens of which only the answers are counted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from smp_train.data.source import IGNORED, Row
from smp_train.data.text.fields import Chat, Document, Fields
from smp_train.errors import ConfigError, one_line
from smp_train.models.hugging_face import load_tokenizer
from smp_train.storage.paths import place

ASSISTANT = "assistant"
MOST_TURNS = 512
"""Most turns of a chat whose template has no marks: answers are found by rendering it up to each of them."""
SHOWN = 300
"""Characters of a message that a template raises."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
"""The function by which templates write today's date."""
TODAY = datetime(2024, 7, 26)
"""The date that they write here: always the same, so that a resumed run reads the same rows."""
SAME_DAY = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f"|replace('%{code}', '{TODAY.strftime('%' + code)}')" for code in (*"dbBmyYaAHMS", "-d", "-m"))
    + " -}}{%- endmacro %}\n"  # of which nothing is written: templates are compiled with trim_blocks
)
"""Prepended to a template that asks for the date: replaces `CLOCK`."""

Encoded = Row | str
"""A row, or why there is none: reason; what to do."""
Span = tuple[int, int]


def chat_tokenizer(location: str, chat_template: str | None, fields: Fields) -> Any:
    """Return transformers' tokenizer at a location, with ``chat_template``, a file, where one is given.

    Raises ConfigError where the tokenizer is unusable for documents of ``fields``: slow, or, for chats, without a
    chat template that can be compiled.
    """
    tokenizer = load_tokenizer(location)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"--tokenizer {location}: has no fast form; convert it to a tokenizer.json")
    if chat_template is not None:
        try:
            tokenizer.chat_template = place(chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat_template {chat_template}: cannot be read ({one_line(error)})") from None
    if fields.chat:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"--tokenizer {location}: has no chat template, and the data holds chats; give --chat_template FILE"
            )
        _compile(tokenizer, chat_template or location)
    return tokenizer


def _compile(tokenizer: Any, where: str) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        template = _template(tokenizer)
    except ValueError as error:  # several templates, none of which is the default
        raise ConfigError(f"{where}: {one_line(error)}; give one with --chat_template FILE") from None
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat template of {where}: line {error.lineno}: {one_line(error)}; correct it") from None
    except Exception:  # a template may refuse a chat of one turn; the rows say what it refuses
        pass


def _template(tokenizer: Any) -> str:
    template: str = tokenizer.get_chat_template()
    return SAME_DAY + template if CLOCK in template else template


class Conversations:
    """Turns documents into rows: ids of the whole document, and labels that leave all but the answers out.

    Of a chat, through the tokenizer's chat template, the assistant's turns are counted: what the template marks by
    ``{% generation %}``, else what each such turn adds to the text of the turns before it with the prompt for a
    generation behind them. Of a prompt with its completion, the completion and the end token behind it. A token on
    the border is counted.

    Args:
        tokenizer: of transformers, fast, as `chat_tokenizer` returns it.
        fields: what the documents are.
        end: the token behind a completion.
    """

    def __init__(self, tokenizer: Any, fields: Fields, end: int) -> None:
        self.tokenizer, self.fields, self.end = tokenizer, fields, end
        self.template = _template(tokenizer) if fields.chat else ""
        self._marked = bool(GENERATION.search(self.template))

    def __call__(self, documents: Sequence[Document]) -> list[Encoded]:
        """Return a row of each document, or why there is none."""
        return [self._encoded(document) for document in documents]

    def _encoded(self, document: Document) -> Encoded:
        try:
            if isinstance(document, tuple):
                ids, counted = self._completion(*document)
            else:
                assert isinstance(document, Chat)
                ids, counted = self._chat(document)
        except ValueError as error:
            return one_line(error)
        counted[:1] = False  # with no token before it
        labels = np.where(counted, ids, IGNORED).astype(np.int32)
        row = Row(np.array(ids, dtype=np.uint32), labels=labels)
        return row if row.has_target() else "no token of an answer is counted: nothing to learn; remove the record"

    def _completion(self, prompt: str, completion: str) -> tuple[list[int], np.ndarray]:
        text = prompt + completion
        ids, counted = self._tokens(text, [(len(prompt), len(text))])
        if ids[-1:] == [self.end]:  # of a tokenizer that ends each text itself
            counted[-1] = True
            return ids, counted
        return [*ids, self.end], np.append(counted, True)

    def _tokens(self, text: str, spans: list[Span], **options: Any) -> tuple[list[int], np.ndarray]:
        """Return the tokens of a text, and which have a character in one of ``spans``."""
        found = self.tokenizer(text, return_offsets_mapping=True, verbose=False, **options)
        offsets = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        counted = np.zeros(len(offsets), dtype=bool)
        for begin, end in spans:
            counted |= (offsets[:, 1] > begin) & (offsets[:, 0] < end)
        return list(found["input_ids"]), counted

    def _chat(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        parts = [turn["content"] for turn in chat.turns if isinstance(turn.get("content"), list)]
        text = "" if self._marked and not parts else self._text(chat)
        if any(str(content) in text for content in parts):
            raise ValueError("the chat template knows no content in parts; make it one string")
        if not self._marked:
            return self._tokens(text, self._answers(chat, text), add_special_tokens=False)
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._rendered(chat, **options, tokenizer_kwargs={"verbose": False})
        return list(found["input_ids"]), np.array(found["assistant_masks"], dtype=bool)

    def _answers(self, chat: Chat, text: str) -> list[Span]:
        """Return the characters of the assistant's turns in the text of a chat. Raises ValueError."""
        if len(chat.turns) > MOST_TURNS:
            raise ValueError(
                f"its {len(chat.turns)} turns are more than {MOST_TURNS}; divide it, or give a template with "
                "{% generation %} (--chat_template)"
            )
        spans = []
        for number, turn in enumerate(chat.turns):
            if turn["role"] != ASSISTANT:
                continue
            if number == 0:
                raise ValueError(
                    "the first turn is the assistant's, so that the chat template does not tell its beginning; put a "
                    "turn before it, or give a template with {% generation %} (--chat_template)"
                )
            before = self._text(replace(chat, turns=chat.turns[:number]), add_generation_prompt=True)
            behind = self._text(replace(chat, turns=chat.turns[: number + 1]))
            if not (text.startswith(behind) and behind.startswith(before)):
                raise ValueError(
                    f"the chat template writes turn {number + 1} in another way when others follow, so that it cannot "
                    "be found; give a template with {% generation %} (--chat_template)"
                )
            spans.append((len(before), len(behind)))
        if not spans:
            raise ValueError("no turn of the assistant: nothing to learn; remove the record")
        return spans

    def _text(self, chat: Chat, **options: Any) -> str:
        return str(self._rendered(chat, **options))

    def _rendered(self, chat: Chat, **options: Any) -> Any:
        try:
            options = {"chat_template": self.template, "tokenize": False, "tools": chat.tools, **options}
            return self.tokenizer.apply_chat_template(chat.turns, **options)
        except Exception as error:  # of the template, which may raise anything
            raise ValueError(f"the chat template refuses it ({one_line(error)[:SHOWN]}); correct the turns") from None
