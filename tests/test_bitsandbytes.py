"""The `dynamic` codec against bitsandbytes, code for code.

The oracle is bitsandbytes' own Triton kernel, run by Triton's interpreter on CPU tensors (conftest.py turns the
interpreter on; bitsandbytes' CPU kernel encodes only approximately). Both see the same gradients.

One difference is deliberate: a positive v never takes code 0 here. There it does, and that element's v then has another
past from then on. m cannot notice, and another element only if its block's largest v is one with another past.
"""

import pytest
import torch

import fused8
from fused8.codecs import CODECS, Dynamic

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

ROWS, COLUMNS = 16, 256  # one block per row; bitsandbytes keeps fewer than 4096 elements in 32 bits
U = 2.0**-24  # the largest relative error of one rounding to FP32


@pytest.fixture
def bitsandbytes(monkeypatch):
    """bitsandbytes with its 8-bit step on CPU tensors served by its Triton kernel."""
    import bitsandbytes
    import triton
    from bitsandbytes.backends.triton import kernels_optim

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET must be set before triton is imported"
    kernel = kernels_optim.optimizer_update_8bit_blockwise_impl
    monkeypatch.setattr(bitsandbytes.functional, "optimizer_update_8bit_blockwise", kernel)
    return bitsandbytes


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(bitsandbytes, signed):
    ours = torch.tensor(Dynamic.SIGNED if signed else Dynamic.UNSIGNED)
    assert torch.equal(ours, bitsandbytes.functional.create_dynamic_map(signed=signed))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_beside_every_midpoint(bitsandbytes, signed):
    """The 7 floats around each midpoint of two neighbours: the same codes, but for a float 1 ulp from a midpoint.

    There bitsandbytes compares FP32 distances, fl(y - low) <= fl(high - y), each with a relative error of at most U.
    The comparison can be wrong only if 2 |y - mid| <= U (high - low), so |y - mid| <= U (high - low) / 2 <= U mid,
    which is less than one ulp of mid. Here the exact midpoint decides, ties to the lower code.
    """
    from bitsandbytes.backends.triton.kernels_8bit_quant import quantize_blockwise_triton

    values = torch.tensor(Dynamic.SIGNED if signed else Dynamic.UNSIGNED)
    mids = (values[:-1].double() + values[1:].double()) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    y = [mids.float()]
    for _ in range(3):
        y = [torch.nextafter(y[0], down), *y, torch.nextafter(y[-1], up)]
    blocks = torch.cat([torch.stack(y), torch.ones(len(y), 1)], dim=1)  # the 1 makes y / absmax = y
    theirs, _ = quantize_blockwise_triton(blocks, values, COLUMNS)
    codec = CODECS["dynamic"]
    if signed:
        ours = codec.encode(blocks, blocks.square(), torch.zeros_like(blocks, dtype=torch.int64), 0).exp_avg
    else:
        ours, _ = codec.encode_sq(blocks)
        theirs = theirs.clamp(min=1)  # all of these are positive
    rows, columns = (ours != theirs).nonzero(as_tuple=True)
    distance = (blocks[rows, columns].double() - mids[columns]).abs()
    assert (distance < U * mids[columns].abs()).all()
    assert len(rows) <= 1  # signed, at 1.9e-6: where a decade begins, y - low needs more than 24 bits


def even(generator, step):
    """Magnitudes between 0.1 and 1.1: no v is so small that it would take code 0."""
    return normal(generator, step).sign() * (0.1 + torch.rand(ROWS, COLUMNS, generator=generator))


def normal(generator, step):
    return torch.randn(ROWS, COLUMNS, generator=generator)


def lognormal(generator, step):
    return normal(generator, step) * torch.exp(2 * normal(generator, step))


def sparse(generator, step):
    """One element in ten has a gradient, and one block in four none at all in every second step."""
    g = normal(generator, step) ** 3 * (torch.rand(ROWS, COLUMNS, generator=generator) < 0.1)
    g[::4] *= step % 2
    return g


STREAMS = {
    # name: (gradients, options, whether the rule about code 0 applies)
    "even": (even, dict(lr=1e-3), False),
    "normal": (normal, dict(lr=1e-2), True),
    "lognormal": (lognormal, dict(lr=1e-3, betas=(0.8, 0.95)), True),
    "decay": (lognormal, dict(lr=1e-2, weight_decay=0.1), True),
    "sparse": (sparse, dict(lr=1e-3, eps=1e-4), True),
}


def rounding_slack(p, update, step, options):
    """How far apart one step can bring two parameters that were equal: a bound for each element.

    Both optimizers hold the same m and v, bit for bit, the same correctly rounded r = sqrt(v) and the same eps, and
    compute p * decay - lr / c1 * (m / (r / sqrt(c2) + eps)) with c = 1 - beta^step. To first order in U:
    * here the update has 6 roundings: step_size, 1/sqrt(c2), its product with r, + eps, /, and the last product;
    * there it has 6: lr, lr / c1, r / sqrt(c2), + eps, /, the last product. Besides, c1 and c2 come from beta^step
      rounded to FP32: an error of U (1 - c), and U c of the subtraction, relative to c U / c. The square root halves
      that of c2 and adds U;
    * decay is rounded once here; there lr, weight_decay and their product are rounded too, then 1 minus that: U (1 + 3
      lr weight_decay). On each side a product and a subtraction follow: 2 U each, of values no larger than
      |p| + |update|.
    """
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    of_update = 6 + 6 + 1 / c1 + 0.5 / c2 + 1
    of_p = (1 + 2) + (1 + 3 * options["lr"] * options.get("weight_decay", 0) + 2)
    return 1.001 * U * (of_update * update.abs() + of_p * (p.abs() + update.abs()))  # 1.001: higher orders


@pytest.mark.parametrize("name", STREAMS)
def test_the_step_is_that_of_bitsandbytes(bitsandbytes, name):
    gradients, options, rule_applies = STREAMS[name]
    generator = torch.Generator().manual_seed(1)
    p = torch.nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator))
    q = torch.nn.Parameter(p.detach().clone())
    ours = fused8.Adam8bit([p], codec="dynamic", **options)
    theirs = bitsandbytes.optim.Adam8bit([q], **options)
    differs = torch.zeros(ROWS, COLUMNS, dtype=torch.bool)  # v, as stored now
    differed = differs.clone()  # v, as it was stored before any step so far
    slack = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    by_rule = 0
    for step in range(1, 6):
        p.grad = gradients(generator, step)
        q.grad = p.grad.clone()
        before = p.detach().double()
        ours.step()
        theirs.step()
        state, other = ours.state[p], theirs.state[q]
        v_codes, other_v_codes = state["exp_avg_sq"], other["state2"]

        assert torch.equal(state["exp_avg"], other["state1"])
        assert torch.equal(state["exp_avg_scale"].flatten(), other["absmax1"])
        differed |= differs
        other_scale = state["exp_avg_sq_scale"].flatten() != other["absmax2"]
        assert (differs & (v_codes == 255)).any(1)[other_scale].all()  # the largest v has another past
        differs[other_scale] = True
        new = (v_codes != other_v_codes) & ~differs
        assert (v_codes[new] == 1).all() and (other_v_codes[new] == 0).all()  # nothing differs but by the rule
        by_rule += int(new.sum())
        differs = (v_codes != other_v_codes) | other_scale.unsqueeze(1)

        decay = 1 - options["lr"] * options.get("weight_decay", 0)
        slack += rounding_slack(before, p.detach().double() - before * decay, step, options)
        distance = (p.detach().double() - q.detach().double()).abs()
        assert (distance <= slack)[~differed].all()
    assert (by_rule > 0) == rule_applies
    assert differed.double().mean() < 0.6  # most elements were compared to the end
