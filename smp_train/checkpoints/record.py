"""What a checkpoint folder is called, and the COMMITTED file that makes it one.

COMMITTED is written last, when every other file of the folder is on stable storage, and lists those files
with sizes and CRC-32 checksums. A folder without it is not a checkpoint, whatever else it holds.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from smp_train.errors import CheckpointError

try:  # the same CRC-32, several times faster
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    _crc32 = zlib.crc32

COMMITTED = "COMMITTED"
META = "meta.json"
FORMAT = 1
CHUNK_BYTES = 4 << 20

_FOLDER = re.compile(r"(?P<model_type>.+)-(?P<step>\d+)steps")


def folder_name(model_type: str, step: int) -> str:
    """Return the name of the folder that holds the checkpoint of ``step``."""
    return f"{model_type}-{step}steps"


def parse_folder_name(name: str) -> tuple[str, int] | None:
    """Return (model type, step), or None where ``name`` is not that of a checkpoint."""
    match = _FOLDER.fullmatch(name)
    if match is None or name.startswith("."):
        return None
    return match["model_type"], int(match["step"])


class FileRecord(NamedTuple):
    """One file of a checkpoint: its size in bytes and its CRC-32 as eight hexadecimal digits."""

    size: int
    crc32: str


def checksum(stream: BinaryIO) -> FileRecord:
    """Read ``stream`` to its end and return its record."""
    size, crc = 0, 0
    while chunk := stream.read(CHUNK_BYTES):
        crc = _crc32(chunk, crc)
        size += len(chunk)
    return FileRecord(size, f"{crc:08x}")


@dataclass(frozen=True)
class Committed:
    """The contents of COMMITTED."""

    step: int
    model_type: str
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        files = {name: record._asdict() for name, record in sorted(self.files.items())}
        content = {"format": FORMAT, "step": self.step, "model_type": self.model_type, "files": files}
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Committed:
        """Parse the file's contents. Raises ValueError where they are not those of COMMITTED."""
        try:
            content = json.loads(data)
            found = content["format"]
            if found == FORMAT:
                files = {name: FileRecord(**record) for name, record in content["files"].items()}
                return cls(int(content["step"]), str(content["model_type"]), files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{COMMITTED} is not readable ({type(error).__name__}: {error})") from None
        raise CheckpointError(
            f"{COMMITTED} is of format {found}, this version reads {FORMAT}: use a newer smp-train to load it"
        )

    def size_problems(self, sizes: Mapping[str, int]) -> list[str]:
        """Compare the sizes of the files that are there with those recorded; one line per difference."""
        problems = []
        for name, record in self.files.items():
            if name not in sizes:
                problems.append(f"{name} is missing")
            elif sizes[name] != record.size:
                problems.append(f"{name} has {sizes[name]} bytes, {record.size} were written")
        return problems
