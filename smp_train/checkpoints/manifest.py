"""What a checkpoint folder is called, and the COMMITTED file that makes it one.

COMMITTED is written last, when every other file of the folder is on stable storage, and lists those files
with sizes and CRC-32 checksums. A folder without it is not a checkpoint, whatever else it holds.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from smp_train.arguments.run_name import CHECKPOINT_NAME, is_run_name
from smp_train.errors import CheckpointError

try:  # the same CRC-32, several times faster
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    _crc32 = zlib.crc32

COMMITTED = "COMMITTED"
META = "meta.json"
METADATA = ".metadata"
"""DCP's index of a tree."""
TOKENIZER = "tokenizer/"
"""Folder of the files of the tokenizer, below which transformers opens it."""
NODE_LOCAL = "node_local"
"""Key of meta.json that marks one rank's part of a checkpoint, saved to a node's disk."""
FORMAT = 1

DAMAGED, ABANDONED = "damaged", "abandoned"
"""Why a checkpoint was set aside: its files are not those written, or a run went back to before it."""
_ASIDE = re.compile(rf"\.({DAMAGED}|{ABANDONED})(-\d+)?$")


@dataclass(frozen=True)
class RunId:
    """Which run wrote a checkpoint: its name, and the id drawn at its fresh start. Both are empty where unknown."""

    name: str = ""
    id: str = ""

    @classmethod
    def fresh(cls, name: str) -> RunId:
        """Return the identity of a run that starts afresh."""
        return cls(name, uuid.uuid4().hex[:8])

    @classmethod
    def parse(cls, value: Any) -> RunId:
        """Read what `to_json` returned. Raises ValueError for anything else."""
        found = cls(**value)
        if not (is_run_name(found.name) or found.name == "") or not re.fullmatch("[0-9a-f]{8}", found.id):
            raise ValueError(f"{value!r} does not identify a run")
        return found

    def to_json(self) -> dict[str, str]:
        """Return what files say of it."""
        return {"name": self.name, "id": self.id}

    @property
    def key(self) -> str:
        """The name as eight hexadecimal digits, for names of files: jobs of one run have the same; empty if unknown."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:8] if self.id else ""

    @property
    def quoted(self) -> str:
        """The name in quotation marks, for messages."""
        return f"'{self.name}'" if self.name else str(self)

    def __str__(self) -> str:
        return self.name or "(no run)"


def folder_name(model_type: str, step: int) -> str:
    """Return the name of the folder that holds the checkpoint of ``step``.

    The id of its run follows (``-5f3a9c01``) only where the name was taken by something that is not the run's.
    """
    return f"{model_type}-{step}steps"


def parse_folder_name(name: str) -> tuple[str, int] | None:
    """Return (model type, step), or None where ``name`` is not that of a checkpoint."""
    match = CHECKPOINT_NAME.fullmatch(name)
    if match is None or name.startswith("."):
        return None
    return match["model_type"], int(match["step"])


def name_before(name: str) -> str:
    """Return what a checkpoint was called before it was set aside; ``name`` itself where it was not."""
    return _ASIDE.sub("", name)


class FileRecord(NamedTuple):
    """One file of a checkpoint: its size in bytes and its CRC-32 as eight hexadecimal digits."""

    size: int
    crc32: str


class Checksum:
    """The record of what has been added so far."""

    def __init__(self) -> None:
        self._size = self._crc = 0

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take ``chunk`` in."""
        self._crc = _crc32(chunk, self._crc)
        self._size += len(chunk)

    def record(self) -> FileRecord:
        """Return the record."""
        return FileRecord(self._size, f"{self._crc:08x}")


def checksum_of(chunks: Iterable[bytes]) -> FileRecord:
    """Return the record of a file that comes in pieces."""
    found = Checksum()
    for chunk in chunks:
        found.add(chunk)
    return found.record()


@dataclass(frozen=True)
class Committed:
    """The contents of COMMITTED. ``root`` is the sub-folder that holds ``files``; empty: they lie beside COMMITTED.

    ``time`` is when it was committed, in seconds since 1970; 0 where that was not recorded.
    """

    step: int
    model_type: str
    files: Mapping[str, FileRecord]
    root: str = ""
    run: RunId = RunId()
    time: float = 0.0

    def __post_init__(self) -> None:
        """Refuse names that lead out of the folder. Raises ValueError."""
        for name in (self.root, *self.files):
            if name.startswith("/") or {"..", "."} & set(name.split("/")) or "/" in self.root:
                raise ValueError(f"{name!r} is not the name of a file in a checkpoint")

    def at(self, root: str) -> Committed:
        """Return the same with another ``root``."""
        return replace(self, root=root)

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        files = {name: record._asdict() for name, record in sorted(self.files.items())}
        content = {"format": FORMAT, "step": self.step, "model_type": self.model_type, "files": files}
        content |= {"root": self.root} if self.root else {}
        content |= {"run": self.run.to_json()} if self.run.id else {}
        content["time"] = self.time
        content["crc32"] = _crc32_of_json(content)
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Committed:
        """Parse the file's contents. Raises ValueError where they are not those of COMMITTED.

        One without a checksum of its own was written before there was any.
        """
        try:
            content = json.loads(data)
            found = content["format"]
            if found == FORMAT:
                if "crc32" in content and content.pop("crc32") != _crc32_of_json(content):
                    raise ValueError("its checksum is not that of its contents")
                files = {name: FileRecord(**record) for name, record in content["files"].items()}
                if META not in files:
                    raise ValueError(f"it does not list {META}")
                root, time = str(content.get("root", "")), float(content.get("time", 0))
                run = RunId.parse(content["run"]) if "run" in content else RunId()
                return cls(int(content["step"]), str(content["model_type"]), files, root, run, time)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{COMMITTED} is not readable ({type(error).__name__}: {error})") from None
        raise CheckpointError(
            f"{COMMITTED} is of format {found}, this version reads {FORMAT}: use a newer smp-train to load it"
        )

    def size_problems(self, sizes: Mapping[str, int]) -> list[str]:
        """Compare the sizes of the files that are there with those recorded; one line per difference."""
        problems = []
        for name, record in self.files.items():
            if name not in sizes:
                problems.append(f"{name} is missing, or is a link")
            elif sizes[name] != record.size:
                problems.append(f"{name} has {sizes[name]} bytes, {record.size} were written")
        return problems


def _crc32_of_json(content: Mapping[str, object]) -> str:
    return checksum_of([json.dumps(content, indent=1).encode()]).crc32
