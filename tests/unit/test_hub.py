"""Names that may be of the Hugging Face hub, where that cannot be reached."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_train.data.files import list_files
from smp_train.data.tokenizer import load
from smp_train.errors import SmpTrainError
from smp_train.models import hugging_face


def of_data(name: str) -> Any:
    pytest.importorskip("datasets")
    return list_files(name)


@pytest.mark.parametrize(
    "ask",
    [load, hugging_face.load_tokenizer, hugging_face.open_configuration, of_data],
    ids=["prepare", "tokenizer", "model", "data"],
)
def test_a_misspelt_path_is_one_line(ask: Callable[[str], Any], monkeypatch: Any, caplog: Any, tmp_path: Path) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SmpTrainError, match=r"nowhere.*no such path, and the hub cannot be reached") as refused:
        ask("nowhere")
    assert "\n" not in str(refused.value)
    assert not caplog.records
    assert constants.HF_HUB_OFFLINE is False


def test_behind_a_proxy_the_hub_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face.socket, "create_connection", SimpleNamespace)  # to be called without one fails
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://huggingface.co")
    with pytest.raises(FileNotFoundError, match="as the hub says"), hugging_face.asking_hub():
        raise FileNotFoundError("as the hub says")
