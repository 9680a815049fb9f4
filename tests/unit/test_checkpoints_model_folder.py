"""A model that replaces another one: until it is whole the other one is there, and what is no part of either stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp_train.checkpoints.model_folder import put, writing
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage import Storage

INDEX = "model.safetensors.index.json"
OLD = {
    "config.json": b"old", "tokenizer.json": b"old", "generation_config.json": b"old",
    INDEX: json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "second.safetensors"}}).encode(),
    "model-00001-of-00002.safetensors": b"old", "second.safetensors": b"old", "pytorch_model.bin": b"old",
}  # fmt: skip
OTHERS = {"adapter_model.safetensors": b"mine", "model_card.md": b"mine", "training_args.bin": b"mine"}
NEW = {"model.safetensors": b"new", "templates/chat.jinja": b"new", "tokenizer.json": b"new", "config.json": b"new"}
AFTER = {**OTHERS, "generation_config.json": b"old", **NEW}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(folder: Path) -> None:
    folder.mkdir()
    for name, data in {**OLD, **OTHERS}.items():
        (folder / name).write_bytes(data)


def write(out: Storage) -> None:
    for name, data in NEW.items():
        put(out, name, data)


def test_a_model_is_replaced_by_one_that_is_whole(tmp_path: Path) -> None:
    fill(tmp_path / "m")
    with writing(tmp_path / "m", replace=True) as out:
        write(out)
        there = contents(tmp_path / "m")
        assert {name: there.get(name) for name in {**OLD, **OTHERS}} == {**OLD, **OTHERS}
    assert contents(tmp_path / "m") == AFTER
    assert not (tmp_path / "m" / ".partial").exists()


def test_no_file_of_an_earlier_tokenizer_is_left_beside_a_new_one(tmp_path: Path) -> None:
    fill(tmp_path / "m")
    earlier = {"tokenizer_config.json": b"old", "chat_template.jinja": b"old"}
    for name, data in earlier.items():
        (tmp_path / "m" / name).write_bytes(data)
    with writing(tmp_path / "m", replace=True) as out:
        write(out)
    assert earlier.items() <= contents(tmp_path / "m").items()  # of a model without one it is not known whose they are
    with writing(tmp_path / "m", replace=True) as out:
        put(out, "tokenizer_config.json", b"new")
        write(out)
    assert contents(tmp_path / "m") == {**AFTER, "tokenizer_config.json": b"new"}


def test_a_model_that_does_not_get_whole_replaces_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "m")

    def fail() -> None:
        with writing(tmp_path / "m", replace=True) as out:
            write(out)
            raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        fail()
    assert contents(tmp_path / "m") == {**OLD, **OTHERS}
    with pytest.raises(ConfigError, match="holds a model already"), writing(tmp_path / "m"):
        pass
    assert contents(tmp_path / "m") == {**OLD, **OTHERS}


def test_no_adapter_stays_beside_a_model_that_replaces_it(tmp_path: Path) -> None:
    """Transformers would open the adapter, and the weights it names, in place of the model."""
    for name in ("adapter_config.json", "adapter_model.safetensors", "notes.md"):
        (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match="holds a model already"), writing(tmp_path):
        pass
    with writing(tmp_path, replace=True) as out:
        write(out)
    assert contents(tmp_path) == {**NEW, "notes.md": b"mine"}


def test_a_replacement_that_is_cut_short_opens_as_neither_and_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each move: config.json, without which nothing opens, goes first and comes last."""
    rename, unlink = Path.rename, Path.unlink
    moves = 0
    while True:
        folder = tmp_path / str(moves)
        fill(folder)
        left = moves

        def killed(path: Path) -> None:
            nonlocal left
            if ".partial" not in path.name:  # of a file that is being written
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", lambda self, to: (killed(self), rename(self, to))[1])
            patched.setattr(Path, "unlink", lambda self, **more: (killed(self), unlink(self, **more))[1])
            try:
                with writing(folder, replace=True) as out:
                    write(out)
            except KeyboardInterrupt:
                assert contents(folder).get("config.json") == (None if moves else b"old")
        with writing(folder, replace=True) as out:
            write(out)
        assert contents(folder) == AFTER
        if left >= 0:
            break
        moves += 1
    assert moves == 9  # five old files go, four new ones come
