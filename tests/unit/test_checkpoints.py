"""Saving, finding and retaining in one process, in a folder and in S3; what needs several is in tests/distributed."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from smp_train.checkpoints import format as format_module
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import best_of, open_checkpoint, open_verified
from smp_train.checkpoints.folder import open_folder
from smp_train.checkpoints.format import FORMAT, Marker
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.errors import CheckpointError, ConfigError
from smp_train.launch import flags as launch_flags
from smp_train.storage import base
from smp_train.storage.checksum import checksum_of
from tests.checkpoint_files import (
    check,
    committed,
    contents,
    files,
    flipped,
    harm,
    keys,
    listed,
    loaded,
    manager,
    names,
    owning,
    resumed,
    save,
    split,
    state,
    stop_at,
)

# --- saving and finding


def newest_step(parent, name):
    """Return the step that a launcher sees."""
    return launch_flags.newest_step(SimpleNamespace(checkpoint_dir=[parent], run_name=name), in_s3=True)


def test_all_of_a_checkpoint_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    """What a power failure would find: files, and the names of files and folders, are synced before COMMITTED is."""
    done: list[tuple[str, str]] = []
    fsync, rename, link = os.fsync, Path.rename, os.link

    def synced(descriptor: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(("rename", str(target)))
        return rename(self, target)

    def linked(source: Path, target: Path) -> None:
        done.append(("rename", str(target)))
        link(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(os, "link", linked)
    run = tmp_path / "run"
    save(run, 3)
    folder = run / "llama_v2-3steps"
    committed = done.index(("rename", str(folder / "COMMITTED")))
    marker = Marker.from_bytes((folder / "COMMITTED").read_bytes())
    for name in [".begun", *marker.files]:
        named = done.index(("rename", str(folder / name)))
        assert any(what == "sync" and f"/.{name}." in path for what, path in done[:named]), f"{name} is synced"
        assert ("sync", str(folder)) in done[named:committed], "then its name"
    assert {("sync", str(path)) for path in (tmp_path, run, folder)} <= set(done[:committed])
    assert any(what == "sync" and "/.COMMITTED." in path for what, path in done[:committed])
    assert ("sync", str(folder)) in done[committed:]


@pytest.mark.core
def test_what_is_saved_is_found_and_loaded(place):
    save(place, 7, 9, 12)
    found = open_verified(f"{place}/")
    assert (found.step, found.path, found.meta) == (12, f"{place}/llama_v2-12steps", {"tokens": 120, "step": 12})
    check(found)
    assert loaded(place) == 12
    check(open_verified(f"{place}/llama_v2-7steps"))
    check(open_verified(split(place)[0]))
    assert keys(place) == files("llama_v2-7steps", "llama_v2-9steps", "llama_v2-12steps")
    folder = open_folder(place)
    marker = Marker.from_bytes(folder.read("llama_v2-9steps", "COMMITTED"))
    assert (marker.step, marker.model_type, marker.generation) == (9, "llama_v2", 1)
    sizes = folder.sizes("llama_v2-9steps")
    assert {name: record.size for name, record in marker.files.items()} == {
        name: size for name, size in sizes.items() if name not in ("COMMITTED", ".begun")
    }
    parent, name = split(place)
    assert (newest_step(parent, name), newest_step(parent, "other")) == (12, 0)


def test_only_due_steps_are_saved_unless_forced(tmp_path):
    saver = manager(tmp_path, every=5)
    assert [step for step in range(12) if saver.due(step)] == [5, 10]
    assert [saver.next_due(step) for step in (0, 4, 5)] == [5, 5, 10]
    assert saver.save(4, state(), {}) == []
    assert saver.save(4, state(), {}, force=True) == [f"{tmp_path}/llama_v2-4steps"]


def test_a_first_start_finds_nothing(place, tmp_path):
    assert resumed(place) is None
    for location in (place, tmp_path / "later"):
        with pytest.raises(CheckpointError, match=rf"{location} does not exist"):
            open_verified(location)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} holds no checkpoint of this program"):
        open_verified(tmp_path)


def test_what_is_not_a_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "llama_v2-99steps").write_text("a file by that name")
    for name in ("tensorboard", "llama_v2-50steps", ".llama_v2-60steps", "gpt_neox-xsteps"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama_v2-50steps" / "meta.json").write_text("{}")
    assert loaded(tmp_path) == 3


def test_one_that_is_named_and_of_no_use_is_refused_with_the_others(tmp_path):
    save(tmp_path, 3, 6, 9)
    (tmp_path / "llama_v2-6steps" / "COMMITTED").unlink()
    harm(tmp_path, "llama_v2-9steps", ".distcp", flipped)
    for name, said in (("llama_v2-6steps", "COMMITTED"), ("llama_v2-9steps", r"__0_0.distcp has CRC-32.*")):
        with pytest.raises(CheckpointError, match=rf"{name} .*{said}"):
            open_verified(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"; complete ones in {tmp_path}: llama_v2-3steps$"):
        open_verified(tmp_path / "llama_v2-9steps")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has CRC-32.*: llama_v2-3steps$"):
        resumed(tmp_path, name="llama_v2-9steps")
    assert contents(tmp_path) == before, "a checkpoint that the user names is not marked, nor passed over"
    assert loaded(tmp_path) == 3


def test_a_folder_of_several_runs_is_refused_with_their_names(place):
    parent, _ = split(place)
    for name in ("one", "two"):
        save(f"{parent}/{name}", 3)
    for open_it in (open_checkpoint, open_verified):
        with pytest.raises(CheckpointError, match=rf"{parent} holds 2 runs; name one of them: {parent}/one, .*/two"):
            open_it(parent)


def test_the_best_checkpoint_is_looked_up_in_the_newest_ones_metadata(place):
    for step, best in ((2, None), (4, 2), (6, 4), (8, 4)):
        manager(place, keep=9).save(step, state(step), {"tokens": step * 10, "best": {"step": best, "loss": 1.0}})
    assert open_verified(f"{place}/best").step == 4
    check(open_verified(f"{place}/best"))
    open_folder(place).delete("llama_v2-4steps")
    with pytest.raises(CheckpointError, match="step 4 was the best, and is not kept without --keep_best 1"):
        open_checkpoint(f"{place}/best")
    save(place, 9)
    with pytest.raises(CheckpointError, match="no best checkpoint is known; train with --validation_freq"):
        best_of(open_folder(place))


def test_other_kinds_of_places_are_refused_by_name(tmp_path):
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        open_verified(tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match="gs://bucket/prefix"):
        open_verified("gs://bucket/prefix")
    with pytest.raises(ConfigError, match="s3:///prefix"):
        manager("s3:///prefix/run")
    policies = [Policy(str(tmp_path), 1, 2), Policy(f"{tmp_path}/.", 4, 2)]
    with pytest.raises(ConfigError, match="--checkpoint_dir"):
        CheckpointManager(policies, run_name="run", model_type="m")
    with pytest.raises(ConfigError, match="'a/b' cannot be part of a folder's name"):
        manager(tmp_path, model_type="a/b")


# --- damage


DAMAGE = [
    (lambda data: data[:-1], "__0_0.distcp", "bytes"),
    (flipped, "__0_0.distcp", "CRC-32"),
    (lambda data: None, "__0_0.distcp", "missing"),
    (flipped, ".metadata", "CRC-32"),
    (lambda data: None, "meta.json", "missing"),
    (flipped, "meta.json", "CRC-32"),
    (lambda data: b"{", "COMMITTED", "COMMITTED is not readable"),
]


@pytest.mark.parametrize(("change", "file", "said"), DAMAGE)
def test_a_damaged_newest_one_is_marked_and_the_older_one_used(place, caplog, change, file, said):
    save(place, 3, 6)
    harm(place, "llama_v2-6steps", file, change)
    before = contents(place)
    with pytest.raises(CheckpointError, match=said):
        resumed(place, strict=True)
    assert contents(place) == before, "strict: the start stops, and changes nothing"
    assert loaded(place) == 3
    assert "llama_v2-6steps is damaged" in caplog.text
    assert file in caplog.text
    after = contents(place)
    mark = after.pop("llama_v2-6steps/DAMAGED")
    assert said in mark.decode()
    assert after == before, "COMMITTED and all other files stay as they are"
    save(place, 6, 7, keep=1, generation=2)  # the step is reached again; the program does not delete damaged ones
    assert names(place) == ["llama_v2-6steps", "llama_v2-7steps"]
    assert contents(place).items() >= {name: data for name, data in before.items() if "6steps" in name}.items()
    assert loaded(place) == 7


def test_a_marked_one_is_not_read_again_until_the_mark_is_deleted(place, monkeypatch):
    save(place, 3, 6)
    harm(place, "llama_v2-6steps", ".distcp", flipped)
    verified, verify = [], Checkpoint.verify
    monkeypatch.setattr(Checkpoint, "verify", lambda self, *args: (verified.append(self.step), verify(self, *args))[1])
    assert loaded(place) == 3
    assert verified == [6, 3]
    assert loaded(place) == 3
    assert verified == [6, 3, 3], "DAMAGED says it already"
    said = r"__0_0.distcp has CRC-32.* \(file DAMAGED; delete it if the checkpoint has been repaired\)"
    with pytest.raises(CheckpointError, match=said):
        open_verified(f"{place}/llama_v2-6steps")
    harm(place, "llama_v2-6steps", ".distcp", flipped)
    open_folder(place).storage.delete("llama_v2-6steps/DAMAGED")
    assert loaded(place) == 6


def test_damaged_ones_do_not_count_among_those_that_are_kept(place):
    save(place, 2, 4, 6)
    for name in ("llama_v2-4steps", "llama_v2-6steps"):
        harm(place, name, ".distcp", flipped)
    assert loaded(place) == 2
    save(place, 3, keep=2, generation=2)
    assert loaded(place) == 3
    harm(place, "llama_v2-3steps", ".distcp", flipped)
    assert loaded(place) == 2, "two intact ones were kept"


def test_when_all_are_damaged_a_run_does_not_start_afresh_unasked(place):
    save(place, 3)
    harm(place, "llama_v2-3steps", ".distcp", flipped)
    for _ in range(2):  # at the first start, and again when the scheduler starts the job anew
        with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged; they are kept"):
            resumed(place)


def test_each_attempt_at_a_step_has_a_folder_of_its_own(tmp_path):
    save(tmp_path, 3, 6)
    for number in (2, 3):
        harm(tmp_path, committed(tmp_path)[0], ".distcp", flipped)
        assert loaded(tmp_path) == 3
        save(tmp_path, 6, generation=number)
        assert loaded(tmp_path) == 6
    assert committed(tmp_path) == ["llama_v2-6steps-3", "llama_v2-6steps-2", "llama_v2-6steps", "llama_v2-3steps"]
    assert [key for key in keys(tmp_path) if "DAMAGED" in key] == [
        "llama_v2-6steps-2/DAMAGED", "llama_v2-6steps/DAMAGED",
    ]  # fmt: skip


def test_a_folder_is_listed_and_tidied_while_a_job_removes_what_is_in_it(tmp_path, monkeypatch):
    """What is there when its folder is read may be gone when it is looked at."""
    save(tmp_path, 3, 6)
    older, scan = tmp_path / "llama_v2-3steps", os.scandir

    @contextlib.contextmanager
    def scan_then_remove(path):
        with scan(path) as entries:
            found = list(entries)
        if Path(path) == older:
            for entry in found:
                os.unlink(entry.path)
        yield iter(found)

    monkeypatch.setattr(os, "scandir", scan_then_remove)
    folder = open_folder(tmp_path)
    assert folder.sizes("llama_v2-3steps") == {}
    assert committed(tmp_path) == ["llama_v2-6steps"]
    monkeypatch.undo()
    folder.sweep(9)
    folder.delete("llama_v2-3steps")
    folder.delete("llama_v2-3steps")  # as `prune` and a job may at the same time
    assert listed(tmp_path) == ["llama_v2-6steps"]


def test_each_rank_verifies_its_share_of_the_files(tmp_path):
    save(tmp_path, 3)
    found = open_checkpoint(tmp_path)
    for file in found.marker.files:
        path = Path(found.path, file)
        path.write_bytes(flipped(path.read_bytes()))
    shares = [found.verify(rank, 2) for rank in range(2)]
    assert all(shares)
    assert len([problem for share in shares for problem in share]) == len(found.marker.files)


def test_a_format_of_the_future_is_refused_and_is_no_damage(tmp_path, monkeypatch):
    save(tmp_path, 3)
    with monkeypatch.context() as patched:
        patched.setattr(format_module, "FORMAT", FORMAT + 1)
        save(tmp_path, 6)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="use a newer smp-train"):
        resumed(tmp_path)
    assert contents(tmp_path) == before
    path = tmp_path / "llama_v2-6steps" / "COMMITTED"
    path.write_text(path.read_text().replace(f'"format": {FORMAT + 1}', f'"format": {FORMAT + 2}'))
    assert loaded(tmp_path) == 3, "a flipped number is damage"


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/meta.json", "a/./b"])
def test_a_marker_that_names_files_elsewhere_is_not_readable(name):
    with pytest.raises(ValueError, match="is not the name of a file in a checkpoint"):
        Marker(3, "m", 1, {"meta.json": checksum_of([b""]), name: checksum_of([b""])})


# --- generations


def test_the_highest_generation_then_the_highest_step_is_the_newest(place):
    """Neither names nor clocks order checkpoints."""
    save(place, 30, generation=1)
    save(place, 8, generation=3)
    save(place, 20, 5, generation=2)
    order = ["llama_v2-8steps", "llama_v2-20steps", "llama_v2-5steps", "llama_v2-30steps"]
    assert committed(place) == order
    assert (loaded(place), open_verified(place).step) == (8, 8)
    parent, name = split(place)
    assert newest_step(parent, name) == 8


def test_a_folder_that_was_renamed_to_another_step_is_ordered_by_its_marker(tmp_path):
    save(tmp_path, 3, 6)
    (tmp_path / "llama_v2-3steps").rename(tmp_path / "llama_v2-99steps")
    assert loaded(tmp_path) == 6
    assert open_verified(tmp_path / "llama_v2-99steps").step == 3


def test_an_unreadable_marker_is_ordered_by_the_generation_that_began_the_attempt(place):
    save(place, 30, generation=1)
    save(place, 8, generation=2)
    harm(place, "llama_v2-8steps", "COMMITTED", lambda data: data[:-9])
    assert committed(place)[0] == "llama_v2-8steps"
    with pytest.raises(CheckpointError, match="COMMITTED is not readable"):
        resumed(place, strict=True)


def test_a_run_that_goes_back_is_not_overtaken_by_what_it_left(place):
    save(place, 10, 20, 30)
    left = {name: data for name, data in contents(place).items() if "30steps" in name}
    saver = manager(place, keep=9, generation=2)
    assert loaded(place) == 30, "nothing has been written yet"
    saver.save(21, state(21), {"tokens": 210})
    assert loaded(place) == 21
    saver.next_generation()
    saver.save(20, state(20), {"tokens": 200})
    assert (committed(place)[0], loaded(place)) == ("llama_v2-20steps-2", 20)
    saver.save(40, state(40), {"tokens": 400})
    assert loaded(place) == 40, "its own later ones count"
    assert {name: data for name, data in contents(place).items() if "30steps" in name} == left


def test_retention_keeps_the_newest_and_never_deletes_those_of_later_generations(place):
    save(place, 1, 2, 3)
    save(place, 2, 4, 5, generation=3)
    save(place, 9, keep=1, generation=2)
    later = ["llama_v2-5steps", "llama_v2-4steps", "llama_v2-2steps-2"]
    assert committed(place) == [*later, "llama_v2-9steps"]
    save(place, 1, keep=2, generation=3)
    assert committed(place) == [*later[:2], "llama_v2-1steps"], "what was just saved stays as well"


# --- what is cut short, or in the way


@pytest.mark.parametrize("stage", ["write", "checksum", "commit", "publish"])
def test_a_failure_at_any_stage_leaves_what_was_there(tmp_path, stage):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=f"llama_v2-6steps: .*{stage}"):
        save(tmp_path, 6, on_stage=stop_at(stage))
    assert listed(tmp_path) == ["llama_v2-3steps"]


def test_saving_a_step_again_replaces_nothing(place):
    save(place, 3)
    before = contents(place)
    manager(place).save(3, state(3), {"again": True, "tokens": 30})
    assert loaded(place) == 3
    assert open_verified(place).meta == {"again": True, "tokens": 30, "step": 3}
    assert {name: data for name, data in contents(place).items() if name in before} == before
    assert keys(place) == files("llama_v2-3steps", "llama_v2-3steps-2")
    assert all(open_checkpoint(f"{place}/{name}").verify() == [] for name in names(place))


def test_what_is_there_under_the_name_is_left_alone(tmp_path):
    (tmp_path / "llama_v2-3steps" / "tp0_ep0").mkdir(parents=True)
    (tmp_path / "llama_v2-3steps" / "tp0_ep0" / "__0_0.distcp").write_text("another program's")
    (tmp_path / "llama_v2-4steps").write_text("a file")
    save(tmp_path, 3, 4, keep=1, generation=9)
    assert listed(tmp_path) == ["llama_v2-3steps", "llama_v2-4steps", "llama_v2-4steps-2"]
    assert listed(tmp_path / "llama_v2-3steps" / "tp0_ep0") == ["__0_0.distcp"]
    assert open_verified(tmp_path).path == f"{tmp_path}/llama_v2-4steps-2"
    save(tmp_path, 3, generation=9)
    assert (tmp_path / "llama_v2-3steps-2" / "COMMITTED").exists()


def test_leftovers_of_earlier_generations_are_swept_and_no_others(tmp_path):
    """An attempt of this generation may be under way; one without a readable .begun is not ours."""
    folder = open_folder(tmp_path)
    for generation in (1, 2, 3):
        folder.put(folder.begin("m", generation, generation), "__0_0.distcp", b"half")
    for name, begun in (("m-8steps", b""), ("m-9steps", b"[]")):
        folder.put(name, ".begun", begun)
    (tmp_path / "m-5steps").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.glob("m-*/*") if "m-1steps" not in path.parts}
    for step in (2, 3):
        save(tmp_path, 7, generation=step)
        assert listed(tmp_path / "m-1steps") == [".begun", ".swept"]
        assert folder.begin("m", 1, 9) == f"m-1steps-{step}", "the writer of the first attempt may only have stalled"
        if step == 2:
            assert {path: path.read_bytes() for path in before} == before
    assert listed(tmp_path / "m-2steps") == [".begun", ".swept"]


def test_a_deletion_that_was_cut_short_is_finished(tmp_path):
    save(tmp_path, 3, 6)
    folder = open_folder(tmp_path)
    folder.withdraw("llama_v2-6steps")
    for file in ("meta.json", "__0_0.distcp"):
        folder.storage.delete(f"llama_v2-6steps/{file}")
    assert loaded(tmp_path) == 3
    save(tmp_path, 4, generation=3)
    assert names(tmp_path) == ["llama_v2-3steps", "llama_v2-4steps"]


def test_a_kill_while_a_small_file_is_written_leaves_the_name_free(tmp_path):
    for step, file in ((3, ".begun"), (4, "COMMITTED")):
        partial = tmp_path / f"llama_v2-{step}steps" / f".{file}.0123abcd.partial"
        partial.parent.mkdir()
        partial.write_text("{")
        for path in (partial, partial.parent):
            os.utime(path, (1, 1))
    save(tmp_path, 3)
    assert listed(tmp_path) == ["llama_v2-3steps"]
    assert keys(tmp_path) == files("llama_v2-3steps")


def test_meta_that_is_not_json_fails_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        manager(tmp_path).save(3, state(), {"x": object()})
    assert listed(tmp_path) == []


@pytest.mark.parametrize("stage", ["checksum", "commit", "publish"])
def test_a_save_whose_attempt_was_swept_by_another_job_does_not_count(tmp_path, stage):
    def meanwhile(reached: str) -> None:
        if reached == stage:
            open_folder(tmp_path).sweep(9)

    save(tmp_path, 3)
    base.VISIBLE_WITHIN_SECONDS, before = 0.1, base.VISIBLE_WITHIN_SECONDS
    try:
        with pytest.raises(CheckpointError, match="6steps: "):
            manager(tmp_path, on_stage=meanwhile).save(6, state(6), {"tokens": 60})
    finally:
        base.VISIBLE_WITHIN_SECONDS = before
    assert names(tmp_path) == committed(tmp_path) == ["llama_v2-3steps"]


# --- retention


def test_the_newest_k_stay_and_unfinished_ones_are_not_touched(tmp_path):
    (tmp_path / "llama_v2-90steps").mkdir()
    (tmp_path / "llama_v2-91steps").mkdir()
    (tmp_path / "llama_v2-91steps" / "weights").touch()
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert listed(tmp_path) == ["llama_v2-3steps", "llama_v2-4steps", "llama_v2-90steps", "llama_v2-91steps"]


@pytest.mark.parametrize("keep", [0, -1])
def test_without_a_limit_all_are_kept(tmp_path, keep):
    save(tmp_path, 1, 2, 3, keep=keep)
    assert len(committed(tmp_path)) == 3


def test_the_best_one_is_kept(tmp_path):
    saver = manager(tmp_path, keep=1)
    saver.best = 2
    for step in (1, 2, 3, 4):
        saver.save(step, state(), {})
    assert committed(tmp_path) == ["llama_v2-4steps", "llama_v2-2steps"]


def test_each_folder_has_its_own_policy(tmp_path):
    policies = [Policy(f"{tmp_path}/a", 2, 2), Policy(f"{tmp_path}/b", 3, 1)]
    saver = CheckpointManager(policies, run_name="run", model_type="m")
    for step in range(1, 13):
        saver.save(step, state(), {})
    assert listed(tmp_path / "a" / "run") == ["m-10steps", "m-12steps"]
    assert listed(tmp_path / "b" / "run") == ["m-12steps"]
    saver.save(13, state(), {}, force=True)
    assert listed(tmp_path / "a" / "run") == ["m-12steps", "m-13steps"]
    assert listed(tmp_path / "b" / "run") == ["m-13steps"]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, caplog, monkeypatch):
    save(tmp_path, 1)
    unlink = os.unlink

    def refuse(path, **options):
        if "1steps" in os.fspath(path) and not os.fspath(path).endswith("COMMITTED"):
            raise PermissionError(13, "Permission denied")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    save(tmp_path, 2, keep=1)
    assert "cannot be deleted" in caplog.text
    assert committed(tmp_path) == ["llama_v2-2steps"]
    monkeypatch.undo()
    save(tmp_path, 3, keep=1, generation=3)
    assert names(tmp_path) == ["llama_v2-3steps"]


def test_the_owners_of_a_run_leave_their_claim_and_nothing_else(place):
    with owning(place) as saver:
        saver.check_folders()
        saver.save(3, state(3), {"tokens": 30})
    assert keys(place) == files("llama_v2-3steps")
    with owning(place) as saver:
        assert saver.generation == 2
        saver.save(2, state(2), {"tokens": 20})
    assert loaded(place) == 2
    assert list(open_folder(place).storage.level()[0]) == [".owner-2"]


# --- folders that cannot be used


def test_a_folder_that_can_be_written_is_made_and_left_empty(tmp_path):
    manager(tmp_path / "a" / "b").check_folders()
    assert listed(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/checkpoints"])
def test_a_folder_that_cannot_be_written_is_found_at_start(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="--checkpoint_dir"):
        manager(tmp_path / place / "run").check_folders()


# --- loading


def test_another_model_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    found = open_verified(tmp_path)
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
    open_verified(place).load(target)
    assert target == {"extra": {"count": 3, "words": ["a", "b"]}}


def test_a_tensor_in_a_folder_is_read_without_a_copy_of_it(tmp_path):
    manager(tmp_path).save(1, {"model": {"w": torch.ones(4_000_000)}}, {})
    target, found = {"model": {"w": torch.zeros(4_000_000)}}, open_verified(tmp_path)
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
    found, model = open_verified(tmp_path), {"model": held(torch.bfloat16)["model"]}
    found.load(model)
    assert not [record for record in caplog.records if record.levelname == "WARNING"], "of a save, and of a model alone"
    found.load(held(torch.bfloat16))
    assert "model.w was saved as torch.float32 and is torch.bfloat16 here" in caplog.text


class Evil:
    def __reduce__(self):
        return print, ("code from a checkpoint ran",)


def test_a_checkpoint_cannot_run_code(tmp_path, capsys):
    save(tmp_path, 1)
    folder = open_folder(tmp_path)
    marker = Marker.from_bytes(folder.read("llama_v2-1steps", "COMMITTED"))
    record = folder.put("llama_v2-1steps", ".metadata", pickle.dumps(Evil()))
    folder.commit("llama_v2-1steps", replace(marker, files={**marker.files, ".metadata": record}))
    with pytest.raises(CheckpointError, match=r"builtins\.print"):
        open_verified(tmp_path).load(state())
    manager(tmp_path).save(2, {"extra": {"x": Evil()}}, {})
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="no code of a file is run"):
        open_verified(tmp_path).load({"extra": {"x": None}})
    assert "ran" not in capsys.readouterr().out


def test_a_full_disk_is_named_with_the_remedy(tmp_path):
    def full(stage):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "__0_0.distcp")

    with pytest.raises(CheckpointError, match=r"-5steps: No space left on device; free space and start the same"):
        manager(tmp_path, on_stage=full).save(5, state(), {})
