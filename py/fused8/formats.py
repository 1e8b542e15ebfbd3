"""The formats that a parameter can have in memory, with or without extra mantissa bits kept beside it.

A parameter of 16 or 8 bits is updated in FP32 and then rounded to its format: to nearest, or stochastically, which is
unbiased, so that updates far below its precision still add up. With `extra` mantissa bits kept in a separate integer
tensor (the correction) it behaves as a longer float: bfloat16 and 16 bits are exactly FP32.

Everything is integer arithmetic on the bits of FP32, the same on every backend. A format has M mantissa bits and its
smallest normal number is 2^(E0 - 127). Its magnitudes, counted from 0, are its codes without the sign: a code is
(exponent field << M) + mantissa, for subnormals too, and the next code is the next larger number. So a format extended
by n bits is one with M + n mantissa bits and the same exponents; of its code c the parameter keeps the upper part,
rounded to nearest, and the correction the signed rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class Format(NamedTuple):
    mantissa_bits: int
    e0: int
    """The FP32 exponent field of the smallest normal number."""
    largest: int
    """The code of the largest finite number."""
    overflow: int
    """The code that a number beyond it takes: infinity; the largest for FP8."""
    nan: int
    bits: torch.dtype
    """The integer dtype of the same size."""


FORMATS = {
    torch.bfloat16: Format(7, 1, 0x7F7F, 0x7F80, 0x7FC0, torch.int16),
    torch.float16: Format(10, 113, 0x7BFF, 0x7C00, 0x7E00, torch.int16),
    torch.float8_e4m3fn: Format(3, 121, 0x7E, 0x7E, 0x7F, torch.uint8),
    torch.float8_e5m2: Format(2, 113, 0x7B, 0x7B, 0x7E, torch.uint8),
}

CORRECTION_DTYPES = {8: torch.int8, 16: torch.int16}


def random_bits(index: Tensor, key: Tensor | int) -> Tensor:
    """32 random bits (as int64) for each element index modulo 2^32 (int64), from the key of this step.

    A counter-based generator: the hash `lowbias32` (Wellons, "Prospecting for Hash Functions", 2018) of index + key.
    """
    h = (index + key) & _MASK32
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK32
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK32  # wraps beyond 2^63, which leaves the low 32 bits right
    return h ^ (h >> 16)


def rounding_key(seed: int, step: int) -> int:
    """The key of `random_bits` for a step: two rounds of splitmix64 (Steele, Lea & Flood, 2014) over (seed, step)."""
    z = 0
    for word in (seed, step):
        z = (z + word + _GOLDEN) & _MASK64
        for shift, multiplier in _SPLITMIX:
            z = ((z ^ (z >> shift)) * multiplier) & _MASK64
        z ^= z >> 31
    return z & _MASK32


def rounding_keys(seed: int, steps: Tensor) -> Tensor:
    """`rounding_key` for int64 steps, without leaving their device; int64 arithmetic wraps as the masks do."""
    z = torch.zeros_like(steps)
    for word in (_signed64(seed), steps):
        z = z + word + _signed64(_GOLDEN)
        for shift, multiplier in _SPLITMIX:
            z = (z ^ _logical_shift(z, shift)) * _signed64(multiplier)
        z = z ^ _logical_shift(z, 31)
    return z & _MASK32


def _signed64(x: int) -> int:
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x


def _logical_shift(x: Tensor, shift: int) -> Tensor:
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def encode(x: Tensor, dtype: torch.dtype, extra: int = 0, random: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """FP32 -> the parameter in its dtype and, with `extra` bits (8 or 16), its correction.

    Rounds to nearest, ties to even, or with `random` (32 bits each, int64) up with the probability of the part that is
    cut off. NaN stays NaN, infinity and what is beyond the largest number become the format's overflow; but the largest
    itself where there are extra bits, and in FP16 rounded stochastically, whose infinity is no neighbour of a number.
    """
    f = FORMATS[dtype]
    bits = x.contiguous().view(torch.int32).to(torch.int64) & _MASK32
    negative, magnitude = bits >> 31, bits & 0x7FFFFFFF
    exponent = (magnitude >> 23).clamp(min=1)
    mantissa = torch.where(magnitude >> 23 > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    drop = 23 - f.mantissa_bits - extra + (f.e0 - exponent).clamp(min=0)
    left, drop = (-drop).clamp(min=0), drop.clamp(0, 31)
    mantissa = mantissa << left
    if random is None:
        add = torch.where(drop > 0, (1 << (drop - 1).clamp(min=0)) - 1 + ((mantissa >> drop) & 1), 0)
    else:
        add = random & ((1 << drop) - 1)
    code = ((exponent - f.e0).clamp(min=0) << (f.mantissa_bits + extra)) + ((mantissa + add) >> drop)
    half = (1 << extra) >> 1
    upper = (code + half) >> extra
    beyond = upper > f.largest
    special = torch.where(magnitude > 0x7F800000, f.nan, f.overflow)
    saturates = extra or (random is not None and f.e0 > 1)  # an infinite parameter could never come back
    saturated = f.largest if saturates else special
    upper = torch.where(magnitude >= 0x7F800000, special, torch.where(beyond, saturated, upper))
    size = dtype.itemsize * 8
    stored = (upper | (negative << (size - 1))) & ((1 << size) - 1)
    parameter = stored.to(torch.int32).to(f.bits).view(dtype) if size == 8 else _to_int16(stored).view(dtype)
    if not extra:
        return parameter, None
    correction = torch.where((magnitude >= 0x7F800000) | beyond, half - 1, code - (upper << extra))
    correction = torch.where(magnitude >= 0x7F800000, 0, correction)
    return parameter, correction.to(CORRECTION_DTYPES[extra])


def _to_int16(x: Tensor) -> Tensor:
    return torch.where(x >= 0x8000, x - 0x10000, x).to(torch.int16)


def decode(parameter: Tensor, correction: Tensor | None = None) -> Tensor:
    """The parameter with its correction -> FP32, exactly."""
    if correction is None or parameter.dtype == torch.float32:
        return parameter.float()
    f = FORMATS[parameter.dtype]
    extra = correction.dtype.itemsize * 8
    size = parameter.dtype.itemsize * 8
    stored = parameter.contiguous().view(f.bits).to(torch.int64) & ((1 << size) - 1)
    negative, upper = stored >> (size - 1), stored & ((1 << (size - 1)) - 1)
    code = ((upper << extra) + correction.to(torch.int64)).clamp(min=0)
    mantissa_bits = f.mantissa_bits + extra
    shift = 23 - mantissa_bits
    normal = (code << shift if shift >= 0 else code >> -shift) + ((f.e0 - 1) << 23)
    subnormal = (code.double() * 2.0 ** (f.e0 - 127 - mantissa_bits)).float()
    value = torch.where(
        code < (1 << mantissa_bits), subnormal, normal.clamp(max=0x7FFFFFFF).to(torch.int32).view(torch.float32)
    )
    value = torch.where(negative == 1, -value, value)
    return torch.where(upper > f.largest, parameter.float(), value)
