"""Chats, a tokenizer with a chat template, and what transformers alone makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IGNORED = -100
HEAD = "{% for turn in messages %}{% if turn.role not in ('system', 'user', 'assistant') %}" + (
    "{{ raise_exception('unknown role ' + turn.role) }}{% endif %}{{ '<|' + turn.role + '|>' }}"
)
TAIL = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = HEAD + "{{ turn.content + '<|end|>\n' }}" + TAIL
MARKED = (
    HEAD + "{% if turn.role == 'assistant' %}"
    "{% generation %}{{ turn.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ turn.content + '<|end|>\n' }}{% endif %}" + TAIL
)
CALLING = (
    "{% if tools %}{{ '<|system|>' + (tools | tojson) + '<|end|>\n' }}{% endif %}{% for turn in messages %}"
    "{{ '<|' + turn.role + '|>' }}{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for part in turn.content %}{{ part.text }}{% endfor %}{% endif %}{% if turn.tool_calls %}"
    "{{ turn.tool_calls | tojson }}{% endif %}{{ '<|end|>\n' }}" + TAIL
)
"""A template that knows tools, calls of them, and content in parts."""
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {name: {}}}}}
         for name in ("add", "halve")]  # fmt: skip
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def turns(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a chat of these texts, the user's first."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *said] if system else said


def chat(number: int) -> list[dict[str, str]]:
    """Return a chat of one to three questions with answers; no two are the same."""
    texts = []
    for at in range(1 + number % 3):
        texts += [f"what is {number} plus {at}?", f"it is {number + at}" + " é🙂" * (number % 2)]
    return turns(*texts, system="be brief" if number % 4 == 0 else None)


def write_tokenizer(folder: Path, template: str | None = PLAIN) -> Path:
    """Write a byte-level tokenizer of 300 entries, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    from smp_train.data import tokenizer as tokenizers

    texts = [one["content"] for number in range(40) for one in chat(number)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.train(texts, 300, SPECIAL), eos_token=tokenizers.END,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if template is not None:
        made.chat_template = template
    made.save_pretrained(folder)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def by_transformers(tokenizer: Path, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
    """Return the ids and labels of a chat, by transformers alone."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    if "{% generation %}" in loaded.chat_template:
        found = loaded.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        return ids, [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
    ids = loaded.apply_chat_template(messages, tools, return_dict=False)
    labels = [IGNORED] * len(ids)
    for number, turn in enumerate(messages):
        if turn["role"] == "assistant":
            before = loaded.apply_chat_template(messages[:number], tools, add_generation_prompt=True, return_dict=False)
            end = len(loaded.apply_chat_template(messages[: number + 1], tools, return_dict=False))
            labels[len(before) : end] = ids[len(before) : end]
    return ids, labels


def completion_by_transformers(tokenizer: Path, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """Return the ids and labels of a prompt with its completion, where no token is across their border."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    before, behind = loaded(prompt)["input_ids"], [*loaded(completion)["input_ids"], loaded.eos_token_id]
    return before + behind, [IGNORED] * len(before) + behind
