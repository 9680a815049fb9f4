"""The memory that models need of each GPU: ``python -m smp_train.planning.table > docs/memory.md``."""

from __future__ import annotations

import math
import multiprocessing

from smp_train.arguments import parse
from smp_train.models.resolve import presets, resolve
from smp_train.models.state_memory import GIB
from smp_train.planning import fitting
from smp_train.planning.estimate import estimate
from smp_train.planning.options import check
from smp_train.planning.world import world

MODELS = [
    ("scratch", "7b"), ("scratch", "13b"), ("scratch", "30b"), ("scratch", "70b"), ("llama_v3", "8b"),
    ("mixtral", "8x7b"), ("falcon", "40b"),
]  # fmt: skip
DEVICES = (8, 16, 32, 64)
ROWS, TOKENS = 4, 2048
PAGE = """# What models need of each GPU

GiB, with the slack, as `smp-train plan` says: {rows} rows of {tokens} tokens on each GPU, bf16, layers checkpointed in
full, one copy of the model over all GPUs. [How, and what lowers it](planning.md).

| `--model_type`, `--model_size` | parameters | {devices} GPUs |
|---|---|{dashes}|
{table}

A GPU with 40 GB has 37 GiB by the vendor's number, one with 80 GB 74. Weights, gradients and optimizer are 16 bytes of
each parameter, shared by all GPUs; activations, gathered layers and the head stay what they are.

Generated: `python -m smp_train.planning.table > docs/memory.md`, some minutes.
"""


def needed(model_type: str, model_size: str, devices: int) -> int:
    """Return whole GiB, rounded up."""
    names = [f"--model_type={model_type}", f"--model_size={model_size}"]
    args = parse([*names, f"--train_batch_size={ROWS}", f"--max_context_width={TOKENS}"], {}).args
    check(args)
    with world(devices, 8) as ranks:
        memory = estimate(args, resolve(args), devices=devices, per_node=8, seq_len=TOKENS, ranks=ranks)
    return math.ceil(fitting.needed(args, memory, gpu=True) / GIB)


def markdown() -> str:
    """Return the page."""
    cells = [(*model, devices) for model in MODELS for devices in DEVICES]
    # What torch keeps of one world does not hold in the next: each has a process of its own.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = dict(zip(cells, pool.starmap(needed, cells, chunksize=1), strict=True))
    table = [
        f"| {' '.join(model)} | {presets()[model].parameters / 1e9:.1f} B | "
        + " | ".join(str(found[(*model, devices)]) for devices in DEVICES) + " |"
        for model in MODELS
    ]  # fmt: skip
    return PAGE.format(
        rows=ROWS, tokens=TOKENS, devices=" | ".join(map(str, DEVICES)), dashes="---|" * len(DEVICES),
        table="\n".join(table),
    ).replace("||\n", "|\n")  # fmt: skip


if __name__ == "__main__":
    print(markdown(), end="")
