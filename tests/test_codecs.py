"""The codecs by themselves: tables pinned, every code checked, encoding against brute force."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused8.codecs import ABS_MAX_GRAD, CODECS, Dynamic, Encoded, time_offset

from .support import CODECS as CODEC_NAMES

ADAPTIVE, DYNAMIC, E4M3 = (CODECS[name] for name in CODEC_NAMES)


def sq_block(values):
    v = torch.zeros(1, 256)
    v[0, : len(values)] = torch.as_tensor(values, dtype=torch.float32)
    return v


def round_trip(codec, m, v, step=1):
    index = torch.arange(m.numel()).view_as(m)
    return codec.decode(codec.encode(m, v, index, time_offset(step)))


# -- dynamic ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign, values", [("signed", Dynamic.SIGNED), ("unsigned", Dynamic.UNSIGNED)])
def test_dynamic_maps_are_pinned(sign, values):
    """The FP32 bit patterns, as bitsandbytes has them (test_bitsandbytes.py compares the two directly)."""
    pinned = Path(__file__).with_name("data") / f"dynamic_map_{sign}.hex"
    assert [struct.pack(">f", x).hex() for x in values] == pinned.read_text().split()


@pytest.mark.parametrize("values", [Dynamic.SIGNED, Dynamic.UNSIGNED], ids=["signed", "unsigned"])
def test_dynamic_map_is_the_published_one(values):
    """Derived again in exact arithmetic: decade i has 2^i (signed) or 2^(i+1) midpoints of equal parts of [0.1, 1]."""
    signed = values[0] < 0
    expected = [0.0, 1.0]
    for i in range(7):
        n = 2**i * (1 if signed else 2)
        decade = [(0.1 + 0.9 * (j + 0.5) / n) * 10.0 ** (i - 6) for j in range(n)]
        expected += decade + ([-x for x in decade] if signed else [])
    assert np.allclose(values, sorted(expected), rtol=3e-7, atol=0)
    assert len(set(values)) == 256 and values == sorted(values)


def test_dynamic_landmarks():
    assert (Dynamic.SIGNED[127], Dynamic.SIGNED[255]) == (0.0, 1.0)
    assert Dynamic.SIGNED[0] == pytest.approx(-0.9929687, abs=1e-7)
    assert Dynamic.UNSIGNED[0] == 0.0
    assert Dynamic.UNSIGNED[1:3] == pytest.approx([3.25e-7, 7.75e-7], rel=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_dynamic_encodes_to_the_nearest_value_on_both_sides_of_every_midpoint(signed):
    values = np.array(Dynamic.SIGNED if signed else Dynamic.UNSIGNED, dtype=np.float64)
    mids = np.array(Dynamic.SIGNED_MID if signed else Dynamic.UNSIGNED_MID, dtype=np.float32)
    near = [mids]
    for direction in (np.float32(-np.inf), np.float32(np.inf)):
        x = mids
        for _ in range(3):
            x = np.nextafter(x, direction)
            near.append(x)
    y = np.concatenate([*near, values.astype(np.float32), np.linspace(-1 if signed else 0, 1, 5001, dtype=np.float32)])
    distance = np.abs(y.astype(np.float64)[:, None] - values[None, :])  # exact in float64; argmin: the lower of a tie
    expected = distance.argmin(1)
    assert np.array_equal(DYNAMIC._to_codes(torch.from_numpy(y), signed).numpy(), expected)


# -- e4m3 -------------------------------------------------------------------------------------------------------------


def test_e4m3_codes_are_those_of_float8_e4m3fn():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float() * torch.tensor(1 / 448)
    assert torch.equal(E4M3._from_codes(codes, signed=True), expected)


def test_e4m3_rounds_as_torch_does():
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mids = (finite[1:] + finite[:-1]) / 2
    z = torch.cat([finite, mids, torch.nextafter(mids, torch.tensor(0.0)), torch.nextafter(mids, torch.tensor(1e9))])
    z = torch.cat([z, torch.rand(20000) * 448, torch.rand(2000) * 0.05])
    y = z / torch.full_like(z, 448.0)
    y = torch.cat([y, -y])
    expected = (y * 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(E4M3._to_codes(y, signed=True).to(torch.uint8), expected)


# -- adaptive ---------------------------------------------------------------------------------------------------------


def test_adaptive_codes_are_positive_finite_fixed_points():
    """Each of the 255 codes at every k and at the lowest and highest base decodes to a finite v > 0, which encodes to
    itself whatever the dither."""
    codes = torch.arange(1, 256, dtype=torch.int32).view(1, -1)
    for k in range(2, 7):
        shift = 23 - k
        for base in (0, 1, 100, (0x7E800000 >> shift) - 254):
            bits = (codes + base) << shift
            v = bits.view(torch.float32)
            assert bool((v > 0).all()) and bool(v.isfinite().all())
            meta = torch.tensor([[base * 8 + k]], dtype=torch.int32)
            assert torch.equal(ADAPTIVE.decode_sq(codes.to(torch.uint8), meta), v)
            for add in (0, (1 << shift) - 1):
                assert torch.equal((((bits + add) >> shift) - base).clamp(1, 255), codes)


def test_adaptive_scale_of_m_is_the_exact_root():
    """m is kept relative to 2^ceil(e/2), e the exponent of the stored v, and the encoder divides by just that."""
    for e in range(-126, 127):
        bits = torch.tensor([[2.0**e]]).view(torch.int32)
        root = (((bits >> 24) + 64) << 23).view(torch.float32)
        inverse = ((190 - (bits >> 24)) << 23).view(torch.float32)
        assert root.item() == 2.0 ** math.ceil(e / 2) and (root * inverse).item() == 1.0


@pytest.mark.parametrize("spread", [1.5, 10.0, 1e3, 1e6])
def test_adaptive_dither_is_unbiased_and_moves_v_in_small_steps(spread):
    """The mean of the decoded v over 1024 steps is v to within 0.1 % of the step between two codes, although a single
    v may be a whole code away. The additive recurrence with the golden ratio has discrepancy O(log N / N)."""
    v = sq_block(np.geomspace(1e-6, 1e-6 * spread, 256))
    decoded = [round_trip(ADAPTIVE, torch.zeros_like(v), v, step)[1].double() for step in range(1, 1025)]
    meta = ADAPTIVE.encode_sq(v)[1]
    ulp = 2.0 ** (-(meta & 7).double())  # relative distance of two codes, at most
    assert ((torch.stack(decoded).mean(0) / v.double() - 1).abs() / ulp).max() < 8 / 1024
    assert ((decoded[0] / v.double() - 1).abs() <= ulp).all()


def test_adaptive_chooses_the_finest_mantissa_that_fits():
    for spread, k in (
        (1.0, 6),
        (10.0, 6),
        (2.0**6, 5),
        (2.0**14, 4),
        (2.0**30, 3),
        (2.0**60, 2),
        (2.0**120, 2),
    ):
        meta = ADAPTIVE.encode_sq(sq_block([1.0, 1.0 / spread]))[1]
        assert int(meta) & 7 == k, spread


# -- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_zero_state_decodes_to_zero_and_is_encoded_from_zero(name):
    codec = CODECS[name]
    zeros = torch.zeros(2, 64)
    encoded = codec.encode(zeros, zeros, torch.arange(128).view(2, 64), time_offset(5))
    m, v = codec.decode(encoded)
    assert torch.equal(m, zeros) and torch.equal(v, zeros)
    for i, code in enumerate(codec.zero_codes):
        assert bool((encoded[i] == code).all())
    assert codec.check(encoded) is None


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_every_code_decodes_to_a_finite_value_of_its_sign(name):
    codec = CODECS[name]
    codes = torch.arange(256, dtype=torch.int32).view(1, 256)
    m_codes = codes.to(torch.uint8).view(codec.code_dtypes[0])
    scale = torch.ones(1, 1)
    meta = torch.tensor([[1000 * 8 + 4]], dtype=torch.int32) if name == "adaptive" else scale
    usable = (codes & 0x7F != 0x7F) if name == "e4m3" else torch.ones(1, 256, dtype=torch.bool)
    m, v = codec.decode(Encoded(m_codes, codes.to(torch.uint8), scale, meta))
    assert bool(m[usable].isfinite().all()) and bool(v[usable].isfinite().all())
    assert bool((v[usable & (codes < 128)] >= 0).all())
    assert bool((v[0, 1:127] > 0).all())


floats = st.floats(0, 2.0**126, width=32, allow_subnormal=True)


@pytest.mark.parametrize("name", CODEC_NAMES)
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-(2.0**63), 2.0**63, width=32), floats), min_size=1, max_size=40),
    st.integers(1, 2**24),
)
def test_any_moments_survive(name, moments, step):
    """From any |m| <= 2^63 and 0 <= v <= 2^126: finite, zero stays zero, positive v stays positive, `check` agrees."""
    codec = CODECS[name]
    m, v = (sq_block(column) for column in zip(*moments, strict=True))
    index = torch.arange(256).view(1, 256)
    encoded = codec.encode(m, v, index, time_offset(step))
    new_m, new_v = codec.decode(encoded)
    assert bool(new_m.isfinite().all()) and bool(new_v.isfinite().all())
    assert bool((new_v[v == 0] == 0).all())
    if name == "adaptive":
        assert bool((new_v[v > 0] > 0).all())
    else:  # the code is positive; its value may underflow with the scale
        assert bool((encoded.exp_avg_sq[v > 0] > 0).all())
    sane = codec is not ADAPTIVE or bool((m.abs() <= 2.0**20 * v.sqrt()).all())
    if sane:
        assert codec.check(encoded) is None
    sq_codes, _sq_scale = codec.encode_sq(v)
    assert bool((sq_codes[v > 0] > 0).all()) and bool((sq_codes[v == 0] == 0).all())


def test_check_refuses_what_encode_cannot_make():
    codes = torch.full((1, 256), 255, dtype=torch.uint8)
    m_codes = torch.full((1, 256), 127, dtype=torch.int8)
    one = torch.ones(1, 1)

    def adaptive(meta, scale=one, m=m_codes):
        return ADAPTIVE.check(Encoded(m, codes, scale, torch.tensor([[meta]], dtype=torch.int32)))

    good = (0x3F800000 >> 17) - 254
    assert adaptive(good * 8 + 6) is None
    for meta in (0, 1, good * 8 + 7, -8, 2**31 - 1, -(2**31) + 2, (0x7F800000 >> 17) * 8 + 6):
        assert "exp_avg_sq_scale" in adaptive(meta)
    for scale in (float("nan"), float("inf"), -1.0):
        assert "exp_avg_scale" in adaptive(good * 8 + 6, one * scale)
    huge = (0x7E000000 >> 17) - 254
    assert "2^63" in adaptive(huge * 8 + 6, one * 2.0**40)
    assert adaptive(huge * 8 + 6, one * 2.0**40, torch.zeros_like(m_codes)) is None
    codes = torch.full((1, 256), 0x7E, dtype=torch.uint8)
    for codec in (DYNAMIC, E4M3):
        for bad in (float("nan"), float("inf"), -1.0):
            assert codec.check(Encoded(codes, codes, one * bad, one)) is not None
            assert codec.check(Encoded(codes, codes, one, one * bad)) is not None
        assert codec.check(Encoded(codes, codes, one * ABS_MAX_GRAD, one * ABS_MAX_GRAD**2)) is None
    for bad in (0x7F, 0xFF, 0x80):  # NaN twice, and minus zero where only v >= 0 can be
        assert "exp_avg_sq" in E4M3.check(Encoded(codes, torch.full_like(codes, bad), one, one))
    assert "exp_avg" in E4M3.check(Encoded(torch.full_like(codes, 0xFF), codes, one, one))
