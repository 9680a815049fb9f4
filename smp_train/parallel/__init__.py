"""Parallelism on stock PyTorch: the mesh and the transformations applied to a model on it."""
