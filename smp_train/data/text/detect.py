"""Which fields of files hold their documents, by --text_column or by what the first of them has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from smp_train.data.lines import lines_of
from smp_train.data.text.fields import COMPLETION, MESSAGES, PROMPT, TEXT, Fields
from smp_train.data.text.read import TextFile, opened_table, record_of
from smp_train.errors import ConfigError, DataError

LOOKED_AT = 100
"""Lines at the beginning of a file, of which the first that is a record decides."""
FOUND = (Fields((TEXT,)), Fields((MESSAGES,), chat=True), Fields((PROMPT, COMPLETION)))
"""What is found without --text_column."""


def first_fields(column: str | None) -> tuple[str, ...]:
    """Return the fields of which a record of documents has at least one."""
    return (column.partition(",")[0],) if column else tuple(fields.names[0] for fields in FOUND)


def find_fields(files: Sequence[TextFile], column: str | None) -> Fields:
    """Return what the documents of files are.

    ``column`` is --text_column: a field of texts, one of chats (lists), or two, joined by a comma, of prompts and
    completions. Raises ConfigError where two kinds are there to choose from, DataError for chats beside text files.
    """
    of_records = [file for file in files if file.kind != "whole"]
    fields = _by_first_record(of_records[0], column) if of_records else FOUND[0]
    whole = next((file for file in files if file.kind == "whole"), None)
    if whole is not None and fields.answers:
        raise DataError(f"{whole.path}: is text, and {of_records[0].shown} holds {fields.kind}; give one of the two")
    return fields


def _by_first_record(file: TextFile, column: str | None) -> Fields:
    lists = fields_that_are_lists(file)
    if column:
        names = (column,) if column in lists else tuple(column.split(","))
        if len(names) > 2:
            raise ConfigError(f"--text_column {column}: give one field, or PROMPT,COMPLETION")
        return Fields(names, chat=len(names) == 1 and lists.get(column, False))
    found = [fields for fields in FOUND if all(name in lists for name in fields.names)]
    if len(found) > 1:
        choices = " or ".join(",".join(fields.names) for fields in found)
        raise ConfigError(f"{file.shown}: holds {' and '.join(f.kind for f in found)}; set --text_column {choices}")
    return found[0] if found else FOUND[0]


def fields_that_are_lists(file: TextFile) -> dict[str, bool]:
    """Return, by the name of each field of the first record, whether it is a list; nothing where there is no record.

    What is wrong with such a file its reader names.
    """
    if file.kind == "lines":
        with file.open() as raw:
            for _, line in islice(lines_of(raw, file.path), LOOKED_AT):
                try:
                    return {name: isinstance(value, list) for name, value in record_of(line).items()}
                except ValueError:
                    continue
        return {}
    if file.split is not None:
        return _lists(file.split.schema())
    with opened_table(file) as (_, schema):
        return _lists(schema)


def _lists(schema: Any) -> dict[str, bool]:
    import pyarrow as pa

    return {field.name: pa.types.is_list(field.type) or pa.types.is_large_list(field.type) for field in schema or ()}
