"""Initial weights: the distribution of the model's own initialization, from seed, name and index alone."""

import math
import resource
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from smp_train.arguments import Arguments
from smp_train.errors import SmpTrainError
from smp_train.models import counter_random
from smp_train.models.build import build_meta, decoder_layers, materialise
from smp_train.models.initialization import initialise
from smp_train.models.recording import construct_on_meta
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


def ready(family: str, seed: int = 1, **kwargs: Any) -> nn.Module:
    model = build_meta(spec_of(family))
    materialise(model, "cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    initialise(model, seed, **kwargs)
    return model


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
    model: Any = ready(family)
    torch.manual_seed(0)
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


def test_the_padding_row_is_zero_and_the_size_of_the_pieces_does_not_matter() -> None:
    spec = spec_of("llama_v2")
    spec.config.pad_token_id = 7
    model = build_meta(spec)
    materialise(model, "cpu")
    weights: list[list[torch.Tensor]] = []
    for chunk in (None, 333, 1 << 20):
        for param in model.parameters():
            param.data.fill_(float("nan"))
        initialise(model, 1, chunk=chunk)
        weights.append([param.detach().clone() for param in model.parameters()])
        zeros = (model.get_input_embeddings().weight == 0).all(dim=1)
        assert zeros.nonzero().flatten().tolist() == [7]
    assert all(torch.equal(one, other) for others in weights[1:] for one, other in zip(weights[0], others, strict=True))


def test_values_depend_on_seed_and_name_only() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    first, other = (dict(ready("llama_v2", seed).named_parameters()) for seed in (1, 2))
    torch.manual_seed(99)
    model: Any = build_meta(spec_of("llama_v2"))
    for index, (_, layer) in enumerate(decoder_layers(model)):
        model.model.layers[index] = checkpoint_wrapper(layer)
    materialise(model, "cpu")
    initialise(model, 1)
    wrapped = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}
    assert wrapped.keys() == first.keys()
    assert all(torch.equal(wrapped[name], first[name]) for name in first)
    one, two = (first[f"model.layers.{number}.mlp.up_proj.weight"].detach().flatten() for number in (0, 1))
    assert not bool((one == other["model.layers.0.mlp.up_proj.weight"].flatten()).any())
    assert not bool((one == two).any())
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 5 / math.sqrt(one.numel())


class Zoo(nn.Module):
    """One parameter for each way in which constructors set them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 200)
        self.truncated = nn.Parameter(torch.empty(200, 100))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=0.3)
        self.wide = nn.Parameter(torch.empty(200, 100))
        nn.init.trunc_normal_(self.wide, std=0.02)
        self.scaled = nn.Parameter(torch.randn(200, 100) * 1.0)
        self.scaled.data.normal_().mul_(0.1).add_(3.0)
        self.computed = nn.Parameter(torch.log(torch.arange(1, 17, dtype=torch.float32)).repeat(3, 1))
        self.copied = nn.Parameter(torch.empty(6, 4))
        self.copied.data.copy_(torch.arange(24.0).view(6, 4))
        self.partly = nn.Parameter(torch.ones(6, 4))
        with torch.no_grad():
            self.partly[1:3, 1:4].zero_()
        self.register_buffer("table", torch.arange(5.0) * 2)


def test_other_distributions_and_computed_values() -> None:
    ours = construct_on_meta(Zoo)
    assert all(param.is_meta for param in ours.parameters())
    materialise(ours, "cpu")
    initialise(ours, 5)
    torch.manual_seed(0)
    theirs = dict(Zoo().named_parameters())
    for name, param in ours.named_parameters():
        if name in ("computed", "copied", "partly"):
            assert torch.equal(param, theirs[name]), name
        elif name != "scaled":
            assert same_distribution(param.detach(), theirs[name].detach()), name
    params = {name: param.detach() for name, param in ours.named_parameters()}
    assert float(params["scaled"].mean()) == pytest.approx(3.0, abs=0.005)
    assert float(params["scaled"].std()) == pytest.approx(0.1, rel=0.02)
    assert -0.6 <= float(params["truncated"].min()) < -0.59
    assert 0.29 < float(params["truncated"].max()) <= 0.3
    bound = 1 / math.sqrt(100)
    assert 0.99 * bound < float(params["linear.weight"].abs().max()) <= bound
    assert torch.equal(ours.table, torch.arange(5.0) * 2)


def test_initializations_that_cannot_be_drawn_in_parts_are_refused() -> None:
    transformers_init = pytest.importorskip("transformers.initialization", reason="came with transformers 5")

    def linear(source: Any, name: str, **options: Any) -> nn.Module:
        module = nn.Linear(4, 4)
        getattr(source, name)(module.weight, **options)  # looked up while its record is taken
        return module

    for construct in (
        partial(linear, nn.init, "orthogonal_"), partial(linear, nn.init, "eye_"),
        partial(linear, nn.init, "sparse_", sparsity=0.5), partial(linear, transformers_init, "orthogonal_"),
        lambda: nn.ParameterList([torch.empty(4)]),
    ):  # fmt: skip
        model = construct_on_meta(construct)
        materialise(model, "cpu")
        with pytest.raises(SmpTrainError, match=next(name for name, _ in model.named_parameters())):
            initialise(model, 1)
    assert nn.init.orthogonal_ is transformers_init.TORCH_INIT_FUNCTIONS["orthogonal_"]
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


def test_splitmix64_gives_its_published_numbers() -> None:
    # Vigna's splitmix64.c with state 1234567, as listed in many test suites.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = counter_random.bits(1234567, torch.arange(4))
    assert [value % 2**64 for value in got.tolist()] == expected
