"""Saving, finding and retaining in one process; what needs several is in tests/distributed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import time
import zlib
from pathlib import Path

import pytest
import torch

from smp_train.checkpoints import CheckpointManager, Policy, RunId, find
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.manifest import Committed, FileRecord
from smp_train.checkpoints.runs import committed as committed_entries
from smp_train.checkpoints.runs import damaged
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage.folder import FolderStorage
from tests.checkpoint_files import flat, tree


def manager(folder: Path | str, every: int = 1, keep: int = 2, **more) -> CheckpointManager:
    return CheckpointManager([Policy(str(folder), every, keep)], model_type="llama_v2", **more)


def state(value: float = 0.0) -> dict:
    w = torch.full((4, 3), value, dtype=torch.float32)
    return {"model": {"w": w, "b": torch.full((3,), value, dtype=torch.bfloat16)}}


def save(folder: Path | str, *steps: int, **more) -> None:
    saver = manager(folder, **{"keep": 10, **more})
    for step in steps:
        saver.save(step, state(step), {"tokens": step * 10})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(folder: Path) -> None:
    """Make all that is in ``folder`` a minute older than this process."""
    then = time.time() - 60
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


class Stop(Exception):
    pass


def stop_at(stage: str):
    def on_stage(reached: str) -> None:
        if reached == stage:
            raise Stop(f"at {stage}")

    return on_stage


# --- saving and finding


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """What a power failure would find: files, and the names of files and folders, are synced before COMMITTED is."""
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(("rename", str(target)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path, 3)
    folder = tmp_path / "llama_v2-3steps"
    attempt = tree(folder)
    committed = done.index(("rename", str(folder / "COMMITTED")))
    for name in json.loads((folder / "COMMITTED").read_text())["files"]:
        named = done.index(("rename", str(attempt / name)))
        assert any(what == "sync" and f"/.{name}." in path for what, path in done[:named]), f"{name} is synced"
        assert ("sync", str(attempt)) in done[named:committed], "then its name"
    assert {("sync", str(path)) for path in (tmp_path, folder, attempt)} <= set(done[:committed])
    assert any(what == "sync" and "/.COMMITTED." in path for what, path in done[:committed])
    assert ("sync", str(folder)) in done[committed:]


def test_what_a_library_wrote_itself_is_brought_to_the_disk_with_its_names(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    there, part = open_folder(tmp_path), tmp_path / "m-3steps" / "0123abcd" / "tp0_ep0"
    part.parent.mkdir(parents=True)
    there.make("m-3steps/0123abcd/tp0_ep0")
    (part / "__0_0.distcp").write_bytes(b"data")
    assert there.secure("m-3steps/0123abcd/tp0_ep0", "__0_0.distcp", 4).size == 4
    assert synced == [str(part.parent), str(part / "__0_0.distcp"), str(part)]


def test_what_is_saved_is_found_and_loaded(tmp_path):
    save(tmp_path, 7, 12, 9)
    found = find(f"{tmp_path}/")
    assert found is not None
    assert (found.step, found.path) == (12, f"{tmp_path}/llama_v2-12steps")
    assert found.meta == {"tokens": 120, "step": 12}
    target = state(-1)
    found.load(target)
    assert all(torch.equal(target["model"][k], v) for k, v in state(12)["model"].items())


def test_one_checkpoint_can_be_named(tmp_path):
    save(tmp_path, 7, 12)
    found = find(tmp_path / "llama_v2-7steps")
    assert found is not None
    assert found.step == 7


def test_the_folder_holds_the_documented_files_and_committed_lists_them(tmp_path):
    save(tmp_path, 7)
    folder = tmp_path / "llama_v2-7steps"
    attempt = tree(folder)
    assert names(folder) == sorted([attempt.name, "COMMITTED"])
    assert names(attempt) == [".metadata", ".run", "__0_0.distcp", "meta.json"]
    committed = json.loads((folder / "COMMITTED").read_text())
    assert committed["step"] == 7
    assert set(committed["files"]) == {".metadata", "__0_0.distcp", "meta.json"}
    assert all(
        record["size"] == (attempt / name).stat().st_size for name, record in committed["files"].items()
    )


def test_only_due_steps_are_saved_unless_forced(tmp_path):
    saver = manager(tmp_path, every=5)
    assert [step for step in range(12) if saver.due(step)] == [5, 10]
    assert saver.save(4, state(), {}) == []
    assert saver.save(4, state(), {}, force=True) == [f"{tmp_path}/llama_v2-4steps"]


def test_a_first_start_finds_nothing(tmp_path):
    assert find(tmp_path) is None
    assert find(tmp_path / "later", missing_ok=True) is None
    with pytest.raises(CheckpointError, match="later"):
        find(tmp_path / "later")


def test_what_is_not_a_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "llama_v2-99steps").write_text("a file by that name")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "llama_v2-50steps").mkdir()
    (tmp_path / ".llama_v2-60steps.0123abcd.staging").mkdir()
    (tmp_path / "gpt_neox-xsteps").mkdir()
    found = find(tmp_path)
    assert found is not None
    assert found.step == 3


def test_other_runs_in_the_folder_can_be_left_out(tmp_path):
    first, second = RunId.fresh("first"), RunId.fresh("second")
    save(tmp_path, 3, run=first)
    CheckpointManager([Policy(str(tmp_path), 1, 1)], model_type="gpt_neox", run=second).save(8, state(), {})
    assert find(tmp_path).path.endswith("gpt_neox-8steps")
    assert find(tmp_path, run=first).step == 3
    assert find(tmp_path, run=RunId.fresh("second")) is None, "another life of that name"


def test_an_unfinished_checkpoint_that_is_named_is_refused_with_the_others(tmp_path):
    save(tmp_path, 3, 6)
    (tmp_path / "llama_v2-6steps" / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match=r"COMMITTED.*llama_v2-3steps"):
        find(tmp_path / "llama_v2-6steps")
    assert find(tmp_path).step == 3


def test_a_damaged_checkpoint_that_is_named_is_refused_with_the_others(tmp_path):
    save(tmp_path, 3, 6)
    newest = tmp_path / "llama_v2-6steps"
    next(newest.glob("*/*.distcp")).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"6steps.*: llama_v2-3steps$"):
        find(newest)
    assert newest.exists()


def test_a_file_is_refused(tmp_path):
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        find(tmp_path / "weights.pt")


def test_other_kinds_of_places_are_refused_by_name():
    with pytest.raises(ConfigError, match="gs://bucket/prefix"):
        find("gs://bucket/prefix")
    with pytest.raises(ConfigError, match="s3:///prefix"):
        manager("s3:///prefix")


# --- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = [
    (truncate, "__0_0.distcp", "bytes"),
    (flip, "__0_0.distcp", "CRC-32"),
    (Path.unlink, "__0_0.distcp", "missing"),
    (flip, ".metadata", "CRC-32"),
    (Path.unlink, "meta.json", "missing"),
    (truncate, "COMMITTED", "COMMITTED is not readable"),
]


@pytest.mark.parametrize(("harm", "file", "said"), DAMAGE)
def test_a_damaged_newest_one_is_named_and_set_aside_and_the_older_one_used(
    tmp_path, caplog, harm, file, said
):
    save(tmp_path, 3, 6)
    newest = tmp_path / "llama_v2-6steps"
    if file == "COMMITTED":
        (newest / file).write_text("{")
    else:
        harm(tree(newest) / file)
    with pytest.raises(CheckpointError, match=said):
        find(tmp_path, strict=True)
    assert names(tmp_path) == ["llama_v2-3steps", "llama_v2-6steps"]
    found = find(tmp_path)
    assert found is not None
    assert found.step == 3
    assert "COMMITTED.damaged" in names(newest)
    assert "llama_v2-6steps is damaged" in caplog.text
    assert file in caplog.text


def test_a_damaged_one_that_is_named_is_refused_and_left_alone(tmp_path):
    save(tmp_path, 3, 6)
    flip(tree(tmp_path / "llama_v2-6steps") / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has CRC-32"):
        find(tmp_path / "llama_v2-6steps")
    assert "llama_v2-6steps" in names(tmp_path)


def test_when_all_are_damaged_a_run_does_not_start_afresh_unasked(tmp_path):
    save(tmp_path, 3)
    flip(tree(tmp_path / "llama_v2-3steps") / "__0_0.distcp")
    for _ in range(2):  # at the first start, and again when the scheduler starts the job anew
        with pytest.raises(CheckpointError, match="damaged"):
            find(tmp_path)


def test_a_second_damaged_one_of_a_step_does_not_overwrite_the_first(tmp_path):
    for _ in range(2):
        save(tmp_path, 3, 6)
        flip(tree(tmp_path / "llama_v2-6steps") / "__0_0.distcp")
        assert find(tmp_path).step == 3
    folder = tmp_path / "llama_v2-6steps"
    assert [name for name in names(folder) if "COMMITTED" in name] == ["COMMITTED.damaged", "COMMITTED.damaged-2"]
    assert len(list(folder.glob("*/*.distcp"))) == 2


def test_the_list_tells_damaged_ones_from_those_that_count(tmp_path, capsys):
    for _ in range(2):
        save(tmp_path, 3, 6)
        flip(tree(tmp_path / "llama_v2-6steps") / "__0_0.distcp")
        find(tmp_path)
    main(["ls", str(tmp_path)])
    assert ["llama_v2-6steps", "damaged"] in [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    save(tmp_path, 6)
    main(["ls", str(tmp_path)])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["llama_v2-3steps", "committed"],
        ["llama_v2-6steps", "committed"],
    ]


def test_a_folder_is_listed_and_tidied_while_a_job_removes_what_is_in_it(tmp_path, monkeypatch, capsys):
    """What is there when its folder is read may be gone when it is looked at."""
    save(tmp_path, 3, 6)
    older, size = tree(tmp_path / "llama_v2-3steps"), os.lstat

    def gone(path, **more):
        if Path(path).parent in (older, older.parent) and Path(path).is_file():
            Path(path).unlink(missing_ok=True)
        return size(path, **more)

    monkeypatch.setattr(os, "lstat", gone)
    assert main(["ls", str(tmp_path)]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["llama_v2-6steps", "committed"] in listed
    assert ["llama_v2-3steps", "incomplete"] in listed
    storage = open_folder(tmp_path)
    storage.sweep(-math.inf)
    storage.delete("llama_v2-3steps")
    storage.delete("llama_v2-3steps")  # as `prune` and a job may at the same time
    assert names(tmp_path) == ["llama_v2-6steps"]


def test_verify_deals_the_files_out(tmp_path):
    save(tmp_path, 3)
    found = find(tmp_path)
    for file in found.committed.files:
        flip(tree(found.path) / file)
    shares = [found.verify(rank, 2) for rank in range(2)]
    assert all(shares)
    assert len([problem for share in shares for problem in share]) == len(found.committed.files)


def test_a_format_of_the_future_is_refused_not_set_aside(tmp_path):
    save(tmp_path, 3)
    path = tmp_path / "llama_v2-3steps" / "COMMITTED"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="use a newer smp-train"):
        find(tmp_path)
    assert names(tmp_path) == ["llama_v2-3steps"]


# --- what is cut short


@pytest.mark.parametrize("stage", ["write", "checksum", "commit", "publish"])
def test_a_failure_at_any_stage_leaves_what_was_there(tmp_path, stage):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=f"llama_v2-6steps: .*{stage}"):
        save(tmp_path, 6, on_stage=stop_at(stage))
    assert names(tmp_path) == ["llama_v2-3steps"]


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 3)
    manager(tmp_path).save(3, state(33), {"again": True})
    found = find(tmp_path)
    assert found.meta == {"again": True, "step": 3}
    target = state()
    found.load(target)
    assert torch.equal(target["model"]["w"], state(33)["model"]["w"])
    assert names(tmp_path) == ["llama_v2-3steps"]


def test_what_is_there_under_the_name_is_left_alone(tmp_path):
    (tmp_path / "llama_v2-3steps" / "tp0_ep0").mkdir(parents=True)
    (tmp_path / "llama_v2-3steps" / "tp0_ep0" / "__0_0.distcp").write_text("another program's")
    (tmp_path / "llama_v2-4steps").write_text("a file")
    run = RunId.fresh("mine")
    save(tmp_path, 3, 4, keep=1, run=run)
    assert names(tmp_path) == ["llama_v2-3steps", "llama_v2-4steps", f"llama_v2-4steps-{run.id}"]
    assert names(tmp_path / "llama_v2-3steps" / "tp0_ep0") == ["__0_0.distcp"]
    assert find(tmp_path).path == f"{tmp_path}/llama_v2-4steps-{run.id}"
    with pytest.raises(CheckpointError, match="llama_v2-3steps"):
        save(tmp_path, 3)


def test_what_versions_before_wrote_is_loaded_replaced_and_deleted(tmp_path):
    """Files beside COMMITTED, damaged ones renamed, and scratch folders of what was cut short."""
    save(tmp_path, 1, 2, 3, 4)
    for path in list(tmp_path.iterdir()):
        flat(path)
    assert names(tmp_path / "llama_v2-4steps") == [".metadata", "COMMITTED", "__0_0.distcp", "meta.json"]
    (tmp_path / "llama_v2-4steps").rename(tmp_path / "llama_v2-4steps.damaged")
    (tmp_path / "llama_v2-1steps").rename(tmp_path / ".llama_v2-1steps.0123abcd.replaced")
    for left in (".llama_v2-5steps.0123abcd.staging", ".llama_v2-6steps.0123abcd.deleting"):
        (tmp_path / left).mkdir()
    assert find(tmp_path).step == 3
    target = state()
    find(tmp_path).load(target)
    assert torch.equal(target["model"]["w"], state(3)["model"]["w"])
    assert [entry.step for entry in damaged(open_folder(tmp_path))] == [4]
    again = manager(tmp_path, keep=9)
    again.lock()
    assert (find(tmp_path / "llama_v2-1steps").step, find(tmp_path / "llama_v2-1steps").verify()) == (1, [])
    again.save(3, state(33), {})
    again.close()
    assert names(tmp_path / "llama_v2-3steps") == sorted([tree(tmp_path / "llama_v2-3steps").name, "COMMITTED"])
    every = [f"llama_v2-{step}steps" for step in (1, 2, 3)]
    assert names(tmp_path) == [*every, "llama_v2-4steps.damaged"]
    assert main(["prune", str(tmp_path), "--keep", "1", "--damaged", "1"]) == 0
    assert names(tmp_path) == every[-1:]


@pytest.mark.parametrize("deleted", range(6))
def test_a_deletion_of_what_versions_before_wrote_that_is_cut_short_is_finished(tmp_path, monkeypatch, deleted):
    save(tmp_path, 1)
    flat(tmp_path / "llama_v2-1steps")
    (tmp_path / "llama_v2-1steps" / "hf").mkdir()
    (tmp_path / "llama_v2-1steps" / "hf" / "config.json").touch()
    with monkeypatch.context() as patched:
        left, delete = iter(range(deleted)), FolderStorage.delete
        patched.setattr(FolderStorage, "delete", lambda self, name: (next(left), delete(self, name)))
        with contextlib.suppress(StopIteration):
            open_folder(tmp_path).delete("llama_v2-1steps")
    assert committed_entries(open_folder(tmp_path)) == []
    save(tmp_path, 2)
    assert names(tmp_path) == ["llama_v2-2steps"]


def test_a_checkpoint_that_cannot_have_its_name_back_is_not_swept(tmp_path):
    save(tmp_path, 1)
    flat(tmp_path / "llama_v2-1steps")
    left = (tmp_path / "llama_v2-1steps").rename(tmp_path / ".llama_v2-1steps.0123abcd.replaced")
    (tmp_path / "llama_v2-1steps" / "notes").mkdir(parents=True)
    again = manager(tmp_path)
    again.lock()
    again.save(3, state(), {})
    again.close()
    assert (left / "COMMITTED").exists()


def test_leftovers_are_swept_but_not_those_of_a_save_that_may_be_running(tmp_path):
    old = tmp_path / "llama_v2-2steps" / "0123abcd"
    old.mkdir(parents=True)
    (old / "__0_0.distcp").write_text("half")
    age(tmp_path)
    saver = manager(tmp_path)
    new = tmp_path / "llama_v2-2steps" / "0123abce"
    new.mkdir()
    (new / "__0_0.distcp").write_text("half")
    os.utime(new / "__0_0.distcp", (time.time() + 60, time.time() + 60))
    saver.save(3, state(), {})
    assert names(tmp_path) == ["llama_v2-2steps", "llama_v2-3steps"]
    assert names(tmp_path / "llama_v2-2steps") == [new.name]


def test_a_kill_while_committed_is_written_leaves_the_name_free(tmp_path):
    for name in ("llama_v2-3steps", "llama_v2-4steps"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".COMMITTED.0123abcd.partial").write_text("{")
        os.utime(tmp_path / name / ".COMMITTED.0123abcd.partial", (1, 1))
    save(tmp_path, 3)
    assert names(tmp_path) == ["llama_v2-3steps"]
    assert len(names(tmp_path / "llama_v2-3steps")) == 2


def test_meta_that_is_not_json_fails_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        manager(tmp_path).save(3, state(), {"x": object()})
    assert names(tmp_path) == []


# --- retention


def test_the_newest_k_stay(tmp_path):
    save(tmp_path, *range(1, 6), keep=2)
    assert names(tmp_path) == ["llama_v2-4steps", "llama_v2-5steps"]


def test_unfinished_ones_do_not_count_and_other_models_are_not_touched(tmp_path):
    neox, ours = RunId.fresh("neox"), RunId.fresh("ours")
    CheckpointManager([Policy(str(tmp_path), 1, 1)], model_type="gpt_neox", run=neox).save(1, state(), {})
    (tmp_path / "llama_v2-90steps").mkdir()
    save(tmp_path, 1, 2, 3, keep=2, run=ours)
    assert names(tmp_path) == ["gpt_neox-1steps", "llama_v2-2steps", "llama_v2-3steps", "llama_v2-90steps"]


def test_each_folder_has_its_own_policy(tmp_path):
    saver = CheckpointManager([Policy(f"{tmp_path}/a", 2, 2), Policy(f"{tmp_path}/b", 3, 1)], model_type="m")
    for step in range(1, 13):
        saver.save(step, state(), {})
    assert names(tmp_path / "a") == ["m-10steps", "m-12steps"]
    assert names(tmp_path / "b") == ["m-12steps"]
    saver.save(13, state(), {}, force=True)
    assert names(tmp_path / "a") == ["m-12steps", "m-13steps"]
    assert names(tmp_path / "b") == ["m-13steps"]


def test_two_policies_on_one_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--checkpoint_dir"):
        CheckpointManager([Policy(str(tmp_path), 1, 2), Policy(f"{tmp_path}/.", 4, 2)], model_type="m")


@pytest.mark.parametrize(
    ("keep", "steps", "newest", "kept"),
    [
        (2, [1, 2, 3], 3, {2, 3}),
        (0, [1, 2, 3], 3, {1, 2, 3}),
        (-1, [1, 2, 3], 3, {1, 2, 3}),
        # a run that went back to step 1 does not delete what it writes, nor the branch it left
        (2, [1, 2, 8, 9], 2, {2, 8, 9}),
    ],
)
def test_which_steps_are_kept(keep, steps, newest, kept):
    assert Policy("f", 1, keep).kept(steps, newest) == kept


def test_a_run_that_goes_back_is_not_overtaken_by_what_it_left(tmp_path, caplog, capsys):
    save(tmp_path, 10, 20, 30)
    left = (tmp_path / "llama_v2-30steps" / "COMMITTED").read_bytes()
    for new, kept in ((21, "llama_v2-30steps/COMMITTED.abandoned"), (15, "llama_v2-20steps/COMMITTED.abandoned")):
        saver = manager(tmp_path, keep=9)
        saver.go_back(find(tmp_path / f"llama_v2-{new // 10 * 10}steps"))
        assert find(tmp_path).step > new, "nothing has been written yet"
        saver.save(new, state(new), {})
        assert find(tmp_path).step == new
        assert f"kept as {kept}" in caplog.text
        saver.save(new + 20, state(), {})
        assert find(tmp_path).step == new + 20, "its own later ones count"
    assert (tmp_path / "llama_v2-30steps" / "COMMITTED.abandoned").read_bytes() == left
    assert main(["ls", str(tmp_path)]) == 0
    listed = dict(line.split()[:2] for line in capsys.readouterr().out.splitlines())
    assert listed["llama_v2-30steps"] == "abandoned"
    assert main(["prune", str(tmp_path), "--keep", "9", "--abandoned", "1"]) == 0
    assert names(tmp_path) == ["llama_v2-10steps", "llama_v2-15steps", "llama_v2-35steps"]


def test_what_is_gone_back_to_elsewhere_changes_nothing(tmp_path):
    save(tmp_path / "theirs", 20, run=RunId.fresh("theirs"))
    ours = RunId.fresh("ours")
    save(tmp_path / "ours", 30, run=ours)
    saver = manager(tmp_path / "ours", run=ours)
    saver.go_back(find(tmp_path / "theirs" / "llama_v2-20steps"))
    saver.save(21, state(), {})
    assert names(tmp_path / "ours") == ["llama_v2-21steps", "llama_v2-30steps"]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, caplog, monkeypatch):
    save(tmp_path, 1)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refuse)
    save(tmp_path, 2, keep=1)
    assert "cannot be deleted" in caplog.text
    assert find(tmp_path).step == 2


def test_a_deletion_cut_short_leaves_nothing_that_looks_like_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("shutil.rmtree", lambda path: None)
    save(tmp_path, 2, keep=1)
    assert [entry.name for entry in committed_entries(open_folder(tmp_path))] == ["llama_v2-2steps"]
    monkeypatch.undo()
    age(tmp_path)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["llama_v2-3steps"]


# --- folders that cannot be used


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path):
    manager(tmp_path / "a" / "b").check_writable()
    assert names(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/checkpoints"])
def test_a_folder_that_cannot_be_written_is_found_at_start(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="--checkpoint_dir"):
        manager(tmp_path / place).check_writable()


# --- loading


def test_another_model_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    found = find(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.more .*--num_layers"):
        found.load({"model": {**state()["model"], "more": torch.zeros(1)}})
    with pytest.raises(CheckpointError, match=r"model\.b "):
        found.load({"model": {"w": torch.zeros(4, 3)}})
    with pytest.raises(CheckpointError, match=r"model\.w .*\[4, 3\].*\[5, 3\]"):
        found.load({"model": {**state()["model"], "w": torch.zeros(5, 3)}})


def test_part_of_a_checkpoint_can_be_loaded(tmp_path):
    manager(tmp_path).save(1, {**state(4), "optim": {"state": {"w": {"step": torch.ones(())}}}}, {})
    target = state()
    find(tmp_path).load(target)
    assert torch.equal(target["model"]["w"], state(4)["model"]["w"])


def test_plain_values_are_restored(tmp_path):
    manager(tmp_path).save(1, {"extra": {"count": 3, "words": ["a", "b"]}}, {})
    target = {"extra": {"count": 0, "words": []}}
    find(tmp_path).load(target)
    assert target == {"extra": {"count": 3, "words": ["a", "b"]}}


def test_another_dtype_is_converted_with_a_warning(tmp_path, caplog):
    save(tmp_path, 1)
    target = {
        "model": {"w": torch.zeros(4, 3, dtype=torch.bfloat16), "b": torch.zeros(3, dtype=torch.bfloat16)}
    }
    find(tmp_path).load(target)
    assert "model.w was saved as torch.float32 and is torch.bfloat16 here" in caplog.text


class Evil:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_a_checkpoint_cannot_run_code(tmp_path, capsys):
    save(tmp_path, 1)
    folder = tmp_path / "llama_v2-1steps"
    flat(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    committed = Committed.from_bytes((folder / "COMMITTED").read_bytes())
    data = (folder / ".metadata").read_bytes()
    files = {**committed.files, ".metadata": FileRecord(len(data), f"{zlib.crc32(data):08x}")}
    (folder / "COMMITTED").write_bytes(Committed(1, "llama_v2", files).to_bytes())
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        find(tmp_path).load(state())
    manager(tmp_path).save(2, {"extra": {"x": Evil()}}, {})
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=re.compile("weights.only", re.IGNORECASE)):
        find(tmp_path).load({"extra": {"x": None}})
    assert "ran" not in capsys.readouterr().out


def test_a_first_save_into_a_new_folder_warns_of_nothing(tmp_path, caplog):
    manager(tmp_path / "new").save(1, {"model": {"w": torch.ones(2)}}, {})
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
