"""Weights in S3: the same tensors, a range at a time; what S3 refuses stops with its bucket and operation."""

from __future__ import annotations

import io
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from safetensors.torch import save as as_safetensors

from smp_train.arguments import Arguments
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.build import materialise
from smp_train.models.hf_weights import load_pretrained
from smp_train.models.resolve import resolve
from smp_train.models.weight_files import WeightFiles
from smp_train.storage import s3
from smp_train.storage.paths import S3Path, on_this_machine, place
from tests.s3_server import bucket, serving, upload
from tests.unit.test_models_hf_weights import FAMILIES, IDS, built, expected_logits, loaded, pickled, save

TENSORS = {
    "matrix": torch.randn(37, 20), "scalar": torch.tensor(3.0), "experts": torch.randn(5, 6, 7).bfloat16(),
    "long": torch.arange(300), "empty": torch.zeros(0, 3), "mask": torch.rand(9, 9) > 0.5,
}  # fmt: skip
VIEWS = {"turned": TENSORS["matrix"].t(), "rows": TENSORS["matrix"][3:9]}


@pytest.fixture(scope="module")
def server():
    with serving() as proxy:
        yield proxy


@pytest.fixture
def there(server, monkeypatch, request) -> str:
    """Return a bucket of this test's own."""
    return bucket(server, monkeypatch, request.node.nodeid)


@pytest.mark.parametrize("form", ["safetensors", "torch", "torch before 1.6"])
def test_any_block_of_any_tensor(form: str, there: str, server, monkeypatch) -> None:
    content = TENSORS if form == "safetensors" else {**TENSORS, **VIEWS}
    file = io.BytesIO(as_safetensors(TENSORS))
    if form != "safetensors":
        file = io.BytesIO()
        torch.save({"model": content, "step": 1}, file, _use_new_zipfile_serialization=form == "torch")
    upload(f"{there}/m", {"model.safetensors" if form == "safetensors" else "m.pt": file.getvalue()})
    rnd = random.Random(1)
    for part in (72, 1 << 20):  # a row in two requests, several small ones in one; everything in one
        monkeypatch.setattr(s3, "PART_BYTES", part)
        with ExitStack() as stack:
            files = WeightFiles(place(f"{there}/m"), stack)
            assert set(files.files) == set(content)
            for name, expected in content.items():
                block = files.tensor(name)
                assert torch.equal(block[...], expected)
                low = [rnd.randrange(size + 1) for size in expected.shape]
                index: Any = tuple(slice(a, rnd.randint(a, s)) for a, s in zip(low, expected.shape, strict=True)) or ...
                assert torch.equal(block[index], expected[index]), (name, index, part)


def test_only_the_requested_rows_are_fetched(there: str, server) -> None:
    upload(there, {"model.safetensors": as_safetensors({f"layer{i}": torch.zeros(1000, 1000) for i in range(3)})})
    server.gets.clear()
    with ExitStack() as stack:
        block = WeightFiles(place(f"{there}/model.safetensors"), stack).tensor("layer1")
        assert block[slice(10, 20), slice(0, 1000)].numel() == 10_000
    spans = [span.removeprefix("bytes=").split("-") for _, span in server.gets]
    assert sum(int(last) + 1 - int(first) for first, last in spans) < 2_000_000  # of 12


@pytest.mark.parametrize("family", ["llama_v3", "mixtral"])  # Tied; fused from one tensor per expert.
def test_a_model_in_s3_is_the_model(family: str, there: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path, max_shard_size="60KB")
    expected = expected_logits(tmp_path)
    upload(f"{there}/m", tmp_path)
    upload(f"{there}/without", {"config.json": (tmp_path / "config.json").read_bytes()})
    with torch.no_grad():
        assert torch.equal(loaded(f"{there}/m")(input_ids=IDS).logits, expected)
    assert resolve(Arguments(hf_pretrained_model_name_or_dir=f"{there}/without")).pretrained is None


def test_files_in_s3_that_cannot_be_read_are_named(there: str, server, tmp_path: Path) -> None:
    save(FAMILIES["llama_v2"], tmp_path)
    upload(f"{there}/m", tmp_path)
    model = built(f"{there}/m")
    materialise(model, "cpu")
    weights, whole = "m/model.safetensors", (tmp_path / "model.safetensors").read_bytes()
    for location in ("s3://nowhere-at-all/m", f"{there}/elsewhere"):
        with pytest.raises((CheckpointError, ConfigError), match=location):
            load_pretrained(model, location)
    with pytest.raises(ConfigError, match=f"{there}/elsewhere"):
        resolve(Arguments(hf_pretrained_model_name_or_dir=f"{there}/elsewhere"))
    for wrong, why in (
        (whole[:-4], "shorter than its header says"),
        (b"\xff" * 99, "its header would be"),
        (pickled(tmp_path).read_bytes(), f"{there}/{weights} cannot be read as safetensors"),
    ):
        upload(f"{there}/m", {"model.safetensors": wrong})
        with pytest.raises(CheckpointError, match=why):
            load_pretrained(model, f"{there}/m")
    requests = iter((False, True))  # the second one meets another version

    def replace(method: str, path: str) -> None:
        if method == "GET" and weights in path and next(requests, False):
            upload(f"{there}/m", {"model.safetensors": whole[:-4] + b"abcd"})

    upload(f"{there}/m", {"model.safetensors": whole})
    server.on_request = replace
    with pytest.raises(CheckpointError, match="was replaced while it was being read"):
        load_pretrained(model, f"{there}/m")


def test_a_tokenizer_is_copied_without_the_weights(there: str, monkeypatch) -> None:
    monkeypatch.setattr("smp_train.storage.paths.SMALL_BYTES", 100)
    upload(f"{there}/m", {"tokenizer.json": b"{}", "model.safetensors": b"x" * 200, "sub/other": b"y"})
    with on_this_machine(f"{there}/m") as folder:
        assert [path.name for path in Path(folder).iterdir()] == ["tokenizer.json"]


def test_places_have_the_parts_of_paths() -> None:
    path = S3Path("s3://b/x//y/")
    assert (str(path), path.name, str(path.parent), str(path / "z")) == ("s3://b/x/y", "y", "s3://b/x", "s3://b/x/y/z")
    assert (str(path.parent.parent.parent), S3Path("s3://b").name) == ("s3://b", "")
