"""Memory: figures, its owners by sizes that are known, and what is to be changed first when it runs out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from smp_train.arguments import Arguments, parse, validate
from smp_train.arguments.tuning import MORE_DEVICES, Uses, remedies
from smp_train.distributed import heartbeat
from smp_train.distributed.degrees import plan
from smp_train.errors import ConfigError
from smp_train.telemetry import memory_owners, memory_tracker
from smp_train.telemetry.memory_owners import changes, owners

MIB = 1 / 1024


def trained(device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of two layers of 1 MiB and a head of 2 MiB, after a step of AdamW."""
    layers = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(2)])
    model = nn.ModuleDict({"layers": layers, "head": nn.Linear(512, 1024, bias=False)})
    model.register_buffer("table", torch.zeros(256, 1024))
    model.get_output_embeddings = lambda: model["head"]  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_owners_have_their_sizes() -> None:
    made = torch.zeros(1024, 777)
    views = made[:10], made.view(32, 32, 777)
    held = owners(*trained(), torch.device("cpu"), {777})
    sizes = dict(held)
    assert sizes["optimizer state"] == pytest.approx(8 * MIB, rel=1e-4)
    assert sizes["gradients"] == pytest.approx(4 * MIB)
    assert sizes["weights of the head"] == pytest.approx(2 * MIB)
    (layers,) = (name for name in sizes if name.startswith("weights of 2 layers"))
    assert sizes[layers] == pytest.approx(2 * MIB)
    assert sizes["buffers"] == pytest.approx(1 * MIB)
    assert sizes[memory_owners.LOGITS] == pytest.approx(1024 * 777 * 4 / 2**30)
    assert views
    assert [size for _, size in held] == sorted(sizes.values(), reverse=True)


ACTIVATIONS = [(memory_owners.OTHERS, 40.0), ("optimizer state", 20.0), ("gradients", 10.0)]
STATE = [("optimizer state", 40.0), (memory_owners.OTHERS, 20.0)]
FRAGMENTS = [*STATE, (memory_owners.PIECES, 10.0)]


WHOLE = "--sharding_strategy full_shard --hybrid_shard_degree 0"


def of(flags: str) -> Arguments:
    return parse(["--use_synthetic_data=1", *flags.split()], {}).args


def changes_of(flags: str, held: list[tuple[str, float]], *, on_gpu: bool = True, smp: bool = False) -> list[str]:
    args = of(flags)
    return changes(args, held, plan(args, 8, 8, smp=smp), 8, on_gpu=on_gpu, smp=smp)


@pytest.mark.parametrize(
    ("held", "flags", "first"),
    [
        (ACTIVATIONS, "--activation_checkpointing none --chunked_loss 0", "--chunked_loss 1"),
        (ACTIVATIONS, "--activation_checkpointing none", "--activation_checkpointing full"),
        (ACTIVATIONS, "--selective_checkpointing 2",
         "--activation_checkpointing full --selective_checkpointing 1"),
        (ACTIVATIONS, "--train_batch_size 6", "--train_batch_size 3 --gradient_accumulation_steps 2"),
        (ACTIVATIONS, "--train_batch_size 9 --gradient_accumulation_steps 2",
         "--train_batch_size 3 --gradient_accumulation_steps 6"),
        (ACTIVATIONS, "--train_batch_size 1", "--sm_activation_offloading 1"),
        (STATE, "--hybrid_shard_degree 2", WHOLE),
        (STATE, "--sharding_strategy no_shard --tensor_parallel_degree 2", WHOLE),
        (STATE, "", "--cpu_offload 1"),
        (FRAGMENTS, "", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"),
    ],
)  # fmt: skip
def test_what_to_change_first(held: list[tuple[str, float]], flags: str, first: str) -> None:
    named = changes_of(flags, held)
    assert named[0].partition(" (with ")[0] == first
    assert len(named) <= memory_owners.FLAGS


def test_what_the_machine_or_the_backend_does_not_do_is_not_named() -> None:
    one_row = "--train_batch_size 1"
    for held in (ACTIVATIONS, STATE):
        assert set(changes_of(one_row, held, on_gpu=False)) == {"a smaller --max_context_width", MORE_DEVICES}
    state = "--cpu_offload 1 (with at least 40 GiB of host memory per rank)"
    assert state in changes_of(one_row, STATE)
    assert not any("cpu_offload" in change for change in changes_of(one_row, STATE, smp=True))
    fp8 = "--fp8 1 --train_batch_size 1"
    activations = "--sm_activation_offloading 1 (with at least 20 GiB of host memory per rank)"
    assert activations in changes_of(fp8, STATE)
    assert not any("offload" in change for change in changes_of(fp8, STATE, smp=True))


DEGREES = st.tuples(*[st.sampled_from([1, 2, 3, 4, 8])] * 4)


@settings(max_examples=100, deadline=None)
@given(
    degrees=DEGREES, world_size=st.sampled_from([8, 24, 64]), rows=st.integers(1, 15), steps=st.integers(1, 3),
    more=st.sampled_from(["", "--short pack", "--fp8 1", "--selective_checkpointing 0.5", "--chunked_loss 0",
                          *(f"--sharding_strategy {each}" for each in ("no_shard", "shard_grad_op"))]),
)  # fmt: skip
def test_every_remedy_is_accepted_and_keeps_the_global_batch(
    degrees: tuple[int, ...], world_size: int, rows: int, steps: int, more: str
) -> None:
    names = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "hybrid_shard_degree")
    words = " ".join(f"--{name} {value}" for name, value in zip(names, degrees, strict=True) if value > 1)
    args = of(f"--backend native --train_batch_size {rows} --gradient_accumulation_steps {steps} {words} {more}")
    try:
        validate(args, world_size, 8)
    except ConfigError:
        assume(False)
    uses = Uses(1, 1, 1, 1)

    def batch(of: Arguments) -> int:
        readers = plan(of, world_size, 8, smp=False).data_parallel
        return of.train_batch_size * of.gradient_accumulation_steps * readers

    for flags in remedies(args, uses, plan(args, world_size, 8, smp=False), 8, gpu=True, experts=8):
        if flags is not None:
            changed = replace(args, **flags)
            validate(changed, world_size, 8)
            assert changed != args
            assert batch(changed) == batch(args)


def test_a_snapshot_of_the_first_steps_and_none_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory_tracker.dump(tmp_path, 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("x"))
    assert not list(tmp_path.iterdir())
    memory_tracker.MemoryRows(torch.device("cpu"), tmp_path / "logs", 3, on=True)
    snapshot = tmp_path / "logs/memory-rank3.pickle"
    for step in range(1, memory_tracker.FIRST_STEPS + 2):
        assert not snapshot.exists()
        for phase in (heartbeat.DATA, heartbeat.FORWARD):
            heartbeat.enter(phase, step)
    assert snapshot.exists()
    heartbeat.end()

    def fails(path: str) -> Any:
        raise RuntimeError("out of memory again")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fails)
    memory_tracker.dump(tmp_path, 3)
