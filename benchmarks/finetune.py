"""Memory of a finetune with adapters (LoRA) against one of all parameters: tensors in the CPU's memory, in one run.

Peak: of all that torch's allocator gave, from building the model to the end of the third step, activations included.
State: parameters, gradients and moments alone, behind the formula of docs/from-a-checkpoint.md.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.step import scratch_of
from smp_train import arguments, distributed, train_lib
from smp_train.build_run import build_run
from smp_train.distributed import Runtime

STEPS = 3
MIB = 1 << 20


def main(argv: Sequence[str]) -> int:
    """Measure both, and print the bytes per parameter of the model and the ratio."""
    parser = argparse.ArgumentParser(prog="smp-train bench finetune", description=__doc__)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default 16)")
    parser.add_argument("--width", type=int, default=512, help="of the model (default 512)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    options = parser.parse_args(argv)
    ranks = distributed.detect()
    with scratch_of(ranks) as scratch:
        count = write_model(scratch / "model", options.width, options.layers)
        found = {
            kind: measured(ranks, scratch, kind, more)
            for kind, more in (("full", []), ("lora", ["--lora_rank", str(options.rank)]))
        }
    print(f"{count / 1e6:.1f} M parameters, rank {options.rank}; MiB, and bytes per parameter of the model")
    for kind, sizes in found.items():
        shown = [f"{name} {size / MIB:.0f} ({size / count:.2f})" for name, size in sizes.items()]
        print(f"  {kind}  {'  '.join(shown)}")
    ratios = ", ".join(f"{name} {found['lora'][name] / found['full'][name]:.3f}" for name in found["full"])
    print(f"  lora : full  {ratios}")
    return 0


def write_model(folder: Path, width: int, layers: int) -> int:
    """Write a Llama as transformers does, and return its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=3 * width, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def measured(ranks: Runtime, scratch: Path, kind: str, more: list[str]) -> dict[str, int]:
    """Return the bytes of a run of `STEPS` steps: of its state, and at the peak."""
    flags = [
        *("--hf_pretrained_model_name_or_dir", str(scratch / "model"), "--use_synthetic_data", "1", "--bf16", "0"),
        *("--train_batch_size", "1", "--max_context_width", "64", "--max_steps", "100", "--run_name", kind),
        *("--run_dir", str(scratch / kind), "--checkpoint_dir", str(scratch / "checkpoints"), *more),
    ]
    resolved = arguments.parse(flags)
    arguments.validate(resolved.args, ranks.world_size, ranks.local_world_size)
    device = distributed.start(ranks, distributed_backend=resolved.args.distributed_backend, timeout_seconds=600)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run = build_run(resolved, ranks, device, ExitStack())
        run.read_from_here()
        for _ in range(STEPS):
            train_lib.step(run)
        parameters = list(run.model.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        moments = [value for state in run.optimizer.state.values() for value in state.values()]
        state = sum(each.nbytes for each in [*parameters, *gradients, *moments] if torch.is_tensor(each))
        run.batches.close()
        run.close()
        del run, parameters, gradients, moments  # what is freed after this is not seen
        gc.collect()
    seen.export_chrome_trace(str(scratch / f"{kind}.json"))
    events = json.loads((scratch / f"{kind}.json").read_text())["traceEvents"]
    memory = sorted(((e["ts"], e["args"]) for e in events if e["name"] == "[memory]"), key=itemgetter(0))
    before = memory[0][1]["Total Allocated"] - memory[0][1]["Bytes"]
    return {"state": state, "peak": max(each["Total Allocated"] for _, each in memory) - before}
