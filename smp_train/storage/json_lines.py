"""Files of JSON lines: written line by line, and read without the lines that a kill has cut."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class LineWriter:
    """Appends lines to a file and flushes each of them. ``failure`` is the first error of a write."""

    def __init__(self, path: Path) -> None:
        """Open the file, and end the partial last line of a killed run. Raises OSError."""
        self.path = path
        self.failure: OSError | None = None
        self._file = path.open("a", encoding="utf-8")
        with path.open("rb") as written:
            written.seek(max(0, written.seek(0, os.SEEK_END) - 1))
            if written.read(1) not in (b"", b"\n"):
                self._file.write("\n")

    def write(self, line: str) -> None:
        """Append a line."""
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as failure:
            self.failure = self.failure or failure

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a write has failed before
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without broken lines. Raises OSError."""
    records: list[Any] = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]
