"""The memory that models need of each GPU: ``python -m benchmarks.memory_table > docs/memory.md``."""

from __future__ import annotations

import math
import multiprocessing

from smp_train.arguments import parse
from smp_train.models.resolve import presets
from smp_train.models.state_memory import GIB
from smp_train.planning.best import planned_run
from smp_train.planning.estimate import estimate

MODELS = [
    ("scratch", "7b"), ("scratch", "13b"), ("scratch", "30b"), ("scratch", "70b"), ("llama_v3", "8b"),
    ("mixtral", "8x7b"), ("falcon", "40b"),
]  # fmt: skip
DEVICES = (8, 16, 32, 64)
ROWS, TOKENS = 4, 2048
PAGE = """# Memory that models need of each GPU

GiB, slack included, as `smp-train plan` prints: {rows} rows of {tokens} tokens on each GPU, bf16, full activation
checkpointing, one copy of the model over all GPUs. [How it is counted, and how to lower it](planning.md).

| `--model_type`, `--model_size` | parameters | {devices} GPUs |
|---|---|{dashes}|
{table}

A GPU with 40 GB has 37 GiB by the vendor's number, one with 80 GB 74. Weights, gradients and optimizer take 16 bytes
per parameter, shared by all GPUs; activations, gathered layers and the head do not shrink with more GPUs.

Generated in some minutes: `python -m benchmarks.memory_table > docs/memory.md`.
"""


def needed(model_type: str, model_size: str, devices: int) -> int:
    """Return whole GiB, rounded up."""
    flags = [f"--model_type={model_type}", f"--model_size={model_size}"]
    args = parse([*flags, f"--train_batch_size={ROWS}", f"--max_context_width={TOKENS}"], {}).args
    return math.ceil(estimate(planned_run(args, devices, 8, gpu=True)).needed / GIB)


def markdown() -> str:
    """Return the page."""
    cells = [(*model, devices) for model in MODELS for devices in DEVICES]
    # One process per cell: what torch caches for one number of ranks is wrong for another.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        sizes = dict(zip(cells, pool.starmap(needed, cells, chunksize=1), strict=True))
    table = [
        f"| {' '.join(model)} | {presets()[model].parameters / 1e9:.1f} B | "
        + " | ".join(str(sizes[(*model, devices)]) for devices in DEVICES) + " |"
        for model in MODELS
    ]  # fmt: skip
    return PAGE.format(
        rows=ROWS, tokens=TOKENS, devices=" | ".join(map(str, DEVICES)), dashes="---|" * len(DEVICES),
        table="\n".join(table),
    ).replace("||\n", "|\n")  # fmt: skip


if __name__ == "__main__":
    print(markdown(), end="")
