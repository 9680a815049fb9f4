"""The manifest that ``smp-train prepare`` writes of a split, and the comparison of a folder with it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_train.data import s3
from smp_train.data.utils import is_shard_name
from smp_train.errors import DataError, first_few

MANIFEST = "_manifest.json"
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Split:
    """One split of a preparation."""

    seq_len: int
    shards: dict[str, dict[str, Any]]
    """By shard name: ``rows``, ``bytes``, ``sha256``."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a shard; None of one that is not listed."""
        return self.shards[name]["bytes"] if name in self.shards else None


def find(location: str) -> Split | None:
    """Return what the manifest in a folder of shards, or in the one above, says of it; None where it names none.

    Raises DataError when that cannot be found out, and for a preparation that is not finished.
    """
    whole = location.rstrip("/") if s3.is_s3(location) else os.path.realpath(location)
    parent, _, name = whole.rpartition("/")
    for place in (whole, parent):
        if place in ("s3:/", "s3:"):
            continue
        path = f"{place}/{MANIFEST}"
        manifest = _read(path)
        try:
            totals = manifest["splits"][name]
            shards = {entry["name"]: {**entry, "bytes": int(entry["bytes"])} for entry in totals["shards"]}
            return Split(int(manifest["seq_len"]), shards)
        except (KeyError, TypeError, AttributeError, ValueError):
            pass  # of another split, an earlier version, or another program
        if manifest.get("complete") is False and name in ("train", "test"):
            raise DataError(f"{path}: this preparation is not finished; run smp-train prepare again, and it goes on")
    return None


def _read(path: str) -> dict[str, Any]:
    try:
        text = s3.read_small(path) if s3.is_s3(path) else Path(path).read_bytes()
        found = json.loads(text or b"null")
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        return {}
    except OSError as error:
        # No guess: ranks must come to the same answer.
        raise DataError(f"{path}: cannot be read ({error.strerror}); is its file system there on every node?") from None
    return found if isinstance(found, dict) else {}


def _files(location: str) -> tuple[dict[str, int], list[str]]:
    """Return (size of each file, names of folders) of a folder; nothing where it is none."""
    if s3.is_s3(location):
        objects, folders = s3.list_folder(location)
        return {shard.name: shard.size for shard in objects if shard.path != location}, folders
    try:
        with os.scandir(location) as entries:
            found = list(entries)
        return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}, [
            entry.name for entry in found if entry.is_dir()
        ]
    except OSError:
        return {}, []


def check(location: str) -> None:
    """Raise DataError for a folder that holds other shards than its manifest lists, or a whole preparation."""
    refuse_root(location)
    found = differences(location, checksums=False)
    if found:
        raise DataError(
            f"{location}: is not what its {MANIFEST} lists: {first_few(found, '; ')}: copy or prepare it "
            f"again, or remove the {MANIFEST} if it is meant to be as it is"
        )


def refuse_root(location: str) -> None:
    """Raise DataError for the folder above the splits."""
    root = location.rstrip("/")
    splits = _read(f"{root}/{MANIFEST}").get("splits")
    if not isinstance(splits, dict):
        return
    files, folders = _files(location)
    found = [(name, find(f"{root}/{name}")) for name in splits if name in folders]
    here = [f"{root}/{name}" for name, split in found if split is not None and not split.shards.keys() & files.keys()]
    if here:
        raise DataError(f"{location}: was made by smp-train prepare; its shards are in {' and '.join(here)}: give one")


def differences(location: str, *, checksums: bool) -> list[str]:
    """Return what is missing, changed or not listed in a split of a preparation; nothing where it is none.

    ``checksums`` reads every file of a folder on this machine.
    """
    split = find(location)
    if split is None:
        return []
    files, _ = _files(location)
    if not files and not os.path.isdir(location) and not s3.is_s3(location):
        return []
    problems = []
    for name, entry in split.shards.items():
        if name not in files:
            problems.append(f"{name} is missing")
        elif files[name] != entry["bytes"]:
            problems.append(f"{name} has {files[name]} bytes, not {entry['bytes']}")
        elif checksums and not s3.is_s3(location) and _sha256(Path(location, name)) != entry.get("sha256"):
            problems.append(f"{name} has another checksum")
    suffixes = {Path(name).suffix for name in split.shards}
    of_lines = any(map(is_shard_name, split.shards))
    more = (name for name in sorted(files) if name not in split.shards and name[0] not in "._")
    read = (name for name in more if (of_lines and is_shard_name(name)) or Path(name).suffix in suffixes)
    return problems + [f"{name} is not listed" for name in read]


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
