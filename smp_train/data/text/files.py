"""Files of documents, wherever they are: in folders, in S3, or a data set of the Hugging Face hub."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from smp_train.data import s3
from smp_train.data.hf_dataset import refuse_dict
from smp_train.data.lines import GZIP_ERRORS, GZIP_MAGIC, GzipFile
from smp_train.data.text.detect import first_fields
from smp_train.data.text.hub import open_split
from smp_train.data.text.read import LINES_SUFFIXES, LOOKED_INTO, TABLE_SUFFIXES, TEXT_SUFFIXES, TextFile
from smp_train.data.utils import say_left_out
from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

FIRST_LINE_BYTES = 1 << 20
LOOKED_INTO_TOGETHER = 16
SUFFIXES = TEXT_SUFFIXES + LINES_SUFFIXES + TABLE_SUFFIXES
OF_DATASETS = ("state.json", "dataset_info.json", "cache-*.arrow", "tmp*.arrow")
"""What ``datasets`` puts beside the Arrow files of a data set."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_files(
    inputs: Sequence[str],
    patterns: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    config: str | None = None,
    split: str = "train",
    column: str | None = None,
    flag: str = "--input",
) -> list[TextFile]:
    """List the files below ``inputs``: files, folders, ``s3://`` prefixes, and names of data sets of the hub.

    They are ordered by a hash of their names: always the same, and the first of them are a fair sample of all.

    ``patterns`` select by file name, or, when empty, `SUFFIXES`, and of files called ``.json`` those whose first line
    is an object with a field of documents (``column`` is --text_column). A file or folder whose name matches one of
    ``exclude`` is left out with all below it, and so are files of 0 bytes. A file given itself is taken whatever its
    name. ``config`` and ``split`` are for the hub. Raises DataError when there is none, or an input is not there;
    messages name ``flag``.
    """
    found: list[TextFile] = []
    for given in inputs:
        if s3.is_s3(given) or os.path.isdir(given):
            below = _below(given, patterns, exclude)
            found += below if patterns else _of_documents(below, given, first_fields(column))
        elif os.path.isfile(given):
            found.append(_local(Path(given), os.path.basename(given)))
        elif HUB_NAME.fullmatch(given) and not given.lower().endswith((*SUFFIXES, LOOKED_INTO)):
            found += open_split(given, config, split, flag).files()
        else:
            raise DataError(f"{given}: no such file or folder; check {flag}")
    if not found:
        wanted = " ".join(patterns) or " ".join("*" + suffix for suffix in SUFFIXES)
        wanted += "" if patterns else f" (or a *{LOOKED_INTO} of lines with {_named(first_fields(column))})"
        raise DataError(
            f"{', '.join(inputs)}: no file that matches {wanted}; give another {flag}"
            + (" or --pattern" if flag == "--input" else "")
        )
    _refuse_duplicates(found)
    empty = [file for file in found if not (file.size or file.remote)]
    if len(empty) == len(found):
        raise DataError(f"{found[0].path}: is empty, as is all of {flag}; write it again")
    if empty:
        logger.warning(
            "left out %d empty files of %d; the first is %s", len(empty), len(found), empty[0].path, extra=ALL_RANKS
        )
    return sorted((file for file in found if file.size or file.remote), key=_in_sampled_order)


def _in_sampled_order(file: TextFile) -> tuple[bytes, str, str]:
    name = file.name.encode(errors="surrogateescape")
    return hashlib.blake2b(name, digest_size=8).digest(), file.name, file.path


def _named(fields: Sequence[str]) -> str:
    return "a field " + " or ".join(fields)


def _of_documents(found: list[TextFile], given: str, fields: Sequence[str]) -> list[TextFile]:
    """Leave out files called ``.json`` that hold something else, such as a configuration, with a warning."""
    doubtful = [file for file in found if file.name.lower().endswith(LOOKED_INTO) and file.path != given]
    with ThreadPoolExecutor(LOOKED_INTO_TOGETHER) as pool:
        # Tokens are taken too: their reader names what they are.
        hold = pool.map(lambda file: begins_with(file, *fields, "input_ids"), doubtful)
        others = {file.path for file, holds in zip(doubtful, hold, strict=True) if not holds}
    if others:
        logger.warning(
            "left out %d files called *%s whose first line is no object with %s; the first is %s",
            len(others), LOOKED_INTO, _named(fields), min(others), extra=ALL_RANKS,
        )  # fmt: skip
    return [file for file in found if file.path not in others]


def begins_with(file: TextFile, *fields: str, most: int = FIRST_LINE_BYTES) -> bool:
    """True when the first line of a file is an object with one of some fields, or damaged, as its reader then names.

    Of a line above ``most`` bytes only the beginning is searched.
    """
    with file.open() as raw:
        zipped = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        raw.seek(0)
        try:
            lines = partial((GzipFile(fileobj=raw, mode="rb") if zipped else raw).readline, most)
            line = next((line for line in iter(lines, b"") if not line.isspace()), b"")
        except GZIP_ERRORS:
            return True
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        long = len(line) == most and not line.endswith(b"\n")
        return long and any(json.dumps(field).encode() in line for field in fields)
    return isinstance(record, dict) and not record.keys().isdisjoint(fields)


def _refuse_duplicates(found: list[TextFile]) -> None:
    seen: set[tuple[str, int]] = set()
    for file in found:
        key = (file.path if file.remote else os.path.realpath(file.path), file.shard)
        if key in seen:
            raise DataError(f"{file.path}: is given twice, so its documents would count twice; give it once")
        seen.add(key)
    paths = {file.path for file in found}
    for file in found:
        if file.path.lower().endswith(".gz") and file.path[:-3] in paths:
            raise DataError(
                f"{file.path}: {os.path.basename(file.path)[:-3]} is beside it, so its documents would count twice; "
                "remove one of the two"
            )


def _local(path: Path, name: str) -> TextFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); remove it or mend the link") from None
    return TextFile(str(path), name, status.st_size, str(status.st_mtime_ns))


def _below(given: str, patterns: Sequence[str], exclude: Sequence[str]) -> list[TextFile]:
    """List the wanted files below a folder or an ``s3://`` prefix, or the one object given whatever its name."""
    if s3.is_s3(given):
        objects = {shard.name: shard for shard in s3.list_folder(given, deep=True)[0] if shard.size}
        names = [name for name in objects if not any(_left_out(part, exclude) for part in name.split("/"))]
        wanted = [name for name in names if objects[name].path == given or _wanted(name, patterns)]
        found = [TextFile(objects[name].path, name, objects[name].size, objects[name].etag) for name in wanted]
    else:
        refuse_dict(given, set(os.listdir(given)))
        names = list(_walk(Path(given), exclude))
        wanted = [name for name in names if _wanted(name, patterns)]
        found = [_local(Path(given, name), name) for name in wanted]
    if not patterns:
        others = [os.path.basename(name) for name in set(names) - set(wanted)]
        say_left_out(given, [name for name in others if not _matches(name, OF_DATASETS)])
    return found


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _left_out(name, exclude))
        yield from (
            os.path.relpath(os.path.join(folder, name), root) for name in sorted(files) if not _left_out(name, exclude)
        )


def _left_out(name: str, exclude: Sequence[str]) -> bool:
    return name[:1] in ("", ".") or _matches(name, exclude)


def _wanted(path: str, patterns: Sequence[str]) -> bool:
    name = os.path.basename(path)
    if patterns:
        return _matches(name, patterns)
    return name.lower().endswith((*SUFFIXES, LOOKED_INTO)) and name[0] != "_" and not _matches(name, OF_DATASETS)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
