"""Saving, finding, retaining and loading in one process, in a folder and in S3."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smp_train.checkpoints import format as format_module
from smp_train.checkpoints.find import best_of, open_checkpoint, open_verified
from smp_train.checkpoints.folder import open_folder
from smp_train.checkpoints.format import FORMAT, Marker
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.errors import CheckpointError
from smp_train.launch import flags as launch_flags
from smp_train.models.hub_state import create_optimizer_state, gather_state
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


# --- damage


DAMAGE = [
    (lambda data: data[:-1], "__0_0.distcp", "bytes"),
    (flipped, "__0_0.distcp", "CRC-32"),
    (lambda data: None, "__0_0.distcp", "missing"),
    (flipped, ".metadata", "CRC-32"),
    (flipped, "index.bin", "CRC-32"),
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


def test_a_marked_one_is_not_used_until_the_mark_is_deleted(place):
    save(place, 3, 6)
    for _ in range(2):  # harmed, marked, and repaired
        harm(place, "llama_v2-6steps", ".distcp", flipped)
        assert loaded(place) == 3
    said = r"__0_0.distcp has CRC-32.* \(file DAMAGED; delete it if the checkpoint has been repaired\)"
    with pytest.raises(CheckpointError, match=said):
        open_verified(f"{place}/llama_v2-6steps")
    open_folder(place).storage.delete("llama_v2-6steps/DAMAGED")
    assert loaded(place) == 6


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


# --- generations


def test_the_highest_generation_then_the_highest_step_is_the_newest(place):
    """Neither names nor clocks order checkpoints: a run that goes back is not overtaken by what it left."""
    save(place, 30, generation=1)
    save(place, 8, generation=3)
    save(place, 20, 5, generation=2)
    order = ["llama_v2-8steps", "llama_v2-20steps", "llama_v2-5steps", "llama_v2-30steps"]
    assert committed(place) == order
    assert (loaded(place), open_verified(place).step) == (8, 8)
    parent, name = split(place)
    assert newest_step(parent, name) == 8
    before = contents(place)
    saver = manager(place, keep=9, generation=3)
    saver.next_generation()
    for step in (5, 9):
        saver.save(step, state(step), {"tokens": step * 10})
        assert loaded(place) == step
    assert committed(place) == ["llama_v2-9steps", "llama_v2-5steps-2", *order]
    assert contents(place).items() >= before.items(), "nothing is replaced"


def test_a_folder_that_was_renamed_to_another_step_is_ordered_by_its_marker(tmp_path):
    save(tmp_path, 3, 6)
    (tmp_path / "llama_v2-3steps").rename(tmp_path / "llama_v2-99steps")
    assert loaded(tmp_path) == 6
    assert open_verified(tmp_path / "llama_v2-99steps").step == 3


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


# --- retention


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


def test_an_object_in_a_checkpoint_cannot_run_code(tmp_path, capsys):
    manager(tmp_path).save(2, {"extra": {"x": Evil()}}, {})
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="no code of a file is run"):
        open_verified(tmp_path).load({"extra": {"x": None}})
    assert "ran" not in capsys.readouterr().out


def test_wrapper_prefixes_are_not_part_of_names():
    wrapped = nn.ModuleDict({"layer": nn.ModuleDict({"_checkpoint_wrapped_module": torch.compile(nn.Linear(2, 2))})})
    assert set(gather_state(wrapped)["model"]) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("fused", [False, True])
def test_creating_optimizer_state_changes_no_later_step(fused):
    def trained(create: bool) -> tuple[list, list]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
        if create:
            create_optimizer_state(optimizer)
            assert all(not value.any() for values in optimizer.state.values() for value in values.values())
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], list(optimizer.state.values())

    (plain, states), (created, other_states) = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, created, strict=True))
    for values, others in zip(states, other_states, strict=True):
        assert all(torch.equal(values[key], others[key]) for key in values)


def test_a_parameter_without_a_gradient_is_saved_and_hyper_parameters_are_not(tmp_path):
    def build(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=rate)

    model, optimizer = build(0.5)
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager(tmp_path).save(1, gather_state(model, optimizer), {})
    other, fresh = build(0.25)
    found = gather_state(other, fresh)
    open_verified(tmp_path).load(found)
    assert found["optim"]["state"]["used.weight"]["step"] == 1
    assert found["optim"]["state"]["idle.weight"]["step"] == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["weight_decay"]) == (0.25, 0.25)
