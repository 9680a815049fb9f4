"""A prefix of a bucket: listed, and its objects read whole or by ranges, several requests at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

from smp_train.errors import CheckpointError
from smp_train.storage import client as s3

AT_ONCE = s3.AT_ONCE
PART_BYTES = 16 << 20
"""Bytes of one request, up or down. A rank holds some twenty of them at most."""
ATTEMPTS = s3.ATTEMPTS
WAIT_SECONDS = 0.2
"""Before the second try of a read that broke off; doubled before each further one."""


class Entry(NamedTuple):
    """An object below a prefix."""

    size: int
    modified: datetime


class S3Folder:
    """A prefix of a bucket. What fails is a `CheckpointError` that names the object, or the prefix, and what to do."""

    def __init__(self, location: str) -> None:
        self.bucket, key = s3.split(location)
        self.prefix = key.strip("/")
        self.location = f"{s3.SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        self._pinned: dict[str, str] = {}

    @property
    def client(self) -> Any:
        """The client of this process; made on first use."""
        return s3.client()

    def key(self, *parts: str) -> str:
        """Return the key of something below the prefix."""
        return "/".join(part.strip("/") for part in (self.prefix, *parts) if part)

    def ask(self, operation: str, *, key: str | None = None, **more: Any) -> Any:
        """Make one request about ``key``, or about the prefix. Raises `CheckpointError` that names both."""
        from botocore.exceptions import BotoCoreError, ClientError

        given = more if key is None else {"Key": key, **more}
        try:
            return getattr(self.client, operation)(Bucket=self.bucket, **given)
        except (BotoCoreError, ClientError) as error:
            raise self.explained(error, operation, key) from error

    def explained(self, error: BaseException, operation: str, key: str | None) -> CheckpointError:
        """Return what to tell of a request that failed."""
        place = self.location if key is None else f"{s3.SCHEME}{self.bucket}/{key}"
        return CheckpointError(str(s3.explain(error, place, operation, CheckpointError)))

    def entries(self, folder: str) -> dict[str, Entry]:
        """Return all objects below ``folder``, by their path there."""
        start = f"{self.key(folder)}/".lstrip("/")
        found: dict[str, Entry] = {}
        for page in self._pages("list_objects_v2", Prefix=start):
            for each in page.get("Contents", ()):
                found[each["Key"][len(start) :]] = Entry(each["Size"], each["LastModified"])
        found.pop("", None)  # how consoles draw an empty folder
        return found

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each object directly in the prefix, by its name."""
        start = self.key() + "/" if self.prefix else ""
        found: dict[str, int] = {}
        for page in self._pages("list_objects_v2", Prefix=start, Delimiter="/"):
            found |= {each["Key"][len(start) :]: each["Size"] for each in page.get("Contents", ())}
        found.pop("", None)
        return found

    def pin(self, file: str) -> int:
        """Return an object's size in bytes; reading it fails from now on where it has been replaced."""
        key = self.key(file)
        answer = self.ask("head_object", key=key)
        self._pinned[key] = answer["ETag"]
        return int(answer["ContentLength"])

    def _pages(self, operation: str, **given: Any) -> Iterator[dict[str, Any]]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield from self.client.get_paginator(operation).paginate(Bucket=self.bucket, **given)
        except (BotoCoreError, ClientError) as error:
            raise self.explained(error, operation, None) from error

    def has(self, name: str, file: str) -> bool:
        """Return whether ``file`` is there."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.head_object(Bucket=self.bucket, Key=self.key(name, file))
        except (BotoCoreError, ClientError) as error:
            if getattr(error, "response", {}).get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                return False
            raise self.explained(error, "head_object", self.key(name, file)) from error
        return True

    def read(self, name: str, file: str) -> bytes:
        """Return a small file's contents."""
        return self.body(self.key(name, file), None)

    def ranges(self, wanted: Iterable[tuple[str, str, int, int]]) -> Iterator[bytes]:
        """Yield each (name, file, start, length) as bytes, in this order, the next ones being fetched meanwhile."""
        waiting: deque[Future[bytes]] = deque()
        coming = iter(wanted)
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="smp-train-s3") as pool:
            try:
                while True:
                    for name, file, start, length in coming:
                        waiting.append(pool.submit(self.body, self.key(name, file), (start, length)))
                        if len(waiting) >= AT_ONCE:
                            break
                    if not waiting:
                        return
                    yield waiting.popleft().result()
            finally:
                for each in waiting:
                    each.cancel()

    def body(self, key: str, span: tuple[int, int] | None) -> bytes:
        """Return an object, or (start, length) of it. A body that breaks off is fetched again."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        if span is not None and span[1] == 0:
            return b""
        given: dict[str, Any] = {"IfMatch": self._pinned[key]} if key in self._pinned else {}
        given |= {} if span is None else {"Range": f"bytes={span[0]}-{span[0] + span[1] - 1}"}
        problem: Exception
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(min(WAIT_SECONDS * 2 ** (attempt - 1), 10.0))
            try:
                answer = self.client.get_object(Bucket=self.bucket, Key=key, **given)
                data: bytes = answer["Body"].read()
                if len(data) != answer["ContentLength"]:
                    problem = EOFError(f"{len(data)} of {answer['ContentLength']} bytes came")
                elif span is not None and len(data) != span[1]:
                    break  # the object ends before
                else:
                    return data
            except ClientError as error:
                raise self.explained(error, "get_object", key) from error
            except (BotoCoreError, HTTPError, ConnectionError, TimeoutError) as error:
                if type(error).__name__ == "NoCredentialsError":
                    raise self.explained(error, "get_object", key) from error
                problem = error
        else:
            last = s3.one_line(problem)
            raise CheckpointError(f"{s3.SCHEME}{self.bucket}/{key}: cannot be read in {ATTEMPTS} tries (last: {last})")
        raise CheckpointError(f"{s3.SCHEME}{self.bucket}/{key}: is shorter than it should be; it has been replaced")
