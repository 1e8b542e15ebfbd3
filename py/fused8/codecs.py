"""The 8-bit state formats: constants, and encode and decode in plain torch.

A codec stores the two moments of Adam together. `decode` turns the codes and scales of some blocks into FP32
`exp_avg` (m) and `exp_avg_sq` (v); `encode` turns them back. Blocks are the rows of a 2-D tensor [blocks,
block_size]; scales have the shape [blocks, 1]. A block that is shorter than block_size is padded with the zero state,
which decodes to exactly zero and influences nothing.

These functions are the ground truth: csrc/codecs.h and triton_kernels/codecs.py give the same bits. Only separate
FP32 operations are used, each rounded once, and tensor / tensor where a division is meant (torch turns scalar / tensor
into a multiplication by a reciprocal).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

ABS_MAX_GRAD = 2.0**63  # a larger |gradient| could not be squared in FP32; so |m| <= 2^63 and v <= 2^126 always

_MASK32 = 0xFFFFFFFF


class Encoded(NamedTuple):
    """Codes [blocks, block_size] and scales [blocks, 1] of both moments."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor


class Codec:
    """One state format. The dtypes are those of (exp_avg, exp_avg_sq)."""

    name: str
    code_dtypes: tuple[torch.dtype, torch.dtype]
    scale_dtypes: tuple[torch.dtype, torch.dtype]
    zero_codes: tuple[int, int] = (0, 0)

    def decode(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Codes and scales -> FP32 m and v, each [blocks, block_size]."""
        raise NotImplementedError

    def encode(self, m: Tensor, v: Tensor, index: Tensor, time_offset: Tensor | int) -> Encoded:
        """FP32 m and v [blocks, block_size] -> codes and scales.

        `index` (int64, same shape) is the element index modulo 2^32, `time_offset` the value of that function for this
        step; both matter only to a codec that dithers.
        """
        raise NotImplementedError

    def encode_nearest(self, m: Tensor, v: Tensor) -> Encoded:
        """As `encode`, with every v rounded to the nearest code: half a code is the dither of all elements."""
        return self.encode(m, v, torch.zeros((), dtype=torch.int64, device=m.device), 1 << 31)

    def decode_sq(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Codes and scales of exp_avg_sq or max_exp_avg_sq -> FP32 v."""
        raise NotImplementedError

    def encode_sq(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """FP32 v -> codes and scales, rounded to nearest (for max_exp_avg_sq)."""
        raise NotImplementedError

    def check(self, encoded: Encoded) -> str | None:
        """What is wrong with this state, or None. It may come from a damaged or foreign file.

        Refused: scales that `encode` cannot make, and moments beyond |m| <= 2^63 and v <= 2^126.
        """
        raise NotImplementedError


def time_offset(step: int) -> int:
    """The dither's offset at this step (1 at the first step): (step * 2^32/golden ratio) mod 2^32."""
    return (step * Adaptive.TIME) & _MASK32


def _float_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _bits_float(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)


def _check_range(name: str, x: Tensor, largest: float) -> str | None:
    if x.numel() and not bool(((x >= 0) & (x <= largest)).all()):  # also catches NaN
        return f"{name} holds values outside [0, {largest:g}]"
    return None


class Adaptive(Codec):
    """Adaptive FP8, the default.

    v is an unsigned 8-bit float, the upper bits of its FP32 pattern counted from a base. Each block chooses how many
    mantissa bits to keep (k = 2..6) so that its own range fits into 255 codes. The grid is absolute: it does not move
    when the block's largest value moves. Truncation is made unbiased by a dither, without which a step of 0.1 %
    (beta2 = 0.999) could never move an 8-bit v; the dither is a low-discrepancy (additive recurrence) sequence in the
    step, shifted per element, and so needs no random stream.

    m is int8 relative to 2^ceil(e/2), a power of two near sqrt(v), e the exponent of the *stored* v. `exp_avg_sq_scale`
    holds base * 8 + k.
    """

    name = "adaptive"
    code_dtypes = (torch.int8, torch.uint8)
    scale_dtypes = (torch.float32, torch.int32)

    SPACE = 0x6E1EF25B  # odd and below 2^31; as a fraction of 2^32: 1 - the second constant of the R2 sequence
    TIME = 0x9E3779B9  # 2^32 / golden ratio
    K_MIN, K_MAX = 2, 6
    SPAN = 253  # largest distance of a block's end codes that leaves room for the dither's carry
    SMALLEST_RATIO_BITS = (127 - 64) << 23  # 2^-64: below it a block stores m = 0, so 127 / max cannot overflow

    @staticmethod
    def _value_bits(codes: Tensor, base: Tensor, shift: Tensor) -> Tensor:
        codes = codes.to(torch.int32)
        return torch.where(codes == 0, 0, (codes + base) << shift)

    @classmethod
    def _sq_bits(cls, codes: Tensor, meta: Tensor) -> Tensor:
        return cls._value_bits(codes, meta >> 3, 23 - (meta & 7))

    def decode_sq(self, codes: Tensor, scale: Tensor) -> Tensor:
        return _bits_float(self._sq_bits(codes, scale))

    def decode(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        bits = self._sq_bits(encoded.exp_avg_sq, encoded.exp_avg_sq_scale)
        root = _bits_float(((bits >> 24) + 64) << 23)
        m = (encoded.exp_avg.to(torch.float32) * encoded.exp_avg_scale) * root
        return m, _bits_float(bits)

    def _encode_sq(self, v: Tensor, dither: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, meta, and the FP32 bits that the codes decode to. `dither` None rounds to nearest."""
        bits = _float_bits(v)
        largest = bits.amax(1, keepdim=True)
        smallest = torch.where(bits > 0, bits, 0x7FFFFFFF).amin(1, keepdim=True)
        smallest = torch.where(largest == 0, 0, smallest)
        k = torch.full_like(largest, self.K_MIN)
        for candidate in range(self.K_MIN + 1, self.K_MAX + 1):
            span = (largest >> (23 - candidate)) - (smallest >> (23 - candidate))
            k = torch.where(span <= self.SPAN, candidate, k)
        shift = 23 - k
        base = ((largest >> shift) - 254).clamp(min=0)
        if dither is None:
            add = torch.ones_like(shift) << (shift - 1)
        else:
            add = (dither >> (9 + k).to(torch.int64)).to(torch.int32)  # floor(dither * 2^shift / 2^32)
        codes = (((bits + add) >> shift) - base).clamp(1, 255)
        codes = torch.where(bits == 0, 0, codes)
        return codes.to(torch.uint8), base * 8 + k, self._value_bits(codes, base, shift)

    def encode_sq(self, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._encode_sq(v, dither=None)[:2]

    def encode(self, m: Tensor, v: Tensor, index: Tensor, time_offset: Tensor | int) -> Encoded:
        dither = (index * self.SPACE + time_offset) & _MASK32
        v_codes, meta, v_bits = self._encode_sq(v, dither)
        inverse_root = _bits_float((190 - (v_bits >> 24)) << 23)
        ratio = torch.where(v_codes == 0, 0.0, m * inverse_root)
        largest_bits = (_float_bits(ratio) & 0x7FFFFFFF).amax(1, keepdim=True)
        largest_bits = torch.where(largest_bits < self.SMALLEST_RATIO_BITS, 0, largest_bits)
        largest = _bits_float(largest_bits)
        inverse = torch.where(largest_bits > 0, torch.full_like(largest, 127.0) / largest, 0.0)
        m_codes = torch.round(ratio * inverse).to(torch.int8)
        one_127th = torch.full_like(largest, 1 / 127)
        return Encoded(m_codes, v_codes, largest * one_127th, meta)

    def check(self, encoded: Encoded) -> str | None:
        meta, scale = encoded.exp_avg_sq_scale, encoded.exp_avg_scale
        base, k = meta >> 3, meta & 7
        valid = (k >= self.K_MIN) & (k <= self.K_MAX) & (base >= 0)
        top = (base.to(torch.int64) + 255) << (23 - k.clamp(self.K_MIN, self.K_MAX)).to(torch.int64)
        # In a block whose largest v is 2^126, code 255 is one step above it.
        valid &= top <= self._top_bits(2.0**126) + (1 << (23 - self.K_MIN))
        zero_state = (meta == 0) & (encoded.exp_avg_sq == 0).all(1, keepdim=True)
        if not bool((valid | zero_state).all()):
            return "exp_avg_sq_scale holds values that are no base * 8 + k of the adaptive codec"
        if message := _check_range("exp_avg_scale", scale, 2.0**126):
            return message
        # Only where a block could hold an |m| above 2^63 does it have to be decoded to know.
        root = _bits_float((((top >> 24) + 64) << 23).to(torch.int32))
        suspects = ((scale * 127.0) * root > ABS_MAX_GRAD).flatten()
        if bool(suspects.any()):
            m, _ = self.decode(Encoded(*(tensor[suspects] for tensor in encoded)))
            if not bool((m.abs() <= ABS_MAX_GRAD).all()):
                return "exp_avg decodes to values beyond 2^63"
        return None

    @staticmethod
    def _top_bits(x: float) -> int:
        return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _dynamic_map(signed: bool) -> list[float]:
    """The 256 values of the dynamic-exponent map (Dettmers et al., "8-bit Optimizers via Block-wise Quantization").

    Ascending, as bitsandbytes computes them in FP32: decade i = 0..6 from 10^-6 to 1, cut into 2^i (signed) or
    2^(i+1) equal parts, whose midpoints are the values; then 0 and 1. The boundaries are torch's two-sided FP32
    linspace with fused multiply-add, as on a processor that has one (without, torch.linspace differs in its last bit).
    """

    def f32(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).float().item()

    values = []
    for i in range(7):
        n = 2**i if signed else 2 ** (i + 1)
        first, last, power = f32(0.1), 1.0, f32(10.0 ** (i - 6))
        step = f32((last - first) / n)
        bounds = [f32(first + step * j) if j < (n + 1) // 2 else f32(last - step * (n - j)) for j in range(n + 1)]
        means = [f32(f32(a + b) / 2) for a, b in itertools.pairwise(bounds)]
        decade = [f32(mean * power) for mean in means]
        values += decade + ([-x for x in decade] if signed else [])
    return sorted([*values, 0.0, 1.0])


def _midpoints(values: list[float]) -> list[float]:
    """For neighbours a < b the largest FP32 not above (a + b) / 2: x takes b's code exactly if x is above it."""
    mids = []
    for a, b in itertools.pairwise(values):
        exact = torch.tensor((a + b) / 2, dtype=torch.float64)  # exact: neighbours differ by less than 2^29
        mid = exact.float()
        if mid.double() > exact:
            mid = torch.nextafter(mid, torch.tensor(-math.inf))
        mids.append(mid.item())
    return mids


def _block_absmax(x: Tensor) -> Tensor:
    return x.abs().amax(1, keepdim=True)


def _divide(x: Tensor, absmax: Tensor) -> Tensor:
    """x / absmax, and 0 in a block that is all zero."""
    return torch.where(absmax > 0, x / absmax.expand_as(x), 0.0)


class _AbsmaxCodec(Codec):
    """Codes of x relative to the block's largest |x|, which is the scale. Rounds to nearest."""

    code_dtypes = (torch.uint8, torch.uint8)
    scale_dtypes = (torch.float32, torch.float32)

    def _from_codes(self, codes: Tensor, signed: bool) -> Tensor:
        """The value of each code relative to the scale."""
        raise NotImplementedError

    def _to_codes(self, y: Tensor, signed: bool) -> Tensor:
        """y in [-1, 1] -> int codes."""
        raise NotImplementedError

    def decode_sq(self, codes: Tensor, scale: Tensor) -> Tensor:
        return self._from_codes(codes, signed=False) * scale

    def decode(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        m = self._from_codes(encoded.exp_avg, signed=True) * encoded.exp_avg_scale
        return m, self.decode_sq(encoded.exp_avg_sq, encoded.exp_avg_sq_scale)

    def encode_sq(self, v: Tensor) -> tuple[Tensor, Tensor]:
        absmax = _block_absmax(v)
        codes = self._to_codes(_divide(v, absmax), signed=False)
        # A positive v never becomes 0: m would keep a code while v vanished, and the next step were m / eps.
        codes = torch.where(v > 0, codes.clamp(min=1), codes)
        return codes.to(torch.uint8), absmax

    def encode(self, m: Tensor, v: Tensor, index: Tensor, time_offset: Tensor | int) -> Encoded:
        m_absmax = _block_absmax(m)
        m_codes = self._to_codes(_divide(m, m_absmax), signed=True).to(torch.uint8)
        v_codes, v_absmax = self.encode_sq(v)
        return Encoded(m_codes, v_codes, m_absmax, v_absmax)

    def check(self, encoded: Encoded) -> str | None:
        return _check_range("exp_avg_scale", encoded.exp_avg_scale, ABS_MAX_GRAD) or _check_range(
            "exp_avg_sq_scale", encoded.exp_avg_sq_scale, ABS_MAX_GRAD**2
        )


class Dynamic(_AbsmaxCodec):
    """The dynamic-exponent map of bitsandbytes: code = index into 256 ascending values.

    Checkpoints of bitsandbytes load into it without loss. One deliberate difference: a positive v never takes code 0.
    """

    name = "dynamic"
    zero_codes = (127, 0)

    SIGNED = _dynamic_map(signed=True)
    UNSIGNED = _dynamic_map(signed=False)
    SIGNED_MID = _midpoints(SIGNED)
    UNSIGNED_MID = _midpoints(UNSIGNED)

    def _from_codes(self, codes: Tensor, signed: bool) -> Tensor:
        values = torch.tensor(self.SIGNED if signed else self.UNSIGNED, device=codes.device)
        return values[codes.to(torch.int64)]

    def _to_codes(self, y: Tensor, signed: bool) -> Tensor:
        mids = torch.tensor(self.SIGNED_MID if signed else self.UNSIGNED_MID, device=y.device)
        return torch.searchsorted(mids, y.contiguous())  # the number of midpoints below y


class E4M3(_AbsmaxCodec):
    """float8_e4m3fn codes (sign, 4 exponent and 3 mantissa bits, largest 448), stored as uint8."""

    name = "e4m3"

    def _from_codes(self, codes: Tensor, signed: bool) -> Tensor:
        codes = codes.to(torch.int32)
        magnitude = codes & 0x7F
        normal = _bits_float((magnitude << 20) + (120 << 23))
        value = torch.where(magnitude < 8, magnitude.to(torch.float32) * 2.0**-9, normal)
        value = torch.where(codes >= 128, -value, value)
        return value * torch.full_like(value, 1 / 448)

    def _to_codes(self, y: Tensor, signed: bool) -> Tensor:
        z = y.abs() * 448.0
        mantissa = _float_bits(z) - (120 << 23)
        normal = (mantissa + 0x7FFFF + ((mantissa >> 20) & 1)) >> 20
        codes = torch.where(z < 2.0**-6, torch.round(z * 512.0).to(torch.int32), normal)
        return codes | torch.where(torch.signbit(y), 128, 0) if signed else codes

    def check(self, encoded: Encoded) -> str | None:
        if bool(((encoded.exp_avg & 0x7F) == 0x7F).any()):
            return "exp_avg holds the code of NaN"
        if bool((encoded.exp_avg_sq >= 0x7F).any()):
            return "exp_avg_sq holds codes of negative values or NaN"
        return super().check(encoded)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Adaptive(), Dynamic(), E4M3())}
FP32 = "fp32"  # the name, wherever a codec is named, of state that stays in 32 bits
