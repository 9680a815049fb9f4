"""Router losses: those of transformers and of Megatron Core on one process, and the same on every mesh."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed.test_same_numbers import MESHES, PLAIN, WIDTH, arguments_of, rows_of, train_cell
from tests.releases import needs_transformers_5
from tests.tiers import slow
from tests.training import alike, built, flags, group, records, train

SMP = {"moe": 1, "moe_load_balancing": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    # flags, and whether the model's configuration asks for a loss
    "smp": (SMP, False),
    "z alone": ({**SMP, "moe_load_balancing": "none"}, False),
    "hub": ({}, True),
}
COEFFICIENT = 0.7


def by_transformers(kind: str) -> dict[str, float]:
    """Return the router loss, load and gradient norm of ours on one batch, and what transformers' parts of it give."""
    import torch

    from smp_train import train_utils
    from smp_train.backends.native import NativeBackend

    changes, asked = KINDS[kind]
    with group() as (ranks, device):
        line = arguments_of("mixtral", "one", PLAIN, 1, **changes)
        args, _, spec = built(ranks, device, line)
        spec.config.output_router_logits, spec.config.router_aux_loss_coef = asked, COEFFICIENT
        backend = NativeBackend(args, ranks, device)
        model: Any = backend.build(backend.check(spec, seq_len=WIDTH), seed=3)
        optimizer = train_utils.build_optimizer(args, backend, model)
        batch, tokens = rows_of(0, 0, 4)
        counted = torch.tensor(tokens)
        attended = (batch.labels != -100).long()
        result = train_utils.train_step(backend, model, optimizer, [batch], tokens=counted, lr=0.0, max_grad_norm=0.0)
        optimizer.zero_grad()
        model.config.output_router_logits = asked  # a copy of the run's, in which it is off
        out = model(input_ids=batch.input_ids, attention_mask=attended, output_router_logits=True)
        aux, mask = out.aux_loss, attended.flatten().bool()
        if asked:
            added = COEFFICIENT * aux
        else:
            added = torch.zeros(())
            for logits in (each[mask] for each in out.router_logits):
                probabilities = logits.softmax(dim=1)
                taken = torch.nn.functional.one_hot(probabilities.topk(2, dim=1).indices, 4).sum(dim=1).float()
                if kind == "smp":
                    added = added + 0.5 * 4 / 2 * (taken.mean(dim=0) * probabilities.mean(dim=0)).sum()
                added = added + 0.1 * logits.logsumexp(dim=1).square().mean()
        targets = torch.full_like(batch.labels, -100)
        targets[:, :-1] = batch.labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        (loss + added).backward()
        norm = backend.clip_grad_norm(model, 0.0, optimizer)
        ours = train_utils.StepNumbers.read(result.to_host()).router
        return {"loss": result.loss.item(), "norm": result.grad_norm.item(), "router": ours["router_loss"],
                "load": ours["expert_load"], "their loss": loss.item(), "their norm": norm.item(),
                "their router": added.item(), "saved": spec.config.output_router_logits}  # fmt: skip


@needs_transformers_5
@pytest.mark.parametrize("kind", slow(KINDS, "smp".__ne__))
def test_the_loss_is_that_of_transformers_or_megatron(kind: str) -> None:
    (found,) = harness.run(by_transformers, 1, kind)
    for name in ("loss", "norm", "router"):
        assert found[name] == pytest.approx(found[f"their {name}"], rel=1e-5), name
    assert found["load"] > 1
    assert found["saved"] == KINDS[kind][1]  # a checkpoint keeps what the model's configuration says


def trained(mesh: str, modes: list[tuple[str, int, int]]) -> list[list[tuple[float, float]]]:
    with group() as (ranks, device):
        lines = [arguments_of("mixtral", mesh, mode, ranks.world_size, **SMP) for mode in modes]
        return [train_cell(line, ranks, device) for line in lines]


@cache
def expected() -> list[tuple[float, float]]:
    return harness.run(trained, 1, "one", [PLAIN])[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "one"])
def test_every_mesh_has_the_same_numbers(mesh: str) -> None:
    modes = [("full", 0, 1), ("selective:op", 0, 0), ("none", 1, 1)]
    for of_rank in harness.run(trained, MESHES[mesh][0], mesh, modes):
        for found, mode in zip(of_rank, modes, strict=True):
            alike(found, expected(), (mesh, mode))


@pytest.mark.slow
def test_metrics_and_compiled_layers(tmp_path: Path) -> None:
    given = {"model_type": "mixtral", "num_local_experts": 4, **SMP, "gradient_accumulation_steps": 2, "attn_pdrop": 0}
    compiled = {"use_torch_compile": 1, "torch_compile_backend": "aot_eager"}
    harness.run(train, 1, flags(tmp_path / "one", **given, train_batch_size=2))
    harness.run(train, 2, flags(tmp_path / "ep2", **given, **compiled, expert_parallel_degree=2))
    harness.run(train, 1, flags(tmp_path / "compiled", **given, **compiled, train_batch_size=2))
    names = ("loss", "grad_norm", "router_loss", "expert_load")
    one, *others = ([[r[name] for name in names] for r in records(tmp_path / at) if "loss" in r]
                    for at in ("one", "ep2", "compiled"))  # fmt: skip
    for other in others:
        for ours, theirs in zip(other, one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
