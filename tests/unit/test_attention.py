"""Masks that are not made, kernels that are asked for, and no wait for the device: against transformers' own path."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from smp_train import losses
from smp_train.data.batch import Batch, collate
from smp_train.data.samples import Sample
from smp_train.data.source import Row
from smp_train.errors import ConfigError
from smp_train.models import attention
from smp_train.models.attention import Attention
from smp_train.models.traits import check_packed
from tests.releases import need_model, needs_transformers_5
from tests.waits import Waits

CPU = torch.device("cpu")
WIDTH, WINDOW = 32, 12
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "initializer_range": 0.2, "use_cache": False,
}  # fmt: skip
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64} | dict.fromkeys(
    ("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES, "mistral": {**SIZES, "sliding_window": WINDOW}, "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen2": {**SIZES, **MIXED, "use_sliding_window": True}, "qwen3": SIZES, "gemma3_text": {**SIZES, **MIXED},
    "gpt_neox": {**SIZES, "hidden_dropout": 0.0}, "gpt2": GPT2,
    "phi": {**SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}  # fmt: skip
OTHERS = {"falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}}
DOCUMENTS = [[9, 17, 6], [20, 5]]  # the second row ends in padding


@cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES, **OTHERS}[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def pair(family: str, **options: Any) -> tuple[Any, Any, Attention]:
    """Return a model on transformers' path, and a copy on ours, with its attention."""
    theirs = model_of(family)
    ours = copy.deepcopy(theirs)
    return theirs, ours, Attention(ours, CPU, **{"half": False, "packed": False, "compiled": False, **options})


def rows_of(kind: str) -> Batch:
    ids = np.random.default_rng(0).integers(3, 64, (2, WIDTH))
    if kind == "whole":
        rows = [Row(row) for row in ids]
    elif kind == "short":
        rows = [Row(ids[0][:20]), Row(ids[1][:9])]
    else:
        rows = [Row(row[: sum(sizes)], None, np.array(sizes)) for row, sizes in zip(ids, DOCUMENTS, strict=True)]
    return batch_of(*rows)


def batch_of(*rows: Row, size: int | None = None) -> Batch:
    return collate([Sample(row, "") for row in rows], WIDTH, size=size)


def loss_of(model: Any, batch: Batch, inputs: dict[str, Any]) -> Tensor:
    logits = model(input_ids=batch.input_ids, use_cache=False, **inputs).logits
    return losses.cross_entropy_sum(logits, losses.shift(batch.labels))


def ours_of(how: Attention, batch: Batch) -> dict[str, Any]:
    return how.inputs(batch.input_ids, batch.position_ids, batch.documents)


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


@needs_transformers_5
@pytest.mark.parametrize("kind", ["whole", "short", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_equal_transformers_masks_without_waiting(family: str, kind: str) -> None:
    theirs, ours, how = pair(family)
    batch = rows_of(kind)
    mask = (torch.arange(WIDTH) < torch.tensor([[20], [9]])).long() if kind == "short" else None
    packed = batch.position_ids is not None
    expected = loss_of(
        theirs, batch, {"position_ids": batch.position_ids} if packed else {"attention_mask": mask}
    )
    with Waits() as waits:
        found = loss_of(ours, batch, ours_of(how, batch))
        slopes = gradients(ours, found)
    assert waits.seen == []
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(slopes, gradients(theirs, expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_trained_model_generates_as_with_sdpa(family: str) -> None:
    """With cached keys, and beyond a window."""
    theirs, ours, _ = pair(family)
    prompt = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "use_cache": True, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(prompt)
    found = [model.eval().generate(prompt, **settings) for model in (ours, theirs)]
    theirs.train()
    assert torch.equal(*found)


SPECIAL: dict[str, dict[str, Any]] = {
    **{family: {} for family in ("falcon", "bloom", "gpt_oss", "llama4_text", "lfm2")},
    "gemma2": {"attn_logit_softcapping": 50.0}, "gemma3_text": {"use_bidirectional_attention": True},
}  # fmt: skip


@pytest.mark.parametrize("family", SPECIAL)
def test_models_with_special_masks_have_a_reason(family: str) -> None:
    need_model(family)
    config = AutoConfig.for_model(family)
    for name, value in SPECIAL[family].items():
        setattr(config, name, value)
    assert all(name in str(attention.causal_alone(config)) for name in SPECIAL[family] or [family])


@needs_transformers_5
def test_other_models_keep_the_path_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    """And without a mask, tokens before padding on the right have the same loss."""
    with caplog.at_level("INFO", "smp_train"):
        theirs, ours, how = pair("falcon")
    assert ours.config._attn_implementation == "sdpa"
    assert "falcon" in caplog.text
    with pytest.raises(ConfigError, match="--short pack: a falcon"):
        check_packed(ours.config, "pack")
    batch = rows_of("packed")
    assert ours_of(how, batch)["position_ids"] is batch.position_ids
    batch = rows_of("short")
    mask = (torch.arange(WIDTH) < torch.tensor([[20], [9]])).long()
    expected = loss_of(theirs, batch, {"attention_mask": mask})
    torch.testing.assert_close(loss_of(ours, batch, ours_of(how, batch)), expected, rtol=1e-6, atol=0)


# --- documents by their bounds ------------------------------------------------------------------------------------


class Varlen:
    """In the place of ``torch.nn.attention.varlen``, whose kernel runs on a GPU alone; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def varlen_attn(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert cu_seq_q is cu_seq_k
        assert max_q == max_k
        if not torch.compiler.is_compiling():
            self.calls.append((cu_seq_q.tolist(), int(max_q), window_size))
        back, ahead = window_size
        assert ahead == 0
        tokens = torch.arange(len(query))
        document, behind = torch.searchsorted(cu_seq_q, tokens, right=True), tokens[:, None] - tokens
        seen = (document[:, None] == document) & (behind >= 0) & (behind < max_q)
        seen = seen & (behind <= back) if back >= 0 else seen
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        output = F.scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True)
        return output[0].transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Varlen:
    stand_in = Varlen()
    monkeypatch.setattr(attention, "varlen", stand_in)
    monkeypatch.setattr(attention, "_against_bounds", lambda *args, **options: None)
    return stand_in


@needs_transformers_5
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt2"])
def test_documents_reach_the_kernel_by_their_bounds(family: str, kernel: Varlen) -> None:
    """The numbers are those of one document a row."""
    _, ours, how = pair(family, packed=True)
    batch = rows_of("packed")
    with Waits() as waits:
        inputs = ours_of(how, batch)
    found = loss_of(ours, batch, inputs)
    windows = {"mistral": [WINDOW - 1] * 2, "qwen2": [WINDOW - 1, -1]}.get(family, [-1, -1])
    assert [call[:2] for call in kernel.calls] == [([0, 9, 26, 32, 52, 57, 64], 20)] * 2
    assert [call[2] for call in kernel.calls] == [(back, 0) for back in windows]
    slopes = gradients(ours, found)
    assert waits.seen == []
    apart = [
        Row(ids[end - size : end])
        for ids, sizes in zip(batch.input_ids.numpy(), DOCUMENTS, strict=True)
        for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]
    alone = batch_of(*apart)
    expected = loss_of(ours, alone, {"attention_mask": None})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(slopes, gradients(ours, expected), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif("window_size" not in attention._OPTIONS, reason="torch before 2.11")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_torchs_own_kernel_takes_these_arguments(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone are computed, as on any device."""
    monkeypatch.setattr(attention, "_against_bounds", lambda *args, **options: None)
    _, ours, how = pair(family, packed=True)
    batch = rows_of("packed")
    inputs = {name: tensor.to("meta") for name, tensor in ours_of(how, batch).items()}
    ours.to("meta")(input_ids=batch.input_ids.to("meta"), use_cache=False, **inputs).logits.sum().backward()
    assert ours.get_input_embeddings().weight.grad.shape == (64, 32)


@needs_transformers_5
def test_whole_rows_have_bounds_where_a_window_is_shorter(kernel: Varlen) -> None:
    theirs, ours, how = pair("mistral")
    batch = rows_of("whole")
    found = loss_of(ours, batch, ours_of(how, batch))
    assert kernel.calls == [([0, WIDTH, 2 * WIDTH], WIDTH, (WINDOW - 1, 0))] * 2
    torch.testing.assert_close(found, loss_of(theirs, batch, {"attention_mask": None}), rtol=1e-6, atol=0)
    _, ours, how = pair("llama")
    assert ours_of(how, batch) == {"attention_mask": None}


def test_flash_attention_gets_the_bounds_from_the_host() -> None:
    ours = copy.deepcopy(model_of("llama"))
    how = Attention(ours, CPU, half=True, packed=True, compiled=False)
    ours.config._attn_implementation = "flash_attention_2"
    inputs = ours_of(how, rows_of("packed"))
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 9, 26, 32, 52, 57, 64]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 32  # at least the longest, 20
    assert inputs.get("attention_mask") is None


@pytest.mark.slow
@pytest.mark.core
def test_one_compilation_serves_packed_whole_and_short_batches(kernel: Varlen) -> None:
    from torch._dynamo.utils import counters

    from smp_train.models.build import decoder_layers
    from smp_train.parallel import compile

    theirs, ours, how = pair("llama", packed=True, compiled=True)
    compile.apply([layer for _, layer in decoder_layers(ours)], backend="aot_eager")
    random = np.random.default_rng(1)

    def packed(*sizes: int) -> Row:
        return Row(random.integers(3, 64, sum(sizes)), None, np.array(sizes))

    batches = [
        batch_of(packed(9, 7, 8, 8), packed(8, 8, 8, 8)),  # as many bounds as the longest has tokens
        batch_of(packed(9, 17, 6), packed(20, 5)), rows_of("whole"),
        batch_of(packed(1, 1, 1), packed(4, 28)), rows_of("short"),
        batch_of(packed(30, 2), size=2), collate([], WIDTH, size=2),
    ]  # fmt: skip
    torch.compiler.reset()
    counters.clear()
    graphs = []
    for batch in [*batches, *batches]:
        found = loss_of(ours, batch, ours_of(how, batch))
        gradients(ours, found)
        with torch.no_grad():
            loss_of(ours, batch, ours_of(how, batch))
        graphs.append(counters["stats"]["unique_graphs"])
        packs = batch.position_ids is not None
        expected = loss_of(theirs, batch, {"position_ids": batch.position_ids} if packs else {})
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert not counters["graph_break"]
    assert set(graphs) == {2}  # with gradients and without
