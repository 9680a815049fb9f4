"""What is in documents before they are prepared: their tokens, which of these are counted, and what is malformed."""

from __future__ import annotations

import sys

from smp_train.data.pipelines.text_data import rows_in_order
from smp_train.data.survey import Survey
from smp_train.data.text.detect import find_fields
from smp_train.data.text.files import find_files
from smp_train.data.text.opening import open_tokenizer
from smp_train.data.text.stream import Reading


def look_at_documents(
    path: str, tokenizer: str, seq_len: int | None, *, column: str | None, template: str | None
) -> Survey:
    """Read all documents of a place, going on after each malformed one. Raises ConfigError and DataError."""
    files = find_files([path], column=column, flag="PATH")
    fields = find_fields(files, column)
    opened, end, conversations = open_tokenizer(tokenizer, template, fields)
    survey = Survey(fields.kind.capitalize(), seq_len, shards=len(files))
    reading = Reading(
        opened, end, sys.maxsize, 0, False, fields, left_out=survey.problems.append, conversations=conversations
    )
    for name, row in rows_in_order(files, reading):
        survey.add(name, row)
    return survey
