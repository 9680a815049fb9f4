"""Checkpoints hold the names and layouts of the Hugging Face hub, whatever the installed transformers has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smp_train.arguments import Arguments
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.pretrained import load_weights
from smp_train.models.build import build_meta, materialise
from smp_train.models.hub_state import gather_state
from smp_train.models.resolve import resolve
from tests.checkpoint_files import manager
from tests.training import flatten, read_checkpoint
from tests.unit.test_models_hf_weights import FAMILIES, IDS, expected_logits, save

KINDS = ("exp_avg", "exp_avg_sq")


def fresh(folder: Path) -> tuple[Any, torch.optim.AdamW]:
    """Return the model of a Hugging Face folder without its weights, and its optimizer."""
    model = build_meta(resolve(Arguments(hf_pretrained_model_name_or_dir=str(folder))))
    materialise(model, "cpu")
    return model, torch.optim.AdamW(model.parameters())


def published(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state under the names in the files of a Hugging Face folder, with moments of its own."""
    return with_moments(load_file(folder / "model.safetensors"))


def with_moments(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    moments = {
        name: {"step": torch.tensor(3.0), **{kind: value * (2 + n) for n, kind in enumerate(KINDS)}}
        for name, value in weights.items()
    }
    return {"model": weights, "optim": {"state": moments}}


def in_memory(folder: Path) -> dict[str, Any]:
    """Return the same as older versions saved it: as the installed transformers has it in memory."""
    model, _ = fresh(folder)
    load_weights(model, str(folder))
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    return with_moments(tensors)


def saved(state: dict[str, Any], folder: Path, source: Path) -> Path:
    config = resolve(Arguments(hf_pretrained_model_name_or_dir=str(source))).config
    (path,) = manager(folder, model_type="m").save(1, state, {"model_config": config.to_dict()})
    return Path(path)


@pytest.mark.parametrize("kind", ["the hub's names", "names in memory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_other_versions_are_saved_under_the_hubs_names(family: str, kind: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path / "theirs")
    expected = published(tmp_path / "theirs")
    state = in_memory(tmp_path / "theirs") if kind == "names in memory" else expected
    path = saved(state, tmp_path / "ours", tmp_path / "theirs")
    model, optimizer = fresh(tmp_path / "theirs")
    open_verified(path).load(gather_state(model, optimizer))
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, expected_logits(tmp_path / "theirs"))
    found = read_checkpoint(saved(gather_state(model, optimizer), tmp_path / "again", tmp_path / "theirs"))
    assert found.keys() == flatten(expected).keys()
    assert all(torch.equal(found[name], value) for name, value in flatten(expected).items())
    again, _ = fresh(tmp_path / "theirs")
    load_weights(again, str(path))
    assert all(map(torch.equal, again.parameters(), model.parameters()))
