"""The reference against numpy, whose FP32 operations round correctly, written again from the definition."""

import numpy as np
import pytest
import torch

from fused8 import reference
from fused8.codecs import ABS_MAX_GRAD, time_offset
from fused8.formats import rounding_key
from fused8.step_plan import SCALAR_COLUMNS, Hyperparameters, fill_scalar_table, scalar_row, scalar_table

from .support import bits, hostile_gradient

F32, I32 = np.float32, np.int32


def numpy_decode(m_codes, v_codes, scale, meta):
    base, shift = meta >> 3, 23 - (meta & 7)
    v_bits = np.where(v_codes == 0, 0, (v_codes.astype(I32) + base) << shift).astype(I32)
    root = (((v_bits >> 24) + 64) << 23).astype(I32).view(F32)
    return (m_codes.astype(F32) * scale) * root, v_bits.view(F32)


def numpy_encode(m, v, index, offset):
    b = v.view(I32)
    largest = b.max(1, keepdims=True)
    smallest = np.where(largest == 0, 0, np.where(b > 0, b, 0x7FFFFFFF).min(1, keepdims=True))
    k = np.full_like(largest, 2)
    for candidate in (3, 4, 5, 6):
        k = np.where((largest >> (23 - candidate)) - (smallest >> (23 - candidate)) <= 253, candidate, k)
    shift = 23 - k
    base = np.maximum((largest >> shift) - 254, 0)
    hashed = (index.astype(np.uint64) * np.uint64(0x6E1EF25B) + np.uint64(offset)) & np.uint64(0xFFFFFFFF)
    q = np.clip(((b + (hashed >> (32 - shift).astype(np.uint64)).astype(I32)) >> shift) - base, 1, 255)
    q = np.where(b == 0, 0, q).astype(I32)
    v_bits = np.where(q == 0, 0, (q + base) << shift).astype(I32)
    r = np.where(q == 0, F32(0), m * ((190 - (v_bits >> 24)) << 23).astype(I32).view(F32))
    a = np.abs(r).max(1, keepdims=True)
    a = np.where(a < F32(2.0**-64), F32(0), a)
    with np.errstate(divide="ignore"):
        inverse = np.where(a > 0, F32(127) / a, F32(0))
    return np.rint(r * inverse).astype(np.int8), q.astype(np.uint8), a * F32(1 / 127), (base * 8 + k).astype(I32)


def numpy_step(p, g, state, index, step, lr, weight_decay):
    g = np.where(np.abs(g) <= F32(2.0**63), g, F32(0))
    m, v = numpy_decode(*state)
    p = p * F32(1 - lr * weight_decay)
    m = F32(0.9) * m + F32(1 - 0.9) * g
    v = F32(0.999) * v + (F32(1 - 0.999) * g) * g
    denom = np.sqrt(v) * F32(1 / np.sqrt(1 - 0.999**step)) + F32(1e-8)
    p = p - F32(lr / (1 - 0.9**step)) * (m / denom)
    return p, numpy_encode(m, v, index, step * 0x9E3779B9 % 2**32)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_adaptive_step_equals_numpy():
    rows, block, row0 = 64, 256, 2**24 - 20  # element indices cross 2^32
    p = np.random.default_rng(0).standard_normal((rows, block)).astype(F32)
    state = [np.zeros((rows, block), np.int8), np.zeros((rows, block), np.uint8), np.zeros((rows, 1), F32)]
    state.append(np.zeros((rows, 1), I32))
    index = (np.arange(rows * block).reshape(rows, block) + row0 * block) % 2**32
    params, ours = [torch.from_numpy(p.copy())], [torch.from_numpy(x.copy()) for x in state]
    nonfinite = torch.zeros(1, dtype=torch.int64)
    table = torch.tensor([[0, row0, 0, block]])
    expected_nonfinite = 0
    for step in range(1, 41):
        lr = 1e-3 * (1 + step % 3)
        g = hostile_gradient((rows, block), step)
        expected_nonfinite += int((~(g.abs() <= 2.0**63)).sum())
        p, state = numpy_step(p, g.numpy(), state, index, step, lr, 0.01)
        scalars = scalar_table([scalar_row(Hyperparameters(lr, 0.9, 0.999, 1e-8, 0.01, True), step)])
        lists = ([x] for x in ours)
        reference.adam_step(
            params,
            [g],
            *lists,
            [],
            [],
            [],
            scalars,
            table,
            None,
            None,
            nonfinite,
            "adaptive",
            block,
            True,
            False,
            False,
        )
        for name, a, b in zip(["p", "exp_avg", "exp_avg_sq", "scale", "meta"], [p, *state], params + ours, strict=True):
            assert torch.equal(bits(torch.from_numpy(a)), bits(b)), f"{name} at step {step}"
    assert int(nonfinite) == expected_nonfinite > 0


def test_square_root_is_correctly_rounded():
    """Every exponent, both parities, all mantissas of one binade: torch.sqrt on a CPU is not."""
    mantissas = torch.arange(0, 1 << 23, 7, dtype=torch.int32)
    for exponent in (0, 1, 2, 63, 64, 126, 127, 128, 200, 253):
        x = ((exponent << 23) | mantissas).view(torch.float32)
        assert np.array_equal(reference.sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_scalars_are_rounded_once_from_float64():
    h = Hyperparameters(3e-4, 0.9, 0.999, 1e-8, 0.1, True, rounding_seed=5)
    row = scalar_table([scalar_row(h, 7)])[0]
    expected = {
        "beta1": 0.9,
        "one_minus_beta1": 1 - 0.9,
        "beta2": 0.999,
        "one_minus_beta2": 1 - 0.999,
        "eps": 1e-8,
        "step_size": 3e-4 / (1 - 0.9**7),
        "inv_bias_correction2_sqrt": 1 / (1 - 0.999**7) ** 0.5,
        "decay": 1 - 3e-4 * 0.1,
        "weight_decay": 0.0,
    }
    for i, name in enumerate(SCALAR_COLUMNS[:9]):
        assert row[i].item() == F32(expected[name]), name
    assert row.view(torch.int32)[9].item() % 2**32 == time_offset(7) == 7 * 0x9E3779B9 % 2**32
    assert row.view(torch.int32)[10].item() % 2**32 == rounding_key(5, 7)
    coupled = scalar_table([scalar_row(h._replace(decoupled_weight_decay=False, eps=0.0), 1)])[0]
    assert (coupled[7].item(), coupled[8].item(), coupled[4].item()) == (1.0, F32(0.1), 2.0**-64)


@pytest.mark.parametrize("lr", [3e-4, torch.tensor(3e-4, dtype=torch.float64)])
def test_scalars_computed_on_the_device_are_the_same(lr):
    h = Hyperparameters(lr, 0.9, 0.999, 1e-8, 0.1, True, rounding_seed=-12345678901234567890)
    steps = [1, 2, 3, 10, 1000, 99_999, 2**24 - 1]
    on_device = torch.zeros(len(steps), 16)
    fill_scalar_table(on_device, h, torch.tensor(steps, dtype=torch.float32))
    on_host = scalar_table([scalar_row(h, step) for step in steps])
    assert torch.equal(on_device.view(torch.int32), on_host.view(torch.int32))


def test_the_largest_gradients_that_count():
    params = [torch.zeros(1, 64)]
    state = [torch.zeros(1, 64) for _ in range(2)]
    g = torch.zeros(1, 64)
    g[0, :4] = torch.tensor([ABS_MAX_GRAD, -ABS_MAX_GRAD, 2.0**63 * (1 + 2**-23), float("inf")])
    nonfinite = torch.zeros(1, dtype=torch.int64)
    scalars = scalar_table([scalar_row(Hyperparameters(1.0, 0.0, 0.0, 0.0, 0.0, True), 1)])
    table = torch.tensor([[0, 0, 0, 64]])
    lists = ([state[0]], [state[1]], [], [], [], [], [])
    flags = ("fp32", 256, True, False, False)
    reference.adam_step(params, [g], *lists, scalars, table, None, None, nonfinite, *flags)
    assert params[0][0, :4].tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert state[1].max() == 2.0**126 and int(nonfinite) == 2
