"""Counter-based random numbers: element i of a stream is a function of (key, i) alone.

Any part of a stream can be computed alone, in any order and chunk size, with the same bits. Uniform numbers have the
same bits on every device. Normal numbers of different kinds of devices may differ in a float64's last bit.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX1 = 0xBF58476D1CE4E5B9
MIX2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def stream_key(seed: int, name: str, ordinal: int = 0) -> int:
    """Return the 64-bit key, as a signed integer, of stream number ``ordinal`` of the tensor ``name``."""
    digest = hashlib.blake2b(f"{seed}\0{name}\0{ordinal}".encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def _shift_xor(z: Tensor, bits: int) -> Tensor:
    shifted = z >> bits  # arithmetic; the mask makes it the logical shift of the generator's definition
    return z.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))


def bits(key: int, index: Tensor) -> Tensor:
    """Return the 64 random bits of each element (int64), by SplitMix64 at position ``index`` (int64).

    Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014; Stafford's mix 13.
    """
    z = index * _signed(GOLDEN)
    z += _signed(key + GOLDEN)
    z = _shift_xor(z, 30).mul_(_signed(MIX1))
    z = _shift_xor(z, 27).mul_(_signed(MIX2))
    return _shift_xor(z, 31)


def uniform(key: int, index: Tensor) -> Tensor:
    """Return float64 uniform on (0, 1), neither end included: odd multiples of 2^-53."""
    top = bits(key, index)
    top >>= 12
    return top.to(torch.float64).add_(0.5).mul_(2.0**-52).add_(0.5)


def normal(key: int, index: Tensor) -> Tensor:
    """Return float64 standard normal numbers, by inversion."""
    return torch.special.ndtri(uniform(key, index))
