"""Lists a data set's files in a folder, in S3 or on the Hugging Face hub; rank 0 makes the list and broadcasts it."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from smp_train import distributed
from smp_train.arguments.sources import HELD_OUT, is_hub_name
from smp_train.data import hub, manifest, s3
from smp_train.data.kinds import TEXTS, Kind, kind_of_record
from smp_train.data.readers import records
from smp_train.data.text import object_of
from smp_train.errors import ConfigError, DataError, first_few
from smp_train.storage import is_s3

if TYPE_CHECKING:
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

READERS = {
    ".json": "lines", ".jsonl": "lines", ".ndjson": "lines", ".json.gz": "lines", ".jsonl.gz": "lines",
    ".ndjson.gz": "lines", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text", ".md": "text", ".rst": "text",
    ".py": "text", ".txt.gz": "text",
}  # fmt: skip
"""Reader of a file, by the suffix of its name."""
SUFFIX = re.compile(f"({'|'.join(map(re.escape, READERS))})\\Z")
NOT_TEXT = (
    ".csv", ".tsv", ".html", ".htm", ".xml", ".pdf", ".docx", ".zip", ".tar", ".gz", ".zst", ".bz2", ".xz", ".tok",
    ".idx",
)  # fmt: skip
"""Suffixes of files that are refused. A single file with any other unknown suffix is read as text."""
DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
OTHER_FILES = (
    DATASET_DICT, DATASET_STATE, "dataset_info.json", "cache-*.arrow", "tmp*.arrow", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json", "generation_config.json",
    "*.png", "*.jpg", "*.svg",
)  # fmt: skip
"""Files without records: those that ``datasets``, ``prepare`` and ``transformers`` write, and pictures in READMEs."""
OTHER_NAME = re.compile("|".join(map(fnmatch.translate, OTHER_FILES)))
FIRST_RECORDS = 100
"""Only this many records at the start of a file are tried; the first well-formed one decides the file's kind."""


@dataclass(frozen=True)
class DataFile:
    """One file of records, or one shard of a data set on the hub, as it was when it was listed."""

    path: str  # absolute path, s3://bucket/key, or the name of a data set on the hub
    name: str  # name within the data set: the path relative to the location
    size: int  # bytes; 0 on the hub, where the size is unknown
    version: str  # version of the content: modification time in ns, ETag, or a digest of the hub's files
    kind: str  # name of the reader: lines, parquet, arrow, text (the file is one record), or hub
    shard: int = 0  # for a data set on the hub: number of the shard; below, its configuration and split
    config: str | None = None
    split: str | None = None

    @property
    def shown(self) -> str:
        """Return the name of the file in messages."""
        return f"{self.path}/{self.name}" if self.kind == "hub" else self.path

    @property
    def remote(self) -> bool:
        """Return whether the file is in S3 or on the hub."""
        return self.kind == "hub" or is_s3(self.path)

    def at(self, number: int) -> str:
        """Return the name of a record in messages, by its number from 1: ``PATH:LINE`` or ``PATH: row N``."""
        if self.kind == "text":
            return self.shown
        return f"{self.shown}:{number}" if self.kind == "lines" else f"{self.shown}: row {number}"


class Entry(NamedTuple):
    """A file at a location: the first fields of `DataFile`, without the name."""

    path: str
    size: int
    version: str


@dataclass(frozen=True)
class FileSet:
    """The files of one location, ordered by name, and the kind of their records."""

    location: str  # location as it was given; for a folder of splits, with the chosen split
    files: tuple[DataFile, ...]
    kind: Kind

    @property
    def on_hub(self) -> bool:
        """Return whether this is a data set of the hub."""
        return self.files[0].kind == "hub"

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Selection:
    """The flags that select files and fields."""

    column: str | None = None  # --text_column
    config: str | None = None  # --dataset_config_name, for the hub
    patterns: Sequence[str] = ()  # patterns of the names of files to read, instead of the known suffixes
    exclude: Sequence[str] = ()  # patterns of the names of files and folders to leave out
    zipped: bool | None = None  # --zipped_data: refuse plain files (True) or gzipped files (False)
    flag: str = "--training_dir"  # the flag that gave the location, for messages
    check_manifest: bool = True  # refuse files that differ from the manifest that prepare wrote


def list_sources(
    locations: Sequence[str], selection: Selection, *, ranks: Runtime, split: str | Sequence[str] = "train",
    held_out: bool = False,
) -> list[FileSet]:  # fmt: skip
    """Return the files of each location as rank 0 lists them; one rank per node checks local files. Collective.

    ``held_out`` uses `list_held_out`, and skips locations with no split to validate on. Raises DataError, ConfigError.
    """
    filesets: list[FileSet] = []
    with distributed.together(f"listing {first_few(locations)}"):
        if distributed.rank() == 0:
            listed = [
                list_held_out(location, selection) if held_out else list_files(location, selection, split=split)
                for location in locations
            ]
            filesets = [fileset for fileset in listed if fileset is not None]
            _refuse_duplicates([file for fileset in filesets for file in fileset.files])
    filesets = distributed.from_main(filesets)
    with distributed.together("checking the listed files"):
        if ranks.local_rank == 0:
            check_local_files([file for fileset in filesets for file in fileset.files])
    return filesets


def check_local_files(files: Sequence[DataFile]) -> None:
    """Raise DataError if this node lacks a local file, or has the file with another size. Not collective."""
    for file in files:
        if file.remote:
            continue
        try:
            size = os.stat(file.path).st_size
        except OSError:
            raise DataError(
                f"{file.path}: is missing on this node; give each node all files under the same path (in SageMaker by "
                "S3DataDistributionType FullyReplicated, not ShardedByS3Key)"
            ) from None
        if size != file.size:
            raise DataError(
                f"{file.path}: has {size} bytes on this node and {file.size} on rank 0's; give all nodes the same files"
            )


def list_files(location: str, selection: Selection | None = None, *, split: str | Sequence[str] = "train") -> FileSet:
    """Return the files of a location: a file, a folder, an ``s3://`` prefix or a data set on the hub. Not collective.

    A folder is read with all folders below it. From a data set on the hub, or from a folder of splits (a DatasetDict,
    the output of prepare, or folders called train and test), only the first ``split`` that exists is read. Raises
    DataError, ConfigError.
    """
    selection = selection or Selection()
    splits = (split,) if isinstance(split, str) else tuple(split)
    fileset = _listed(location, selection, splits)
    if isinstance(fileset, FileSet):
        return fileset
    raise DataError(f"{selection.flag} {location}: has no split {splits[0]}; it has {', '.join(fileset)}")


def list_held_out(location: str, selection: Selection | None = None) -> FileSet | None:
    """Return the files of the split to validate on, or None if the location has no validation or test split.

    Not collective. Raises DataError also if the hub cannot be reached, since the data set may have such a split.
    """
    fileset = _listed(location, selection or Selection(), HELD_OUT, splits_only=True)
    return fileset if isinstance(fileset, FileSet) else None


def reader_of(name: str) -> str | None:
    """Return the reader of a file by its name; None for a file that is not read."""
    lower = os.path.basename(name).lower()
    if lower[0] in "._" or OTHER_NAME.match(lower):
        return None
    return READERS.get(_suffix(lower))


def _suffix(name: str) -> str:
    """Return the longest known suffix of a name, or an empty one."""
    known = SUFFIX.search(name.lower())
    return known[0] if known else ""


def _listed(
    location: str, selection: Selection, splits: Sequence[str], *, splits_only: bool = False
) -> FileSet | list[str]:
    """Return the files of the first of ``splits`` that exists; if none exists, the names of the location's splits.

    A location without splits is listed as one file set, unless ``splits_only`` is set.
    """
    if not is_hub_name(location):
        entries = _s3_entries(location) if is_s3(location) else _local_entries(location, selection)
        existing = _splits_in(entries)
        split = next((split for split in splits if split in existing), None)
        if split is not None:
            below = {name.removeprefix(f"{split}/"): entries[name] for name in entries if name.startswith(f"{split}/")}
            return _fileset(f"{location.rstrip('/')}/{split}", below, selection)
        return existing if existing or splits_only else _fileset(location, entries, selection)
    try:
        streams, identities = hub.open_splits(location, selection.config)
    except (ConfigError, DataError) as error:
        raise type(error)(f"{selection.flag} {error}") from None
    split = next((split for split in splits if split in streams), None)
    if split is None:
        return list(streams)
    count = streams[split].num_shards
    files = tuple(
        DataFile(location, f"{split}-{shard:0{len(str(count))}d}", 0, identities[split], "hub", shard,
                 selection.config, split)
        for shard in range(count)
    )  # fmt: skip
    return FileSet(location, files, _kind_of_files(files, selection.column))


def _s3_entries(location: str) -> dict[str, Entry]:
    """Return the objects below a prefix, or the one object, by their names relative to the location."""
    return {
        name: Entry(*entry)
        for name, entry in s3.list_objects(location).items()
        if not any(part[:1] in "._" for part in name.split("/"))
    }


def _local_entries(location: str, selection: Selection) -> dict[str, Entry]:
    """Return the files below a folder, or the one file, by their names relative to the location."""
    root = os.path.abspath(location)
    if os.path.isfile(root):
        return {os.path.basename(root): _local_entry(root)}
    if not os.path.isdir(root):
        raise DataError(f"{location}: no such file or folder; check {selection.flag}")
    entries = {}

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed ({error.strerror})")

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder) + "/"
        # A link to a parent folder would be followed without end.
        folders[:] = [
            name for name in sorted(folders)
            if _is_selected(name, selection) and not real.startswith(os.path.realpath(f"{folder}/{name}") + "/")
        ]  # fmt: skip
        for name in sorted(names):
            if _is_selected(name, selection):
                entries[f"{folder}/{name}"[len(root) + 1 :]] = _local_entry(f"{folder}/{name}")
    return entries


def _is_selected(name: str, selection: Selection) -> bool:
    return name[0] not in "._" and not any(fnmatch.fnmatchcase(name, pattern) for pattern in selection.exclude)


def _local_entry(path: str) -> Entry:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); remove it or mend the link") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file; move it out of the data folder")
    return Entry(path, status.st_size, str(status.st_mtime_ns))


def _splits_in(entries: dict[str, Entry]) -> list[str]:
    """Return the names of the splits in a folder of splits; an empty list for any other folder."""
    folders = list(dict.fromkeys(name.partition("/")[0] for name in entries if "/" in name))
    if DATASET_DICT in entries:
        return folders
    splits = [name for name in ("train", *HELD_OUT) if name in folders]
    # A text, such as a README, does not make it a folder of records.
    has_records = any("/" not in name and reader_of(name) not in (None, "text") for name in entries)
    return splits if "train" in splits and not has_records and (len(splits) > 1 or len(folders) == 1) else []


def _fileset(location: str, entries: dict[str, Entry], selection: Selection) -> FileSet:
    """Return the files of a location that hold records. Raises DataError and ConfigError."""
    path = location if is_s3(location) else os.path.abspath(location)
    single = [entry.path for entry in entries.values()] == [path]
    readers = _readers(location, entries, selection.patterns, single)
    listed = [
        DataFile(entry.path, name, entry.size, entry.version, readers[name])
        for name, entry in entries.items() if name in readers
    ]  # fmt: skip
    files = [file for file in listed if _is_usable(file, single, selection.zipped)]
    if not files:
        names = _describe(entries)
        hint = f"; not read: {names}; write the records as JSON lines" if names else ""
        suffixes = " ".join(selection.patterns) or " ".join(f"*{suffix}" for suffix in READERS)
        raise DataError(f"{selection.flag} {location}: no file that matches {suffixes}{hint}")
    _refuse_duplicates(files)
    if selection.check_manifest and not selection.patterns and not single:
        problems = manifest.differences(location, {file.name: file.size for file in files})
        if problems:
            raise DataError(
                f"{location}: is not what its {manifest.MANIFEST} lists: {first_few(problems, '; ')}: copy or prepare "
                "it again, or remove the manifest if the files are as intended"
            )
    kind = _kind_of_files(files, selection.column)
    if kind.name != "text":  # leave out texts, such as a README
        files = [file for file in files if file.kind != "text"]
    left_out = _describe(entries.keys() - {file.name for file in files})
    if left_out and not selection.patterns:
        logger.warning("%s: left out, as they are not read: %s", location, left_out)
    return FileSet(location, tuple(sorted(files, key=lambda file: file.name)), kind)


def _readers(location: str, entries: dict[str, Entry], patterns: Sequence[str], single: bool) -> dict[str, str]:
    """Return the reader of each file that is read."""
    if DATASET_STATE in entries and not patterns:
        return dict.fromkeys(_dataset_files(location, entries), "arrow")
    readers: dict[str, str] = {}
    for name in entries:
        selected = single or any(fnmatch.fnmatchcase(os.path.basename(name), pattern) for pattern in patterns)
        reader = READERS.get(_suffix(name)) or (None if name.lower().endswith(NOT_TEXT) else "text")
        if reader and (selected or (not patterns and reader_of(name))):
            readers[name] = reader
    return readers


def _dataset_files(location: str, entries: dict[str, Entry]) -> list[str]:
    """Return the names of the files of a data set that ``save_to_disk`` wrote. Raises DataError."""
    path = entries[DATASET_STATE].path
    try:
        state = json.loads((s3.read_object(path) or b"") if is_s3(path) else Path(path).read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise ValueError("an old release of datasets kept the order of the rows in a separate file")
        if not names or not entries.keys() >= set(names):
            raise ValueError(f"of its files {first_few(sorted(set(names) - entries.keys())) or 'all'} are missing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{location}: not a whole data set ({error}); save it again with save_to_disk") from None
    return names


def _kind_of_files(files: Sequence[DataFile], column: str | None) -> Kind:
    """Return the kind of the first well-formed record. Raises DataError and ConfigError."""
    problem: DataError | None = None
    for file in (file for file in files if file.kind != "text"):
        for _, number, record in islice(records(file), FIRST_RECORDS):
            try:
                return kind_of_record(object_of(record), column, file.at(number))
            except DataError as error:
                problem = problem or error
            except ValueError as error:
                problem = problem or DataError(f"{file.at(number)}: {error}")
    if any(file.kind == "text" for file in files):
        return Kind("text", (column,)) if column else TEXTS
    raise problem or DataError(f"{files[0].shown}: no record in this file, nor in {len(files) - 1} others")


def _refuse_duplicates(files: Iterable[DataFile]) -> None:
    """Raise DataError if records would count twice: a file is listed twice, or lies next to its compressed form."""
    seen: dict[object, DataFile] = {}
    for file in files:
        status = None if file.remote else os.stat(file.path)
        same = (file.path, file.split, file.shard) if status is None else (status.st_dev, status.st_ino)
        # ``stem`` is the path without .gz, and for JSON lines also without .json, .jsonl or .ndjson.
        suffix = _suffix(file.path) if file.kind != "hub" else ""
        stem = file.shown[: len(file.shown) - len(suffix)] + suffix.removesuffix(".gz") * (file.kind != "lines")
        for key in (same, stem):
            twin = seen.setdefault(key, file)
            if twin is not file:
                how = "lies next to" if isinstance(key, str) else "is the same file as"
                raise DataError(f"{file.shown}: {how} {twin.shown}, so its records would count twice; remove one")


def _is_usable(file: DataFile, single: bool, zipped: bool | None) -> bool:
    """Return False for an empty text in a folder. Raises DataError for other empty files and a wrong --zipped_data."""
    if not file.size and (file.kind != "text" or single):
        raise DataError(f"{file.path}: is empty (0 bytes); write it again or remove it")
    if not file.size:
        logger.warning("%s: left out, as it is empty", file.path)
    elif zipped is not None and (file.kind != "lines" or zipped != file.name.lower().endswith(".gz")):
        form = "gzipped" if zipped else "plain"
        raise DataError(f"{file.path}: is no {form} file of JSON lines, but --zipped_data is {int(zipped)}; omit it")
    return bool(file.size)


def _describe(names: Iterable[str]) -> str:
    """Return the first few names, without the known files that hold no records."""
    return first_few(sorted(name for name in names if not OTHER_NAME.match(os.path.basename(name))), most=5)
