"""Find, check and read checkpoints of AWS's SMP v2 sample scripts, under the hub's parameter names."""
