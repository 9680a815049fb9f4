"""The list of a data set's files: in a folder, in S3, or on the Hugging Face hub; made on rank 0 and broadcast."""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import pickle
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smp_train import distributed
from smp_train.arguments.sources import is_hub_name
from smp_train.data_next import hub, manifest, s3
from smp_train.data_next.kinds import TOKENS, Kind, kind_of_record
from smp_train.data_next.readers import Record, is_gzip, parse_object, records
from smp_train.errors import ConfigError, DataError, first_few
from smp_train.storage.client import is_s3

if TYPE_CHECKING:
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")
T = TypeVar("T")

READERS = {
    ".json": "lines", ".jsonl": "lines", ".ndjson": "lines", ".json.gz": "lines", ".jsonl.gz": "lines",
    ".ndjson.gz": "lines", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text", ".md": "text", ".rst": "text",
    ".py": "text", ".txt.gz": "text", ".tok": "tokens", ".idx": "tokens",
}  # fmt: skip
"""Reader of a file, by the suffix of its name."""
NOT_TEXT = (".csv", ".tsv", ".html", ".htm", ".xml", ".pdf", ".docx", ".zip", ".tar", ".gz", ".zst", ".bz2", ".xz")
"""Suffixes that are refused even for a single file, which else is read as text."""
HELD_OUT = ("validation", "valid", "val", "dev", "test")
"""Splits to validate on, the first that exists."""
SPLITS = ("train", *HELD_OUT)
DATASET_DICT, DATASET_STATE = "dataset_dict.json", "state.json"
OTHER_FILES = (
    DATASET_DICT, DATASET_STATE, "dataset_info.json", "cache-*.arrow", "tmp*.arrow", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json", "generation_config.json",
)  # fmt: skip
"""Files without records that ``datasets``, ``prepare`` and ``transformers`` write next to records."""
FIRST_RECORDS = 100
"""Records of a file among which the first well-formed one decides the kind."""
PEEK_THREADS = 16


@dataclass(frozen=True)
class DataFile:
    """One file of records, or one shard of a data set on the hub, as it was when it was listed."""

    path: str
    """An absolute path, ``s3://bucket/key``, or the name of a data set on the hub."""
    name: str
    """Its name within the data set: the path relative to the location."""
    size: int
    """Bytes; 0 where unknown (hub)."""
    version: str
    """Differs between contents under the same path: modification time in ns, ETag, or a digest of the hub's files."""
    kind: str
    """Reader of the file: ``lines``, ``parquet``, ``arrow``, ``text`` (one record), ``hub``, or ``tokens`` (a ``.tok``
    or an ``.idx`` file)."""
    shard: int = 0
    """Number of the shard on the hub."""
    config: str | None = None
    """Configuration of the data set on the hub."""
    split: str | None = None
    """Split of the data set on the hub."""

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


@dataclass(frozen=True)
class FileSet:
    """The files of one location, ordered by name, and the kind of their records."""

    location: str
    files: tuple[DataFile, ...]
    kind: Kind

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Selection:
    """The flags that select files and fields."""

    column: str | None = None
    """--text_column."""
    config: str | None = None
    """--dataset_config_name, for the hub."""
    patterns: Sequence[str] = ()
    """Patterns of the names of files to read, instead of the known suffixes."""
    exclude: Sequence[str] = ()
    """Patterns of the names of files and folders to leave out."""
    zipped: bool | None = None
    """--zipped_data: refuse files that are stored the other way."""
    flag: str = "--training_dir"
    """The flag that gave the location, for messages."""
    check_manifest: bool = True
    """Refuse files that differ from the manifest that prepare wrote."""


# --- Collective


def list_sources(
    locations: Sequence[str], selection: Selection, *, ranks: Runtime, split: str | Sequence[str] = "train"
) -> list[FileSet]:
    """Return the files of each location, as rank 0 lists them; one rank per node checks the local sizes. Collective.

    Raises DataError and ConfigError, on all ranks.
    """

    def work() -> list[FileSet]:
        filesets = [list_files(location, selection, split=split) for location in locations]
        _refuse_duplicates([file for fileset in filesets for file in fileset.files])
        return filesets

    filesets = _from_main(f"listing {first_few(locations)}", work)
    _check_nodes(filesets, ranks)
    return filesets


def list_held_out_source(location: str, selection: Selection, *, ranks: Runtime) -> FileSet | None:
    """Return `list_held_out` of rank 0, checked on each node. Collective."""
    fileset = _from_main(f"looking for validation data in {location}", lambda: list_held_out(location, selection))
    _check_nodes([fileset] if fileset else [], ranks)
    return fileset


def _from_main(what: str, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on rank 0, on all ranks. Long lists are broadcast once, not gathered."""
    content = b""
    with distributed.together(what):
        if distributed.rank() == 0:
            content = pickle.dumps(work())
    (content,) = distributed.exchange(content)
    result: T = pickle.loads(content)
    return result


def _check_nodes(filesets: Sequence[FileSet], ranks: Runtime) -> None:
    """Raise DataError where a node lacks a listed local file, or has another size of it."""
    with distributed.together("checking the listed files"):
        if ranks.local_rank == 0:
            for fileset in filesets:
                check_local_files(fileset.files)


def check_local_files(files: Iterable[DataFile]) -> None:
    """Raise DataError where this node lacks a local file, or has another size of it. Not collective."""
    local = [file for file in files if not file.remote]
    sizes = {file.path: _size_of(file.path) for file in local}
    missing = [path for path, size in sizes.items() if size is None]
    if missing:
        folder = os.path.dirname(missing[0])
        siblings = {os.path.join(folder, name) for name in (os.listdir(folder) if os.path.isdir(folder) else ())}
        if any(reader_of(path) for path in siblings - sizes.keys()):
            raise DataError(
                f"{missing[0]}: is missing on this node, which has other files there: each node has its own part of "
                "the data (ShardedByS3Key); give every node all files (S3DataDistributionType FullyReplicated)"
            )
        raise DataError(
            f"{missing[0]}: is missing on this node, with {len(missing) - 1} more of {len(sizes)} files that rank 0 "
            "listed; give every node the same files under the same path"
        )
    for file in local:
        if sizes[file.path] != file.size:
            raise DataError(
                f"{file.path}: has {sizes[file.path]} bytes on this node and {file.size} on rank 0's; give every node "
                "the same files"
            )


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


# --- On one process


def list_files(location: str, selection: Selection | None = None, *, split: str | Sequence[str] = "train") -> FileSet:
    """Return the files of a file, a folder, an ``s3://`` prefix or a data set on the hub.

    Folders are read with all folders below. Of a folder of splits (a DatasetDict, the output of prepare, or folders
    called train and test) and of a data set on the hub, ``split`` is read, or the first of several that exists.

    Raises DataError and ConfigError.
    """
    splits = (split,) if isinstance(split, str) else tuple(split)
    fileset = _listed(location, selection or Selection(), splits)
    if isinstance(fileset, FileSet):
        return fileset
    flag = (selection or Selection()).flag
    raise DataError(f"{flag} {location}: has no split {splits[0]}; it has {', '.join(fileset)}")


def list_held_out(location: str, selection: Selection | None = None) -> FileSet | None:
    """Return the files of the split to validate on, ``validation`` or ``test``; None where there is none.

    Raises DataError also where the hub cannot be reached: it may have such a split.
    """
    fileset = _listed(location, selection or Selection(), HELD_OUT, plain=False)
    return fileset if isinstance(fileset, FileSet) else None


def reader_of(name: str) -> str | None:
    """Return the reader of a file by its name; None for a file that is not read."""
    lower = os.path.basename(name).lower()
    suffixes = [suffix for suffix in READERS if lower.endswith(suffix)]
    if not suffixes or lower[0] in "._" or any(fnmatch.fnmatchcase(lower, pattern) for pattern in OTHER_FILES):
        return None
    return READERS[max(suffixes, key=len)]


def _listed(location: str, selection: Selection, splits: Sequence[str], *, plain: bool = True) -> FileSet | list[str]:
    """Return the files of the first of ``splits`` that exists, or else the names of the splits that do.

    A location without splits is listed as it is, or, unless ``plain``, has no split.
    """
    if is_hub_name(location):
        try:
            streams, identities = hub.open_splits(location, selection.config)
        except (ConfigError, DataError) as error:
            raise type(error)(f"{selection.flag} {error}") from None
        chosen = next((split for split in splits if split in streams), None)
        if chosen is None:
            return list(streams)
        shards = range(streams[chosen].num_shards)
        names = [f"{chosen}-{shard:0{len(str(len(shards)))}d}" for shard in shards]
        files = [
            DataFile(location, name, 0, identities[chosen], "hub", shard, selection.config, chosen)
            for shard, name in zip(shards, names, strict=True)
        ]
        return FileSet(location, tuple(files), _kind_of_files(files, selection.column))
    entries = _s3_entries(location) if is_s3(location) else _local_entries(location, selection)
    existing = _splits_in(entries)
    if existing:
        chosen = next((split for split in splits if split in existing), None)
        if chosen is None:
            return existing
        location = f"{location.rstrip('/')}/{chosen}"
        prefix = f"{chosen}/"
        entries = {name[len(prefix) :]: entry for name, entry in entries.items() if name.startswith(prefix)}
    elif not plain:
        return []
    return _fileset(location, entries, selection)


Entry = tuple[str, int, str]
"""Path, size and version of a file."""


def _s3_entries(location: str) -> dict[str, Entry]:
    """Return the objects below a prefix, or the one object, by their names relative to the location."""
    entries = s3.list_objects(location)
    return {name: entry for name, entry in entries.items() if not any(part[:1] in "._" for part in name.split("/"))}


def _local_entries(location: str, selection: Selection) -> dict[str, Entry]:
    """Return the files below a folder, or the one file, by their names relative to the location."""
    path = os.path.abspath(location)
    if os.path.isfile(path):
        return {os.path.basename(path): _local_entry(path)}
    if not os.path.isdir(path):
        raise DataError(f"{location}: no such file or folder; check {selection.flag}")
    return {name: _local_entry(f"{path}/{name}") for name in sorted(_walk(path, "", selection.exclude, frozenset()))}


def _walk(root: str, below: str, exclude: Sequence[str], parents: frozenset[str]) -> Iterator[str]:
    """Yield the names of files below a folder; hidden files and folders, and those that begin with _, are left out."""
    folder = os.path.join(root, below)
    real = os.path.realpath(folder)
    if real in parents:  # a link to a folder above
        return
    try:
        with os.scandir(folder) as entries:
            children = [(entry.name, entry.is_dir()) for entry in entries]
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror})") from None
    for name, is_folder in children:
        if name[0] in "._" or any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            continue
        if is_folder:
            yield from _walk(root, f"{below}{name}/", exclude, parents | {real})
        else:
            yield f"{below}{name}"


def _local_entry(path: str) -> Entry:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); remove it or mend the link") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file; move it out of the data folder")
    return path, status.st_size, str(status.st_mtime_ns)


def _splits_in(entries: dict[str, Entry]) -> list[str]:
    """Return the names of the splits in a folder of splits; none for another folder."""
    folders = list(dict.fromkeys(name.partition("/")[0] for name in entries if "/" in name))
    if DATASET_DICT in entries:
        return folders
    splits = [name for name in SPLITS if name in folders]
    if "train" not in splits or any("/" not in name and reader_of(name) for name in entries):
        return []
    return splits if len(splits) > 1 or len(folders) == 1 else []


def _fileset(location: str, entries: dict[str, Entry], selection: Selection) -> FileSet:
    """Return the files of a location that hold records. Raises DataError and ConfigError."""
    files = _readable_files(location, entries, selection)
    single = _is_single(location, entries)
    _refuse_duplicates(files)
    if selection.check_manifest and not selection.patterns and not single:
        manifest.check(location, {file.name: file.size for file in files})
    files = _without_empty(files)
    for file in files:
        _check_zipped(file, selection.zipped)
    kind = _kind_of_files(files, selection.column)
    files = files if single else _without_other_files(files, kind)
    left_out = _describe(entries.keys() - {file.name for file in files})
    if left_out and not selection.patterns:
        logger.warning("%s: left out, as they are not read: %s", location, left_out)
    return FileSet(location, tuple(sorted(files, key=lambda file: file.name)), kind)


def _is_single(location: str, entries: dict[str, Entry]) -> bool:
    """Return whether the location is itself a file."""
    (path, *_), *others = entries.values() or [("",)]
    return not others and path == (location if is_s3(location) else os.path.abspath(location))


def _readable_files(location: str, entries: dict[str, Entry], selection: Selection) -> list[DataFile]:
    """Return the files for which there is a reader. Raises DataError if there are none."""
    single, patterns = _is_single(location, entries), selection.patterns
    readers: dict[str, str | None] = {}
    for name in entries:
        selected = single or any(fnmatch.fnmatchcase(os.path.basename(name), pattern) for pattern in patterns)
        readers[name] = reader_of(name) if selected or not patterns else None
        if selected and readers[name] is None and not name.lower().endswith(NOT_TEXT):
            readers[name] = "text"
    if DATASET_STATE in entries and not patterns:
        readers = dict.fromkeys(_dataset_files(location, entries), "arrow")
    files = []
    for name, (path, size, version) in entries.items():
        if reader := readers.get(name):
            files.append(DataFile(path, name, size, version, reader))
    if not files:
        names = _describe(entries)
        others = f"; it has {names}, which are not read: write their records as JSON lines" if names else ""
        suffixes = " ".join(patterns) or " ".join(f"*{suffix}" for suffix in READERS)
        raise DataError(f"{selection.flag} {location}: no file that matches {suffixes}{others}")
    prepared = [file for file in files if file.kind == "tokens"]
    others = next((file.name for file in files if file.kind != "tokens"), "")
    if prepared and others:
        raise DataError(f"{location}: holds prepared tokens (.tok) and {others}; keep one kind in a folder")
    return files


def _dataset_files(location: str, entries: dict[str, Entry]) -> list[str]:
    """Return the names of the files of a data set that ``save_to_disk`` wrote. Raises DataError."""
    path = entries[DATASET_STATE][0]
    try:
        content = (s3.read_object(path) or b"") if is_s3(path) else Path(path).read_bytes()
        state = json.loads(content)
        names = [entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise ValueError("an old release of datasets kept the order of the rows in a separate file")
        for name in names:
            if name not in entries:
                raise ValueError(f"{name} is missing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{location}: not a whole data set ({error}); save it again with save_to_disk") from None
    if not names:
        raise DataError(f"{location}: the data set has no file; save it again with save_to_disk")
    return names


def _kind_of_files(files: Sequence[DataFile], column: str | None) -> Kind:
    """Return the kind of the first well-formed record. Raises DataError and ConfigError."""
    if files[0].kind == "tokens":
        return TOKENS
    first_problem: Exception | None = None
    # Texts, and .json files next to other files, may be documentation or settings.
    for file in sorted(files, key=_is_json):
        if file.kind == "text":
            continue
        table: dict[str, object] = {}
        for _, number, record in islice(records(file), FIRST_RECORDS):
            try:
                fields = parse_object(record) if isinstance(record, bytes) else _merged(table, record)
                if isinstance(record, bytes) or None not in table.values():
                    return kind_of_record(fields, column, file.at(number))
            except ValueError as error:
                first_problem = first_problem or DataError(f"{file.at(number)}: {error}")
            except DataError as error:
                first_problem = first_problem or error
        if table:
            return kind_of_record(table, column, file.shown)
    if any(file.kind == "text" for file in files):
        return Kind("text", (column or "text",))
    raise first_problem or DataError(f"{files[0].shown}: no record in this file, nor in {len(files) - 1} others")


def _is_json(file: DataFile) -> bool:
    return file.name.lower().endswith(".json")


def _merged(table: dict[str, object], row: Record) -> dict[str, object]:
    """Add a row to ``table``, which keeps the first value of each column that is not null."""
    assert isinstance(row, dict)
    for name, value in row.items():
        if table.get(name) is None:
            table[name] = value
    return table


def _without_other_files(files: list[DataFile], kind: Kind) -> list[DataFile]:
    """Leave out texts next to records that are no text, and ``.json`` files with something else, such as settings.

    Next to rows of tokens, and where all files are called ``.json``, each of these must hold records.
    """
    if kind.name != "text":
        files = [file for file in files if file.kind != "text"]
    doubtful = [file for file in files if _is_json(file)]
    if kind == TOKENS or len(doubtful) == len(files):
        return files
    with ThreadPoolExecutor(PEEK_THREADS) as pool:
        without = pool.map(lambda file: _begins_with_other_object(file, kind), doubtful)
        others = {file.name for file, other in zip(doubtful, without, strict=True) if other}
    return [file for file in files if file.name not in others]


def _begins_with_other_object(file: DataFile, kind: Kind) -> bool:
    """Return whether a file's first line is an object without the fields of a record, or the start of one."""
    with suppress(DataError):  # reported when the file is read
        for _, _, record in records(file):
            assert isinstance(record, bytes)
            try:
                return kind.fields[0] not in parse_object(record)
            except ValueError:
                return record.strip() in (b"{", b"[")
    return False


def _refuse_duplicates(files: Iterable[DataFile]) -> None:
    """Raise DataError where records would count twice: a file listed twice, or next to its compressed form."""
    contents: dict[tuple[object, ...], DataFile] = {}
    stems: dict[str, DataFile] = {}
    for file in files:
        twin = contents.setdefault(_content_key(file), file)
        if twin is not file:
            raise DataError(
                f"{file.shown}: is the same file as {twin.shown}, so its records would count twice; remove one"
            )
        twin = stems.setdefault(_stem(file), file)
        if twin is not file:
            raise DataError(
                f"{file.shown}: lies next to {os.path.basename(twin.path)}, so its records would count twice; remove "
                "one of the two"
            )


def _content_key(file: DataFile) -> tuple[object, ...]:
    if file.remote:
        return file.path, file.split, file.shard
    status = os.stat(file.path)
    return status.st_dev, status.st_ino


def _stem(file: DataFile) -> str:
    """Return the path without suffixes under which the same records may lie twice: .gz, and .json for .jsonl."""
    if file.kind == "hub":
        return f"{file.path}/{file.name}"
    lower = file.path.lower()
    suffix = max((suffix for suffix in READERS if lower.endswith(suffix)), key=len, default="")
    stem = file.path[: len(file.path) - len(suffix)]
    return stem if file.kind == "lines" else stem + suffix.removesuffix(".gz")


def _without_empty(files: list[DataFile]) -> list[DataFile]:
    """Leave out empty texts. Raises DataError for another empty file."""
    empty = [file for file in files if not file.size]
    for file in empty:
        if file.kind != "text" or len(empty) == len(files):
            raise DataError(f"{file.path}: is empty (0 bytes); write it again or remove it")
    if empty:
        logger.warning("left out %d empty files of %d; the first is %s", len(empty), len(files), empty[0].path)
    return [file for file in files if file.size]


def _check_zipped(file: DataFile, zipped: bool | None) -> None:
    """Raise an error where ``--zipped_data`` contradicts the file. An object in S3 is judged by its name."""
    if zipped is None:
        return
    if file.kind != "lines":
        raise ConfigError(f"--zipped_data {int(zipped)} is for JSON lines, and {file.path} is none: leave it out")
    if zipped != (file.name.lower().endswith(".gz") if file.remote else is_gzip(file)):
        kind = "plain" if zipped else "gzipped"
        raise DataError(f"{file.path}: is {kind}, but --zipped_data is {int(zipped)}; leave the flag out")


def _describe(names: Iterable[str]) -> str:
    """Return the number of files of each suffix, such as ``3 *.csv, 1 *.html``; files of data sets are left out."""
    suffixes = Counter(
        f"*{os.path.splitext(name)[1].lower()}" if "." in name else name
        for name in map(os.path.basename, names)
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in (*OTHER_FILES, "*.idx"))
    )
    ordered = sorted(suffixes.items(), key=lambda item: (-item[1], item[0]))
    return first_few([f"{count} {suffix}" for suffix, count in ordered], most=5)
