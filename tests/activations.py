"""A few steps of many variants of one tiny model in one process group: what tests of its memory compare."""

from __future__ import annotations

from typing import Any

from tests.training import built, group

STEPS = 3
DEEP = {"num_layers": 4, "max_context_width": 24, "train_batch_size": 2}


def run_variants(variants: dict[str, dict[str, Any]], watch: Any = None) -> dict[str, list[tuple[float, float]]]:
    """Return, on every rank, (this rank's loss, gradient norm) of each step of each variant."""
    with group() as (ranks, device):
        return {name: train(ranks, device, changes, name, watch) for name, changes in variants.items()}


def train(
    ranks: Any, device: Any, changes: dict[str, Any], name: str = "", watch: Any = None, first: int = 0
) -> list[tuple[float, float]]:
    """Train one variant from step ``first`` on; ``watch(name, step, model, backend, optimizer)`` is called before the
    first step, as step 0, and after each.
    """
    import torch

    from smp_train import train_utils
    from smp_train.data.batch import Batch

    args, backend, spec = built(ranks, device, **{**DEEP, **changes})
    model = backend.build(backend.check(spec, seq_len=args.max_context_width), seed=args.seed)
    optimizer = train_utils.build_optimizer(args, backend, model)
    generator = torch.Generator().manual_seed(7 + ranks.rank)
    watch = watch or (lambda *_: None)
    watch(name, 0, model, backend, optimizer)
    results = []
    for step in range(STEPS):
        micro_batches = []
        for _ in range(args.gradient_accumulation_steps):
            tokens = torch.randint(0, 256, (args.train_batch_size, args.max_context_width), generator=generator)
            micro_batches.append(Batch(input_ids=tokens, labels=tokens))
        if step < first:
            continue
        train_utils.seed_step(args.seed, step, ranks.rank)
        result = train_utils.train_step(
            backend, model, optimizer, micro_batches, tokens=torch.tensor(100), lr=args.lr, max_grad_norm=1.0
        )
        results.append((result.loss.item(), result.grad_norm.item()))
        watch(name, step + 1, model, backend, optimizer)
    return results
