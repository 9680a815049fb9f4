"""One training program for Hugging Face language models: on SMP v2, on stock PyTorch, or with no GPU at all."""

__version__ = "0.1.0"
