"""The 8-bit state formats as device functions: the same bits as fused8/codecs.py, which describes them.

Tiles are [blocks, width]; scales are [blocks, 1]. Elements beyond the end of a block hold zeros, which influence
nothing. CODEC is the name of a codec, TARGET as in arithmetic.py. `tables` points to `dynamic_tables()` for the codec
"dynamic" and is None for the others.
"""

# ruff: noqa: SIM108 (conditions on constexprs are written for the compiler)

import torch
import triton
import triton.language as tl

from ..codecs import Adaptive, Dynamic
from .arithmetic import bits_float, float_bits, ratio, relative, round_to_int, signed_bytes_to_float

SPACE = tl.constexpr(Adaptive.SPACE)
SPAN = tl.constexpr(Adaptive.SPAN)
FINEST_SHIFT = tl.constexpr(23 - Adaptive.K_MAX)
COARSEST_SHIFT = tl.constexpr(23 - Adaptive.K_MIN)
SMALLEST_RATIO = tl.constexpr(2.0**-64)
ONE_127TH = tl.constexpr(1 / 127)

ONE_448TH = tl.constexpr(1 / 448)

# Rows of `dynamic_tables()`.
TABLE_WIDTH = tl.constexpr(256)
SIGNED_VALUES = tl.constexpr(0)
UNSIGNED_VALUES = tl.constexpr(1)
SIGNED_MIDPOINTS = tl.constexpr(2)
UNSIGNED_MIDPOINTS = tl.constexpr(3)


def dynamic_tables() -> torch.Tensor:
    """float32 [4, 256]: the values of the signed and the unsigned map, and the midpoints of both."""
    midpoints = [[*mids, float("inf")] for mids in (Dynamic.SIGNED_MID, Dynamic.UNSIGNED_MID)]
    return torch.tensor([Dynamic.SIGNED, Dynamic.UNSIGNED, *midpoints], dtype=torch.float32, device="cpu")


@triton.jit
def decode(m_codes, v_codes, m_scale, v_scale, tables, CODEC: tl.constexpr, TARGET: tl.constexpr):
    """Codes and scales -> FP32 m and v."""
    if CODEC == "adaptive":
        pattern, shift = _adaptive_pattern(v_codes, v_scale)
        root = bits_float(((pattern >> (24 - shift)) + 64) << 23)
        return (signed_bytes_to_float(m_codes, TARGET) * m_scale) * root, bits_float(pattern << shift)
    elif CODEC == "dynamic":
        m = tl.load(tables + SIGNED_VALUES * TABLE_WIDTH + m_codes.to(tl.int32)) * m_scale
        return m, decode_sq(v_codes, v_scale, tables, CODEC)
    else:
        return _e4m3_value(m_codes) * m_scale, decode_sq(v_codes, v_scale, tables, CODEC)


@triton.jit
def decode_sq(codes, scale, tables, CODEC: tl.constexpr):
    """Codes and scales of exp_avg_sq or max_exp_avg_sq -> FP32 v."""
    if CODEC == "adaptive":
        pattern, shift = _adaptive_pattern(codes, scale)
        return bits_float(pattern << shift)
    elif CODEC == "dynamic":
        return tl.load(tables + UNSIGNED_VALUES * TABLE_WIDTH + codes.to(tl.int32)) * scale
    else:
        return _e4m3_value(codes) * scale


@triton.jit
def encode(m, v, index, time_offset, tables, CODEC: tl.constexpr, TARGET: tl.constexpr):
    """FP32 m and v -> codes and scales of both. `index` (uint32) is the element index, for a codec that dithers."""
    if CODEC == "adaptive":
        dither = index * SPACE + time_offset
        v_codes, pattern, shift, meta = _adaptive_encode_sq(v, dither, True)
        inverse_root = bits_float((190 - (pattern >> (24 - shift))) << 23)
        relative_m = tl.where(float_bits(v) == 0, 0.0, m * inverse_root)
        largest = tl.max(tl.abs(relative_m), 1, keep_dims=True)
        largest = tl.where(largest < SMALLEST_RATIO, 0.0, largest)
        inverse = ratio(tl.full(largest.shape, 127.0, tl.float32), tl.maximum(largest, SMALLEST_RATIO), TARGET)
        inverse = tl.where(largest > 0.0, inverse, 0.0)
        m_codes = round_to_int(relative_m * inverse).to(tl.int8)
        return m_codes, v_codes, largest * ONE_127TH, meta
    else:
        absmax = tl.max(tl.abs(m), 1, keep_dims=True)
        y = relative(m, absmax, TARGET)
        if CODEC == "dynamic":
            m_codes = _dynamic_code(y, tables, True)
        else:
            m_codes = _e4m3_magnitude(y) | tl.where((float_bits(m) < 0) & (absmax > 0.0), 128, 0)
        v_codes, v_absmax = encode_sq(v, tables, CODEC, TARGET)
        return m_codes.to(tl.uint8), v_codes, absmax, v_absmax


@triton.jit
def encode_sq(v, tables, CODEC: tl.constexpr, TARGET: tl.constexpr):
    """FP32 v -> codes and scales, rounded to nearest."""
    if CODEC == "adaptive":
        codes, _, _, meta = _adaptive_encode_sq(v, 0, False)
        return codes, meta
    else:
        absmax = tl.max(v, 1, keep_dims=True)
        y = relative(v, absmax, TARGET)
        if CODEC == "dynamic":
            codes = _dynamic_code(y, tables, False)
        else:
            codes = _e4m3_magnitude(y)
        return tl.where(v > 0.0, tl.maximum(codes, 1), codes).to(tl.uint8), absmax


# -- adaptive: v is the upper bits of its FP32 pattern, counted from a base


@triton.jit
def _adaptive_pattern(codes, meta):
    """The FP32 pattern of v without its low `shift` bits, and that shift."""
    codes = codes.to(tl.int32)
    return tl.where(codes == 0, 0, codes + (meta >> 3)), 23 - (meta & 7)


@triton.jit
def _adaptive_encode_sq(v, dither, DITHER: tl.constexpr):
    """Codes of v, their patterns (of any value where v is 0), the shift and the meta of each block."""
    bits = float_bits(v)
    largest = tl.max(bits, 1, keep_dims=True)
    # The smallest positive one: 0 wraps around to the end. If there is none it wraps back to 0.
    smallest = (tl.min((bits - 1).to(tl.uint32, bitcast=True), 1, keep_dims=True) + 1).to(tl.int32, bitcast=True)

    # The finest grid that spans the block. The bit length of the range leaves two to choose from (a conversion that
    # rounds up to the next power of two only skips one that is too fine).
    bit_length = (float_bits((largest - smallest).to(tl.float32)) >> 23) - 126
    shift = tl.minimum(tl.maximum(bit_length - 8, FINEST_SHIFT), COARSEST_SHIFT)
    spanned = (largest >> shift) - (smallest >> shift) <= SPAN
    shift = tl.where(spanned, shift, tl.minimum(shift + 1, COARSEST_SHIFT))
    base = tl.maximum((largest >> shift) - 254, 0)

    if DITHER:
        add = (dither >> (32 - shift).to(tl.uint32)).to(tl.int32)
    else:
        add = 1 << (shift - 1)
    # Never above 255: the largest v is at most 254 above the base, and what is added carries at most one.
    codes = tl.maximum((bits + add - (base << shift)) >> shift, 1)
    codes = tl.where(bits == 0, 0, codes)
    return codes.to(tl.uint8), codes + base, shift, base * 8 + 23 - shift


# -- dynamic: a base-10 float


@triton.jit
def _dynamic_code(y, tables, SIGNED: tl.constexpr):
    """The number of midpoints below y, for |y| <= 1.

    Within a decade the midpoints are evenly spaced, so arithmetic finds the one nearest to |y|, with an error far below
    the half spacing that would matter; a comparison with its exact value decides.
    """
    PARTS: tl.constexpr = 1 if SIGNED else 2  # of the first decade; each next one has twice as many
    a = tl.abs(y)
    slope = tl.full(a.shape, PARTS * 1e6 / 0.9, tl.float32)
    parts = tl.full(a.shape, PARTS, tl.float32)
    for decade in tl.static_range(1, 7):
        above = a >= 10.0 ** (decade - 7)
        slope = tl.where(above, PARTS * 2.0**decade * 10.0 ** (6 - decade) / 0.9, slope)
        parts = tl.where(above, PARTS * 2.0**decade, parts)
    nearest = round_to_int(a * slope + parts * (0.8 / 0.9) - PARTS)
    if SIGNED:
        nearest = tl.maximum(tl.where(y < 0.0, 126 - nearest, 127 + nearest), 0)
        midpoint = tl.load(tables + SIGNED_MIDPOINTS * TABLE_WIDTH + nearest)
    else:
        nearest = tl.maximum(nearest, 0)
        midpoint = tl.load(tables + UNSIGNED_MIDPOINTS * TABLE_WIDTH + nearest)
    return nearest + tl.where(midpoint < y, 1, 0)


# -- e4m3: an FP32 pattern shifted by 20 bits, whose exponent bias is 120 too small


@triton.jit
def _e4m3_value(codes):
    codes = codes.to(tl.int32)
    return (bits_float(((codes & 0x7F) << 20) | ((codes & 0x80) << 24)) * 2.0**120) * ONE_448TH


@triton.jit
def _e4m3_magnitude(y):
    z = tl.abs(y) * 448.0
    bits = float_bits(z) - (120 << 23)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    return tl.where(z < 2.0**-6, round_to_int(z * 512.0), normal)
