"""Counter-based random numbers: element i of a stream is a function of (key, i) alone.

Any part of a stream can be computed alone, in any order and chunk size, on any device, with the same bits: all
operations are integer operations or + - * / sqrt in float64, whose rounding IEEE 754 fixes. (A library's logarithm or
error function may differ in the last bit between machines.)
"""

from __future__ import annotations

import hashlib
import math

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


def centred(key: int, index: Tensor) -> Tensor:
    """Return float64 uniform on (-1/2, 1/2): odd multiples of 2^-53, so the set is exactly symmetric."""
    top = bits(key, index)
    top >>= 12
    return top.to(torch.float64).add_(0.5).mul_(2.0**-52)


def uniform(key: int, index: Tensor) -> Tensor:
    """Return float64 uniform on (0, 1), neither end included."""
    return centred(key, index).add_(0.5)


def normal(key: int, index: Tensor) -> Tensor:
    """Return float64 standard normal numbers, by inversion (`quantile`)."""
    return quantile(centred(key, index))


# Coefficients of algorithm AS 241, routine PPND16 (constant term last): relative accuracy about 1e-16.
# M. J. Wichura: "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988).
_A = (
    2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
    1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0,
)  # fmt: skip
_B = (
    5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
    5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0,
)  # fmt: skip
_C = (
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0,
)  # fmt: skip
_D = (
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0,
)  # fmt: skip
_E = (
    2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
    2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0,
)  # fmt: skip
_F = (
    2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
    1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0,
)  # fmt: skip


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total = x * coefficients[0]
    for c in coefficients[1:-1]:
        total.add_(c).mul_(x)
    return total.add_(coefficients[-1])


def _ratio(top: tuple[float, ...], bottom: tuple[float, ...], x: Tensor) -> Tensor:
    return _polynomial(top, x).div_(_polynomial(bottom, x))


# log((1 + s) / (1 - s)) = 2 (s + s^3/3 + s^5/5 + ...); |s| <= 0.1716, so terms from s^23 on are below 1e-18.
_SERIES = tuple(2.0 / k for k in range(21, 0, -2))
_SQRT_HALF = math.sqrt(0.5)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive float64 numbers, with the same rounding on every device."""
    mantissa, exponent = torch.frexp(x)
    low = mantissa < _SQRT_HALF  # moves the mantissa from [1/2, 1) to [sqrt(1/2), sqrt(2))
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    exponent = exponent.to(torch.float64).sub_(low.to(torch.float64))
    s = (mantissa - 1.0).div_(mantissa + 1.0)
    return _polynomial(_SERIES, s * s).mul_(s).add_(exponent.mul_(math.log(2.0)))


def quantile(q: Tensor) -> Tensor:
    """Return the standard normal quantile of ``q + 1/2``, for float64 q in (-1/2, 1/2) of one dimension."""
    r = (q * q).neg_().add_(0.180625)
    out = _ratio(_A, _B, r).mul_(q)
    outer = (r < 0).nonzero().squeeze(-1)  # |q| > 0.425
    if outer.numel():
        tail = q[outer]
        r = log(tail.abs().neg_().add_(0.5)).neg_().sqrt_()
        value = _ratio(_C, _D, r - 1.6)
        far = (r > 5.0).nonzero().squeeze(-1)
        if far.numel():
            value[far] = _ratio(_E, _F, r[far] - 5.0)
        out[outer] = torch.where(tail < 0, value.neg(), value)
    return out
