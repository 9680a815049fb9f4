"""Train with a loss of one's own: cross entropy with a penalty that keeps logits small (the z-loss of PaLM).

    python examples/own_loss.py
    torchrun --nproc_per_node 2 examples/own_loss.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from smp_train import train

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
PENALTY = 1e-2


def with_z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over counted tokens, not a mean: the run divides it by the tokens of the global batch.

    Args:
        logits: float32 ``[batch, seq, vocab]``.
        targets: int64 ``[batch, seq]``, shifted, -100 where a token is not counted.
    """
    counted = targets != -100
    normalizer = torch.logsumexp(logits, dim=-1)
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") + PENALTY * (
        normalizer.square() * counted
    ).sum()


def main() -> None:
    run = train(
        loss=with_z_loss, training_dir=[str(SAMPLE / "train")], test_dir=str(SAMPLE / "test"), validation_freq=40,
        model_type="llama_v2", vocab_size=1024, max_context_width=128, hidden_width=64, num_layers=2, num_heads=4,
        intermediate_size=128, activation_checkpointing="none",
        train_batch_size=4, max_steps=40, lr=5e-3, warmup=5, logging_freq=10,
    )  # fmt: skip
    losses = [record["loss"] for record in run.history() if "event" not in record]
    print(f"cross entropy with penalty: {losses[0]:.3f} at first, {losses[-1]:.3f} after {run.step} steps")


if __name__ == "__main__":
    main()
