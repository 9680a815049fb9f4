"""Which layers are checkpointed, what travels to host memory and back, and what is refused."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import sysconfig
import types
import weakref
from collections.abc import Sequence
from fractions import Fraction
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from smp_train.arguments import checkpointing
from smp_train.distributed.host_memory import pinned_bytes
from smp_train.errors import ConfigError
from smp_train.parallel import activation_checkpointing as activations
from smp_train.parallel import activation_offloading as offload
from smp_train.parallel import compile, float8

WIDTH = 32
CPU = torch.device("cpu")

# --- which layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "setting", "layers"),
    [(4, "none", []), (3, "selective:op", [0, 1, 2]), (6, "selective:2", [0, 2, 4]), (9, "selective:1/3", [1, 4, 7])],
)
def test_the_selected_layers(count: int, setting: str, layers: list[int]) -> None:
    assert checkpointing.evenly_spaced(count, checkpointing.read(setting)[0]) == layers


@given(count=st.integers(1, 100), share=st.fractions(0, 1, max_denominator=50))
def test_a_share_is_kept_and_evenly_spread(count: int, share: Fraction) -> None:
    layers = checkpointing.evenly_spaced(count, share)
    assert abs(len(layers) - count * share) <= Fraction(1, 2)
    gaps = {b - a for a, b in itertools.pairwise(layers)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    # fms-fsdp's loop, as it is written.
    cut_off, theirs = Fraction(1, 2), []
    for block in range(1, count + 1):
        if block * share >= cut_off:
            cut_off += 1
            theirs.append(block - 1)
    assert layers == theirs


# --- what is computed again ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Three projections that are views of one product, an in-place change, dropout, attention and a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.table = nn.Buffer(torch.linspace(0.5, 1.5, width))

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(hidden).split(hidden.shape[-1], dim=-1)
        q = q * self.table if scale is None else q * scale
        mixed = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        mixed = torch.nn.functional.dropout((mixed * 2).add_(1.0).tanh(), 0.25)
        return hidden + self.out(mixed)


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **kwargs)
        return hidden


def step(model: Stack, **kwargs: Any) -> list[Tensor]:
    """Return output and gradients of a forward and backward pass."""
    model.zero_grad()
    torch.manual_seed(1)
    hidden = torch.randn(2, 16, WIDTH, requires_grad=True)
    output = model(hidden, **kwargs)
    output.square().sum().backward()
    return [output.detach(), hidden.grad, *(p.grad for p in model.parameters())]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_names_stay_as_they_are() -> None:
    model = Stack(2)
    names = [name for name, _ in model.named_parameters()]
    activations.apply(list(model.layers), "full")
    compile.apply(list(model.layers), backend="eager")
    offload.Offload(list(model.layers), device=CPU, horizon=1)
    assert [name for name, _ in model.named_parameters()] == names


def chosen(asked: bool | None, device: str = "cpu", *, backend: str = "inductor", training: bool = True) -> bool:
    return compile.enabled(asked, device=torch.device(device), backend=backend, training=training)


def test_an_unknown_compiler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--torch_compile_backend fastest: this torch (?!.*TESTING_ONLY).*inductor"):
        chosen(True, backend="fastest")
    assert chosen(True)


def test_compilation_is_on_by_default_where_a_gpu_and_its_compilers_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert not chosen(None)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    sys.modules["triton"].__spec__ = ModuleSpec("triton", None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "gcc").touch(0o755)
    assert not chosen(None, "cuda"), "no Python.h"
    (tmp_path / "Python.h").touch()
    assert chosen(None, "cuda")
    assert not chosen(None, "cuda", training=False)
    (tmp_path / "gcc").unlink()
    assert not chosen(None, "cuda"), "no compiler"


# --- offloading ---------------------------------------------------------------------------------------------------


class LateLane(offload.Lane):
    """Copies as late as allowed: only when one is waited for. A read without waiting hence sees what was there."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.queue: list[tuple[Tensor, Tensor]] = []

    def copy(self, target: Tensor, source: Tensor) -> int:
        target.fill_(255)  # every float of it a NaN
        self.queue.append((target, source))
        return len(self.queue)

    def wait(self, mark: int | None) -> None:
        for at in range(mark or 0):  # one lane: all that came before is done too
            if self.queue[at] is not None:
                target, source = self.queue[at]
                target.copy_(source)
                self.queue[at] = None  # type: ignore[call-overload]


def offloaded(depth: int, horizon: int, setting: str = "none", lane: offload.Lane | None = None) -> tuple[Stack, Any]:
    model = Stack(depth)
    layers = list(model.layers)
    activations.apply(layers, setting)
    return model, offload.Offload(layers, device=CPU, horizon=horizon, lane=lane)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("setting", ["none", "full", "selective:op", "selective:2"])
@pytest.mark.parametrize("horizon", [1, 2, 9])
def test_offloading_changes_no_bit(horizon: int, setting: str, late: bool) -> None:
    expected = step(Stack(5))
    model, engine = offloaded(5, horizon, setting, LateLane() if late else None)
    sizes = set()
    for _ in range(3):
        assert_same(step(model), expected)
        sizes.add(engine.pool.allocated)
    assert sizes == {engine.pool.peak}, "buffers are reused"
    assert (engine.pool.peak > 0) == (horizon < 5)
    assert engine.pool.in_use == 0


@settings(max_examples=60, deadline=None)
@given(rounds=st.lists(st.lists(st.integers(1, 5_000_000), max_size=8), min_size=1, max_size=6), data=st.data())
def test_the_pool_never_holds_more_than_was_in_use_at_once(rounds: list[list[int]], data: st.DataObject) -> None:
    pool = offload.HostPool(pin_memory=False)
    for sizes in rounds:
        out = [pool.take(size) for size in sizes]
        blocks = [block for buffer in out for block in buffer]
        assert len({block.data_ptr() for block in blocks}) == len(blocks)
        assert all(pinned_bytes(block.numel()) == block.numel() for block in blocks)
        for size, buffer in zip(sizes, out, strict=True):
            assert size <= sum(block.numel() for block in buffer) <= max(size + 511, size * 9 // 8)
            assert len(buffer) <= 4
        assert pool.in_use == sum(block.numel() for block in blocks)
        assert pool.allocated <= pool.peak
        for buffer in data.draw(st.permutations(out)):
            pool.give(buffer)
        assert pool.allocated == sum(n * len(free) for n, free in pool._free.items())


def test_inputs_of_checkpointed_layers_are_offloaded_and_no_shared_or_small_tensors() -> None:
    one_input = 2 * 16 * WIDTH * 4
    for setting, least, most in (("full", 4, 4), ("none", 4 * 6, 4 * 9)):  # the last of five layers keeps all
        model, engine = offloaded(5, 1, setting)
        step(model, scale=torch.rand(2, 16, WIDTH))  # an input without a gradient, which all layers share
        # The packed projections are one storage of three inputs' size, saved as three views and sent once.
        assert least * one_input <= engine.pool.peak <= most * one_input
    model, engine = offloaded(3, 1)
    model(torch.randn(1, 1, WIDTH, requires_grad=True)).sum().backward()
    assert engine.pool.peak == 0
    with torch.no_grad():
        model(torch.randn(2, 16, WIDTH))
    assert engine.pool.peak == 0


def watched(model: Stack, **kwargs: Any) -> tuple[Tensor, list[list[offload.Packed | Tensor]]]:
    """Run a forward pass; also return what each layer packed."""
    packed: list[list[Any]] = []
    begin, pack = offload.LayerPass.__init__, offload.LayerPass.pack

    def started(self: offload.LayerPass, *args: Any, **options: Any) -> None:
        packed.append([])
        begin(self, *args, **options)

    def noted(self: offload.LayerPass, tensor: Tensor) -> Any:
        packed[-1].append(pack(self, tensor))
        return packed[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload.LayerPass, "__init__", started)
        patch.setattr(offload.LayerPass, "pack", noted)
        return model(torch.randn(2, 16, WIDTH, requires_grad=True), **kwargs), packed


def test_device_memory_is_given_up_after_the_next_layer_and_back_a_horizon_ahead() -> None:
    model, _ = offloaded(6, 2, "full")
    output, packed = watched(model)
    sent = [[weakref.ref(one.stored) for one in layer if isinstance(one, offload.Packed)] for layer in packed]
    assert [len(layer) for layer in sent] == [1, 1, 1, 1, 0, 0]
    packed.clear()

    def present() -> list[int]:
        alive = [(at, reference()) for at, layer in enumerate(sent) for reference in layer]
        return [at for at, stored in alive if stored is not None and stored.on_device is not None]

    assert present() == []
    seen = {}
    for index, layer in enumerate(model.layers):
        # A gradient of the last product of a layer: early in its backward pass.
        layer.out.bias.register_hook(lambda grad, index=index: seen.update({index: present()}))
    output.sum().backward()
    assert seen == {5: [3], 4: [2, 3], 3: [1, 2, 3], 2: [0, 1, 2], 1: [0, 1], 0: [0]}


def test_two_backward_passes_through_one_graph() -> None:
    def twice(model: Stack) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        output = model(torch.randn(2, 16, WIDTH)).sum()
        output.backward(retain_graph=True)
        output.backward()
        return [p.grad for p in model.parameters()]

    model, engine = offloaded(4, 1, lane=LateLane())
    assert_same(twice(model), twice(Stack(4)))
    gc.collect()
    assert engine.pool.in_use == 0


def test_a_forward_pass_that_fails_leaves_nothing_behind() -> None:
    model, engine = offloaded(4, 1, lane=LateLane())
    out = model.layers[2].out
    model.layers[2].out = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        step(model)
    gc.collect()
    assert engine.pool.in_use == 0
    model.layers[2].out = out
    assert_same(step(model), step(Stack(4)))


def test_a_storage_written_to_after_a_part_of_it_was_saved() -> None:
    class Filling(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            table = torch.empty(2, *hidden.shape)
            table.data[0] = 2
            first = hidden * table[0]  # saves the first half
            table.data[1] = 3  # as a kernel of its own would, unseen by autograd
            return first + hidden * table[1]

    layers: list[nn.Module] = [Filling(), Filling()]
    hidden = torch.randn(16, WIDTH, requires_grad=True)
    offload.Offload(layers, device=CPU, horizon=1)
    layers[1](layers[0](hidden)).sum().backward()
    assert torch.equal(hidden.grad, torch.full_like(hidden, 25))


def test_a_kept_result_must_not_be_changed_in_place() -> None:
    class Changing(Layer):
        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden @ self.out.weight).add_(1).tanh()

    hidden = torch.randn(2, 16, WIDTH, requires_grad=True)
    layer = Changing()
    expected = torch.autograd.grad(layer(hidden).sum(), hidden)
    activations.apply([layer], "selective:op")
    with pytest.raises(ConfigError, match=r"aten\.mm\.default .*\(aten\.add_\.Tensor\)"):
        layer(hidden)
    layer.forward = Changing.forward.__get__(layer)
    activations.apply([layer], "selective:op")
    compile.apply([layer], backend="aot_eager")
    assert_same(torch.autograd.grad(layer(hidden).sum(), hidden), expected)


# --- compilation --------------------------------------------------------------------------------------------------


class Doubles(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


@torch._dynamo.config.patch(recompile_limit=8)  # what dynamo starts with
def test_layers_may_be_compiled_often_and_the_limit_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile.RECOMPILE_LIMIT >= 32, "four kinds, checkpointed or not, in training or not, masked or not"
    monkeypatch.setattr(compile, "RECOMPILE_LIMIT", 12)
    monkeypatch.setattr(logging.getLogger("smp_train"), "propagate", True)
    torch._dynamo.reset()
    layer = Doubles()
    compile.apply([layer], backend="eager")

    def warnings_of(sizes: range) -> list[logging.LogRecord]:
        caplog.clear()
        for size in sizes:
            assert torch.equal(layer(torch.ones(size)), torch.full((size,), 2.0))
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    try:
        assert not warnings_of(range(2, 14))
        (limit,) = warnings_of(range(14, 20))
        assert "forward" in limit.getMessage()
        assert len(limit.getMessage().splitlines()) == 1
    finally:
        torch._dynamo.reset()


# --- what is refused ----------------------------------------------------------------------------------------------


def test_fp8_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: nn.Module, **options: Any) -> None:
        raise OSError("undefined symbol: _ZN3c104impl")

    needs_torchao = r"--fp8 1: torchao .*pip install torchao"
    built_for_another_torch = types.SimpleNamespace(convert_to_float8_training=broken)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    for device, capability, torchao, reason in (
        ("cpu", None, None, "--fp8 1 .* CPU"), ("cuda", (8, 9), None, r"NVIDIA L4 .*8\.9.* --bf16 1"),
        ("cuda", (9, 0), None, needs_torchao), ("cuda", (9, 0), built_for_another_torch, needs_torchao),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setitem(sys.modules, "torchao", torchao)
        monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
        with pytest.raises(ConfigError, match=reason) as refusal:
            float8.check(torch.device(device, 0))
        assert len(str(refusal.value).splitlines()) == 1


def test_fp8_converts_linear_layers_that_16_divides() -> None:
    layer = nn.ModuleDict({"up": nn.Linear(32, 64), "gate": nn.Linear(32, 9), "norm": nn.LayerNorm(32),
                           "down": nn.Linear(24, 32), "table": nn.Embedding(32, 32)})  # fmt: skip
    assert [name for name, part in layer.items() if float8.convertible(part)] == ["up"]
