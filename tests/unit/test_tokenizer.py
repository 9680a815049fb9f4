"""Which tokenizer a run keeps in its checkpoints: its own, the weights', the checkpoint's or its data's."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_train.arguments import parse
from smp_train.data.kinds import Kind
from smp_train.data.rows import Recipe
from smp_train.errors import ConfigError
from smp_train.models import tokenizer
from smp_train.models.hugging_face import load_tokenizer
from smp_train.run.tokenizer import tokenizer_of_run
from smp_train.storage.s3 import S3Storage
from tests.chats import PLAIN, write_tokenizer

CHATS = Kind("chats", ("messages", "tools"))


def args_of(*data: Path, **changes: Any) -> Any:
    words = [f"--{name}={value}" for name, value in changes.items()]
    return parse(["--training_dir", *(str(each / "train") for each in data), *words]).args


def spec_of(weights: Path | None) -> Any:
    return SimpleNamespace(pretrained=None if weights is None else str(weights))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of prepared data: ``chats`` with a template, ``text`` without."""
    folder = tmp_path_factory.mktemp("tokenizers")
    write_tokenizer(folder / "chats")
    write_tokenizer(folder / "text", template=None)
    for each in folder.iterdir():
        (each / "train").mkdir()
    return folder


def template_of(files: dict[str, bytes]) -> Any:
    with tokenizer.tokenizer_from(files) as found:
        return found and found.chat_template


def test_data_prepared_with_one_tokenizer_in_two_folders(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "chats", tmp_path / "again")
    settings = tmp_path / "again" / tokenizer.SETTINGS
    settings.write_text(json.dumps({"name_or_path": "elsewhere", **json.loads(settings.read_text())}))
    (tmp_path / "bare" / "train").mkdir(parents=True)
    given = args_of(tmp_path / "bare", tmp_path / "again", made / "chats")
    assert template_of(tokenizer_of_run(given, spec_of(None), None)) == PLAIN


@pytest.mark.parametrize(
    ("name", "change"), [("tokenizer.json", {"decoder": None}), ("tokenizer_config.json", {"eos_token": "<|end|>"})]
)
def test_data_of_different_tokenizers(name: str, change: Any, made: Path, tmp_path: Path, caplog: Any) -> None:
    other = shutil.copytree(made / "text", tmp_path / "other")
    fields = json.loads((other / name).read_text())
    (other / name).write_text(json.dumps({**fields, **change}))
    assert tokenizer_of_run(args_of(made / "text", other), spec_of(None), None) == {}
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert all(part in line for part in (str(made / "text"), str(other), "--tokenizer"))
    assert tokenizer_of_run(args_of(made / "text", other, tokenizer=other), spec_of(None), None)


@pytest.mark.parametrize("adapted", ["weights", "checkpoint"])
def test_chats_bring_their_template_and_text_takes_none_away(adapted: str, made: Path, tmp_path: Path) -> None:
    """The same for weights with a tokenizer beside them and for a checkpoint that holds one."""

    def of(data: Path, model: Path) -> Any:
        saved: Any = SimpleNamespace(tokenizer=lambda: tokenizer.tokenizer_files(str(model)))
        of_weights = (spec_of(model), None) if adapted == "weights" else (spec_of(None), saved)
        return template_of(tokenizer_of_run(args_of(data), *of_weights))

    assert of(made / "chats", made / "text") == PLAIN
    assert of(made / "text", made / "chats") == PLAIN
    with_more = shutil.copytree(made / "text", tmp_path / "more")
    fields = json.loads((with_more / "tokenizer.json").read_text())
    fields["added_tokens"].append({**fields["added_tokens"][0], "id": 300, "content": "<|more|>"})
    (with_more / "tokenizer.json").write_text(json.dumps(fields))
    assert of(made / "chats", with_more) is None


def test_the_template_that_chats_were_read_with_is_kept(made: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text(PLAIN + "!")
    saved: Any = SimpleNamespace(tokenizer=lambda: tokenizer.tokenizer_files(str(made / "chats")))
    args = parse([f"--dataset={tmp_path}", f"--chat_template={given}", f"--resume_from_checkpoint={tmp_path}"]).args
    assert template_of(tokenizer_of_run(args, spec_of(None), saved)) == PLAIN + "!"


def test_the_tokenizer_of_a_checkpoint_or_in_s3_is_named_and_not_its_copy(made: Path, s3_place: str) -> None:
    files, name = tokenizer.tokenizer_files(str(made / "text")), "tokenizer of the checkpoint"
    with pytest.raises(ConfigError, match=f"{name}: has"), tokenizer.folder_of(files) as folder:
        Recipe(CHATS, tokenizer=folder).open()
    with pytest.raises(ConfigError, match=f"^{name} cannot"), tokenizer.folder_of({"tokenizer.json": b"{"}) as folder:
        load_tokenizer(folder)
    for file, content in files.items():
        S3Storage(s3_place).put(file, content)
    for given in (s3_place, f"{s3_place}/tokenizer.json"):
        with pytest.raises(ConfigError, match=rf"^--tokenizer {given}: has no chat template"):
            Recipe(CHATS, tokenizer=given).open()
