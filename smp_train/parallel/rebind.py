"""Bind a model to new process groups, after its ranks have destroyed their groups and met again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from smp_train.errors import SmpTrainError
from smp_train.parallel.mesh import Mesh

BETWEEN_STEPS: dict[str, Any] = {
    # Attributes of a unit and of its parameter groups:
    "_training_state": TrainingState.IDLE,
    # attributes of a parameter group:
    "_all_gather_result": None, "_reshard_after_forward_event": None, "_post_reduce_event": None,
    "_all_reduce_state": None, "_partial_reduce_output": None, "_post_forward_indices": [],
    "_post_backward_pending": False, "_partial_reduce_output_layout": {},
    # attributes of a parameter:
    "unsharded_accumulated_grad": None,
    # attributes of the objects that all units share:
    "all_gather_state": None, "reduce_scatter_state": None, "reduce_scatter_states": [], "post_forward_order": [],
    "_last_post_reduce_events": {}, "active_gradient_reduction": None,
    "iter_forward_root": None, "post_backward_final_callback_queued": False, "_modules_to_run_forward": set(),
    "manual_backward_finalization_active": None, "gradient_reduction_pending": False,
}  # fmt: skip
"""Values between two steps of FSDP2's attributes, of which each release of torch has some."""


def rebind(model: nn.Module, mesh: Mesh) -> None:
    """Form the groups of ``mesh`` again, and make ``model`` ready for a step that uses them; collective.

    The model keeps its meshes, to which every DTensor, compiled graph and cache refers. Torch finds a mesh's group by
    name, and groups that are formed by the same calls get the same names. FSDP2 holds group objects: they are replaced,
    and the state of the failed step is reset. Parameters and already reduced gradients do not change.

    Raises `SmpTrainError` if this process has formed other groups since its ranks met.
    """
    root = mesh.root
    if root.device_type == "cuda":
        torch.cuda.synchronize()  # work that is queued may use the buffers that are released below
    names = mesh.group_names()
    # Torch 2.8 to 2.10 would return the flattened dimensions of any equal mesh, and form no groups.
    getattr(device_mesh._mesh_resources, "root_to_flatten_mapping", {}).pop(root, None)
    new = Mesh(mesh.degrees, root.device_type)
    if new.group_names() != names:
        raise SmpTrainError(
            f"the process groups of the mesh are now named {', '.join(new.group_names())}, not {', '.join(names)}; "
            "form no other group before them"
        )
    if hasattr(root, "_pg_registry"):  # torch 2.11 or newer
        root._pg_registry.update(new.root._pg_registry)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _rebind_unit(module._get_fsdp_state())


def _rebind_unit(state: Any) -> None:
    """Give a unit of FSDP2 the groups of its meshes, and reset it as if no step had begun."""
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 or newer
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    _reset(state)
    _reset(state._state_ctx)
    for group in groups:
        _reset(group)
        _reset(group.comm_ctx)
        group._to_sharded()
        for parameter in group.fsdp_params:
            _reset(parameter)
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        for holder in (group, *group.fsdp_params):
            for info in (holder.mesh_info, holder.post_forward_mesh_info):
                if info is not None:
                    info.__post_init__()  # looks the groups up


def _reset(holder: Any) -> None:
    for name, value in BETWEEN_STEPS.items():
        if name not in vars(holder):
            continue
        if isinstance(value, list | dict | set):
            getattr(holder, name).clear()  # other objects refer to it
        else:
            setattr(holder, name, value)
