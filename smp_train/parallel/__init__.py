"""How a model is spread over devices on stock PyTorch: the mesh, and what is applied to the model on it."""
