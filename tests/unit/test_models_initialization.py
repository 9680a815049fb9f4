"""Initial weights: the distribution of the model's own initialization, from seed and name alone."""

import math
import resource
import time
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from smp_train.arguments import Arguments
from smp_train.errors import SmpTrainError
from smp_train.models.build import build_meta, decoder_layers, materialise
from smp_train.models.initialization import initialise
from smp_train.models.meta import CONSTRUCT, construct_on_meta
from smp_train.models.resolve import resolve
from tests.harness import run

WIDTHS = {"num_layers": 2, "num_heads": 4, "hidden_width": 80, "vocab_size": 300, "max_context_width": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5},
    "llama_v2": {"num_key_value_heads": 2},
    "llama_v3": {"tie_word_embeddings": 1, "rope_scaling_type": "llama3"},
    "mistral": {"initializer_range": 0.1},
    "mixtral": {"num_local_experts": 2},  # as many as layers
    "gpt2": {},
    "falcon": {},
    "phi": {},
}


def spec_of(family: str) -> Any:
    return resolve(Arguments(**WIDTHS, model_type=family, **FAMILIES[family]))


def drawn(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return the initial weights of a model on meta."""
    materialise(model, "cpu")
    initialise(model, seed)
    return {name.replace("_checkpoint_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}


def same_distribution(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare means and standard deviations within five standard errors; what is constant must be equal."""
    a, b, n = ours.double(), theirs.double(), ours.numel()
    if bool((b == b.flatten()[0]).all()):
        return torch.equal(a, b)
    spread = float(b.std())
    close = abs(float(a.mean() - b.mean())) < 5 * spread * math.sqrt(2 / n)
    close &= abs(float(a.std()) / spread - 1) < 5 / math.sqrt(n)
    return close and float(a.abs().max()) < 7 * spread and not bool(torch.isnan(a).any())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_distribution_is_that_of_the_models_own_initialization(family: str) -> None:
    model: Any = build_meta(spec_of(family))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn(model)
    assert torch.equal(state, torch.get_rng_state())
    ordinary = AutoModelForCausalLM.from_config(spec_of(family).config)
    theirs = dict(ordinary.named_parameters())
    for name, param in model.named_parameters():
        assert same_distribution(param.detach(), theirs[name].detach()), name
    assert theirs.keys() == dict(model.named_parameters()).keys()
    buffers = dict(ordinary.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert model.training
    assert model.config.use_cache is False
    assert [name.rpartition(".")[2] for name, layer in decoder_layers(model)] == ["0", "1"]
    assert not any("expert" in name for name, _ in decoder_layers(model))
    if model.config.tie_word_embeddings:
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_padding_row_is_zero() -> None:
    spec = spec_of("llama_v2")
    spec.config.pad_token_id = 7
    zeros = (drawn(build_meta(spec))["model.embed_tokens.weight"] == 0).all(dim=1)
    assert zeros.nonzero().flatten().tolist() == [7]


def test_values_depend_on_seed_and_name_only() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    first, other = (drawn(build_meta(spec_of("llama_v2")), seed) for seed in (1, 2))
    torch.manual_seed(99)
    model: Any = build_meta(spec_of("llama_v2"))
    for index, (_, layer) in enumerate(decoder_layers(model)):
        model.model.layers[index] = checkpoint_wrapper(layer)
    wrapped = drawn(model)
    assert wrapped.keys() == first.keys()
    assert all(torch.equal(wrapped[name], first[name]) for name in first)
    one, two = (first[f"model.layers.{number}.mlp.up_proj.weight"].flatten() for number in (0, 1))
    assert not bool((one == other["model.layers.0.mlp.up_proj.weight"].flatten()).any())
    assert not bool((one == two).any())
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 5 / math.sqrt(one.numel())


class Zoo(nn.Module):
    """A parameter for each way in which models set them, small and large ones; ``inner`` is set from outside."""

    def __init__(self, *unset: int) -> None:
        super().__init__()
        self.linear, self.large = nn.Linear(100, 200), nn.Linear(600, 600)
        self.inner, self.norm = nn.Linear(600, 600), nn.LayerNorm(100)
        self.orthogonal = nn.Parameter(torch.empty(30, 30))
        self.computed = nn.Parameter(torch.log(torch.arange(1, 17, dtype=torch.float32)).repeat(3, 1))
        self.partly = nn.Parameter(torch.ones(6, 4))
        with torch.no_grad():
            self.partly[1:3, 1:4].zero_()
        self.random = nn.Parameter(torch.rand(200, 100))
        self.unset = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in unset])
        self.register_buffer("table", torch.arange(5.0) * 2)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.orthogonal_(self.orthogonal)
            nn.init.trunc_normal_(self.inner.weight, std=0.5, a=-0.6, b=0.3)
        elif module is self.inner:
            nn.init.zeros_(self.inner.weight)


def zoo_on_meta(*unset: int) -> nn.Module:
    model: nn.Module = construct_on_meta(lambda: Zoo(*unset))
    model.__dict__[CONSTRUCT] = lambda: Zoo(*unset)
    return model


def test_every_way_of_initializing() -> None:
    model = zoo_on_meta()
    assert all(param.is_meta for param in model.parameters())
    ours, again = drawn(model, 5), drawn(zoo_on_meta(), 5)
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    torch.manual_seed(0)
    theirs = Zoo()
    theirs.apply(theirs._init_weights)
    for name, param in theirs.named_parameters():
        assert same_distribution(ours[name], param.detach()), name
    assert all(torch.equal(ours[name], theirs.get_parameter(name)) for name in ("computed", "partly", "norm.weight"))
    assert torch.allclose(ours["orthogonal"] @ ours["orthogonal"].T, torch.eye(30), atol=1e-5)
    assert -0.6 <= float(ours["inner.weight"].min()) < -0.59
    assert 0.29 < float(ours["inner.weight"].max()) <= 0.3
    assert torch.equal(model.table, torch.arange(5.0) * 2)


@pytest.mark.parametrize("size", [4, 600 * 600])
def test_a_parameter_that_nothing_initializes_is_refused(size: int) -> None:
    with pytest.raises(SmpTrainError, match=r"unset\.0; start from weights"):
        drawn(zoo_on_meta(size))


def test_a_parameter_that_is_initialized_from_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    init_weights = Zoo._init_weights

    def copying(zoo: Zoo, module: nn.Module) -> None:
        init_weights(zoo, module)
        zoo.inner.weight.copy_(zoo.large.weight)

    monkeypatch.setattr(Zoo, "_init_weights", copying)
    with pytest.raises(SmpTrainError, match=r"inner\.weight.*start from weights"):
        drawn(zoo_on_meta())


def test_a_model_of_another_origin_or_without_memory_is_refused() -> None:
    for model, missing in ((nn.Linear(2, 2), "build_meta"), (build_meta(spec_of("gpt2")), "materialise")):
        with pytest.raises(SmpTrainError, match=missing):
            initialise(model, 1)


def build_the_largest() -> tuple[float, int]:
    """Return the seconds of this process that building the largest model takes, and the bytes by which it grows."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    model = build_meta(resolve(Arguments(model_type="llama_v3", model_size="405b")))
    assert len(decoder_layers(model)) == 126
    return time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_the_largest_model_takes_seconds_and_no_memory() -> None:
    ((seconds, taken),) = run(build_the_largest, 1)  # a process whose peak is its own
    assert seconds < 60  # one or two, where a machine is not slow
    assert taken < 300 << 20


def draw_a_large_model() -> int:
    """Return the bytes by which this process grows while it draws weights of 420 MB, whose memory it already has."""
    flags = {"num_layers": 6, "num_heads": 8, "hidden_width": 1024, "intermediate_size": 4096, "vocab_size": 8192}
    model = build_meta(resolve(Arguments(model_type="llama_v2", **flags)))
    materialise(model, "cpu")
    for param in model.parameters():
        param.data.zero_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    initialise(model, 1)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.slow
def test_one_parameter_is_whole_at_a_time() -> None:
    assert run(draw_a_large_model, 1)[0] < 100 << 20  # the largest takes 34 MB
