"""Addresses in S3, and a store in a folder that stands in for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def is_s3_uri(path: object) -> bool:
    return str(path).startswith("s3://")


def parse_s3_uri(path: str) -> tuple[str, str]:
    bucket, _, key = format_s3_path(path).removeprefix("s3://").partition("/")
    return bucket, key


def format_s3_path(path: object) -> str:
    text = str(path)
    if not is_s3_uri(text):
        raise ValueError(f"{text} is not an S3 URI")
    return text.rstrip("/")


def local(path: object) -> Path:
    """Return where ``path`` is on this machine; what is in S3 is in the folder that SMP_STANDIN_S3 names."""
    if not is_s3_uri(path):
        return Path(str(path))
    root = Path(os.environ.get("SMP_STANDIN_S3") or Path(tempfile.gettempdir(), "smp-standin-s3"))
    return root.joinpath(*parse_s3_uri(str(path)))
