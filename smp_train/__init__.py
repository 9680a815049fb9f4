"""smp-train: one training program for Hugging Face language models, on SMP v2, stock PyTorch, or no GPU at all."""

__version__ = "0.1.0"
