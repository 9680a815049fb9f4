"""Finetune on chats: of each, the assistant's turns alone are learnt. Then ask the model.

    python examples/chat_finetune.py                                              # a tiny model from scratch, on a CPU
    python examples/chat_finetune.py meta-llama/Llama-3.2-1B-Instruct             # adapters (LoRA) for a real one
    torchrun --nproc_per_node 8 examples/chat_finetune.py meta-llama/Llama-3.1-8B-Instruct
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from smp_train import generate, train

HERE = Path(__file__).parent
CHATS = HERE / "chat" / "chats.jsonl"
FROM_SCRATCH: dict[str, Any] = {
    "tokenizer": str(HERE.parent / "data" / "sample"),
    "model_type": "llama_v2", "vocab_size": 1024, "hidden_width": 64, "num_layers": 2, "num_heads": 4,
    "intermediate_size": 128, "max_context_width": 128, "lr": 1e-2, "max_steps": 150,
}  # fmt: skip


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    adapted = {"hf_pretrained_model_name_or_dir": model, "lora_rank": 16, "lr": 2e-4, "max_steps": 20}
    run = train(
        dataset=str(CHATS), short="pack", train_batch_size=2, weight_decay=0.0, warmup=5, logging_freq=10,
        **(adapted if model else FROM_SCRATCH),
    )  # fmt: skip
    question = "How do I resume a run?"
    answer = generate(run.checkpoint, question, chat=True, num_tokens=40)
    print(f"loss {run.loss:.4f} per token of an answer; {question} {answer}")


if __name__ == "__main__":
    main()
