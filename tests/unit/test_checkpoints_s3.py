"""Checkpoints in S3, one process: what counts and what does not, after every request that may be the last."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train.checkpoints import folder as folder_module
from smp_train.checkpoints.find import open_checkpoint, open_verified
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.errors import CheckpointError
from smp_train.storage import client, s3
from tests.checkpoint_files import check, committed, files, keys, loaded, manager, names, owning, resumed, save, state

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


def sweep(place: str) -> list[str]:
    """Tidy as a start a long time later does."""
    folder = open_folder(place)
    return folder.sweep(10**6)


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
@pytest.mark.parametrize("generation", [1, 2])
def test_a_writer_that_dies_after_any_request_loses_nothing(server, place, monkeypatch, generation):
    """In a start's first save, which sweeps before it, and in a later one."""
    small_parts(monkeypatch)
    rows, after, outcomes = 20_000, 0, []  # in parts
    while True:
        run = f"{place}/{after}"
        save(run, 2)
        if generation == 2:
            folder = open_folder(run)
            folder.put(folder.begin("llama_v2", 3, 1), "meta.json", b"half")
        seen = freeze(server, after)
        with contextlib.suppress(CheckpointError):
            save(run, 3, rows=rows, keep=1, generation=generation)
        server.on_request = lambda method, path: None
        outcomes.append(loaded(run, rows, of_step=3))
        kept = committed(run)
        assert f"llama_v2-{outcomes[-1]}steps" in [name.removesuffix("-2") for name in kept]
        sweep(run)
        assert keys(run) == files(*kept)
        assert uploads(run) == []
        if len(seen) <= after:
            break
        after += 1
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) >= 10


@pytest.mark.slow
def test_a_step_that_is_saved_again_replaces_nothing(server, place):
    """An attempt that dies after any request leaves the earlier one whole."""
    after, tokens = 0, set()
    while True:
        run = f"{place}/{after}"
        save(run, 1, 3)
        seen = freeze(server, after)
        with contextlib.suppress(CheckpointError):
            manager(run, generation=2).save(3, state(3), {"tokens": 30, "again": True})
        server.on_request = lambda method, path: None
        assert loaded(run) == 3
        tokens.add(open_verified(run).meta.get("again"))
        if "llama_v2-3steps" in committed(run):
            check(open_verified(f"{run}/llama_v2-3steps"))
        if len(seen) <= after:
            break
        after += 1
    assert tokens == {None, True}
    assert keys(run) == files("llama_v2-3steps", "llama_v2-3steps-2")


def test_a_save_that_fails_once_it_is_committed_takes_nothing_back(server, place):
    """The last request has its effect, but no answer comes, however often it is tried."""
    save(place, 2)
    server.on_request = lambda method, path: "lost" if method == "PUT" and path.endswith("3steps/COMMITTED") else None
    with pytest.raises(CheckpointError, match=r"3steps/COMMITTED: S3 does not answer as it should"):
        save(place, 3)
    server.on_request = lambda method, path: None
    assert loaded(place) == 3


@pytest.mark.parametrize("lands", [True, False])
def test_a_committed_that_was_given_up_and_lands_later_is_a_whole_checkpoint(place, monkeypatch, lands):
    save(place, 2, 3)
    commit, late = RunFolder.commit, []

    def slow(self, name, marker):
        late.append((self, name, marker))
        raise CheckpointError("no answer came in time")

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "commit", slow)
        with pytest.raises(CheckpointError, match="no answer"):
            manager(place, generation=2).save(3, state(3), {"tokens": 30, "again": True})
    assert loaded(place) == 3
    for request in late if lands else ():
        commit(*request)
    assert loaded(place) == 3
    assert resumed(place, strict=True).meta.get("again", False) == lands
    sweep(place)
    assert keys(place) == files("llama_v2-2steps", "llama_v2-3steps", *["llama_v2-3steps-2"] * lands)


def test_the_last_request_of_the_dead_may_still_be_on_its_way(place, monkeypatch):
    """What would be left without its COMMITTED is not removed while that may come."""
    monkeypatch.setattr(folder_module, "IN_FLIGHT_SECONDS", 3600.0)
    save(place, 2, 3)
    folder = open_folder(place)
    marker = folder.read("llama_v2-3steps", "COMMITTED")
    folder.withdraw("llama_v2-3steps")
    with owning(place, keep=10) as following:
        following.generation = 5
        following.save(4, state(4), {"tokens": 40})
    folder.put("llama_v2-3steps", "COMMITTED", marker)
    check(open_verified(f"{place}/llama_v2-3steps"))


def test_what_is_deleted_is_no_checkpoint_from_the_first_request_on(server, place):
    after = 0
    while True:
        run = f"{place}/{after}"
        save(run, 1, 2)
        seen = freeze(server, after)
        with contextlib.suppress(CheckpointError):
            open_folder(run).delete("llama_v2-1steps")
        server.on_request = lambda method, path: None
        assert open_checkpoint(f"{run}/llama_v2-2steps").verify() == []
        if after:
            assert committed(run) == ["llama_v2-2steps"]
        if len(seen) <= after:
            break
        assert names(run) == ["llama_v2-1steps", "llama_v2-2steps"]
        sweep(run)
        known = files(*["llama_v2-1steps"] * (after == 0), "llama_v2-2steps")
        assert keys(run) == known, "a start knows it for ours"
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
    with pytest.raises(CheckpointError, match=f"cannot write to {place}: .*AccessDenied"):
        manager(place).check_folders()
    server.on_request = lambda method, path: "AccessDenied" if method == "GET" and "distcp" in path else None
    with pytest.raises(CheckpointError, match=refused.format("GetObject")):
        resumed(place)
    server.on_request = lambda method, path: None
    assert keys(place) == files("llama_v2-1steps")
    assert loaded(place) == 1
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/x.*: no such bucket \(404 NoSuchBucket\)"):
        manager("s3://no-such-bucket/x").check_folders()


@pytest.mark.parametrize("fault", ["SlowDown", "reset"])
def test_throttling_and_broken_connections_are_retried_and_then_reported(server, place, fault):
    save(place, 1, 2)
    failures = iter(range(3))
    server.on_request = lambda method, path: fault if "2steps" in path and next(failures, None) is not None else None
    assert loaded(place) == 2
    server.on_request = lambda method, path: fault if "2steps" in path and "distcp" in path else None
    with pytest.raises(CheckpointError, match="distcp"):
        resumed(place)
    server.on_request = lambda method, path: None
    assert keys(place) == files("llama_v2-1steps", "llama_v2-2steps"), "nothing is marked"


def test_two_that_reserve_a_name_at_once_have_two(place):
    """Both have seen that the name is free."""
    one, two = open_folder(place), open_folder(place)
    put, reserved = one.storage.put_if_absent, []

    def late(name: str, data: bytes) -> bool:
        if not reserved:
            reserved.append(two.begin("m", 3, 2))
        return put(name, data)

    one.storage.put_if_absent = late
    assert (one.begin("m", 3, 1), reserved) == ("m-3steps-2", ["m-3steps"])


# --- what is there already


def test_what_others_put_there_stays(place):
    save(place, 3)
    storage = open_folder(place).storage
    for file in ("notes.txt", "tensorboard/events", "llama_v2-3steps/hf/config.json", "llama_v2-3stepsnot/x"):
        storage.put(file, b"mine")
    save(place, 4)
    assert len(keys(place)) == 2 * len(files("one")) + 4
    save(place, 5, keep=1)
    assert keys(place) == sorted(["notes.txt", "tensorboard/events", "llama_v2-3stepsnot/x", *files("llama_v2-5steps")])


def test_a_save_that_may_be_under_way_is_not_swept(place):
    """One of this generation, or of one that follows."""
    save(place, 1)
    folder = open_folder(place)
    for generation in (2, 3):
        folder.put(folder.begin("llama_v2", 9, generation), "__0_0.distcp", b"half")
    save(place, 2, generation=2)
    assert set(names(place)) == {"llama_v2-1steps", "llama_v2-2steps", "llama_v2-9steps", "llama_v2-9steps-2"}
    assert len(sweep(place)) == 2
