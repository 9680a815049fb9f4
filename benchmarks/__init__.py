"""Measurements of this package beside its alternatives; `smp-train bench NAME` runs them."""
