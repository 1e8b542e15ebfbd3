"""Rounding to the parameter's format, and the extra bits kept beside it."""

import numpy as np
import pytest
import torch

from fused8 import formats

from .support import bits

DTYPES = tuple(formats.FORMATS)
SPECIAL = torch.tensor(
    [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-45, 448.0, 465.0, 6e4]
)


def everywhere(n=200_000):
    """FP32 numbers of all exponents and both signs, all ties of 16-bit formats among them."""
    any_bits = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(0, 1 << 16, dtype=torch.int64) << 16 | 0x8000).to(torch.int32)
    near = torch.cat([torch.randn(n) * 10.0**e for e in (-8, -5, -3, 0, 2)])
    x = torch.cat([any_bits.view(torch.float32), ties.view(torch.float32), near, SPECIAL])
    return torch.cat([x, torch.nextafter(x, torch.tensor(0.0))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_to_nearest_as_torch_does(dtype):
    x = everywhere()
    ours = formats.encode(x, dtype)[0].float()
    theirs = x.to(dtype).float()
    if dtype.itemsize == 1:  # ours saturates, torch makes NaN or infinity of what is too large
        largest = torch.finfo(dtype).max
        theirs = torch.where(x.abs() >= largest, torch.copysign(torch.tensor(largest), x), theirs)
        theirs = torch.where(x.isnan(), x, theirs)
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_takes_a_neighbour_and_is_unbiased(dtype):
    """The mean over n draws is within 5 standard errors, at most half a code / sqrt(n), of the number itself."""
    f = torch.finfo(dtype)
    x = torch.cat([torch.randn(2000), torch.randn(2000) * f.tiny, torch.randn(500) * f.tiny * 2.0**-12, SPECIAL[:2]])
    x = x.clamp(-f.max, f.max)
    index = torch.arange(len(x))
    draws = []
    n = 1000
    for step in range(1, n + 1):
        random = formats.random_bits(index, formats.rounding_key(3, step))
        draws.append(formats.encode(x, dtype, random=random)[0].double())
    draws = torch.stack(draws)
    code = torch.maximum(x.double().abs() * f.eps, torch.tensor(f.smallest_normal * f.eps, dtype=torch.float64))
    assert ((draws - x.double()).abs() < code * 1.0000001).all()
    assert ((draws.mean(0) - x.double()).abs() <= 5 * 0.5 * code / n**0.5).all()
    assert (((draws.mean(0) - x.double()) / code).mean().abs()) < 5 * 0.5 / (n * len(x)) ** 0.5
    exact = x.to(dtype).float() == x
    assert torch.equal(draws[0][exact], x.double()[exact])


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("extra", [8, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extra_bits_extend_the_mantissa(dtype, extra, random):
    f = torch.finfo(dtype)
    x = torch.cat([everywhere(50_000), torch.randn(50_000)])
    x = x[(x.abs() <= f.max) | x.isnan()]
    draws = formats.random_bits(torch.arange(len(x)), 5) if random else None
    parameter, correction = formats.encode(x, dtype, extra, draws)
    assert correction.dtype == formats.CORRECTION_DTYPES[extra]
    again = formats.decode(parameter, correction)
    code = torch.maximum(x.abs().double() * f.eps, torch.tensor(f.smallest_normal * f.eps, dtype=torch.float64))
    error = (again.double() - x.double()).abs()[~x.isnan()] * 2**extra / code[~x.isnan()]
    assert error.max() <= (1.0 if random else 0.5) * 1.0000001
    assert torch.equal(again.isnan(), x.isnan())
    # The parameter by itself is the number rounded to its format, within the rounding of the extended one.
    nearest = (parameter.double() - x.double()).abs()[~x.isnan()] / code[~x.isnan()]
    assert nearest.max() <= 0.5 + 2.0 ** -(extra - 1)
    stable, same = formats.encode(again, dtype, extra)
    assert torch.equal(bits(stable.float()), bits(parameter.float())) and torch.equal(same, correction)


def test_bfloat16_and_16_bits_are_float32():
    x = everywhere()
    x = x[x.abs() <= torch.finfo(torch.bfloat16).max]
    assert torch.equal(bits(formats.decode(*formats.encode(x, torch.bfloat16, 16))), bits(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_beyond_the_largest(dtype):
    x = torch.tensor([3.3e38, 3.4e38, float("inf"), -float("inf"), float("nan")])
    parameter, correction = formats.encode(x, dtype, 8)
    again = formats.decode(parameter, correction)
    largest = x[:2].clamp(max=torch.finfo(dtype).max)
    assert bool(again[:2].isfinite().all()) and bool((again[:2] >= largest * 0.999).all())
    assert again[4].isnan()


def test_stochastic_rounding_of_fp16_makes_no_infinity_of_a_number():
    """Between 65504, the largest, and where rounding to nearest overflows there is no second neighbour."""
    x = torch.tensor([65504.0, 65508.0, 65519.0, -65519.0, 1e6, float("inf")]).repeat_interleave(500)
    draws = formats.random_bits(torch.arange(len(x)), formats.rounding_key(0, 1))
    stored = formats.encode(x, torch.float16, random=draws)[0].float()
    assert torch.equal(stored[:2500], x[:2500].clamp(-65504.0, 65504.0)) and bool(stored[2500:].isinf().all())


def test_random_bits_of_neighbours_are_independent():
    """Drawn by neighbouring elements, rows, steps and seeds: the correlation is that of n independent uniform numbers,
    whose standard deviation is 1 / sqrt(n). So is that of any one bit with the same bit, or the next lower one."""
    n = 1 << 17
    index = torch.arange(n)

    def draw(offset=0, seed=0, step=1):
        return formats.random_bits(index + offset, formats.rounding_key(seed, step)).numpy()

    def correlation(a, b):
        return abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1])

    others = [draw(1), draw(2), draw(256), draw(4096), draw(step=2), draw(step=3), draw(seed=1), draw(1, step=2)]
    for other in others:
        assert correlation(draw(), other) < 5 / n**0.5
        for bit in (0, 7, 15, 16, 23, 31):
            mine, theirs = (draw() >> bit) & 1, (other >> bit) & 1
            assert correlation(mine, theirs) < 5 / n**0.5
            assert correlation(mine, (other >> max(bit - 1, 0)) & 1) < 5 / n**0.5


def test_random_bits_are_pinned_and_even():
    """lowbias32 of 0, 1, 2 computed by its published three lines in Python integers."""

    def lowbias32(x):
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    index = torch.tensor([0, 1, 2, 12345, 2**32 - 1])
    assert formats.random_bits(index, 7).tolist() == [lowbias32((i + 7) % 2**32) for i in index.tolist()]
    drawn = formats.random_bits(torch.arange(1 << 16), formats.rounding_key(0, 1)).numpy().astype(np.uint64)
    shares = [((drawn >> np.uint64(b)) & np.uint64(1)).mean() for b in range(32)]
    assert max(abs(share - 0.5) for share in shares) < 5 * 0.5 / 2**8
    assert len({formats.rounding_key(seed, step) for seed in range(50) for step in range(200)}) > 9990
