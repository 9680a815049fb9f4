"""Storage: the same contract in a folder and in S3."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train import storage
from smp_train.errors import CheckpointError, ConfigError, DataError
from smp_train.storage import Range, Storage, client, s3
from tests.harness import free_port

FAILURES = (OSError, CheckpointError)


@pytest.fixture
def there(place) -> Storage:
    return storage.open_storage(place)


@pytest.fixture
def in_s3(bucket) -> s3.S3Storage:
    return s3.S3Storage(f"{bucket}/p")


def in_small_parts(monkeypatch) -> None:
    """Let 200 kB be several parts; S3 itself wants 5 MiB each."""
    monkeypatch.setattr(s3, "PART_BYTES", 1 << 16)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1 << 10)


# --- the contract


def test_files_are_put_listed_read_renamed_and_deleted(there):
    assert (there.files(), there.level("x"), there.exists("a")) == ({}, ({}, []), False)
    with pytest.raises(FAILURES):
        there.read("a")
    there.delete("a")
    there.delete_folder("x")
    content = {"a": b"1", "b/c": b"22", "b/d/e": b"", "bb": random.Random(1).randbytes(5000)}
    for name, data in content.items():
        there.put(name, data)
    assert {name: entry.size for name, entry in there.files().items()} == {n: len(d) for n, d in content.items()}
    assert set(there.files("b")) == {"c", "d/e"}
    files, folders = there.level()
    assert (sorted(files), folders) == (["a", "bb"], ["b"])
    assert {name: there.read(name) for name in content} == content
    assert abs(files["a"].modified - there.now()) < 60
    spans = [(start, length) for start in (0, 1, 4000) for length in (1, 0, 1000)]
    assert list(there.ranges(Range("bb", *span) for span in spans)) == [content["bb"][a : a + n] for a, n in spans]
    there.put("a", b"333")
    there.move("a", "bb")
    there.move("bb", "b/d/e")
    assert there.read("b/d/e") == b"333"
    there.put("x", b"")
    there.delete_folder("b", but=("c",))
    assert set(there.files()) == {"b/c", "x"}
    there.delete("b/c")
    there.delete("x")
    assert there.level() == ({}, [])


def test_one_of_two_puts_if_absent(there):
    assert there.put_if_absent("deep/lock", b"first")
    assert not there.put_if_absent("deep/lock", b"second")
    assert there.read("deep/lock") == b"first"
    assert list(there.files()) == ["deep/lock"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_put_if_absent_is_whole_at_once(links: bool, tmp_path, monkeypatch):
    """An empty claim of a killed job would hide which job owned the run."""
    there, path, fsync = storage.open_storage(tmp_path), tmp_path / "lock", os.fsync

    def looking(descriptor: int) -> None:
        assert not path.exists() or path.read_bytes() == b"first"
        fsync(descriptor)

    def no_link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fsync", looking)
    if not links:
        monkeypatch.setattr(os, "link", no_link)
    assert there.put_if_absent("lock", b"first")
    assert not there.put_if_absent("lock", b"second")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"first", ["lock"])


def test_a_stream_is_a_file_when_it_has_ended(there, monkeypatch):
    in_small_parts(monkeypatch)
    data = random.Random(1).randbytes(200_000)
    for size in (0, 100, len(data)):
        with there.writer("x/f", size) as file:
            for start in range(0, size, 7001):
                file.write(memoryview(data)[start : min(size, start + 7001)])
        assert b"".join(there.ranges([Range("x/f", 0, size)])) == data[:size]

    def fails() -> None:
        with there.writer("x/f") as file:
            file.write(data)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fails()
    assert there.files()["x/f"].size == len(data)
    assert list(there.files()) == ["x/f"]


def test_what_a_killed_writer_left_is_discarded(place, monkeypatch):
    in_small_parts(monkeypatch)
    there = storage.open_storage(place)
    there.put("keep", b"")
    killed = there.writer("x/left")  # is not left
    killed.__enter__().write(bytes(100_000))
    later = there.now() + 60
    assert there.discard_unfinished(lambda name: False, later) == []
    if not storage.is_s3(place):  # to this server all uploads were begun in 2010
        assert there.discard_unfinished(lambda name: True, there.now() - 60) == []
    assert ["left" in name for name in there.discard_unfinished(lambda name: True, later)] == [True]
    assert there.discard_unfinished(lambda name: True, later) == []
    assert list(there.files()) == ["keep"]


def test_locations():
    assert storage.normal("a/../b") == os.path.abspath("b")
    assert storage.normal("s3://b/x//y/") == storage.normal("s3://b//x///y") == "s3://b/x/y"
    for wrong in ("hdfs://x", "s3://"):
        with pytest.raises(ConfigError, match=wrong):
            storage.open_storage(wrong)


# --- a folder


def test_links_are_no_files_of_a_folder(tmp_path):
    there = storage.open_storage(tmp_path)
    there.put("a/x", b"1")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "x")
    (tmp_path / "a" / "folder").symlink_to(tmp_path)
    assert list(there.files()) == ["a/x"]
    assert list(there.files("a/folder")) == []
    assert list(there.level("a")[0]) == ["x"]
    with pytest.raises(CheckpointError, match="is a link"):
        there.read("a/link")


# --- S3


FAULTS = {"SlowDown": 3, "cut": 2, "lost": 1, "short": 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_on_every_request_are_mended(in_s3, server, monkeypatch, fault):
    in_small_parts(monkeypatch)
    met: dict[str, int] = {}

    def on_request(method: str, path: str) -> str | None:
        request = f"{method} {path.partition('?')[0]} {'uploadId' in path}"
        met[request] = met.get(request, 0) + 1
        return fault if met[request] <= FAULTS[fault] else None

    server.on_request = on_request
    data = random.Random(1).randbytes(200_000)
    with in_s3.writer("f") as file:
        file.write(data)
    assert in_s3.put_if_absent("lock", b"mine")
    assert in_s3.read("f") == data
    assert in_s3.read_range("f", 10, 150_000) == data[10:150_010]
    in_s3.delete("f")
    assert list(in_s3.files()) == ["lock"]


def test_a_stall_is_mended(in_s3, server, monkeypatch):
    in_s3.put("f", bytes(1000))
    monkeypatch.setattr(client, "READ_TIMEOUT_SECONDS", 1.0)
    server.faults["p/f"].append("stall")
    assert in_s3.read("f") == bytes(1000)


REFUSED = {
    "AccessDenied": r"access denied \(403 AccessDenied\); the role in use needs s3:{0} on b",
    "ExpiredToken": r"the AWS credentials have expired \(ExpiredToken\); renew",
    "PermanentRedirect": r"the bucket is in another region \(301 .*set AWS_REGION=eu-west-3",
    "SlowDown": r"S3 does not answer as it should \(.*SlowDown.* the {0} operation",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_refused_names_the_object_and_the_permission(in_s3, server, fault):
    in_s3.put("f", b"1")
    requests: dict[str, Callable[[], object]] = {
        "GetObject": lambda: in_s3.read("f"),
        "PutObject": lambda: in_s3.put("f", b"2"),
        "DeleteObject": lambda: in_s3.delete("f"),
    }
    server.on_request = lambda method, path: fault
    for action, request in requests.items():
        with pytest.raises(CheckpointError, match=f"^{in_s3.location}/f: {REFUSED[fault].format(action)}") as refused:
            request()
        assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=f"^{in_s3.location}: "):
        s3.S3Storage(in_s3.location, DataError).files()


def test_a_version_that_was_replaced_or_is_shorter_is_an_error(in_s3):
    in_s3.put("f", b"12345")
    entry = in_s3.entry("f")
    assert in_s3.read_range("f", 1, 3, entry.etag) == b"234"
    for start, length in ((3, 9), (9, 1)):
        with pytest.raises(CheckpointError, match="shorter"):
            in_s3.read_range("f", start, length, entry.etag)
    in_s3.put("f", b"54321")
    with pytest.raises(CheckpointError, match="was replaced while it was being read"):
        in_s3.read_range("f", 1, 3, entry.etag)


def test_few_requests_and_parts_are_held(in_s3, server, monkeypatch):
    in_small_parts(monkeypatch)
    in_s3.put("f", bytes(100))
    coming = in_s3.ranges(Range("f", start, 1) for start in range(100))
    for taken in range(1, 101):
        assert next(coming) == b"\0"
        assert len(server.gets) < taken + client.AT_ONCE
    go, wrote = threading.Event(), threading.Event()
    server.on_request = lambda method, path: go.wait(60) and None if "partNumber" in path else None

    def write() -> None:
        with in_s3.writer("g") as stream:
            stream.write(bytes((client.AT_ONCE + 1) << 16))
            wrote.set()

    writes = threading.Thread(target=write)
    writes.start()
    assert not wrote.wait(0.2), "the last part waits for one that is being sent"
    go.set()
    writes.join()
    assert in_s3.entry("g").size == (client.AT_ONCE + 1) << 16
    assert s3.part_bytes(s3.PART_BYTES * 30_000) * 10_000 >= s3.PART_BYTES * 30_000, "S3 takes 10,000 parts"


def test_an_endpoint_that_does_not_answer_is_warned_about_at_the_first_try(in_s3, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(CheckpointError, match="S3 does not answer as it should"):
        in_s3.read("f")
    assert caplog.text.count(f"{os.environ['AWS_ENDPOINT_URL']} does not answer") == 1, "once in half a minute"
