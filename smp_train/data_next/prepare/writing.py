"""A block of rows as a file that training reads: JSON lines, or a token file."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data_next.atomic_file import atomic_file
from smp_train.data_next.readers import open_gzip_writer
from smp_train.data_next.source import Row
from smp_train.data_next.writer import writing

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]


def write_shard(
    output_type: str, folder: str, name: str, block: Sequence[Row], vocab_size: int, zipped: bool
) -> dict[str, Any]:
    """Write one shard; return its name, rows, bytes and checksum. The same rows give the same bytes."""
    if output_type == "cache":
        with writing(os.path.join(folder, name), vocab_size) as writer:
            writer.add(name, 0, "", enumerate(block, 1))
        name += ".tok"
        content = Path(folder, name).read_bytes()
    else:
        name, content = name + ".json", b"".join(map(_line, block))
        if zipped:
            buffer = io.BytesIO()
            with open_gzip_writer(buffer) as stream:
                stream.write(content)
            name, content = name + ".gz", buffer.getvalue()
        with atomic_file(os.path.join(folder, name)) as file:
            file.write(content)
    return {"name": name, "rows": len(block), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _line(row: Row) -> bytes:
    mask = ",".join("1" * row.input_ids.size).encode()
    labels = b"" if row.labels is None else b',"labels":' + _numbers(row.labels)
    return b'{"input_ids":' + _numbers(row.input_ids) + b',"attention_mask":[' + mask + b"]" + labels + b"}\n"


def _numbers(values: np.ndarray) -> bytes:
    values = np.ascontiguousarray(values, dtype=np.int64)
    if orjson is not None:
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(values.tolist(), separators=(",", ":")).encode()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of one object, complete or not at all."""
    with atomic_file(str(path)) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
