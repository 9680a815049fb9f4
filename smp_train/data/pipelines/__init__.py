"""What the training loop reads, and what a user subclasses: `data_pipeline`."""
