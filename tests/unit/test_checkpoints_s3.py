"""Checkpoints in S3, one process: what counts and what does not, after every request that may be the last."""

from __future__ import annotations

import contextlib
import math

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train.checkpoints.commit import CheckpointFolder, open_folder
from smp_train.checkpoints.runs import summary

from smp_train.checkpoints import commit, find, open_checkpoint
from smp_train.errors import CheckpointError
from smp_train.storage import client, s3
from tests.checkpoint_files import files, keys, loaded, manager, save, state

CHANGES = ("PUT", "POST", "DELETE")


@pytest.fixture
def place(s3_place):
    return s3_place


def small_parts(monkeypatch) -> None:
    """Let 200 kB be several parts; S3 itself wants 5 MiB each."""
    monkeypatch.setattr(s3, "PART_BYTES", 1 << 16)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1 << 10)


def uploads(place: str) -> list[str]:
    answer = client.client().list_multipart_uploads(Bucket=s3.S3Storage(place).bucket)
    return [upload["Key"] for upload in answer.get("Uploads", ())]


def test_a_large_object_goes_up_in_parts_and_comes_back_in_ranges(place, monkeypatch):
    small_parts(monkeypatch)
    rows = 20_000  # 240 kB
    save(place, 3, rows=rows)
    assert loaded(place, rows) == 3
    (size,) = [size for file, size in open_folder(place).sizes("llama_v2-3steps").items() if file.endswith("distcp")]
    assert size > 3 * s3.PART_BYTES


def test_a_copy_in_a_folder_or_of_a_folder_is_a_checkpoint_too(place, tmp_path):
    save(place, 3)
    there, here = open_folder(place).storage, open_folder(tmp_path).storage
    for file in there.files():
        here.put(file, there.read(file))
        there.delete(file)
    assert loaded(tmp_path) == 3
    for file in here.files():
        there.put(file, here.read(file))
    assert loaded(place) == 3
    save(place, 4, keep=1)
    assert keys(place) == files("llama_v2-4steps")


# --- what is cut short: no request later than the n-th has any effect, for every n


def freeze(server, after: int) -> list[str]:
    """Let ``after`` requests that change something through, and none later, as if the writer had died."""
    seen: list[str] = []

    def on_request(method: str, path: str) -> str | None:
        if method not in CHANGES:
            return None
        seen.append(f"{method} {path}")
        return "AccessDenied" if len(seen) > after else None

    server.on_request = on_request
    return seen


@pytest.mark.slow
def test_a_writer_that_dies_after_any_request_loses_nothing(server, place, monkeypatch):
    small_parts(monkeypatch)
    rows, after, outcomes = 20_000, 0, []  # in parts
    while True:
        run = f"{place}/{after}"
        save(run, 2)
        seen = freeze(server, after)
        with contextlib.suppress(CheckpointError):
            save(run, 3, rows=rows, keep=1)
        server.on_request = lambda method, path: None
        outcomes.append(loaded(run, rows, of_step=3))
        assert "this program" not in summary(run, commit.UNKNOWN)
        committed = {key.partition("/")[0] for key in keys(run) if key.endswith("COMMITTED")}
        assert f"llama_v2-{outcomes[-1]}steps" in committed
        open_folder(run).sweep(-math.inf)  # as the next job does once it holds the lock
        assert keys(run) == files(*committed)
        assert uploads(run) == []
        if len(seen) <= after:
            break
        after += 1
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) >= 10


@pytest.mark.slow
def test_a_step_that_is_saved_again_is_replaced_at_once(server, place):
    """A replacement that dies after any request leaves the older or the newer one, whole."""
    after, tokens = 0, set()
    while True:
        run = f"{place}/{after}"
        save(run, 1, 3)
        seen = freeze(server, after)
        with contextlib.suppress(CheckpointError):
            manager(run).save(3, state(3), {"tokens": 30, "again": True})
        server.on_request = lambda method, path: None
        assert loaded(run) == 3
        tokens.add(find(run).meta.get("again"))
        if len(seen) <= after:
            break
        after += 1
    assert tokens == {None, True}
    assert keys(run) == files("llama_v2-1steps", "llama_v2-3steps")


def test_a_save_that_fails_once_it_is_committed_takes_nothing_back(server, place, monkeypatch):
    """The last request has its effect, but no answer comes, however often it is tried."""
    save(place, 2)
    server.on_request = lambda method, path: "lost" if method == "PUT" and path.endswith("3steps/COMMITTED") else None
    with pytest.raises(CheckpointError, match=r"3steps/COMMITTED: S3 does not answer as it should"):
        save(place, 3)
    server.on_request = lambda method, path: None
    assert loaded(place) == 3


@pytest.mark.parametrize("lands", [True, False])
def test_a_committed_that_was_given_up_and_lands_later_names_a_whole_checkpoint(place, monkeypatch, lands):
    save(place, 2, 3)
    put, late = CheckpointFolder.put, []

    def slow(self, name, file, data):
        if file == "COMMITTED":
            late.append((self, name, file, data))
            raise CheckpointError("no answer came in time")
        return put(self, name, file, data)

    again = manager(place)
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFolder, "put", slow)
        with pytest.raises(CheckpointError, match="no answer"):
            again.save(3, state(3), {"tokens": 30, "again": True})
    assert loaded(place) == 3
    for request in late if lands else ():
        put(*request)
    assert loaded(place) == 3
    assert find(place, strict=True).meta.get("again", False) == lands
    open_folder(place).sweep(-math.inf)
    assert keys(place) == files("llama_v2-2steps", "llama_v2-3steps")


def test_the_last_request_of_the_dead_may_still_be_on_its_way(place, monkeypatch):
    """What would be left without its COMMITTED is not removed while that may come."""
    monkeypatch.setattr(commit, "IN_FLIGHT_SECONDS", 3600.0)
    save(place, 2, 3)
    storage = open_folder(place)
    committed = storage.read("llama_v2-3steps", "COMMITTED")
    storage.storage.delete("/".join(["llama_v2-3steps", "COMMITTED"]))
    following = manager(place, keep=10)
    following.lock()
    following.save(4, state(4), {"tokens": 40})
    following.close()
    storage.put("llama_v2-3steps", "COMMITTED", committed)
    assert loaded(f"{place}/llama_v2-3steps") == 3


def test_what_is_deleted_is_no_checkpoint_from_the_first_request_on(server, place):
    after = 0
    while True:
        run = f"{place}/{after}"
        save(run, 1, 2)
        seen = freeze(server, after)
        with contextlib.suppress(CheckpointError):
            open_folder(run).delete("llama_v2-1steps")
        server.on_request = lambda method, path: None
        assert find(f"{run}/llama_v2-2steps").verify() == []
        if after:
            with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
                open_checkpoint(f"{run}/llama_v2-1steps")
        if len(seen) <= after:
            break
        after += 1
    assert keys(run) == files("llama_v2-2steps")


# --- faults


def test_what_is_refused_is_named_and_is_no_damage(server, place):
    save(place, 1)
    refused = rf"access denied \(403 AccessDenied\); the role in use needs s3:{{0}} on {place.split('/')[2]}"
    server.on_request = lambda method, path: "AccessDenied" if method == "PUT" else None
    save_it = f"cannot save {place}/llama_v2-2steps: {place}/llama_v2-2steps/.*{refused.format('PutObject')}"
    with pytest.raises(CheckpointError, match=save_it):
        save(place, 2)
    with pytest.raises(CheckpointError, match=f"cannot write to checkpoint folder {place}: .*AccessDenied"):
        manager(place).check_writable()
    server.on_request = lambda method, path: "AccessDenied" if method == "GET" and "distcp" in path else None
    with pytest.raises(CheckpointError, match=refused.format("GetObject")):
        find(place)
    server.on_request = lambda method, path: None
    assert loaded(place) == 1
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/x.*: no such bucket \(404 NoSuchBucket\)"):
        manager("s3://no-such-bucket/x").check_writable()


# --- what is there already


def test_what_others_put_there_stays(place):
    save(place, 3)
    storage = open_folder(place)
    for file in ("notes.txt", "tensorboard/events", "llama_v2-3steps/hf/config.json", "llama_v2-3stepsnot/x"):
        storage.put("", file, b"mine")
    save(place, 4)
    assert len(keys(place)) == 2 * len(files("one")) + 4
    save(place, 5, keep=1)
    assert keys(place) == sorted(["notes.txt", "tensorboard/events", "llama_v2-3stepsnot/x", *files("llama_v2-5steps")])


def test_a_save_that_may_be_under_way_is_not_swept(server, place):
    save(place, 1)
    saver = manager(place)
    other = open_folder(place)
    other.put("llama_v2-9steps/0123abcd", "0/__0_0.distcp", b"half")
    assert other.sweep(60) == []
    saver.save(2, state(2), {"tokens": 20})
    assert "llama_v2-9steps/*/__0_0.distcp" in keys(place)
    assert len(other.sweep(-math.inf)) == 1
