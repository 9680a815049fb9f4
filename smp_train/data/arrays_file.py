"""Arrays with a header in JSON, as safetensors files: indexes of token files, and tables of samples.

The arrays are mapped: processes that read the same file share its pages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from smp_train.storage.checksum import crc32
from smp_train.storage.folder import FolderStorage


def atomic_file(path: str) -> AbstractContextManager[BinaryIO]:
    """Return a context manager with a file to write; the file appears at ``path`` once it is complete and synced."""
    folder, name = os.path.split(path)
    return FolderStorage(folder or ".").writer(name)


def write_arrays(path: str, version: int, header: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a header and arrays of integers to a file, which appears once it is complete and synced.

    Unsigned integers are stored as signed ones, since torch 2.5 knows hardly any others.
    """
    arrays = {name: array.view(f"<i{array.itemsize}") for name, array in arrays.items()}
    checksums = {name: crc32(array.tobytes()) for name, array in arrays.items()}
    text = json.dumps({"version": version, "checksums": checksums, "header": header})
    with atomic_file(path) as file:
        file.write(save(arrays, {"content": f"{crc32(text.encode()):08x}{text}"}))


class ArraysFile:
    """A file of arrays whose header has been read; ``checksums`` has the CRC-32 of each array."""

    def __init__(self, path: str, header: Any, checksums: Mapping[str, int]) -> None:
        self.path, self.header, self.checksums = path, header, checksums

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The mapped arrays, which stay readable after the file is removed. Raises OSError."""
        with safe_open(self.path, framework="pt") as file:
            return {name: file.get_tensor(name).numpy() for name in self.checksums}

    def intact(self) -> bool:
        """Return whether every array matches its checksum; reads the whole file. Raises OSError."""
        return all(crc32(self.arrays[name]) == expected for name, expected in self.checksums.items())


def read_header(path: str, version: int) -> ArraysFile | None:
    """Return the file at ``path``; None if it is missing, damaged, or has a different version."""
    try:
        with safe_open(path, framework="np") as file:
            names, text = set(file.keys()), file.metadata()["content"]
        content = json.loads(text[8:])
        intact = crc32(text[8:].encode()) == int(text[:8], 16) and content["checksums"].keys() == names
        known = intact and content["version"] == version
        return ArraysFile(path, content["header"], content["checksums"]) if known else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
