"""Turns chats into rows of tokens with the tokenizer's chat template; only the assistant's turns carry loss."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from smp_train.data.kinds import SYSTEM, TOOLS, Kind
from smp_train.data.readers import Record, not_utf8
from smp_train.data.source import Problem, Row
from smp_train.data.text import Span, answer_row, checked_text, object_of, string, tokens_in_spans
from smp_train.errors import ConfigError, one_line
from smp_train.storage.paths import place as open_path

ASSISTANT = "assistant"
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT,
    "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
RENDER_SECONDS = 20.0
"""Limit of the CPU time for a group of chats, since a template may loop without end."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TODAY = datetime(2024, 7, 26)
"""The date that templates get as today's date: always the same, so that a resumed run trains on the same tokens."""
FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{- format"
    + "".join(f"|replace('%{code}', '{TODAY.strftime('%' + code)}')" for code in (*"dbBmyYaAHMS", "-d", "-m"))
    + " -}}{%- endmacro %}\n"  # templates are compiled with trim_blocks, which removes this newline
)
"""Text put before a template: it replaces the function with which the template asks for today's date."""

Turns = list[dict[str, Any]]
"""Turns of a chat, each with ``role``, ``content`` (a string or parts of type text), and other fields of a template."""
Tools = list[dict[str, Any]] | None


class Chats:
    """Makes rows of tokens from chats.

    An answer is the text that the template marks by ``{% generation %}``. If the template has no marks, an answer is
    the text that an assistant's turn adds to the earlier turns with the generation prompt. A token that lies partly in
    an answer carries loss.

    ``tokenizer`` is a fast tokenizer of transformers, ``name`` its name in messages, and ``chat_template`` a file that
    replaces the tokenizer's template. Raises ConfigError if there is no template, or if the template does not compile.
    """

    def __init__(self, tokenizer: Any, kind: Kind, name: str, chat_template: str | None = None) -> None:
        self._tokenizer, self._kind = tokenizer, kind
        self.template = compiled_template(tokenizer, name, chat_template)
        self._marked = bool(GENERATION.search(self.template))

    def __call__(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, or the problem with it."""
        rows: list[Row | Problem | None] = []
        while len(rows) < len(records):
            try:
                with _limited(RENDER_SECONDS):
                    rows.extend(map(self._row, records[len(rows) :]))
            except (EndlessTemplate, MemoryError):
                seconds = f"{RENDER_SECONDS:.0f} s, or all memory"
                rows.append(Problem(f"the chat template takes over {seconds}; does it loop? correct the template"))
        return rows[: len(records)]

    def _row(self, record: Record) -> Row | Problem:
        try:
            turns, tools = chat_of(object_of(record), self._kind)
            parts = [turn["content"] for turn in turns if isinstance(turn.get("content"), list)]
            text = "" if self._marked and not parts else self._render(turns, tools)
            if any(str(content) in text for content in parts):  # the template printed a list
                raise ValueError("the chat template knows no content in parts; make it one string")
            if self._marked:
                options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
                tokens = self._render(turns, tools, **options, tokenizer_kwargs={"verbose": False})
                return answer_row(tokens["input_ids"], np.array(tokens["assistant_masks"], dtype=bool))
            encoding = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
            return answer_row(encoding.ids, tokens_in_spans(encoding.offsets, self._answers(turns, tools, text)))
        except ValueError as error:
            return Problem(one_line(error))

    def _answers(self, turns: Turns, tools: Tools, text: str) -> list[Span]:
        """Return the spans of the assistant's turns in the text of a chat. Raises ValueError."""
        remedy = "give a template with {% generation %} (--chat_template)"
        spans = []
        for number in (number for number, turn in enumerate(turns) if turn["role"] == ASSISTANT):
            if number == 0:
                raise ValueError(
                    "the first turn is the assistant's, so the chat template does not show where it begins; put a "
                    f"turn before it, or {remedy}"
                )
            question = self._render(turns[:number], tools, add_generation_prompt=True)
            answered = self._render(turns[: number + 1], tools)
            if not (text.startswith(answered) and answered.startswith(question)):
                raise ValueError(
                    f"the chat template writes turn {number + 1} in another way when turns follow, so the answer has "
                    f"no fixed position; {remedy}"
                )
            spans.append((len(question), len(answered)))
        if not spans:
            raise ValueError("no turn of the assistant: nothing to learn; remove the record")
        return spans

    def _render(self, turns: Turns, tools: Tools, **options: Any) -> Any:
        """Return the text of a chat, or its tokens if ``tokenize`` is set. Raises ValueError."""
        options = {"chat_template": self.template, "tokenize": False, "tools": tools, **options}
        try:
            return self._tokenizer.apply_chat_template(turns, **options)
        except (EndlessTemplate, MemoryError):
            raise
        except Exception as error:  # a template may raise anything
            raise ValueError(f"the chat template refuses it ({one_line(error)[:300]}); correct the turns") from None


class EndlessTemplate(Exception):
    """Raised when a template takes too much time."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `EndlessTemplate` in the body once it has used ``seconds`` of CPU time; the body must be Python code."""
    body, done = threading.get_ident(), threading.Event()
    thread_clock: Any = getattr(time, "pthread_getcpuclockid", lambda _: time.CLOCK_MONOTONIC)  # macOS lacks it
    clock = thread_clock(body)
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        while not done.wait(0.1):
            if time.clock_gettime(clock) > end:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(body), ctypes.py_object(EndlessTemplate))
                return

    watchdog = threading.Thread(target=watch, name="template-limit", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        done.set()
        watchdog.join()


def compiled_template(tokenizer: Any, name: str, chat_template: str | None) -> str:
    """Return the text of the chat template, after a trial rendering. Raises ConfigError."""
    from jinja2 import TemplateSyntaxError

    location, remedy = chat_template or name, "give --chat_template FILE"
    try:
        if chat_template is not None:
            tokenizer.chat_template = open_path(chat_template).read_text(encoding="utf-8")
        template = str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""
    except (OSError, ValueError) as error:  # ValueError: several templates without a default
        raise ConfigError(f"chat template of {location}: cannot be read ({one_line(error)}); {remedy}") from None
    if not template:
        raise ConfigError(f"--tokenizer {name}: has no chat template, and the data holds chats; {remedy}")
    template = FIXED_CLOCK + template if "strftime_now" in template else template
    try:
        with _limited(RENDER_SECONDS):
            tokenizer.apply_chat_template([{"role": "user", "content": "?"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"chat template of {location}: line {error.lineno}: {one_line(error)}; correct it") from None
    except Exception:  # the template may refuse this chat and accept the data's chats
        pass
    return template


def chat_of(fields: dict[str, Any], kind: Kind) -> tuple[Turns, Tools]:
    """Return the turns and the tools in a record. Raises ValueError: "reason; what to do"."""
    name = kind.fields[0]
    turns = _cleaned(fields.get(name))
    if not isinstance(turns, list):
        raise ValueError(f'no "{name}" list of turns in this record; set --text_column')
    if not turns:
        raise ValueError(f"{name} is empty: nothing to learn; remove the record")
    keys = ("from", "value") if kind.style == "sharegpt" else ("role", "content")
    for number, turn in enumerate(turns):
        role, content = (turn.get(key) if isinstance(turn, dict) else None for key in keys)
        has_content = isinstance(content, str | list) or (isinstance(turn, dict) and turn.get("tool_calls"))
        if not (isinstance(role, str) and has_content):
            missing = keys[isinstance(role, str)]
            raise ValueError(f'{name}[{number}] has no "{missing}" string; write each turn with {" and ".join(keys)}')
        if kind.style == "sharegpt":
            if role not in SHAREGPT_ROLES:
                known = ", ".join(SHAREGPT_ROLES)
                raise ValueError(f"{name}[{number}]: from is {role[:40]!r}, not one of {known}; rename it")
            turns[number] = {"role": SHAREGPT_ROLES[role], "content": content}
        for index, part in enumerate(content if isinstance(content, list) else ()):
            kind_of_part, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
            if kind_of_part != "text" or not isinstance(text, str):
                raise ValueError(
                    f"{name}[{number}]: content[{index}] is {str(kind_of_part)[:40]!r}, not a part of type text; only "
                    "text is trained on: correct or remove the record"
                )
    if kind.style == "sharegpt" and fields.get(SYSTEM):
        turns.insert(0, {"role": "system", "content": string(fields, SYSTEM)})
    tools = fields.get(TOOLS)
    if isinstance(tools, str):  # data sets for TRL hold tools as JSON in a string, as tools have different fields
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(tools or "null")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f'"{TOOLS}" is no list of objects, nor JSON of one; write them as transformers takes them')
    return turns, _cleaned(tools) or None


def _cleaned(value: Any) -> Any:
    """Return a value without nulls (tables hold a null for each absent field). Raises ValueError for unusable text."""
    if isinstance(value, dict):
        return {key: _cleaned(part) for key, part in value.items() if part is not None}
    if isinstance(value, UnicodeDecodeError):
        raise ValueError(not_utf8(value))
    if isinstance(value, str):
        return checked_text(value)
    return [_cleaned(part) for part in value] if isinstance(value, list) else value
