"""The kind of a data set's records: token rows, text, chats, or prompts with completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp_train.errors import ConfigError, DataError, first_few

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
TEXT, TOOLS, SYSTEM = "text", "tools", "system"
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"
PLURALS = {"tokens": "rows of tokens", "text": "text", "chats": "chats", "completions": "prompts with completions"}


@dataclass(frozen=True)
class Kind:
    """The kind of a data set's records, and the fields that hold them."""

    name: str  # tokens, text, chats or completions
    fields: tuple[str, ...]  # fields or columns that are read, the required fields first
    style: str = ""  # sharegpt: turns with from and value; alpaca: instruction, input and output

    @property
    def plural(self) -> str:
        """Return the name of the records in messages."""
        return PLURALS[self.name]

    @property
    def answers_only(self) -> bool:
        """Return whether only answers carry loss: true of chats and of prompts with completions."""
        return self.name in ("chats", "completions")


TOKENS = Kind("tokens", (IDS, MASK, LABELS))
TEXTS = Kind("text", (TEXT,))
ALPACA = Kind("completions", (INSTRUCTION, OUTPUT, INPUT), "alpaca")


def kind_of_record(record: Mapping[str, Any], column: str | None, shown: str) -> Kind:
    """Return the kind of a record by its fields, or by --text_column; messages call the record ``shown``.

    Raises ConfigError where two kinds are possible, DataError for preference pairs and for records of no known kind.
    """
    if column:
        names = (column,) if column in record else tuple(column.split(","))
        if len(names) > 2:
            raise ConfigError(f"--text_column {column}: give one field, or PROMPT,COMPLETION")
        if len(names) == 2:
            return ALPACA if names == ALPACA.fields[:2] else Kind("completions", names)
        if record.get(column) is None:
            raise DataError(f'{shown}: no "{column}" in this record (it has {names_of(record)}); set --text_column')
        return _chats(record, column) if isinstance(record[column], list) else Kind("text", names)
    if IDS in record:
        return TOKENS
    kinds = [_chats(record, name) for name in ("messages", "conversations") if isinstance(record.get(name), list)]
    kinds += [Kind("completions", ("prompt", "completion"))] * ({"prompt", "completion"} <= record.keys())
    kinds += [ALPACA] * ({INSTRUCTION, OUTPUT} <= record.keys())
    kinds += [TEXTS] * (TEXT in record)
    choices = " or ".join(",".join(kind.fields[: 2 if kind.name == "completions" else 1]) for kind in kinds)
    if {"chosen", "rejected"} <= record.keys():
        hint = f"set --text_column {choices}" if kinds else "write the chosen answers as messages, or as completion"
        raise DataError(f"{shown}: is a preference pair (chosen, rejected), which has no training objective; {hint}")
    if len(kinds) > 1:
        plurals = " and ".join(dict.fromkeys(kind.plural for kind in kinds))
        raise ConfigError(f"{shown}: holds {plurals}; set --text_column {choices}")
    if not kinds:
        raise DataError(
            f"{shown}: no field text, messages, conversations, prompt with completion, instruction with output, or "
            f"{IDS} in this record (it has {names_of(record)}); set --text_column"
        )
    return kinds[0]


def names_of(record: Mapping[str, Any]) -> str:
    """Return the names of the first fields, for messages."""
    return first_few(list(record), most=8) or "no field"


def _chats(record: Mapping[str, Any], name: str) -> Kind:
    turn = record[name][0] if record[name] else None
    if isinstance(turn, dict) and turn.get("role") is None and "from" in turn:
        return Kind("chats", (name, TOOLS, SYSTEM), "sharegpt")
    return Kind("chats", (name, TOOLS))
