"""`ladder`: how much of a GPU's peak a run reaches with the defaults, and what each choice costs or gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.cells import Cell, release
from benchmarks.parts import Setting
from benchmarks.program import TINY, Flags, speed
from smp_train.models.state_memory import STATE_BYTES

LLAMA_1B: Flags = {"model_type": "llama_v3", "model_size": "1b"}
LLAMA_8B: Flags = {"model_type": "llama_v3", "model_size": "8b"}
SWITCHES: dict[str, dict[str, Any]] = {
    "checkpointing none": {"activation_checkpointing": "none"},
    "compiled": {"use_torch_compile": 1},
    "checkpointing none, compiled": {"activation_checkpointing": "none", "use_torch_compile": 1},
    "checkpointing full": {"activation_checkpointing": "full"},
    "full, offload horizon 2": {
        "activation_checkpointing": "full", "sm_activation_offloading": 1, "activation_loading_horizon": 2
    },
    "chunked loss 0": {"chunked_loss": 0},
    "selective:op, compiled": {"activation_checkpointing": "selective:op", "use_torch_compile": 1},
    "selective:op": {"activation_checkpointing": "selective:op"},
    "compile 0": {"use_torch_compile": 0},
    "log every 5": {"logging_freq": 5},
    "one row": {"train_batch_size": 1},
    "four rows": {"train_batch_size": 4},
}  # fmt: skip
RATIO_OF: Mapping[str, str] = {"full, offload horizon 2": "checkpointing full"}
"""Cells whose step is compared with another's than the defaults'."""
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
        models = {name: {**TINY, "bf16": 0} for name in models}
        models["8B's widths at 8,192"] = {**models["8B's widths at 8,192"], "num_layers": None}
    found = [
        Cell(f"{name}: defaults", fitting if "num_layers" in flags and flags["num_layers"] is None else measured,
             {"name": name, "flags": flags, **times}, 45)
        for name, flags in models.items()
    ]  # fmt: skip
    for name, switches in (("1B at 8,192", list(SWITCHES)), ("1B at 4,096", list(SWITCHES)[:3])):
        for switch in switches:
            given = {"name": name, "flags": {**models[name], **SWITCHES[switch]}, "switch": switch, **times}
            found.append(Cell(f"{name}: {switch}", measured, given, 60 if "compile" in switch else 20))
    given = {"name": "8B's widths at 8,192", "flags": models["8B's widths at 8,192"], **times}
    found += [
        Cell(f"8B's widths at 8,192: {switch}", fitting,
             {**given, "flags": {**given["flags"], **SWITCHES[switch]}, "switch": switch}, 60)
        for switch in ("compiled", "checkpointing full", "full, offload horizon 2", "selective:op, compiled")
    ]  # fmt: skip
    return found


_seconds: dict[tuple[str, str], float] = {}
"""Of a step, by model and switch, for ratios; a worker that was replaced has lost those before."""
_layers: list[int] = []
"""Of the widths of 8B, how many fitted last."""


def measured(name: str, flags: Flags, warm: int, steps: int, switch: str = "") -> dict[str, Any]:
    """Measure one run, and compare its step with that of the defaults."""
    figures = speed(flags, warm=warm, steps=steps)
    _seconds[name, switch] = figures["step ms"]
    base = _seconds.get((name, RATIO_OF.get(switch, "")))
    return {**figures, **({"of base": figures["step ms"] / base} if switch and base else {})}


def fitting(name: str, flags: Flags, warm: int, steps: int, switch: str = "") -> dict[str, Any]:
    """Measure with as many layers as fit: estimated, and two fewer each time that the memory does not suffice."""
    layers = _layers[-1] if switch and _layers else most_layers()
    while True:
        try:
            figures = measured(name, {**flags, "num_layers": layers, "memory_check": 0}, warm, steps, switch)
            break
        except torch.OutOfMemoryError:
            if layers <= 2:
                raise
        layers -= 2
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
