"""Objects in S3, or anything that speaks its protocol: listed, and fetched many at a time."""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from smp_train.data.utils import Shard
from smp_train.errors import DataError
from smp_train.storage import s3
from smp_train.storage.ranges import Ranges
from smp_train.storage.s3 import SCHEME, is_s3, one_line

__all__ = ["connect", "explain", "fetch", "is_s3", "list_folder", "split", "staged"]

AT_ONCE = 8
"""Objects in flight: one connection of S3 brings some 80 MB/s, and many small clients cost less than one big one."""
READ_TIMEOUT_SECONDS = 20.0
"""A connection that brings nothing for so long is given up and opened again."""
ATTEMPTS = 10
"""Tries in a row that may bring not a byte."""
CHUNK = 1 << 17
"""Bytes per read; of a read that breaks off, what it had is lost."""
LEAST_CHUNK = 1 << 10
READ_AHEAD = 1 << 20
"""Bytes of one request of an object that is read as a file."""
WAIT_SECONDS = 0.2
"""Before the second try; doubled before each further one."""


def split(location: str) -> tuple[str, str]:
    """Return (bucket, key) of ``s3://bucket/key``."""
    return s3.split(location, DataError)


def connect(attempts: int = 5) -> Any:
    """Return a client that tries every request ``attempts`` times. It must not be shared over a fork."""
    return s3.connect(attempts=attempts, connections=2 * AT_ONCE, read_timeout=READ_TIMEOUT_SECONDS)


_WHO = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE")


@lru_cache(maxsize=8)
def _made(process: int, attempts: int, timeout: float, *who: str | None) -> Any:
    return connect(attempts)


def shared(attempts: int = 5) -> Any:
    """Return this process's client, for all who ask: making one costs more than many a request."""
    return _made(os.getpid(), attempts, READ_TIMEOUT_SECONDS, *(os.environ.get(name) for name in _WHO))


def explain(error: Exception, what: str, action: str) -> DataError:
    """Turn boto3's error about ``what`` into a line that says what to do; ``action`` is the permission it needed."""
    return DataError(str(s3.explain(error, what, action, DataError)))


def list_folder(location: str, client: Any = None, *, deep: bool = False) -> tuple[list[Shard], list[str]]:
    """List (objects, names of folders) directly below a prefix, or the one object given; in order of keys.

    ``deep`` lists all objects below the prefix, and no folders. Raises DataError when the listing is refused.
    """
    bucket, key = split(location)
    client = client or shared()
    from botocore.exceptions import BotoCoreError, ClientError

    prefix = key if not key or key.endswith("/") else key + "/"
    found: list[Shard] = []
    folders: list[str] = []
    try:
        level = {} if deep else {"Delimiter": "/"}
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **level)
        for page in pages:
            found += [_object(bucket, entry, prefix) for entry in page.get("Contents", ())]
            folders += [entry["Prefix"][len(prefix) :].rstrip("/") for entry in page.get("CommonPrefixes", ())]
        if not found and not folders and prefix != key:
            page = client.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1)
            parent = key.rpartition("/")[0]
            found = [
                _object(bucket, entry, parent + "/" if parent else "")
                for entry in page.get("Contents", ())
                if entry["Key"] == key
            ]
    except (ClientError, BotoCoreError) as error:
        raise explain(error, location, "s3:ListBucket") from None
    # An object whose key is the prefix itself is how consoles draw an empty folder.
    return [shard for shard in found if shard.name], folders


def _object(bucket: str, entry: dict[str, Any], prefix: str) -> Shard:
    modified = int(entry["LastModified"].timestamp()) * 10**9
    name = entry["Key"][len(prefix) :]
    return Shard(f"{SCHEME}{bucket}/{entry['Key']}", name, entry["Size"], modified, entry["ETag"].strip('"'))


def fetch(shard: Shard, path: str, client: Any, tick: Callable[[], None] = lambda: None) -> None:
    """Write an object to ``path``, exactly the version that was listed.

    ``tick`` is called now and then. Raises DataError.
    """
    with open(path, "wb") as file:
        get_bytes(shard.path, shard.etag, shard.size, client, 0, shard.size, file.write, tick)


def read_small(path: str) -> bytes | None:
    """Return the content of an object that may not be there, or not be ours to read: then None.

    Raises DataError when that cannot be found out: ranks must not come to different answers.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    bucket, key = split(path)
    problem: Exception | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            _pause(attempt - 1)
        try:
            content: bytes = shared(attempts=1).get_object(Bucket=bucket, Key=key)["Body"].read()
            return content
        except (ClientError, BotoCoreError, HTTPError, ConnectionError, TimeoutError) as error:
            if _status(error) in (403, 404):
                return None
            problem = _passing(error, path)
    assert problem is not None
    raise DataError(f"{path}: cannot be read in {ATTEMPTS} tries (last: {one_line(problem)})")


def _status(error: Exception) -> int | None:
    """Return the HTTP status that an answer of S3 had, 0 where it names none; None of what is no answer."""
    from botocore.exceptions import ClientError

    # Others have a response too, of another kind, or none.
    if not isinstance(error, ClientError):
        return None
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _passing(error: Exception, path: str) -> Exception:
    """Return a failure to get an object that another try may not meet; raise the DataError of any other."""
    status = _status(error)
    lasts = type(error).__name__ == "NoCredentialsError" if status is None else status < 500 and status != 429
    if lasts:
        raise explain(error, path, "s3:GetObject") from None
    return error


def _pause(failures: int) -> None:
    time.sleep(min(WAIT_SECONDS * 2**failures, 10.0))


def get_bytes(
    path: str,
    etag: str,
    size: int,
    client: Any,
    begin: int,
    end: int,
    write: Callable[[bytes], Any],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Hand bytes ``begin`` to ``end`` of an object of ``size`` bytes to ``write``, chunk by chunk.

    A body that breaks off is taken up where it broke (Range), under the condition that the object is still the same
    (If-Match). ``tick`` is called now and then. Raises DataError.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    bucket, key = split(path)
    done, failures, chunk_bytes = begin, 0, CHUNK
    while done < end:
        before = done
        tick()
        try:
            given = {"Range": f"bytes={done}-{'' if end == size else end - 1}"} if done or end < size else {}
            body = client.get_object(Bucket=bucket, Key=key, IfMatch=f'"{etag}"', **given)["Body"]
            try:
                for chunk in body.iter_chunks(chunk_bytes):
                    write(chunk)
                    done += len(chunk)
                    tick()
            finally:
                body.close()
            problem: Exception = EOFError(f"{done - begin} of {end - begin} bytes")
        except (ClientError, BotoCoreError, HTTPError, ConnectionError, TimeoutError) as error:
            problem = _passing(error, path)
        if done > end:
            raise DataError(f"{path}: is longer than it was listed; start again when the data is complete")
        if done < end and not isinstance(problem, ClientError):
            # Of a chunk that breaks off nothing is kept: where every connection is short, chunks must be too.
            chunk_bytes = max(LEAST_CHUNK, chunk_bytes // 4)
        failures = 0 if done > before else failures + 1
        if failures >= ATTEMPTS:
            raise DataError(
                f"{path}: cannot be read: {failures} tries in a row brought nothing (last: {one_line(problem)})"
            )
        if failures:
            _pause(failures - 1)


def open_ranges(path: str, size: int, etag: str) -> io.BufferedReader:
    """Return an object as a file of which only what is read is fetched. What is read raises DataError."""
    client = shared(attempts=1)

    def fill(start: int, view: memoryview) -> None:
        place = 0

        def put(chunk: bytes) -> None:
            nonlocal place
            # More than was asked for is an error, which `get_bytes` raises.
            view[place : place + len(chunk)] = chunk[: max(0, len(view) - place)]
            place += len(chunk)

        get_bytes(path, etag, size, client, start, start + len(view), put)

    return io.BufferedReader(Ranges(size, fill), READ_AHEAD)


def staged(
    shards: Iterable[Shard],
    folder: str,
    *,
    at_once: int = AT_ONCE,
    client: Any = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Shard, str]]:
    """Yield (object, local copy) in the order given, ``at_once`` being fetched meanwhile.

    Copies are temporary files in ``folder``: whoever takes one removes it. Never more than ``at_once`` lie there
    untaken; those go when the iterator is closed. Raises DataError, also when ``folder`` is full, and InterruptedError
    when ``stop``, asked all the time, says so.
    """
    # `fetch` tries again itself: it knows what it has already.
    client = client or shared(attempts=1)

    def get(shard: Shard) -> str:
        try:
            handle, path = tempfile.mkstemp(prefix=".stage.", suffix=".tmp", dir=folder)
            os.close(handle)
            try:
                fetch(shard, path, client, give_up)
            except BaseException:
                os.unlink(path)
                raise
            return path
        except InterruptedError:
            raise
        except OSError as error:
            raise DataError(
                f"{folder}: cannot hold a copy of {shard.path} ({error.strerror or error}); "
                "free some space or give a --data_cache_dir that can be written"
            ) from None

    def give_up() -> None:
        if closing or stop():
            raise InterruptedError

    closing: list[bool] = []
    waiting: deque[tuple[Shard, Future[str]]] = deque()
    coming = iter(shards)
    with ThreadPoolExecutor(at_once, thread_name_prefix="smp-train-s3") as pool:
        try:
            while True:
                for shard in coming:
                    waiting.append((shard, pool.submit(get, shard)))
                    if len(waiting) >= at_once:
                        break
                if not waiting:
                    return
                shard, copy = waiting.popleft()
                yield shard, copy.result()
        finally:
            closing.append(True)
            for _, copy in waiting:
                if not copy.cancel() and copy.exception() is None:
                    os.unlink(copy.result())
