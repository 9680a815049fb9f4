"""Masks and kernels of `smp_train.models.attention` against transformers' own, alternating, in one process."""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smp_train import losses
from smp_train.data.batch import Batch, collate
from smp_train.data.samples import Sample
from smp_train.data.source import Row
from smp_train.models.attention import Attention


def main(argv: Sequence[str]) -> int:
    """Print the time of forward and backward pass of each kind of row as a ratio to that on transformers' path."""
    parser = argparse.ArgumentParser("smp-train bench attention", description=__doc__)
    for name, default in (
        ("context", 2048), ("rows", 2), ("documents", 8), ("layers", 4), ("width", 512), ("window", 512), ("rounds", 10)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| model | rows | transformers' masks, ms | ours, ms | ratio |\n|---|---|---|---|---|")
    for family in ("llama", "mistral"):
        theirs, ours, how = _models(family, args, device)
        for kind in ("whole", "padded", "packed"):
            batch = _on(_batch(kind, args), device)
            mask = torch.ones_like(batch.input_ids)
            mask[0, args.context // 2 :] = 0
            given: Any = partial(dict, attention_mask=mask if kind == "padded" else None)
            if batch.position_ids is not None:
                given = partial(dict, position_ids=batch.position_ids)
            own = partial(how.inputs, batch.input_ids, batch.position_ids, batch.documents)
            pairs = [(_pass(theirs, batch, given), _pass(ours, batch, own)) for _ in range(args.rounds + 1)][1:]
            before, after = (statistics.median(times) * 1e3 for times in zip(*pairs, strict=True))
            ratio = statistics.median(two / one for one, two in pairs)
            print(f"| {family} | {kind} | {before:.1f} | {after:.1f} | {ratio:.2f} |", flush=True)
    return 0


def _models(family: str, args: Any, device: torch.device) -> tuple[Any, Any, Attention]:
    config = AutoConfig.for_model(
        family, vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width, num_attention_heads=8,
        num_key_value_heads=2, num_hidden_layers=args.layers, max_position_embeddings=args.context, use_cache=False,
        **({"sliding_window": args.window} if family == "mistral" else {}),
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    if device.type == "cuda":
        theirs = theirs.bfloat16()
    ours = copy.deepcopy(theirs)
    half = device.type == "cuda"
    return theirs, ours, Attention(ours, device, half=half, packed=True, compiled=False)


def _batch(kind: str, args: Any) -> Batch:
    ids = np.random.default_rng(0).integers(256, size=(args.rows, args.context))
    rows = [Row(row) for row in ids]
    if kind == "padded":
        rows[0] = Row(ids[0][: args.context // 2])
    elif kind == "packed":
        rows = [Row(row, None, np.full(args.documents, args.context // args.documents)) for row in ids]
    return collate([Sample(row, "") for row in rows], args.context)


def _on(batch: Batch, device: torch.device) -> Batch:
    for name in ("input_ids", "labels", "position_ids"):
        tensor = getattr(batch, name)
        setattr(batch, name, None if tensor is None else tensor.to(device))
    if batch.documents is not None:
        batch.documents = batch.documents[0].to(device), batch.documents[1]
    return batch


def _pass(model: Any, batch: Batch, inputs: Callable[[], dict[str, Any]]) -> float:
    """Return the seconds of a forward and backward pass: of the device, or of this process where that is the CPU."""
    began = _now()
    logits = model(input_ids=batch.input_ids, use_cache=False, **inputs()).logits
    losses.cross_entropy_sum(logits, losses.shift(batch.labels)).backward()
    return _now() - began


def _now() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()
