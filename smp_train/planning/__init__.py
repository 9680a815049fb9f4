"""What a run takes before it runs: memory, from stepping its own model with fake tensors."""
