"""The state of model and optimizer: names, creation before the first step, what is restored and what not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smp_train.checkpoints.find import open_verified
from smp_train.models.hub_names import canonical_name
from smp_train.models.hub_state import create_optimizer_state, gather_state
from tests.checkpoint_files import manager


def test_wrapper_prefixes_are_not_part_of_names():
    name = "model.layers.0._orig_mod._checkpoint_wrapped_module.mlp.weight"
    assert canonical_name(name) == "model.layers.0.mlp.weight"
    wrapped = torch.compile(nn.Linear(2, 2))
    assert set(gather_state(wrapped)["model"]) == {"weight", "bias"}


@pytest.mark.parametrize("fused", [False, True])
def test_creating_optimizer_state_changes_no_later_step(fused):
    def trained(create: bool) -> tuple[list, list]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=fused)
        if create:
            create_optimizer_state(optimizer)
            assert all(not value.any() for values in optimizer.state.values() for value in values.values())
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()], list(optimizer.state.values())

    (plain, states), (created, other_states) = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, created, strict=True))
    for values, others in zip(states, other_states, strict=True):
        assert all(torch.equal(values[key], others[key]) for key in values)


def test_a_parameter_that_never_had_a_gradient_is_saved_and_loaded(tmp_path):
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    manager(tmp_path).save(1, gather_state(model, optimizer), {})
    other, fresh = build()
    found = gather_state(other, fresh)
    open_verified(tmp_path).load(found)
    assert found["optim"]["state"]["used.weight"]["step"] == 1
    assert found["optim"]["state"]["idle.weight"]["step"] == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_hyper_parameters_stay_those_of_the_run(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5)
    manager(tmp_path).save(1, gather_state(model, optimizer), {})
    fresh = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.25)
    open_verified(tmp_path).load(gather_state(model, fresh))
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["weight_decay"]) == (0.25, 0.25)


def test_torchs_own_state_dicts_can_be_loaded(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    manager(tmp_path).save(1, {"model": weights, "optim": moments}, {})
    other = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(other.parameters())
    open_verified(tmp_path).load(gather_state(other, fresh))
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
