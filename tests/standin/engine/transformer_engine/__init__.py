"""The part of NVIDIA's Transformer Engine that SMP users call, in full precision."""

__version__ = "1.10.0"
