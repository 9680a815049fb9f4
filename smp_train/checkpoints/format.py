"""Names of a checkpoint's files, and the marker COMMITTED that makes a folder a checkpoint.

``<run folder>/<model_type>-<step>steps[-<attempt>]/`` holds one attempt at saving a step. It is written once and never
replaced or renamed. COMMITTED is put last, when every other file is on stable storage. It lists these files with sizes
and CRC-32 checksums. A folder without COMMITTED is not a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smp_train.arguments.run_name import CHECKPOINT_NAME
from smp_train.errors import CheckpointError
from smp_train.storage.checksum import FileRecord, checksum_of

COMMITTED = "COMMITTED"
BEGUN = ".begun"
"""First file of an attempt; its presence reserves the folder for one writer."""
SWEPT = ".swept"
"""Put into an uncommitted attempt before its files are deleted, so that a stalled writer withdraws its COMMITTED."""
DAMAGED = "DAMAGED"
"""Added to a checkpoint whose contents contradict COMMITTED; the file lists the differences."""
META = "meta.json"
METADATA = ".metadata"
"""The index that torch.distributed.checkpoint writes into a tree."""
TOKENIZER = "tokenizer/"
NODE_LOCAL = "node_local"
"""Key that meta.json has only in a node-local checkpoint, which is one rank's part on its node's own disk."""
BEST = "best"
"""Reserved name in a run folder: the checkpoint with the lowest validation loss. The metadata says which one it is."""
FORMAT = 2


def folder_name(model_type: str, step: int, attempt: str = "") -> str:
    """Return the name of the folder of one attempt at saving ``step``."""
    return f"{model_type}-{step}steps" + (f"-{attempt}" if attempt else "")


def parse_folder_name(name: str) -> tuple[str, int] | None:
    """Return (model type, step) from a checkpoint's name, or None for any other name."""
    match = CHECKPOINT_NAME.fullmatch(name)
    if match is None or name.startswith("."):
        return None
    return match["model_type"], int(match["step"])


@dataclass(frozen=True)
class Marker:
    """The contents of COMMITTED.

    Attributes:
        generation: number of the job start that wrote the checkpoint; later starts of a run have higher numbers.
        files: record of each file of the checkpoint, by its path below the checkpoint's folder.
        time: seconds since 1970, for people; no decision depends on it.
    """

    step: int
    model_type: str
    generation: int
    files: Mapping[str, FileRecord]
    time: float = 0.0

    def __post_init__(self) -> None:
        """Refuse paths that lead out of the folder. Raises ValueError."""
        for name in self.files:
            if name.startswith("/") or {"..", "."} & set(name.split("/")):
                raise ValueError(f"{name!r} is not the name of a file in a checkpoint")

    def to_bytes(self) -> bytes:
        """Return the content of COMMITTED; its last field is the checksum of the other fields."""
        content: dict[str, Any] = {
            "format": FORMAT, "step": self.step, "model_type": self.model_type, "generation": self.generation,
            "files": {name: record._asdict() for name, record in sorted(self.files.items())}, "time": self.time,
        }  # fmt: skip
        content["crc32"] = _crc32_of_json(content)
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Marker:
        """Parse COMMITTED's content. Raises ValueError if it is damaged, CheckpointError if its format is newer."""
        try:
            content = json.loads(data)
            if content.pop("crc32") != _crc32_of_json(content):
                raise ValueError("its checksum differs")
            if content["format"] > FORMAT:
                newer = f"{COMMITTED} is of format {content['format']}, and this version reads {FORMAT}"
                raise CheckpointError(f"{newer}: use a newer smp-train")
            files = {name: FileRecord(**record) for name, record in content["files"].items()}
            if META not in files:
                raise ValueError(f"it does not list {META}")
            numbers = int(content["step"]), str(content["model_type"]), int(content["generation"])
            return cls(*numbers, files, float(content["time"]))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{COMMITTED} is not readable ({type(error).__name__}: {error})") from None

    def size_problems(self, sizes: Mapping[str, int]) -> list[str]:
        """Return one line for each listed file that is missing or has another size."""
        problems = []
        for name, record in self.files.items():
            if name not in sizes:
                problems.append(f"{name} is missing, or is a link")
            elif sizes[name] != record.size:
                problems.append(f"{name} has {sizes[name]} bytes, {record.size} were written")
        return problems


def _crc32_of_json(content: Mapping[str, object]) -> str:
    return checksum_of([json.dumps(content, indent=1).encode()]).crc32
