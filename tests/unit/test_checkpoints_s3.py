"""Checkpoints in S3, one process: what counts and what does not, after every request that may be the last."""

from __future__ import annotations

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train.checkpoints import folder as folder_module
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.errors import CheckpointError
from smp_train.storage import client, s3
from tests.checkpoint_files import check, committed, files, keys, loaded, manager, owner, owning, resumed, save, state
from tests.killing import ends


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


# --- what is cut short: no request later than the n-th has any effect, for every n


@pytest.mark.slow
@pytest.mark.parametrize("generation", [1, 2])
def test_a_writer_that_dies_after_any_request_loses_nothing(request, place, monkeypatch, generation):
    """In a start's first save, which sweeps before it, and in a later one."""
    small_parts(monkeypatch)
    rows, after, outcomes, ended = 20_000, 0, [], False  # in parts
    while not ended:
        run = f"{place}/{after}"
        save(run, 2)
        if generation == 2:
            folder = open_folder(run)
            folder.put(folder.begin("llama_v2", 3, 1), "meta.json", b"half")
        ended = ends(
            request, "s3", lambda run=run: save(run, 3, rows=rows, keep=1, generation=generation), after  # type: ignore[misc]
        )
        outcomes.append(loaded(run, rows, of_step=3))
        kept = committed(run)
        assert resumed(run).name == kept[0]
        sweep(run)
        assert keys(run) == files(*kept)
        assert uploads(run) == []
        after += 1
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) >= 10


def test_a_save_that_fails_once_it_is_committed_takes_nothing_back(server, place):
    """The last request has its effect, but no answer comes, however often it is tried."""
    save(place, 2)
    server.on_request = lambda method, path: "lost" if method == "PUT" and path.endswith("3steps/COMMITTED") else None
    with pytest.raises(CheckpointError, match=r"3steps/COMMITTED: S3 does not answer as it should"):
        save(place, 3)
    server.on_request = lambda method, path: None
    assert loaded(place) == 3


def test_a_committed_that_was_given_up_and_lands_later_is_a_whole_checkpoint(place, monkeypatch):
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
    commit(*late[0])
    assert loaded(place) == 3
    assert resumed(place, strict=True).meta["again"]
    sweep(place)
    assert keys(place) == files("llama_v2-2steps", "llama_v2-3steps", "llama_v2-3steps-2")


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


# --- a server that ignores If-None-Match


def once_at_put(server, ending: str, meanwhile) -> None:
    """Call ``meanwhile`` before the first PUT of a key with this ending is done, of which no such key was there."""
    reached: list[str] = []

    def on_request(method: str, path: str) -> None:
        if method == "PUT" and path.endswith(ending) and not reached:
            reached.append(path)
            meanwhile()

    server.on_request = on_request


@pytest.mark.parametrize("conditions", [True, False])
def test_of_two_jobs_that_claim_a_run_at_once_one_goes_on(server, place, monkeypatch, conditions):
    """If the server lets the second claim replace the first one, the first job is told before its next commit."""
    monkeypatch.setattr(server, "conditions", conditions)
    first: list = []

    def meanwhile() -> None:
        ownership = owner(place)
        first.append(manager(place, owner=ownership, generation=ownership.generation))

    once_at_put(server, "/.owner-1", meanwhile)
    if conditions:
        with pytest.raises(CheckpointError, match="in use by a job"):
            owner(place)
        first[0].save(6, state(6), {"tokens": 60})
    else:
        with owning(place) as second:
            second.save(6, state(6), {"tokens": 60})
            with pytest.raises(CheckpointError, match="taken over"):
                first[0].save(9, state(9), {"tokens": 90})
    first[0].close()
    assert loaded(place) == 6
    assert keys(place) == files("llama_v2-6steps")
    with owning(place) as third:
        third.save(7, state(7), {"tokens": 70})
    assert loaded(place) == 7


@pytest.mark.parametrize("conditions", [True, False])
def test_of_two_jobs_that_begin_the_same_attempt_the_owner_writes_it(server, place, monkeypatch, conditions):
    """The first one stalls in its request; the second one takes over, saves the same step and keeps one."""
    monkeypatch.setattr(server, "conditions", conditions)
    second: list = []

    def meanwhile() -> None:
        ownership = owner(place, force=True)
        second.append(manager(place, keep=1, owner=ownership, generation=ownership.generation))
        second[0].save(3, state(3), {"tokens": 30})

    with owning(place, keep=1) as first:
        first.save(2, state(2), {"tokens": 20})
        once_at_put(server, "-3steps/.begun", meanwhile)
        with pytest.raises(CheckpointError, match=r"cannot save .*: .*taken over"):
            first.save(3, state(30), {"tokens": 300})
    assert loaded(place) == 3, "what the owner wrote"
    assert keys(place) == files("llama_v2-3steps")
    second[0].save(4, state(4), {"tokens": 40})
    second[0].close()
    assert loaded(place) == 4
    assert keys(place) == files("llama_v2-4steps")
