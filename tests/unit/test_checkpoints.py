"""Saving, finding and retaining in one process, in a folder and in S3; what needs several is in tests/distributed."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import re
import shutil
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch

from smp_train.checkpoints import CheckpointManager, Policy, RunId, find, open_checkpoint
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.manifest import Committed, FileRecord
from smp_train.checkpoints.runs import committed as committed_entries
from smp_train.checkpoints.runs import damaged
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage.folder import FolderStorage
from tests.checkpoint_files import files, flat, flipped, harm, keys, listed, loaded, manager, save, state, stop_at, tree


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(folder: Path) -> None:
    """Make all that is in ``folder`` a minute older than this process."""
    then = time.time() - 60
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


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


@pytest.mark.core
def test_what_is_saved_is_found_and_loaded(place):
    save(place, 7, 12, 9)
    found = find(f"{place}/")
    assert (found.step, found.path, found.meta) == (12, f"{place}/llama_v2-12steps", {"tokens": 120, "step": 12})
    assert (loaded(place), loaded(f"{place}/llama_v2-7steps")) == (12, 7)
    assert keys(place) == files("llama_v2-7steps", "llama_v2-9steps", "llama_v2-12steps")
    folder = open_folder(place)
    committed = json.loads(folder.read("llama_v2-9steps", "COMMITTED"))
    assert committed["step"] == 9
    sizes = folder.sizes(f"llama_v2-9steps/{committed['root']}")
    assert {name: record["size"] for name, record in committed["files"].items()} | {".run": sizes[".run"]} == sizes


def test_only_due_steps_are_saved_unless_forced(tmp_path):
    saver = manager(tmp_path, every=5)
    assert [step for step in range(12) if saver.due(step)] == [5, 10]
    assert saver.save(4, state(), {}) == []
    assert saver.save(4, state(), {}, force=True) == [f"{tmp_path}/llama_v2-4steps"]


def test_a_first_start_finds_nothing(place, tmp_path):
    assert find(tmp_path if place.startswith("/") else place) is None
    assert find(tmp_path / "later", missing_ok=True) is None
    with pytest.raises(CheckpointError, match="later"):
        find(tmp_path / "later")


def test_what_is_not_a_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "llama_v2-99steps").write_text("a file by that name")
    for name in ("tensorboard", "llama_v2-50steps", ".llama_v2-60steps.0123abcd.staging", "gpt_neox-xsteps"):
        (tmp_path / name).mkdir()
    assert loaded(tmp_path) == 3


def test_one_that_is_named_and_of_no_use_is_refused_with_the_others(tmp_path):
    save(tmp_path, 3, 6, 9)
    (tmp_path / "llama_v2-6steps" / "COMMITTED").unlink()
    harm(tmp_path, "llama_v2-9steps", ".distcp", flipped)
    with pytest.raises(CheckpointError, match=r"COMMITTED.*llama_v2-3steps"):
        find(tmp_path / "llama_v2-6steps")
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has CRC-32.*: llama_v2-3steps$"):
        find(tmp_path / "llama_v2-9steps")
    assert loaded(tmp_path) == 3


def test_other_kinds_of_places_are_refused_by_name(tmp_path):
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        find(tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="gs://bucket/prefix"):
        find("gs://bucket/prefix")
    with pytest.raises(ConfigError, match="s3:///prefix"):
        manager("s3:///prefix")
    with pytest.raises(ConfigError, match="--checkpoint_dir"):
        CheckpointManager([Policy(str(tmp_path), 1, 2), Policy(f"{tmp_path}/.", 4, 2)], model_type="m")


# --- damage


DAMAGE = [
    (lambda data: data[:-1], "__0_0.distcp", "bytes"),
    (flipped, "__0_0.distcp", "CRC-32"),
    (lambda data: None, "__0_0.distcp", "missing"),
    (flipped, ".metadata", "CRC-32"),
    (lambda data: None, "meta.json", "missing"),
    (lambda data: b"{", "COMMITTED", "COMMITTED is not readable"),
]


@pytest.mark.parametrize(("change", "file", "said"), DAMAGE)
def test_a_damaged_newest_one_is_set_aside_and_the_older_one_used(place, caplog, capsys, change, file, said):
    save(place, 3, 6)
    harm(place, "llama_v2-6steps", file, change)
    before = keys(place)
    with pytest.raises(CheckpointError, match=said):
        find(place, strict=True)
    assert keys(place) == before
    assert loaded(place) == 3
    assert "llama_v2-6steps is damaged" in caplog.text
    assert file in caplog.text
    aside = [key.replace("6steps/COMMITTED", "6steps/COMMITTED.damaged") for key in before]
    assert keys(place) == sorted(aside)
    main(["ls", place])
    assert ["llama_v2-6steps", "damaged"] in listed(capsys)
    save(place, 6, 7, keep=1)  # the step is reached again; what was damaged is not the program's to delete
    assert keys(place) == sorted([*(key for key in aside if "6steps" in key), *files("llama_v2-7steps")])
    assert loaded(place) == 7


def test_when_all_are_damaged_a_run_does_not_start_afresh_unasked(place):
    save(place, 3)
    harm(place, "llama_v2-3steps", ".distcp", flipped)
    for _ in range(2):  # at the first start, and again when the scheduler starts the job anew
        with pytest.raises(CheckpointError, match="damaged"):
            find(place)


def test_a_second_damaged_one_of_a_step_does_not_overwrite_the_first(tmp_path, capsys):
    for _ in range(2):
        save(tmp_path, 3, 6)
        path = tree(tmp_path / "llama_v2-6steps") / "__0_0.distcp"
        path.write_bytes(flipped(path.read_bytes()))
        assert find(tmp_path).step == 3
    folder = tmp_path / "llama_v2-6steps"
    assert [name for name in names(folder) if "COMMITTED" in name] == ["COMMITTED.damaged", "COMMITTED.damaged-2"]
    assert len(list(folder.glob("*/*.distcp"))) == 2
    save(tmp_path, 6)
    main(["ls", str(tmp_path)])
    assert listed(capsys) == [["llama_v2-3steps", "committed"], ["llama_v2-6steps", "committed"]]


def test_a_folder_is_listed_and_tidied_while_a_job_removes_what_is_in_it(tmp_path, monkeypatch, capsys):
    """What is there when its folder is read may be gone when it is looked at."""
    save(tmp_path, 3, 6)
    older, scan = tree(tmp_path / "llama_v2-3steps"), os.scandir

    @contextlib.contextmanager
    def scan_then_remove(path):
        with scan(path) as entries:
            found = list(entries)
        if Path(path) in (older, older.parent):
            for entry in found:
                if entry.is_file():
                    os.unlink(entry.path)
        yield iter(found)

    monkeypatch.setattr(os, "scandir", scan_then_remove)
    assert main(["ls", str(tmp_path)]) == 0
    assert listed(capsys) == [["llama_v2-3steps", "incomplete"], ["llama_v2-6steps", "committed"]]
    monkeypatch.undo()
    storage = open_folder(tmp_path)
    storage.sweep(-math.inf)
    storage.delete("llama_v2-3steps")
    storage.delete("llama_v2-3steps")  # as `prune` and a job may at the same time
    assert names(tmp_path) == ["llama_v2-6steps"]


def test_each_rank_verifies_its_share_of_the_files(tmp_path):
    save(tmp_path, 3)
    found = find(tmp_path)
    for file in found.committed.files:
        path = tree(found.path) / file
        path.write_bytes(flipped(path.read_bytes()))
    shares = [found.verify(rank, 2) for rank in range(2)]
    assert all(shares)
    assert len([problem for share in shares for problem in share]) == len(found.committed.files)


def test_a_format_of_the_future_is_refused_not_set_aside(tmp_path):
    save(tmp_path, 3)
    path = tmp_path / "llama_v2-3steps" / "COMMITTED"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="use a newer smp-train"):
        find(tmp_path)
    assert path.exists()


# --- what is cut short, or in the way


@pytest.mark.parametrize("stage", ["write", "checksum", "commit", "publish"])
def test_a_failure_at_any_stage_leaves_what_was_there(tmp_path, stage):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=f"llama_v2-6steps: .*{stage}"):
        save(tmp_path, 6, on_stage=stop_at(stage))
    assert names(tmp_path) == ["llama_v2-3steps"]


def test_saving_a_step_again_replaces_it(place):
    save(place, 3)
    manager(place).save(3, state(3), {"again": True, "tokens": 30})
    assert loaded(place) == 3
    assert find(place).meta == {"again": True, "tokens": 30, "step": 3}
    assert keys(place) == files("llama_v2-3steps")


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
    assert names(tmp_path / "llama_v2-4steps") == [".metadata", "COMMITTED", "__0_0.distcp", "index.bin", "meta.json"]
    (tmp_path / "llama_v2-4steps").rename(tmp_path / "llama_v2-4steps.damaged")
    (tmp_path / "llama_v2-1steps").rename(tmp_path / ".llama_v2-1steps.0123abcd.replaced")
    for left in (".llama_v2-5steps.0123abcd.staging", ".llama_v2-6steps.0123abcd.deleting"):
        (tmp_path / left).mkdir()
    assert loaded(tmp_path) == 3
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


def test_of_a_deletion_that_s3_cut_short_the_marker_goes_first(tmp_path, monkeypatch):
    save(tmp_path, 1)
    flat(tmp_path / "llama_v2-1steps")
    shutil.copy(tmp_path / "llama_v2-1steps/COMMITTED", tmp_path / "llama_v2-1steps/.deleting")
    gone, delete = [], FolderStorage.delete
    monkeypatch.setattr(FolderStorage, "delete", lambda self, name: (gone.append(Path(name).name), delete(self, name)))
    open_folder(tmp_path).sweep(0)
    assert (gone[0], gone[-1]) == ("COMMITTED", ".deleting")
    assert names(tmp_path) == []


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
    old, new = (tmp_path / "llama_v2-2steps" / attempt / "__0_0.distcp" for attempt in ("0123abcd", "0123abce"))
    old.parent.mkdir(parents=True)
    old.write_text("half")
    age(tmp_path)
    saver = manager(tmp_path)
    new.parent.mkdir()
    new.write_text("half")
    os.utime(new, (time.time() + 60, time.time() + 60))
    saver.save(3, state(), {})
    assert names(tmp_path) == ["llama_v2-2steps", "llama_v2-3steps"]
    assert names(tmp_path / "llama_v2-2steps") == [new.parent.name]


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


def test_the_newest_k_stay_and_unfinished_ones_and_other_models_are_not_touched(tmp_path):
    save(tmp_path, 1, model_type="gpt_neox", run=RunId.fresh("neox"))
    (tmp_path / "llama_v2-90steps").mkdir()
    save(tmp_path, 1, 2, 3, 4, keep=2, run=RunId.fresh("ours"))
    assert names(tmp_path) == ["gpt_neox-1steps", "llama_v2-3steps", "llama_v2-4steps", "llama_v2-90steps"]


def test_each_folder_has_its_own_policy(tmp_path):
    saver = CheckpointManager([Policy(f"{tmp_path}/a", 2, 2), Policy(f"{tmp_path}/b", 3, 1)], model_type="m")
    for step in range(1, 13):
        saver.save(step, state(), {})
    assert names(tmp_path / "a") == ["m-10steps", "m-12steps"]
    assert names(tmp_path / "b") == ["m-12steps"]
    saver.save(13, state(), {}, force=True)
    assert names(tmp_path / "a") == ["m-12steps", "m-13steps"]
    assert names(tmp_path / "b") == ["m-13steps"]


@pytest.mark.parametrize(
    ("keep", "steps", "newest", "kept"),
    [
        (2, [1, 2, 3], 3, {2, 3}),
        (0, [1, 2, 3], 3, {1, 2, 3}),
        (-1, [1, 2, 3], 3, {1, 2, 3}),
        (2, [1, 2, 2], 2, {1, 2}),  # two folders may be of one step: the name of one was taken
        # a run that went back to step 1 does not delete what it writes, nor the branch it left
        (2, [1, 2, 8, 9], 2, {2, 8, 9}),
    ],
)
def test_which_steps_are_kept(keep, steps, newest, kept):
    assert Policy("f", 1, keep).kept(steps, newest) == kept


def test_a_run_that_goes_back_is_not_overtaken_by_what_it_left(place, caplog, capsys):
    save(place, 10, 20, 30)
    left = open_folder(place).read("llama_v2-30steps", "COMMITTED")
    for back, new, aside in ((20, 21, 30), (10, 20, 20)):
        saver = manager(place, keep=9)
        saver.go_back(find(f"{place}/llama_v2-{back}steps"))
        assert find(place).step > back, "nothing has been written yet"
        saver.save(new, state(new), {"tokens": new * 10})
        assert loaded(place) == new
        assert f"kept as llama_v2-{aside}steps/COMMITTED.abandoned" in caplog.text
        saver.save(new + 20, state(), {})
        assert find(place).step == new + 20, "its own later ones count"
    assert open_folder(place).read("llama_v2-30steps", "COMMITTED.abandoned") == left
    main(["ls", place])
    assert ["llama_v2-30steps", "abandoned"] in listed(capsys)
    open_folder(place).sweep(-math.inf)
    assert len([key for key in keys(place) if key.endswith("meta.json")]) == 7, "their files stay"
    assert main(["prune", place, "--keep", "9", "--abandoned", "1"]) == 0
    assert keys(place) == files("llama_v2-10steps", "llama_v2-20steps", "llama_v2-40steps")


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


def test_part_of_a_checkpoint_and_plain_values_are_loaded(place):
    more = {"optim": {"state": {"w": {"step": torch.ones(())}}}, "extra": {"count": 3, "words": ["a", "b"]}}
    manager(place).save(1, {**state(1), **more}, {"tokens": 10})
    assert loaded(place) == 1
    target = {"extra": {"count": 0, "words": []}}
    find(place).load(target)
    assert target == {"extra": {"count": 3, "words": ["a", "b"]}}


def test_a_tensor_in_a_folder_is_read_without_a_copy_of_it(tmp_path):
    manager(tmp_path).save(1, {"model": {"w": torch.ones(4_000_000)}}, {})
    target, found = {"model": {"w": torch.zeros(4_000_000)}}, find(tmp_path)
    tracemalloc.start()
    found.load(target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert target["model"]["w"].all()
    assert peak < 4_000_000  # of 16 MB


def test_another_dtype_is_converted_with_a_warning(tmp_path, caplog):
    def held(dtype):
        return {"model": {"w": torch.ones(3, dtype=dtype)}, "optim": {"state": {"w": {"exp_avg": torch.ones(3)}}}}

    manager(tmp_path).save(1, held(torch.float32), {})
    found, model = find(tmp_path), {"model": held(torch.bfloat16)["model"]}
    found.load(model)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "of a save, and of a model alone"
    found.load(held(torch.bfloat16))
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


# --- the verbs


@pytest.mark.core
def test_the_verbs(place, capsys):
    save(place, 3, 6, 9)
    assert main(["ls", place]) == 0
    assert listed(capsys) == [[f"llama_v2-{step}steps", "committed"] for step in (3, 6, 9)]
    assert main(["show", f"{place}/llama_v2-6steps"]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"path: +{place}/llama_v2-6steps", shown)
    assert re.search(r"tokens: +60", shown)
    assert main(["verify", place]) == 0
    assert capsys.readouterr().out.count("intact") == 3
    harm(place, "llama_v2-6steps", ".distcp", flipped)
    with pytest.raises(CheckpointError, match="1 of 3 damaged"):
        main(["verify", place])
    assert main(["prune", place, "--keep", "1", "--dry_run", "1"]) == 0
    assert len(committed_entries(open_folder(place))) == 3
    assert main(["prune", place, "--keep", "1"]) == 0
    assert keys(place) == files("llama_v2-9steps")
    assert open_checkpoint(f"{place}/llama_v2-9steps").verify() == []


def test_a_full_disk_is_named_with_the_remedy(tmp_path):
    def full(stage):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__0_0.distcp")

    with pytest.raises(CheckpointError, match=r"-5steps: No space left on device; free space and start the same"):
        manager(tmp_path, on_stage=full).save(5, state(), {})


def test_what_a_checkpoint_holds_is_read_by_people_and_by_programs(tmp_path, capsys):
    meta = {
        "best": {"step": 2, "loss": 1.5, "since": 3}, "data": {"size": 48, "cursor": {"rows": list(range(9))}},
        "spikes": {"accepted": [[step, 1.0, 2.0] for step in range(100)], "skipped": [[4, 6], [9, 9]], "row": 0},
    }  # fmt: skip
    manager(tmp_path).save(5, state(), meta)
    assert main(["show", str(tmp_path)]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert all(len(line) < 120 and not set(line) & set("{[") for line in shown.values())
    assert "steps 4 to 6, 9" in shown["spikes"]
    assert "step 2 with validation loss 1.5" in shown["best"]
    assert " ".join(shown["data"].split()) == "size 48, cursor (rows 9 entries)"
    assert main(["show", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).items() > meta.items()
    for verb in ("ls", "list"):
        assert main([verb, str(tmp_path)]) == 0
        assert "llama_v2-5steps  committed" in capsys.readouterr().out


def test_prune_lets_a_running_job_be_and_deletes_damaged_ones_when_asked(place, capsys):
    save(place, 3, 6, 9)
    harm(place, "llama_v2-9steps", ".distcp", flipped)
    assert loaded(place) == 6
    running = manager(place)
    running.lock()
    open_folder(place).put("llama_v2-12steps/0123abcd", "__0_0.distcp", b"half")
    assert main(["prune", place, "--keep", "1", "--dry_run", "1", "--damaged", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "would delete llama_v2-3steps", "would delete llama_v2-9steps, which is damaged",
    ]  # fmt: skip
    assert main(["prune", place, "--keep", "1", "--damaged", "1"]) == 0
    assert "is in use by a job on" in capsys.readouterr().out
    running.close()
    assert keys(place) == sorted(["llama_v2-12steps/*/__0_0.distcp", *files("llama_v2-6steps")])
    assert main(["prune", place, "--keep", "1"]) == 0
    assert not open_folder(place).has("", ".lock")
