"""A block of rows as a file that training reads: JSON lines, token cache, or Arrow."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data import token_writer
from smp_train.data.atomic_file import atomic_file
from smp_train.data.hf_dataset import INFO, STATE
from smp_train.data.lines import open_gzip_writer
from smp_train.data.source import Row

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

Block = np.ndarray | list[Row]
"""Rows of one shard: [rows, tokens], all counted, or rows with labels."""


def encode_rows(rows: np.ndarray) -> bytes:
    """Write rows, [n, seq_len], as JSON lines in the shard format, every token counted."""
    tail = (',"attention_mask":[' + ",".join("1" * rows.shape[1]) + "]}\n").encode()
    return b"".join(b'{"input_ids":' + _numbers(row) + tail for row in rows.astype(np.int64))


def encode_labelled(rows: Sequence[Row]) -> bytes:
    """Write rows with labels, of any length, as JSON lines in the shard format."""
    lines = []
    for row in rows:
        assert row.labels is not None
        ids, labels = (_numbers(values.astype(np.int64)) for values in (row.input_ids, row.labels))
        mask = ",".join("1" * row.input_ids.size).encode()
        lines.append(b'{"input_ids":' + ids + b',"attention_mask":[' + mask + b'],"labels":' + labels + b"}\n")
    return b"".join(lines)


def _numbers(row: np.ndarray) -> bytes:
    if orjson is not None:
        return orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(row.tolist(), separators=(",", ":")).encode()


def write_block(kind: str, folder: str, name: str, block: Block, vocab_size: int, zipped: bool) -> dict[str, Any]:
    """Write one shard; return its name, rows, bytes and checksum. The same rows give the same bytes."""
    if kind == "cache":
        token_writer.write_rows(name, os.path.join(folder, name), vocab_size, block)
        name += ".tok"
        content = Path(folder, name).read_bytes()
    else:
        if kind == "arrow":
            name, content = name + ".arrow", _arrow(block)
        else:
            name += ".json"
            content = encode_rows(block) if isinstance(block, np.ndarray) else encode_labelled(block)
        if kind == "shards" and zipped:
            buffer = io.BytesIO()
            with open_gzip_writer(buffer) as stream:
                stream.write(content)
            name, content = name + ".gz", buffer.getvalue()
        with atomic_file(os.path.join(folder, name)) as file:
            file.write(content)
    digest = hashlib.sha256(content).hexdigest()
    entry: dict[str, Any] = {"name": name, "rows": len(block), "bytes": len(content), "sha256": digest}
    if kind == "shards" and isinstance(block, np.ndarray):
        # With these a run knows the shard without having read it (--shuffle window:K).
        entry["digests"] = token_writer.digests_of_block(block, vocab_size)
    return entry


def _arrow(block: Block) -> bytes:
    import pyarrow as pa

    rows = [Row(ids) for ids in block] if isinstance(block, np.ndarray) else block
    starts = pa.array(np.cumsum([0, *(row.input_ids.size for row in rows)], dtype=np.int32))
    columns = {"input_ids": [row.input_ids for row in rows]}
    if rows[0].labels is not None:
        columns["labels"] = [row.labels for row in rows if row.labels is not None]
    lists = {
        name: pa.ListArray.from_arrays(starts, pa.array(np.concatenate(values).astype(np.int32)))
        for name, values in columns.items()
    }
    table = pa.table(lists)
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table)
    return buffer.getvalue()


def finish_arrow(
    folder: Path, split: str, shards: list[dict[str, Any]], columns: Sequence[str] = ("input_ids",)
) -> None:
    """Write what makes a folder of Arrow files a data set for ``datasets.load_from_disk``."""
    digest = hashlib.sha256("".join(shard["sha256"] for shard in shards).encode()).hexdigest()
    state: dict[str, Any] = {
        "_data_files": [{"filename": shard["name"]} for shard in shards],
        "_fingerprint": digest[:16], "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": split,
    }  # fmt: skip
    lists = {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "Sequence"}
    info = {"features": dict.fromkeys(columns, lists)}
    write_json(folder / INFO, info)
    write_json(folder / STATE, state)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file of one object, complete or not at all."""
    with atomic_file(str(path)) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
