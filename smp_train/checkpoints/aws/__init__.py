"""Checkpoints of AWS's SMP v2 sample scripts: found, checked, and read under the hub's parameter names."""
