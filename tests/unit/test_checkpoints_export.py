"""Models in and out of checkpoints: the hub's names, what the verbs refuse, and that only verified weights are read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import smp_train
from smp_train.arguments import Arguments
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.dcp.storage import TreeReader
from smp_train.checkpoints.find import open_checkpoint, open_verified
from smp_train.checkpoints.hf.export import export
from smp_train.checkpoints.pretrained import load_weights
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.build import build_meta, materialise
from smp_train.models.hf_weights import load_pretrained
from smp_train.models.hub_state import gather_state
from smp_train.models.resolve import resolve
from smp_train.run.divergence import roll_back
from smp_train.run.saving import write_model
from tests.chats import write_tokenizer
from tests.checkpoint_files import flipped, harm, manager
from tests.training import flatten, read_checkpoint, same
from tests.unit.test_models_hf_weights import FAMILIES, IDS, expected_logits, pickled, save


def checkpoint(source: Path, folder: Path, step: int = 4, optimizer: bool = True) -> Path:
    """Load what transformers saved and save it as a run would; return the checkpoint."""
    spec = resolve(Arguments(hf_pretrained_model_name_or_dir=str(source)))
    model, adam = fresh(source)
    load_pretrained(model, source)
    saver = manager(folder, keep=0, model_type=spec.model_type)
    meta = {"model_config": spec.config.to_dict(), "tokens": 7}
    (path,) = saver.save(step, gather_state(model, adam if optimizer else None), meta)
    return Path(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a model as transformers saved it, and its checkpoint without an optimizer."""
    folder = tmp_path_factory.mktemp("llama")
    save(FAMILIES["llama_v2"], folder / "theirs")
    return folder / "theirs", checkpoint(folder / "theirs", folder / "ours", optimizer=False)


def fresh(folder: Path) -> tuple[Any, torch.optim.AdamW]:
    """Return the model of a Hugging Face folder without its weights, and its optimizer."""
    model = build_meta(resolve(Arguments(hf_pretrained_model_name_or_dir=str(folder))))
    materialise(model, "cpu")
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_have_the_hubs_names_whatever_the_installed_transformers_has(family: str, tmp_path: Path) -> None:
    """Loaded, saved again, finetuned from and exported: the same weights, moments, logits and files."""
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    save(FAMILIES[family], theirs)
    weights, config = load_file(theirs / "model.safetensors"), json.loads((theirs / "config.json").read_text())
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": value * 2, "exp_avg_sq": value * 3}
               for name, value in weights.items()}  # fmt: skip
    saver = manager(tmp_path / "ours", keep=0, model_type="m")
    state = {"model": weights, "optim": {"state": moments}}
    (path,) = saver.save(1, state, {"model_config": config})
    model, optimizer = fresh(theirs)
    open_verified(path).load(gather_state(model, optimizer))
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, expected_logits(theirs))
    (again,) = saver.save(2, gather_state(model, optimizer), {"model_config": config})
    same(read_checkpoint(Path(again)), flatten(state))
    other, _ = fresh(theirs)
    load_weights(other, path)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    export(open_verified(again), back)
    same(load_file(back / "model.safetensors"), weights)
    assert json.loads((back / "config.json").read_text()) == config
    assert torch.equal(expected_logits(back), expected_logits(theirs))
    assert (back / "generation_config.json").is_file()
    if family == "mixtral":  # into several files with an index
        seen: list[tuple[int, int]] = []
        export(open_verified(path), tmp_path / "split", shard_bytes=60_000, on_progress=lambda *now: seen.append(now))
        files = sorted(tmp_path.glob("split/*.safetensors"))
        assert len(files) > 2
        assert all(file.stat().st_size < 70_000 for file in files)
        assert torch.equal(expected_logits(tmp_path / "split"), expected_logits(theirs))
        assert seen[-1][0] == seen[-1][1] == sum(v.nbytes for file in files for v in load_file(file).values())


def test_another_dtype_and_one_reading_of_the_index(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, path = llama
    read: list[str] = []
    once = TreeReader.preload
    monkeypatch.setattr(TreeReader, "preload", lambda self: (read.append(str(self.path)), once(self))[1])
    export(open_verified(path), tmp_path / "half", dtype=torch.bfloat16)
    exact = load_file(theirs / "model.safetensors")
    for name, value in load_file(tmp_path / "half" / "model.safetensors").items():
        assert torch.equal(value, exact[name].bfloat16())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert len(read) == 1


def test_what_is_not_a_whole_model_is_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((llama[0] / "config.json").read_text())
    saver = manager(tmp_path / "ours", keep=0)
    (path,) = saver.save(1, {"model": {"lm_head.weight": torch.ones(99, 40)}}, {"model_config": config})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight"):
        export(open_verified(path), tmp_path / "back")
    assert not (tmp_path / "back" / "config.json").exists()
    (path,) = saver.save(2, {"model": {"w": torch.ones(2)}}, {})
    with pytest.raises(CheckpointError, match="does not say which model it is"):
        export(open_verified(path), tmp_path / "back")


def test_import_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch.distributed.checkpoint as dcp

    save(FAMILIES["llama_v3"], tmp_path / "theirs")
    expected = expected_logits(tmp_path / "theirs")
    pickled(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "converted"), "--dtype", "float32"]) == 0
    assert torch.equal(expected_logits(tmp_path / "converted"), expected)

    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--step", "3"]) == 0
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--tokenizer", str(tokenizer)]) == 0
    assert f"wrote step 3 of {tmp_path}/ours/llama_v2-3steps" in capsys.readouterr().out
    assert (tmp_path / "back" / "tokenizer.json").is_file()
    assert torch.equal(expected_logits(tmp_path / "back"), expected)

    # What a run of the former program left: its step and place in the data are told.
    stored = torch.load(tmp_path / "theirs" / "pytorch_model.bin", weights_only=True)
    old = {"model": stored, "optimizer": {"x": torch.ones(2)}, "total_steps": 70, "resume_from_sequence_number": 560}
    dcp.save(old, checkpoint_id=tmp_path / "old", no_dist=True)
    capsys.readouterr()
    assert main(["show", str(tmp_path / "old")]) == 0
    assert "resume_from_sequence_number: 560" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match=r"smp-train checkpoint import .*/old FOLDER"):
        main(["export", str(tmp_path / "old"), str(tmp_path / "back"), "--overwrite", "1"])
    with pytest.raises(ConfigError, match=r"has no config.json beside it; .* --model "):
        main(["import", str(tmp_path / "old"), str(tmp_path / "new")])
    assert main(["import", str(tmp_path / "old"), str(tmp_path / "new"), "--model", str(tmp_path / "theirs")]) == 0
    (path,) = (tmp_path / "new").glob("*-70steps")
    assert open_checkpoint(path).meta["imported"]["resume_from_sequence_number"] == 560
    assert main(["export", str(path), str(tmp_path / "newer")]) == 0
    assert torch.equal(expected_logits(tmp_path / "newer"), expected)


class Command:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.fixture(scope="module")
def places(llama: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, and models of which some cannot be read."""
    folder = tmp_path_factory.mktemp("places")
    checkpoint(llama[0], folder / "runs" / "first")
    (folder / "file").write_text("")
    config = (llama[0] / "config.json").read_bytes()
    models = {"model": config, "pickle": config, "half": config, "code": config, "deep": b"[" * 100_000, "cut": b"{"}
    for name, content in models.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes(content)
        if name != "code":
            (folder / name / "model.safetensors").write_bytes((llama[0] / "model.safetensors").read_bytes())
    pickled(folder / "pickle")
    (folder / "link").symlink_to("pickle")
    (folder / "half" / "model.safetensors").write_bytes(b"half")
    weights = {"lm_head.weight": torch.ones(2), "other": Command()}
    torch.save(weights, folder / "code" / "pytorch_model.bin")
    return folder


ONE_CHECKPOINT = "runs/first/llama_v2-4steps"
REFUSED: list[tuple[list[str], type[Exception], str]] = [
    *(([*words, target], ConfigError, "give a folder for the model")
      for words in (["export", "runs/first"], ["convert", "model"])
      for target in ("", " ", "runs", "runs/first", ONE_CHECKPOINT, "file")),
    (["export", "runs/first", "runs", "--overwrite", "1"], ConfigError, "give a folder for the model"),
    *((["convert", "pickle", target, "--overwrite", "1"], ConfigError, target)
      for target in ("pickle", "pickle/../pickle", "link")),
    (["convert", "pickle/pytorch_model.bin", "pickle", "--overwrite", "1"], ConfigError, "pickle"),
    (["convert", "half", "pickle", "--overwrite", "1"], CheckpointError, "half"),
    *((["convert", name, "out"], ConfigError, r"config\.json is missing or not JSON") for name in ("deep", "cut")),
    *(([verb, "code", "out"], CheckpointError, r"pytorch_model\.bin cannot be read .*system")
      for verb in ("convert", "import")),
    *((["import", "model", "out", "--step", step], ConfigError, "--step")
      for step in ("-1", "99999999999999999999", "1000000000000001", "many")),
    (["import", "model", "file"], ConfigError, "is a file"),
    (["import", "model", ""], ConfigError, "names no location"),
    (["import", "model", "best"], ConfigError, "cannot be a run's folder"),
    (["import", "model", "runs"], ConfigError, "holds the checkpoints of runs"),
    (["import", "model", ONE_CHECKPOINT], ConfigError, "is one checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "error", "reason"), REFUSED, ids=[" ".join(words) for words, *_ in REFUSED])
def test_what_is_refused_changes_nothing(
    words: list[str], error: type[Exception], reason: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anybody advised to run the code in a file."""
    monkeypatch.chdir(places)
    before = {path: path.read_bytes() for path in places.rglob("*") if path.is_file()}
    with pytest.raises(error, match=reason) as refused:
        main(words)
    assert not re.search("\n|weights_only", str(refused.value))
    assert len(str(refused.value)) < 600
    assert {path: path.read_bytes() for path in places.rglob("*") if path.is_file()} == before


STEP = "llama_v2-4steps"


@pytest.fixture(scope="module")
def theirs(llama: tuple[Path, Path]) -> Path:
    return llama[0]


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
    load_weights(fresh(theirs)[0], checkpoint)


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


def test_what_is_shown_and_the_tokenizer_are_verified_as_they_are_read(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = manager(tmp_path)
    saver.tokenizer = {"tokenizer.json": b'{"a": 0}'}
    saver.save(4, {"model": {"w": torch.ones(2)}}, {})
    found = open_checkpoint(tmp_path / STEP)
    assert found.tokenizer() == saver.tokenizer
    for file in ("tokenizer.json", "index.bin"):
        damage(tmp_path, STEP, file)
    with pytest.raises(CheckpointError, match=r"tokenizer/tokenizer\.json"):
        found.tokenizer()
    with pytest.raises(CheckpointError, match=r"index\.bin"):
        main(["show", str(tmp_path)])
    assert "tensors" not in capsys.readouterr().out


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", None])
def test_the_example_of_the_model_card_runs(tmp_path, monkeypatch, capsys, template) -> None:
    """With a chat template, the example asks in a chat."""
    write_tokenizer(tmp_path / "tokenizer", template=template)
    save(FAMILIES["llama_v2"] | {"vocab_size": 304}, tmp_path / "theirs")
    ours = checkpoint(tmp_path / "theirs", tmp_path / "ours", optimizer=False)
    export(open_verified(ours), tmp_path / "model", tokenizer=str(tmp_path / "tokenizer"))
    (example,) = re.findall("```python\n(.*?)```", (tmp_path / "model/README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path / "model")
    exec(example)
    assert ('"role": "user"' in example) == (template is not None)
    assert capsys.readouterr().out.strip()
