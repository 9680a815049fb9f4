"""A new model never overwrites another one: it is moved aside first, and a kill leaves no folder that opens wrongly."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from smp_train import storage
from smp_train.checkpoints.hf.model_folder import ModelFolder, new_model
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.weight_files import WeightFiles
from smp_train.storage.paths import names_in
from smp_train.storage.paths import place as path_of
from tests.killing import ends

INDEX = "model.safetensors.index.json"
CARD = b"---\ntags: [smp-train]\n---\n"
OLD = {
    "config.json": b"old", "tokenizer.json": b"old", "generation_config.json": b"old", "README.md": CARD,
    INDEX: json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "second.safetensors"}}).encode(),
    "model-00001-of-00002.safetensors": save({"a": torch.ones(2)}),
    "second.safetensors": save({"b": torch.ones(2)}),
    "chat_template.jinja": b"old",
}  # fmt: skip
SINGLE = {
    "config.json": b"old", "tokenizer.json": b"old", "model.safetensors": save({"a": torch.ones(2), "b": torch.ones(2)})
}  # fmt: skip
OTHERS = {"model_card.md": b"mine", "training_args.bin": b"mine", "adapters/adapter_model.safetensors": b"mine"}
NEW = {
    "config.json": b"new", "tokenizer.json": b"new", "templates/chat.jinja": b"new",
    "model.safetensors": save({"a": torch.full((2,), 2.0), "b": torch.full((2,), 2.0)}),
}  # fmt: skip
VALUES = {1.0: b"old", 2.0: b"new"}


def previous(model: dict[str, bytes], number: int = 1) -> dict[str, bytes]:
    return {f"previous-{number}/{name}": data for name, data in model.items()}


AFTER = {**OTHERS, **NEW, **previous(OLD)}


def contents(place: Path | str) -> dict[str, bytes]:
    folder = storage.open_storage(place)
    return {name: folder.read(name) for name in folder.files()}


def fill(place: Path | str, model: dict[str, bytes] = OLD) -> None:
    for name, data in {**model, **OTHERS}.items():
        storage.open_storage(place).put(name, data)


def write(out: ModelFolder, model: dict[str, bytes] = NEW) -> None:
    """Write config.json first, which must come last nevertheless."""
    for name, data in model.items():
        out.put_all({name: data})


def test_an_existing_model_is_moved_aside(place: str) -> None:
    fill(place)
    with pytest.raises(ConfigError, match=r"holds a model already; .*--overwrite 1"), new_model(place):
        pass
    assert contents(place) == {**OLD, **OTHERS}
    with new_model(place, overwrite=True) as out:
        assert contents(place) == {**OTHERS, **previous(OLD)}
        write(out)
        assert "config.json" not in contents(place)
    assert contents(place) == AFTER
    with new_model(place, overwrite=True) as out:
        write(out, OLD)
    moved = {name: data for name, data in NEW.items() if "/" not in name}
    expected = {**AFTER, **previous(moved, 2), **OLD}
    del expected["model.safetensors"]
    assert contents(place) == expected


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    fill(tmp_path, {**OLD, "README.md": b"# My project\n"})
    (tmp_path / "previous-7").mkdir()
    with new_model(tmp_path, overwrite=True) as out:
        write(out)
    others = {**OTHERS, "README.md": b"# My project\n"}
    moved = {name: data for name, data in OLD.items() if name != "README.md"}
    assert contents(tmp_path) == {**others, **NEW, **previous(moved, 8)}


@pytest.mark.parametrize("config", ["adapter_config.json", "pytorch_model.bin"])
def test_adapters_and_weights_alone_are_a_model_too(config: str, tmp_path: Path) -> None:
    """Transformers would open an adapter beside the model, and the weights it names, in place of the model."""
    model = dict.fromkeys((config, "adapter_model.safetensors"), b"mine")
    fill(tmp_path, model)
    with pytest.raises(ConfigError, match="holds a model already"), new_model(tmp_path):
        pass
    with new_model(tmp_path, overwrite=True) as out:
        write(out)
    assert contents(tmp_path) == {**OTHERS, **NEW, **previous(model)}


@pytest.mark.parametrize("model", [{}, OLD])
def test_an_error_leaves_no_part_of_the_new_model(model: dict[str, bytes], tmp_path: Path) -> None:
    fill(tmp_path, model)

    def fail() -> None:
        with new_model(tmp_path, overwrite=True) as out:
            write(out)
            raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        fail()
    assert contents(tmp_path) == {**OTHERS, **previous(model)}
    with new_model(tmp_path) as out:
        write(out)
    assert contents(tmp_path) == {**OTHERS, **NEW, **previous(model)}


# --- a process that is killed


def replace_model(place: str) -> None:
    with new_model(place, overwrite=True) as out:
        write(out)


def opened(place: str) -> bytes | None:
    """Return the model that a folder opens as, whose weights must be its configuration's; None if it does not open."""
    folder = path_of(place)
    if "config.json" not in names_in(folder):
        return None
    try:
        with ExitStack() as stack:
            files = WeightFiles(folder, stack)
            values = {name: float(files.tensor(name)[...][0]) for name in files.files}
    except CheckpointError:
        return None
    if values.keys() != {"a", "b"}:  # refused: it lacks parameters
        return None
    (value,) = set(values.values())
    config = (folder / "config.json").read_bytes()
    assert config == VALUES[value]
    return config


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("old", [OLD, SINGLE], ids=["shards", "one file"])
def test_a_kill_at_any_operation_leaves_nothing_that_opens_wrongly(
    old: dict[str, bytes], kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    parent = str(tmp_path) if kind == "folder" else request.getfixturevalue("s3_place")
    outcomes, after, ended = [], 0, False
    while not ended:
        place = f"{parent}/{after}"
        fill(place, old)
        ended = ends(request, kind, lambda place=place: replace_model(place), after)  # type: ignore[misc]
        outcomes.append(opened(place))
        assert opened(f"{place}/previous-1") in (None, b"old")
        replace_model(place)
        assert opened(place) == b"new"
        after_all = contents(place)
        assert {name: after_all[name] for name in {**OTHERS, **NEW}} == {**OTHERS, **NEW}
        for name, data in old.items():  # nothing of the old model is lost
            assert data in [content for path, content in after_all.items() if path.endswith(f"/{name}")], name
        if kind == "folder":  # an interrupted move is completed in the same sub-folder
            assert any(previous(old, number).items() <= after_all.items() for number in (1, 2))
            assert not [name for name in after_all if name.endswith(".moving")]
        after += 1
    changes = [model for model, before in zip(outcomes, [None, *outcomes], strict=False) if model != before]
    assert changes == [b"old", None, b"new"]
    assert after > 10
