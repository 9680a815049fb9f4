"""The documents of a preparation in order, and which of them are held out for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from smp_train.data.bad_rows import LeftOut
from smp_train.data.text.files import TextFile
from smp_train.data.text.read import documents


class Place(NamedTuple):
    """The position of a document: the ``number``-th that is not blank, after ``before`` others of file ``file``."""

    file: int = 0
    before: int = 0
    number: int = 0


BEGIN = Place()


def numbered(
    files: Sequence[TextFile], column: str, start: Place = BEGIN, left_out: LeftOut | None = None
) -> Iterator[tuple[Place, str]]:
    """Yield the documents that are not blank, nor malformed where ``left_out`` counts those, from ``start`` on.

    Raises DataError.
    """
    number = start.number
    for index in range(start.file, len(files)):
        first = start.before if index == start.file else 0
        for before, (_, text) in enumerate(documents(files[index], column, start=first, left_out=left_out), first):
            if text:
                yield Place(index, before, number), text
                number += 1


def held_out(number: int, fraction: float) -> bool:
    """True when document ``number`` is for validation: a function of its number alone."""
    draw = hashlib.blake2b(f"smp-train document {number}".encode(), digest_size=8).digest()
    return int.from_bytes(draw, "big") < fraction * 2**64
