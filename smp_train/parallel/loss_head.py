"""A model's method from input ids to the summed loss, with or without the full logits."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method

from smp_train import losses
from smp_train.distributed.device_profile import DeviceProfile
from smp_train.distributed.dtensor import local_tensor
from smp_train.parallel.sequence import gather_hidden


def attach(
    model: Any, *, chunked: bool, tensor: DeviceMesh | None, loss: losses.Loss = losses.cross_entropy_sum,
    kernels: losses.Kernels = losses.EAGER, profile: DeviceProfile | None = None,
) -> None:  # fmt: skip
    """Give ``model`` a method ``loss_sum(input_ids, targets, **inputs)``; call it after sharding.

    FSDP2 gathers parameters for registered forward methods only: the method is registered on the root, and the head's
    part of it on the head, which may be a separate unit. A tied head's weight belongs to the root.

    Args:
        model: A sharded causal LM.
        chunked: Compute the loss by chunks of tokens (`losses.linear_cross_entropy_sum`).
        tensor: The mesh that splits the vocabulary, or None.
        loss: The loss of all logits, for a loss that is not chunked.
        kernels: Kernels of the chunked loss.
        profile: Profile of the device, for the chunked loss; by default, of the hidden states' device.
    """

    def from_logits(input_ids: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
        return loss(model.forward(input_ids=input_ids, use_cache=False, **inputs).logits.float(), targets).float()

    def by_chunks(input_ids: Tensor, targets: Tensor, **inputs: Any) -> Tensor:
        hidden = model.base_model(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
        return head.loss_sum(hidden, targets)

    def of_hidden(hidden: Tensor, targets: Tensor) -> Tensor:
        weight, bias = head.weight, head.bias
        if tensor is None:
            return by_chunk(hidden, weight, targets, bias=bias)
        hidden, weight, bias = gather_hidden(hidden, tensor), local_tensor(weight), local_tensor(bias)
        return by_chunk(hidden, weight, targets, bias=bias, group=tensor.get_group())

    by_chunk = partial(losses.linear_cross_entropy_sum, kernels=kernels, profile=profile)
    head = model.get_output_embeddings()
    if chunked:
        head.loss_sum = of_hidden
        register_fsdp_forward_method(head, "loss_sum")
    model.loss_sum = by_chunks if chunked else from_logits
    register_fsdp_forward_method(model, "loss_sum")
