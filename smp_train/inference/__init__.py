"""Using a trained model: text generation and evaluation."""
