"""Checkpoints in S3, one process: what counts and what does not, after every request that may be the last."""

from __future__ import annotations

import contextlib
import json
import math
import re

import pytest
import torch

pytest.importorskip("boto3")
pytest.importorskip("moto.server")


from smp_train.checkpoints import CheckpointManager, Policy, cli, commit, find, open_checkpoint
from smp_train.checkpoints.commit import CheckpointFolder, open_folder
from smp_train.checkpoints.model_folder import writing
from smp_train.checkpoints.owner import Owner
from smp_train.checkpoints.runs import summary
from smp_train.errors import CheckpointError
from smp_train.storage import client, s3
from tests.s3_server import bucket, serving
from tests.unit.test_checkpoints_model_folder import AFTER, OLD, OTHERS, write

CHANGES = ("PUT", "POST", "DELETE")


@pytest.fixture(scope="module")
def server():
    with serving() as proxy:
        yield proxy


@pytest.fixture
def place(server, monkeypatch, request):
    """Return a prefix of a bucket of this test's own."""
    monkeypatch.setattr(commit, "IN_FLIGHT_SECONDS", -math.inf)
    return f"{bucket(server, monkeypatch, request.node.nodeid)}/runs/one"


def state(value: float = 0.0, rows: int = 4) -> dict:
    w = torch.arange(rows * 3, dtype=torch.float32).reshape(rows, 3) + value
    return {"model": {"w": w, "b": torch.full((3,), value, dtype=torch.bfloat16)}, "extra": {"count": int(value)}}


def manager(place: str, keep: int = 2, **more) -> CheckpointManager:
    return CheckpointManager([Policy(place, 1, keep)], model_type="llama_v2", **more)


def save(place: str, *steps: int, rows: int = 4, **more) -> None:
    saver = manager(place, **{"keep": 10, **more})
    for step in steps:
        saver.save(step, state(step, rows), {"tokens": step * 10})
        saver.finish()


def loaded(place: str, rows: int = 4, of_step: int | None = None) -> int:
    """Return the step that is found, having compared every bit of it with what was saved."""
    found = find(place)
    rows = rows if of_step in (None, found.step) else 4
    target = state(-1, rows)
    found.load(target)
    expected = state(found.step, rows)
    assert all(torch.equal(target["model"][name], value) for name, value in expected["model"].items())
    assert target["extra"] == expected["extra"]
    assert found.meta["tokens"] == found.step * 10
    return found.step


def keys(place: str) -> list[str]:
    """Return all keys of the prefix, attempts shown as *."""
    return sorted(re.sub("/[0-9a-f]{8}/", "/*/", key) for key in open_folder(place).storage.files())


def small_parts(monkeypatch) -> None:
    """Let 200 kB be several parts; S3 itself wants 5 MiB each."""
    monkeypatch.setattr(s3, "PART_BYTES", 1 << 16)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1 << 10)


def uploads(place: str) -> list[str]:
    answer = client.client().list_multipart_uploads(Bucket=s3.S3Storage(place).bucket)
    return [upload["Key"] for upload in answer.get("Uploads", ())]


WHOLE = [".metadata", ".run", "0/__0_0.distcp", "meta.json"]


def files(name: str) -> list[str]:
    return sorted([f"{name}/COMMITTED", *(f"{name}/*/{file}" for file in WHOLE)])


# --- saving and finding


def test_what_is_saved_is_found_and_loaded(place):
    save(place, 7, 12, 9)
    found = find(f"{place}/")
    assert (found.step, found.path) == (12, f"{place}/llama_v2-12steps")
    assert loaded(place) == 12
    assert loaded(f"{place}/llama_v2-7steps") == 7
    assert open_checkpoint(f"{place}/llama_v2-9steps").verify() == []
    assert keys(place) == sorted(file for step in (7, 9, 12) for file in files(f"llama_v2-{step}steps"))


def test_an_empty_prefix_is_a_first_start(place):
    assert find(place) is None
    assert find(place.rpartition("/")[0]) is None


def test_a_large_object_goes_up_in_parts_and_comes_back_in_ranges(place, monkeypatch):
    small_parts(monkeypatch)
    rows = 20_000  # 240 kB
    save(place, 3, rows=rows)
    assert loaded(place, rows) == 3
    (size,) = [size for file, size in open_folder(place).sizes("llama_v2-3steps").items() if file.endswith("distcp")]
    assert size > 3 * s3.PART_BYTES


def test_a_copy_of_it_in_a_folder_is_a_checkpoint_too(place, tmp_path):
    save(place, 3)
    storage = open_folder(place)
    for file in storage.storage.files():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(storage.read("", file))
    assert loaded(str(tmp_path)) == 3


def test_a_folder_copied_to_s3_is_a_checkpoint_too(place, tmp_path):
    save(str(tmp_path), 3)
    storage = open_folder(place)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            storage.put("", path.relative_to(tmp_path).as_posix(), path.read_bytes())
    assert loaded(place) == 3
    save(place, 4, keep=1)
    assert keys(place) == files("llama_v2-4steps")


def test_asynchronous_saves_are_the_same(place):
    save(place, 1, 2, asynchronous=True)
    assert loaded(place) == 2


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
        assert keys(run) == sorted(file for name in committed for file in files(name))
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
    assert keys(run) == files("llama_v2-1steps") + files("llama_v2-3steps")


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
    assert keys(place) == files("llama_v2-2steps") + files("llama_v2-3steps")


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


# --- faults: mended, or named


def each_first(fault: str, times: int = 1):
    """Return a hook that answers every request with ``fault`` the first ``times`` it is made."""
    met: dict[str, int] = {}

    def on_request(method: str, path: str) -> str | None:
        request = f"{method} {path.partition('?')[0]} {'uploadId' in path}"
        met[request] = met.get(request, 0) + 1
        return fault if met[request] <= times else None

    return on_request


@pytest.mark.parametrize(("fault", "times"), [("SlowDown", 3), ("cut", 2), ("lost", 1), ("short", 1)])
def test_faults_on_every_request_are_mended(server, place, monkeypatch, fault, times):
    small_parts(monkeypatch)
    server.on_request = each_first(fault, times)
    save(place, 1)
    save(place, 2, rows=20_000, keep=1)
    assert loaded(place, 20_000) == 2
    assert keys(place) == files("llama_v2-2steps")


REFUSED = {
    "AccessDenied": r"access denied \(403 AccessDenied\); the role in use needs s3:{0} on b",
    "ExpiredToken": r"the AWS credentials have expired \(ExpiredToken\); renew",
    "SlowDown": r"S3 does not answer as it should \(.*SlowDown.* the {0} operation",
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_mended_names_bucket_and_operation(server, place, fault):
    save(place, 1)
    server.on_request = lambda method, path: fault if method == "PUT" else None
    with pytest.raises(CheckpointError, match=REFUSED[fault].format("PutObject")) as refused:
        save(place, 2)
    assert f"cannot save {place}/llama_v2-2steps: {place}/llama_v2-2steps/" in str(refused.value)
    with pytest.raises(CheckpointError, match=f"cannot write to checkpoint folder {place}: .*{fault}"):
        manager(place).check_writable()
    server.on_request = lambda method, path: fault if method == "GET" and "distcp" in path else None
    with pytest.raises(CheckpointError, match=REFUSED[fault].format("GetObject")) as refused:
        find(place)
    assert "\n" not in str(refused.value)
    server.on_request = lambda method, path: None
    assert loaded(place) == 1  # nothing was set aside for what is no damage


def test_a_bucket_that_is_not_there(place):
    with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/x.*: no such bucket \(404 NoSuchBucket\)"):
        manager("s3://no-such-bucket/x").check_writable()
    with pytest.raises(CheckpointError, match=r"no such bucket \(404 NoSuchBucket\)"):
        find("s3://no-such-bucket/x")


# --- damage


def harm(place: str, name: str, ending: str, change) -> None:
    storage = open_folder(place)
    (file,) = [file for file in storage.sizes(name) if file.endswith(ending)]
    data = change(storage.read(name, file))
    if data is None:
        storage.storage.delete("/".join([name, file]))
    else:
        storage.put(name, file, data)


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE = [
    (flip, ".distcp", "CRC-32"),
    (lambda data: data[:-1], ".distcp", "bytes"),
    (lambda data: None, ".metadata", "missing"),
    (lambda data: b"{", "COMMITTED", "COMMITTED is not readable"),
]


@pytest.mark.parametrize(("change", "file", "said"), DAMAGE)
def test_a_damaged_newest_one_is_set_aside_and_kept(place, caplog, capsys, change, file, said):
    save(place, 3, 6)
    harm(place, "llama_v2-6steps", file, change)
    with pytest.raises(CheckpointError, match=said):
        find(place, strict=True)
    before = len(keys(place))
    assert loaded(place) == 3
    assert "llama_v2-6steps is damaged" in caplog.text
    assert "kept as llama_v2-6steps/COMMITTED.damaged" in caplog.text
    assert len(keys(place)) == before
    assert cli.main(["ls", place]) == 0
    assert re.search(r"llama_v2-6steps +damaged", capsys.readouterr().out)
    save(place, 6, 7, keep=1)  # the step is reached again; what was damaged is not the program's to delete
    left = keys(place)
    assert len([key for key in left if key.startswith("llama_v2-6steps/")]) == before - len(files("llama_v2-3steps"))
    assert loaded(place) == 7


def test_a_run_that_goes_back_is_not_overtaken_by_what_it_left(place, capsys):
    save(place, 1, 2, 3)
    saver = manager(place)
    saver.go_back(find(f"{place}/llama_v2-1steps"))
    saver.save(2, state(2), {"tokens": 20, "again": True})
    assert loaded(place) == 2
    assert find(place).meta["again"]
    cli.main(["ls", place])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["llama_v2-1steps", "committed"], ["llama_v2-2steps", "committed"], ["llama_v2-3steps", "abandoned"],
    ]  # fmt: skip
    open_folder(place).sweep(-math.inf)
    aside = ["llama_v2-2steps/COMMITTED.abandoned", "llama_v2-3steps/COMMITTED.abandoned"]
    assert [key for key in keys(place) if "abandoned" in key] == aside
    assert len([key for key in keys(place) if key.endswith("meta.json")]) == 4, "their files stay"
    cli.main(["prune", place, "--keep", "9", "--abandoned", "1"])
    assert keys(place) == files("llama_v2-1steps") + files("llama_v2-2steps")
    assert loaded(place) == 2


def test_when_all_are_damaged_a_run_does_not_start_afresh_unasked(place):
    save(place, 3)
    harm(place, "llama_v2-3steps", ".distcp", flip)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="damaged"):
            find(place)


# --- tidying


def test_a_model_is_replaced_by_one_that_is_whole(place):
    folder = open_folder(place)
    for name, data in {**OLD, **OTHERS}.items():
        folder.put("", name, data)
    with writing(place, replace=True) as out:
        write(out)
        assert all(folder.read("", name) == data for name, data in {**OLD, **OTHERS}.items())
    assert {name: folder.read("", name) for name in folder.storage.files()} == AFTER


def test_what_others_put_there_stays(place):
    save(place, 3)
    storage = open_folder(place)
    for file in ("notes.txt", "tensorboard/events", "llama_v2-3steps/hf/config.json", "llama_v2-3stepsnot/x"):
        storage.put("", file, b"mine")
    save(place, 4)
    assert len(keys(place)) == len(files("")) * 2 + 4
    save(place, 5, keep=1)
    assert keys(place) == sorted(["notes.txt", "tensorboard/events", "llama_v2-3stepsnot/x", *files("llama_v2-5steps")])


def test_a_save_that_may_be_under_way_is_not_swept(server, place):
    save(place, 1)
    saver = manager(place)
    other = open_folder(place)
    other.put("llama_v2-9steps/0123abcd", "0/__0_0.distcp", b"half")
    assert other.sweep(60) == []
    saver.save(2, state(2), {"tokens": 20})
    assert "llama_v2-9steps/*/0/__0_0.distcp" in keys(place)
    assert len(other.sweep(-math.inf)) == 1


@pytest.mark.parametrize("conditions", [True, False])
def test_the_second_job_is_refused_whatever_the_server_knows(server, place, monkeypatch, conditions):
    """Some servers take If-None-Match for no condition, and do not say so."""
    monkeypatch.setattr(server, "conditions", conditions)
    first, second = Owner(open_folder(place)), Owner(open_folder(place))
    first.acquire()
    with pytest.raises(CheckpointError, match="in use by"):
        second.acquire()
    first.check()
    first.release()
    second.acquire()
    second.release()


# --- the verbs


def test_the_verbs(place, tmp_path, capsys):
    save(place, 3, 6, 9)
    assert cli.main(["ls", place]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        [f"llama_v2-{step}steps", "committed"] for step in (3, 6, 9)
    ]
    assert cli.main(["show", f"{place}/llama_v2-6steps"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"path: +{place}/llama_v2-6steps", shown)
    assert re.search(r"tokens: +60", shown)
    assert cli.main(["verify", place]) == 0
    assert capsys.readouterr().out.count("intact") == 3
    harm(place, "llama_v2-6steps", ".distcp", flip)
    with pytest.raises(CheckpointError, match="1 of 3 damaged"):
        cli.main(["verify", place])
    assert cli.main(["prune", place, "--keep", "1", "--dry_run", "1"]) == 0
    assert len([key for key in keys(place) if key.endswith("COMMITTED")]) == 3
    assert cli.main(["prune", place, "--keep", "1"]) == 0
    assert keys(place) == files("llama_v2-9steps")
    assert json.loads(open_folder(place).read("llama_v2-9steps", "COMMITTED"))["step"] == 9


def test_prune_lets_a_running_job_be_and_deletes_damaged_ones_when_asked(place, capsys):
    save(place, 3, 6, 9)
    harm(place, "llama_v2-9steps", ".distcp", flip)
    assert loaded(place) == 6
    running = manager(place)
    running.lock()
    open_folder(place).put("llama_v2-12steps/0123abcd", "0/__0_0.distcp", b"half")
    assert cli.main(["prune", place, "--keep", "1", "--dry_run", "1", "--damaged", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "would delete llama_v2-3steps", "would delete llama_v2-9steps, which is damaged",
    ]  # fmt: skip
    assert cli.main(["prune", place, "--keep", "1", "--damaged", "1"]) == 0
    assert "is in use by a job on" in capsys.readouterr().out
    running.close()
    assert keys(place) == sorted(["llama_v2-12steps/*/0/__0_0.distcp", *files("llama_v2-6steps")])
    assert cli.main(["prune", place, "--keep", "1"]) == 0
    assert not open_folder(place).has("", ".lock")
