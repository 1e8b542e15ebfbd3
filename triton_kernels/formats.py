"""Parameter formats as device functions: the same bits as fused8/formats.py, which describes them.

All of it is arithmetic on 32-bit integers; 16-bit and FP8 parameters are loaded and stored as unsigned integers.
DTYPE is the Triton dtype of the parameter. EXTRA_BITS is the size of its correction, 0 if it has none.
"""

import torch
import triton
import triton.language as tl

from ..formats import FORMATS
from .arithmetic import bits_float

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_FORMAT_OF = {DTYPES[dtype].name: f for dtype, f in FORMATS.items()}
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.constexpr_function
def is_plain(dtype, extra_bits, stochastic):
    """Whether the hardware's conversions do: FP32, or 16 bits rounded to nearest."""
    return dtype.primitive_bitwidth > 8 and not extra_bits and not stochastic


@triton.constexpr_function
def stored_type(dtype):
    """The unsigned integers that a parameter is loaded and stored as."""
    return tl.uint8 if dtype.primitive_bitwidth == 8 else tl.uint16


@triton.constexpr_function
def correction_type(extra_bits):
    return tl.int8 if extra_bits == 8 else tl.int16


@triton.constexpr_function
def _constant(dtype, name):
    """A field of the format; "infinity": its code, 0 where there is none; "size": in bits."""
    f = _FORMAT_OF[dtype.name]
    if name == "infinity":
        return f.largest + 1 if f.largest + 1 != f.nan else 0
    return dtype.primitive_bitwidth if name == "size" else getattr(f, name)


@triton.jit
def random_bits(index, key):
    """32 random bits for each element index, from the key of this step; all uint32."""
    h = index + key
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def _shift_right(x, shift, random, STOCHASTIC: tl.constexpr, ALWAYS: tl.constexpr):
    """x >> shift, rounded to nearest even or by the random bits; all uint32. ALWAYS: the shift is never 0."""
    if STOCHASTIC:
        add = random & ((1 << shift) - 1)
    else:
        add = ((1 << shift) >> 1) - 1 + ((x >> shift) & 1)
        if not ALWAYS:
            add = tl.where(shift > 0, add, 0)
    return (x + add) >> shift


@triton.jit
def encode(x, random, DTYPE: tl.constexpr, EXTRA_BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """FP32 -> the parameter as it is stored and its correction (of no meaning without EXTRA_BITS).

    `random` is `random_bits` if STOCHASTIC, otherwise any value.
    """
    E0: tl.constexpr = _constant(DTYPE, "e0")
    LARGEST: tl.constexpr = _constant(DTYPE, "largest")
    SIZE: tl.constexpr = _constant(DTYPE, "size")
    MANTISSA_BITS: tl.constexpr = _constant(DTYPE, "mantissa_bits") + EXTRA_BITS
    KEEP: tl.constexpr = 23 - MANTISSA_BITS  # how many bits a normal number loses
    HALF: tl.constexpr = (1 << EXTRA_BITS) >> 1
    SATURATES: tl.constexpr = EXTRA_BITS > 0 or (STOCHASTIC and E0 > 1)
    # What is beyond the largest number takes this code.
    LARGEST_EXTENDED: tl.constexpr = (LARGEST << EXTRA_BITS) + (HALF - 1 if EXTRA_BITS else 0)
    LAST: tl.constexpr = LARGEST_EXTENDED if SATURATES else _constant(DTYPE, "overflow")
    SPECIAL: tl.constexpr = _constant(DTYPE, "overflow") << EXTRA_BITS
    NAN: tl.constexpr = _constant(DTYPE, "nan") << EXTRA_BITS

    bits = x.to(tl.uint32, bitcast=True)
    if E0 == 1 and EXTRA_BITS == 0:
        # The upper half of FP32, sign included: rounding carries into infinity at most.
        stored = _shift_right(bits, tl.full(bits.shape, KEEP, tl.uint32), random, STOCHASTIC, True)
        return tl.where(x != x, NAN, stored).to(tl.uint16), None
    else:
        magnitude = bits & 0x7FFFFFFF
        if E0 == 1:
            # The exponents are those of FP32, whose magnitude so is a code with more mantissa bits.
            code = magnitude
            if KEEP > 0:
                code = _shift_right(code, tl.full(code.shape, KEEP, tl.uint32), random, STOCHASTIC, True)
        else:
            exponent = tl.maximum((magnitude >> 23).to(tl.int32), 1)
            mantissa = magnitude - ((exponent - 1) << 23).to(tl.uint32)
            drop = KEEP + tl.maximum(E0 - exponent, 0)
            if KEEP < 0:
                mantissa = mantissa << tl.maximum(-drop, 0).to(tl.uint32)
                drop = tl.maximum(drop, 0)
            drop = tl.minimum(drop, 31).to(tl.uint32)
            # One octave beyond the largest number is as good as many, and does not overflow.
            BEYOND: tl.constexpr = (LARGEST >> (MANTISSA_BITS - EXTRA_BITS)) + 1
            octave = tl.minimum(tl.maximum(exponent - E0, 0), BEYOND).to(tl.uint32)
            code = (octave << MANTISSA_BITS) + _shift_right(mantissa, drop, random, STOCHASTIC, KEEP > 0)
        code = tl.minimum(code, LAST)
        if SATURATES:  # otherwise LAST is right for infinity too
            code = tl.where(magnitude >= _INFINITY_BITS, SPECIAL, code)
        code = tl.where(magnitude > _INFINITY_BITS, NAN, code)
        stored = ((code + HALF) >> EXTRA_BITS) | ((bits >> (32 - SIZE)) & (1 << (SIZE - 1)))
        return stored.to(stored_type(DTYPE)), code.to(correction_type(EXTRA_BITS))


@triton.jit
def decode(stored, correction, DTYPE: tl.constexpr, EXTRA_BITS: tl.constexpr):
    """The parameter as it is stored, with its correction -> FP32, exactly."""
    E0: tl.constexpr = _constant(DTYPE, "e0")
    LARGEST: tl.constexpr = _constant(DTYPE, "largest")
    SIZE: tl.constexpr = _constant(DTYPE, "size")
    MANTISSA_BITS: tl.constexpr = _constant(DTYPE, "mantissa_bits") + EXTRA_BITS
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    SCALE: tl.constexpr = 2.0 ** (E0 - 1)

    stored = stored.to(tl.int32)
    sign = (stored >> (SIZE - 1)) << 31
    upper = stored & ((1 << (SIZE - 1)) - 1)
    code = upper
    if EXTRA_BITS:
        code = tl.maximum((upper << EXTRA_BITS) + correction.to(tl.int32), 0)
    if E0 == 1 and EXTRA_BITS == 0:
        return bits_float(stored << SHIFT)
    elif E0 == 1:
        # FP32 cut off, its infinity and NaN too.
        return bits_float((tl.where(upper > LARGEST, upper << EXTRA_BITS, code) << SHIFT) | sign)
    else:
        if SHIFT >= 0:
            value = bits_float(code << SHIFT) * SCALE  # the code as one of FP32, whose exponents start lower
        else:
            # Subnormal codes may use all their bits: as a number, not as a pattern.
            normal = bits_float(code >> -SHIFT) * SCALE
            subnormal = code.to(tl.float32) * (SCALE * 2.0 ** (-126 - MANTISSA_BITS))
            value = tl.where(code < (1 << MANTISSA_BITS), subnormal, normal)
        special = tl.where(upper == _constant(DTYPE, "infinity"), _INFINITY_BITS, _NAN_BITS)
        bits = tl.where(upper > LARGEST, special, value.to(tl.int32, bitcast=True))
        return bits_float(bits | sign)
