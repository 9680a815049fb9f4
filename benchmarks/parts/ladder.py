"""`ladder`: how much of a GPU's peak a run reaches with the defaults, and what each choice costs or gains."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cells import Cell, release
from benchmarks.parts import Setting
from benchmarks.program import SMALL_GPU, Flags, speed
from smp_train.models.state_memory import STATE_BYTES

LLAMA_1B: Flags = {"model_type": "llama_v3", "model_size": "1b"}
LLAMA_8B: Flags = {"model_type": "llama_v3", "model_size": "8b"}
SWITCHES: dict[str, dict[str, Any]] = {
    "no checkpointing": {"activation_checkpointing": "none"},
    "selective:op": {"activation_checkpointing": "selective:op"},
    "offload horizon 2": {"sm_activation_offloading": 1, "activation_loading_horizon": 2},
    "eager": {"use_torch_compile": 0},
    "eager, no checkpointing": {"use_torch_compile": 0, "activation_checkpointing": "none"},
    "all logits": {"chunked_loss": 0},
    "no checkpointing, one row": {"activation_checkpointing": "none", "train_batch_size": 1},
    "four rows": {"train_batch_size": 4},
    "parameters kept": {"sharding_strategy": "shard_grad_op"},
    "log every 5": {"logging_freq": 5},
}  # fmt: skip
"""Beside the defaults, which on a GPU compile and checkpoint every layer."""
LAYER_PARAMETERS, REST_PARAMETERS = 218_112_000, 1_050_677_248
"""Of Llama 3.1 8B: in one layer, and in embedding, head and last norm."""
FREE_SHARE = 0.80
"""Of the memory, for weights, gradients and optimizer: the rest is for activations, logits and reductions."""


def cells(setting: Setting) -> list[Cell]:
    """Return the defaults of each model first, then the switches."""
    warm, steps = 5, 5 if setting.rehearse else 10
    times: Flags = {"warm": warm, "steps": steps}
    models: dict[str, Flags] = {
        "1B at 8,192": {**LLAMA_1B, "max_context_width": 8192},
        "8B's widths at 8,192": {**LLAMA_8B, "max_context_width": 8192, "num_layers": None},
        "1B at 4,096": {**LLAMA_1B, "max_context_width": 4096},
    }
    if setting.rehearse:
        models = {name: {**SMALL_GPU, **({"num_layers": None} if "num_layers" in flags else {})}
                  for name, flags in models.items()}  # fmt: skip
    wanted = [(name, "") for name in models]
    for name, count in (("1B at 8,192", 3), ("8B's widths at 8,192", 3), ("1B at 4,096", 2), ("1B at 8,192", None)):
        wanted += [(name, switch) for switch in list(SWITCHES)[:count] if (name, switch) not in wanted]
    return [
        Cell(f"{name}: {switch or 'defaults'}", fitting if models[name].get("num_layers", "") is None else measured,
             {"name": name, "flags": {**models[name], **SWITCHES.get(switch, {})}, "switch": switch, **times},
             25 if "eager" in switch else 45)
        for name, switch in wanted
    ]  # fmt: skip


_speeds: dict[str, float] = {}
"""Tokens per second with the defaults, by model, for ratios; a worker that was replaced has lost those before."""
_layers: list[int] = []
"""Of the widths of 8B, how many fitted with the defaults."""


def measured(name: str, flags: Flags, warm: int, steps: int, switch: str = "") -> dict[str, Any]:
    """Measure one run, and compare its time per token with that of the defaults."""
    figures = speed(flags, warm=warm, steps=steps)
    if not switch:
        _speeds[name] = figures["tokens/s/GPU"]
    elif name in _speeds:
        figures["time per token, of the defaults"] = _speeds[name] / figures["tokens/s/GPU"]
    return figures


def fitting(name: str, flags: Flags, warm: int, steps: int, switch: str = "") -> dict[str, Any]:
    """Measure with as many layers as fit: estimated, and a quarter fewer each time that memory does not suffice."""
    layers = _layers[-1] if switch and _layers else most_layers()
    while True:
        try:
            made = {**flags, "num_layers": layers, "memory_check": 0}
            figures = measured(f"{name}, {layers} layers", made, warm, steps, switch)
            break
        except torch.OutOfMemoryError:
            if layers <= 2:
                raise
        layers -= max(2, layers // 4)
        release()  # only here: the exception held the model
    if not switch:
        _layers.append(layers)
    return {"layers": layers, **figures}


def most_layers() -> int:
    """Return how many layers of 8B's widths leave enough memory for a step; two on a CPU."""
    if not torch.cuda.is_available():
        return 2
    states = FREE_SHARE * torch.cuda.get_device_properties(0).total_memory / STATE_BYTES
    return int((states - REST_PARAMETERS) // LAYER_PARAMETERS)
