"""Memory, time, cost and the best settings of a run before it starts, from stepping its model with fake tensors."""
