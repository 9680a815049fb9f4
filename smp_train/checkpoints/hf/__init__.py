"""Models in Hugging Face's format: exported from a checkpoint, with tokenizer and model card."""
