"""Train on rows that a program makes: words and their letters in reverse, of which only the answer is learnt.

    python examples/own_data.py
    torchrun --nproc_per_node 2 examples/own_data.py     # the same rows, the same numbers
"""

from __future__ import annotations

import numpy as np
import torch

from smp_train import evaluate, load_model, train
from smp_train.data.source import IGNORED, Row, Source

LETTERS = 26
LENGTH = 4
ARROW = LETTERS  # the token between a word and its reverse


class Reversed(Source):
    """Row i depends on (seed, i) alone, as resuming and other numbers of ranks ask for."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self.fingerprint = f"reversed words: {rows} rows of seed {seed}"

    def __len__(self) -> int:
        return self.rows

    def row(self, index: int) -> Row:
        word = np.random.default_rng([self.seed, index]).integers(0, LETTERS, LENGTH)
        ids = np.concatenate([word, [ARROW], word[::-1]])
        labels = ids.copy()
        labels[: LENGTH + 1] = IGNORED
        return Row(ids, labels=labels)

    def name(self, index: int) -> str:
        return f"word {index} of seed {self.seed}"


def main() -> None:
    test = Reversed(rows=200, seed=2)
    run = train(
        training_data=Reversed(rows=20_000, seed=1), validation_data=test, validation_freq=100,
        model_type="llama_v2", vocab_size=LETTERS + 1, max_context_width=2 * LENGTH + 1, hidden_width=64, num_layers=2,
        num_heads=4, intermediate_size=128, activation_checkpointing="none",
        train_batch_size=32, max_steps=300, lr=5e-3, warmup=10, logging_freq=50,
    )  # fmt: skip
    score = evaluate(run.checkpoint, test).all
    model, _ = load_model(run.checkpoint)
    rows = torch.tensor(np.stack([test.row(index).input_ids for index in range(len(test))]))
    with torch.no_grad():
        found = model(rows.to(model.device)).logits.argmax(dim=-1).cpu()
    right = (found[:, LENGTH:-1] == rows[:, LENGTH + 1 :]).all(dim=1).float().mean()
    print(f"loss {score.loss:.4f} on {score.tokens} tokens; {right:.0%} of the words reversed without a mistake")


if __name__ == "__main__":
    main()
