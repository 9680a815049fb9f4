"""Weights of a damaged checkpoint, and of one rank's part of a checkpoint, are used by nobody who reads weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import smp_train
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.find import open_checkpoint
from smp_train.checkpoints.pretrained import load_weights
from smp_train.errors import CheckpointError
from smp_train.models.build import build_meta, materialise
from smp_train.models.resolve import resolve
from smp_train.run.divergence import roll_back
from smp_train.run.saving import write_model
from tests.checkpoint_files import flipped, harm, manager
from tests.unit.test_models_hf_weights import FAMILIES, expected_logits, save

STEP = "llama_v2-4steps"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model as transformers saved it."""
    folder = tmp_path_factory.mktemp("verified") / "theirs"
    save(FAMILIES["llama_v2"], folder)
    return folder


def damage(folder: Path | str, name: str, file: str) -> None:
    """Change one bit in the middle of the checkpoint's one file whose name ends so; sizes stay the same."""
    harm(folder, name, file, lambda data: flipped(data[: len(data) // 2]) + data[len(data) // 2 :])


def damaged(theirs: Path, folder: Path) -> str:
    main(["import", str(theirs), str(folder), "--step", "4"])
    damage(folder, STEP, ".distcp")
    return rf"{folder}/{STEP} is damaged: __0_0\.distcp has CRC-32"


def part(theirs: Path, folder: Path) -> str:
    """Save the first half of every tensor, as one of two ranks does to its node's own disk."""
    main(["import", str(theirs), str(folder.parent / "whole"), "--step", "4"])
    whole = open_checkpoint(folder.parent / "whole" / STEP)
    halves = {name: torch.ones(shape[0] // 2, *shape[1:]) for name, shape in shapes(whole.entries()[0]).items()}
    meta = {"model_config": whole.meta["model_config"], "node_local": {"world_size": 2, "rank": 0}}
    manager(folder).save(4, {"model": halves}, meta)
    return rf"{folder}/{STEP} is one rank's part of a checkpoint"


def shapes(entries: Any) -> dict[str, list[int]]:
    return {name.removeprefix("model."): list(entry.size) for name, entry in entries.items()}


def finetune(checkpoint: str, theirs: Path) -> None:
    model = build_meta(resolve(SimpleNamespace(hf_pretrained_model_name_or_dir=str(theirs))))
    materialise(model, "cpu")
    load_weights(model, checkpoint)


def write_final_model(checkpoint: str, out: Path) -> None:
    backend = SimpleNamespace(full_weights=lambda model: None)
    run = SimpleNamespace(runtime=SimpleNamespace(is_main=True), backend=backend, model=None)
    write_model(cast(Any, run), checkpoint, str(out))


READERS: dict[str, Callable[[str, Path, Path], object]] = {
    "export": lambda checkpoint, theirs, out: main(["export", checkpoint, str(out)]),
    "import": lambda checkpoint, theirs, out: main(["import", checkpoint, str(out), "--model", str(theirs)]),
    "finetuning": lambda checkpoint, theirs, out: finetune(checkpoint, theirs),
    "evaluate": lambda checkpoint, theirs, out: smp_train.evaluate(checkpoint, str(theirs)),
    "generate": lambda checkpoint, theirs, out: smp_train.generate(checkpoint, "a"),
    "load_model": lambda checkpoint, theirs, out: smp_train.load_model(checkpoint),
    "rollback": lambda checkpoint, theirs, out: roll_back(cast(Any, None), 5, checkpoint),
    "final model": lambda checkpoint, theirs, out: write_final_model(checkpoint, out),
}


@pytest.mark.parametrize("made", [damaged, part])
def test_no_reader_of_weights_takes_it(made: Callable[[Path, Path], str], theirs: Path, tmp_path: Path) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out"
    said = made(theirs, ours)
    for reader, read in READERS.items():
        with pytest.raises(CheckpointError, match=said) as refused:
            read(f"{ours}/{STEP}", theirs, out)
        assert "\n" not in str(refused.value), reader
        assert not [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".lock")], reader
    assert main(["show", f"{ours}/{STEP}"]) == 0


def test_tensors_are_not_read_before_they_are_verified(theirs: Path, tmp_path: Path) -> None:
    main(["import", str(theirs), str(tmp_path), "--step", "4"])
    with pytest.raises(RuntimeError, match=STEP):
        open_checkpoint(tmp_path / STEP).reader()


def test_what_is_shown_and_the_tokenizer_are_verified_as_they_are_read(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = manager(tmp_path)
    saver.tokenizer = {"tokenizer.json": b'{"a": 0}'}
    saver.save(4, {"model": {"w": torch.ones(2)}}, {})
    found = open_checkpoint(tmp_path / STEP)
    assert found.tokenizer() == saver.tokenizer
    for file in ("tokenizer.json", ".metadata"):
        damage(tmp_path, STEP, file)
    with pytest.raises(CheckpointError, match=r"tokenizer/tokenizer\.json"):
        found.tokenizer()
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        main(["show", str(tmp_path)])
    assert "tensors" not in capsys.readouterr().out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_export_that_is_refused_writes_nothing_and_names_what_is_intact(
    theirs: Path, place: str, tmp_path: Path
) -> None:
    for step in ("4", "8"):
        assert main(["import", str(theirs), place, "--step", step]) == 0
    newer, old, new = "llama_v2-8steps", tmp_path / "old", tmp_path / "new"
    assert main(["export", place, str(old)]) == 0
    before = contents(old)
    damage(place, newer, ".distcp")
    for source in (place, f"{place}/{newer}"):
        for target, more in ((new, []), (old, ["--overwrite", "1"])):
            with pytest.raises(CheckpointError, match=rf"{newer} .*__0_0\.distcp has CRC-32 .*: {STEP}$"):
                main(["export", source, str(target), *more])
    assert not new.exists()
    assert contents(old) == before
    assert main(["export", f"{place}/{STEP}", str(new)]) == 0
    assert torch.equal(expected_logits(new), expected_logits(theirs))


def test_tensors_of_other_shapes_than_the_model_are_not_exported(theirs: Path, tmp_path: Path) -> None:
    """As those of one rank's part that does not say it is one."""
    config = json.loads((theirs / "config.json").read_text())
    main(["import", str(theirs), str(tmp_path / "whole"), "--step", "4"])
    saved = shapes(open_checkpoint(tmp_path / "whole" / STEP).entries()[0])
    state = {name: torch.ones(shape) for name, shape in saved.items()}
    name = "model.embed_tokens.weight"
    state[name] = state[name][:64]
    manager(tmp_path).save(4, {"model": state}, {"model_config": config})
    with pytest.raises(CheckpointError, match=re.escape(f"{name} is [64, ")):
        main(["export", str(tmp_path / STEP), str(tmp_path / "out")])
    assert not (tmp_path / "out" / "config.json").exists()
