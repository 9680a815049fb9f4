"""The manifest that ``smp-train prepare`` writes, and the comparison of a split's files with it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_train.data import s3
from smp_train.errors import DataError
from smp_train.storage import is_s3

MANIFEST = "_manifest.json"


def differences(location: str, sizes: Mapping[str, int], *, checksums: bool = False) -> list[str]:
    """Return which files are missing, changed or not listed, compared with the manifest; empty without a manifest.

    ``checksums`` reads every local file to compare checksums. Raises DataError for a preparation that is not finished.
    """
    listed = _listed_files(location)
    if listed is None:
        return []
    problems = []
    for name, (size, sha256) in listed.items():
        if name not in sizes:
            problems.append(f"{name} is missing")
        elif sizes[name] != size:
            problems.append(f"{name} has {sizes[name]} bytes, not {size}")
        elif checksums and not is_s3(location):
            digest = hashlib.sha256(Path(location, name).read_bytes()).hexdigest()
            problems += [f"{name} has another checksum"] * (digest != sha256)
    return problems + [f"{name} is not listed" for name in sorted(sizes) if name not in listed]


def _listed_files(location: str) -> dict[str, tuple[int, str | None]] | None:
    """Return (size, sha256) by name of the files that the parent folder's manifest lists for a folder, or None."""
    folder = location.rstrip("/") if is_s3(location) else os.path.realpath(location)
    parent, _, name = folder.rpartition("/")
    manifest = {} if parent == "s3:/" else read_manifest(parent)
    if manifest.get("complete") is False and name in ("train", "test"):
        raise DataError(
            f"{parent}/{MANIFEST}: this preparation is not finished; run smp-train prepare again, and it continues"
        )
    try:
        files = manifest["splits"][name]["shards"]
        return {file["name"]: (int(file["bytes"]), file.get("sha256")) for file in files}
    except (KeyError, TypeError, AttributeError, ValueError):
        return None  # the manifest lacks this split, or a different program wrote it


def read_manifest(folder: str) -> dict[str, Any]:
    """Return the manifest in a folder; empty if it is missing or unreadable. Raises DataError."""
    path = f"{folder}/{MANIFEST}"
    try:
        text = s3.read_object(path) if is_s3(path) else Path(path).read_bytes()
        manifest = json.loads(text or b"null")
    except (FileNotFoundError, NotADirectoryError, PermissionError, ValueError):
        return {}
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); is its file system mounted?") from None
    return manifest if isinstance(manifest, dict) else {}
