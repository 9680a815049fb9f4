"""What ``smp-train prepare`` wrote down of a split, held against what lies there."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

MANIFEST = "_manifest.json"
BLOCK_BYTES = 1 << 22


def differences(folder: str) -> list[str]:
    """Return what is missing, changed or not listed in a split of a preparation; nothing where it is none."""
    place = Path(folder)
    try:
        split = json.loads((place.resolve().parent / MANIFEST).read_bytes())["splits"][place.resolve().name]
        listed = {entry["name"]: entry["sha256"] for entry in split["shards"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    problems = []
    for name, checksum in listed.items():
        file = place / name
        if not file.is_file():
            problems.append(f"{file}: is listed in {MANIFEST} and missing; copy it again")
        elif _sha256(file) != checksum:
            problems.append(f"{file}: differs from its checksum in {MANIFEST}; copy it again")
    suffixes = {Path(name).suffix for name in listed}
    for file in sorted(place.iterdir()):
        if file.suffix in suffixes and file.name not in listed and file.name[0] not in "._":
            problems.append(f"{file}: is not listed in {MANIFEST}; was it meant to be here?")
    return problems


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
