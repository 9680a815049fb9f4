"""Checkpoints: one folder per run, committed by a marker, verified before their tensors are read on any mesh."""
