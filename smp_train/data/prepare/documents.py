"""Documents out of files: a text file is one document, a line of ``.jsonl`` is one."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from smp_train.data.utils import open_file, read_lines
from smp_train.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
LINES_SUFFIXES = (".jsonl", ".jsonl.gz")


def find_files(
    inputs: Sequence[str], patterns: Sequence[str], exclude: Sequence[str]
) -> list[tuple[Path, str]]:
    """List (file, name within its input) of all files below ``inputs``.

    In the order of a hash of their names: always the same, and its beginning is a fair sample of the whole.

    ``patterns`` select by file name, or, when empty, the suffixes of text and of ``.jsonl``. A file or
    folder whose name matches one of ``exclude`` is left out with all below it. A file given itself is
    always taken.
    """
    found = []
    for given in inputs:
        root = Path(given)
        if root.is_file():
            found.append((root, root.name))
        elif root.is_dir():
            found += [(root / name, name) for name in _below(root, patterns, exclude)]
        else:
            raise DataError(f"{given}: no such file or folder; check --input")
    if not found:
        wanted = " ".join(patterns) or " ".join("*" + suffix for suffix in TEXT_SUFFIXES + LINES_SUFFIXES)
        raise DataError(
            f"{', '.join(inputs)}: no file that matches {wanted}; give another --input or --pattern"
        )
    return sorted(found, key=lambda item: (hashlib.blake2b(item[1].encode(), digest_size=8).digest(), item))


def _below(root: Path, patterns: Sequence[str], exclude: Sequence[str]) -> Iterator[str]:
    def left_out(name: str) -> bool:
        return name.startswith(".") or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not left_out(name))
        for name in sorted(files):
            wanted = (
                any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
                if patterns
                else name.endswith(TEXT_SUFFIXES + LINES_SUFFIXES)
            )
            if wanted and not left_out(name):
                yield os.path.relpath(os.path.join(folder, name), root)


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of one file, without empty ones. Raises DataError with file and line."""
    if path.name.endswith(LINES_SUFFIXES):
        for number, line in read_lines(str(path)):
            text = _text_of(path, number, line)
            if text.strip():
                yield text
        return
    with open_file(str(path)) as file:
        # A stray byte in one of ten thousand sources is no reason to stop; U+FFFD marks the place.
        text = file.read().decode("utf-8", errors="replace")
    if text.strip():
        yield text


def _text_of(path: Path, number: int, line: bytes) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}:{number}: broken JSON ({error}); one object per line is needed") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{path}:{number}: no "text" string in this line; is it text?')
    return text


def held_out(number: int, fraction: float) -> bool:
    """Tell whether document ``number`` is for validation: by a hash of its number, so always the same."""
    draw = hashlib.blake2b(f"smp-train document {number}".encode(), digest_size=8).digest()
    return int.from_bytes(draw, "big") < fraction * 2**64
