"""The ends of every range: gradients, decay rates, eps, lr, step counts, numbers of parameters and of elements."""

import copy
import math

import pytest
import torch
from fused8.triton_kernels import launch

import fused8
from fused8 import backends, reference
from fused8.codecs import ABS_MAX_GRAD, CODECS, FP32, Dynamic, Encoded
from fused8.state import MAX_STEP, rows_and_inner
from fused8.step_plan import Hyperparameters, scalar_row, scalar_table

from .support import CODECS as CODEC_NAMES
from .support import ISAS, assert_same_bits, assert_same_optimizers, make_parameters, parameters, require_isa

FORMATS = (*CODEC_NAMES, FP32)
BACKENDS = ("cpp", "reference")
SHAPE = (16, 300)  # a row and a tail per kind of gradient
LR = 1e-3
U = 2.0**-24  # the largest relative error of one rounding to FP32


def options_of(codec):
    return dict(min_8bit_size=1 << 40) if codec == FP32 else dict(codec=codec, min_8bit_size=0)


def normal(step, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def decades(step):
    """Every power of ten from 1e-45, a denormal, to 3e38, side by side in one block."""
    exponents = torch.linspace(-45, 38.47, SHAPE[1], dtype=torch.float64)
    return (normal(step).sign().double() * 10**exponents).float()


GRADIENTS = {
    # step (from 1) -> gradient
    "from 1e-45 to 3e38": decades,
    "1e-38": lambda step: normal(step) * 1e-38,
    "denormal": lambda step: normal(step) * 1e-42,
    "the smallest denormal": lambda step: normal(step).sign() * 2.0**-149,
    "squares at the end of FP32": lambda step: normal(step) * 1e-22,
    "the largest that counts": lambda step: normal(step).sign() * ABS_MAX_GRAD,
    "3e38": lambda step: normal(step).sign() * 3e38,
    "all equal": lambda step: torch.full(SHAPE, 1e-3),
    "a spike, then silence": lambda step: torch.zeros(SHAPE).index_fill_(1, torch.tensor([7]), float(step == 1)),
    "a huge spike, then tiny": lambda step: torch.full(SHAPE, ABS_MAX_GRAD if step == 1 else 1e-30),
    "tiny, then a huge spike": lambda step: torch.full(SHAPE, ABS_MAX_GRAD if step == 9 else 1e-30),
    "alternating signs": lambda step: torch.full(SHAPE, 1e-3 * (-1) ** step),
    "zeros": lambda step: torch.zeros(SHAPE),
    "zeros of both signs": lambda step: normal(step) * 0.0,
}


def moments(optimizer, p):
    """FP32 (m, v) of a parameter, decoded."""
    state, block_size = optimizer.state[p], optimizer.param_groups[0]["block_size"]
    if "exp_avg_scale" not in state:
        return state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    rows, inner = rows_and_inner(p.shape)
    codes = [reference._to_blocks(state[name].view(rows, inner), block_size) for name in ("exp_avg", "exp_avg_sq")]
    scales = [state[name].view(-1, 1) for name in ("exp_avg_scale", "exp_avg_sq_scale")]
    decoded = CODECS[optimizer.param_groups[0]["codec"]].decode(Encoded(*codes, *scales))
    return tuple(reference._from_blocks(x, rows, inner).reshape(p.shape) for x in decoded)


def smallest_code(codec):
    """Of v, relative to the largest v of its block; 0 where a positive v is kept whatever stands beside it."""
    return {"dynamic": min(x for x in Dynamic.UNSIGNED if x > 0), "e4m3": 2.0**-9 / 448}.get(codec, 0.0)


def assert_v_stays(codec, before, g, after, betas, block_size=256):
    """Where the new v is positive in FP32, so is what is stored.

    The scale of the absmax codecs is the largest v of the block, and the smallest code a fraction f of it: their
    product is 0 in FP32 only if that largest v is below 2^-149 / f.
    """
    beta2 = betas[1]
    g = torch.where(g.abs() <= ABS_MAX_GRAD, g, 0.0)
    one_minus = torch.tensor(1 - beta2, dtype=torch.float64).float()
    v = torch.tensor(beta2, dtype=torch.float64).float() * before + (one_minus * g) * g
    blocks = reference._to_blocks(v, block_size)
    largest = reference._from_blocks(blocks.amax(1, keepdim=True).expand_as(blocks).contiguous(), *v.shape)
    expected = (v > 0) & (largest.double() * smallest_code(codec) >= (2.0**-149 if smallest_code(codec) else 0.0))
    assert bool((after > 0)[expected].all()), f"{codec}: {int((expected & (after <= 0)).sum())} times v became 0"


def largest_ratio(codec, betas, steps):
    """A bound of |m| / sqrt(v) before each step's update is made, from zero state: a list, one for each step.

    For the new moments, by the triangle inequality,
        |m1| / sqrt(v1) <= beta1 / sqrt(beta2) * (|m| / sqrt(v)) + (1 - beta1) / sqrt(1 - beta2),
    and storing them in 8 bits changes the ratio:
    - adaptive: the dither takes v at most to the code below it, which with two mantissa bits is at least v / 1.25 (a
      denormal v counts for nothing beside eps); m is stored in 127ths of the block's largest m / root, half of one off,
      and root / sqrt(v) lies within [sqrt(1/2), sqrt(2)]: at most 2/254 of the largest ratio is added.
    - dynamic, e4m3: m is relative to the block's largest |m|, A, and v to its largest, V, both stored exactly but for a
      rounding. A <= G, the largest gradient so far, V >= (1 - beta2) beta2^(t-1) G^2 and v >= f V with the smallest
      code f, so |m| / sqrt(v) <= 1 / sqrt(f (1 - beta2) beta2^(t-1)).
    """
    beta1, beta2 = betas
    carried, fresh = (beta1 / math.sqrt(beta2) if beta1 else 0.0), (1 - beta1) / math.sqrt(1 - beta2)
    bounds, stored = [], 0.0
    for t in range(1, steps + 1):
        new = carried * stored + fresh
        bounds.append(new * (1 + 16 * U))
        if codec == "adaptive":
            stored = new * math.sqrt(1.25) * (1 + 2 / 254)
        elif codec == FP32:
            stored = new
        else:
            stored = 1 / math.sqrt(smallest_code(codec) * (1 - beta2) * beta2**t)
    return bounds


BETAS = ((0.9, 0.999), (0.0, 0.99999), (0.99999, 0.99999))
# Every codec with every kind of gradient, and through them with all betas.
CASES = [
    (codec, kind, BETAS[(i + j) % 3]) for i, codec in enumerate(FORMATS) for j, kind in enumerate(GRADIENTS)
]  # fmt: skip


@pytest.mark.parametrize("codec, kind, betas", CASES, ids=str)
def test_no_gradient_makes_nan_loses_v_or_moves_a_parameter_far(codec, kind, betas):
    eps, steps = 1e-8, 10
    optimizers = [
        fused8.Adam8bit(make_parameters([SHAPE]), lr=LR, betas=betas, eps=eps, backend=backend, **options_of(codec))
        for backend in BACKENDS
    ]
    bounds = largest_ratio(codec, betas, steps)
    v = torch.zeros(SHAPE)
    for step in range(1, steps + 1):
        g = GRADIENTS[kind](step)
        for optimizer in optimizers:
            (p,) = parameters(optimizer)
            start = p.detach().clone()
            p.grad = g.clone()
            optimizer.step()
        assert_same_optimizers(*optimizers, f"step {step}")
        assert p.isfinite().all()
        m, new_v = moments(optimizer, p)
        assert m.isfinite().all() and new_v.isfinite().all()
        assert_v_stays(codec, v, g, new_v, betas)
        # Where v is 0, or so small that FP32 rounds it by more than an ulp, the denominator is eps: |m| <= |g| then,
        # and (1 - beta2) g^2 is at most 2^-126, or its block's codes could not hold it (see assert_v_stays).
        tiny_g = math.sqrt(2.0**-126 / max(smallest_code(codec), 1e-3) / (1 - betas[1]))
        c1, c2 = 1 - betas[0] ** step, 1 - betas[1] ** step
        bound = LR / c1 * max(bounds[step - 1] * math.sqrt(c2), tiny_g / eps) * (1 + 16 * U)
        moved = (p.detach().double() - start.double()).abs()
        assert (moved <= bound + 2 * U * start.abs().double()).all(), f"step {step}: {moved.max()} > {bound}"
        v = new_v
    counted = sum(int((GRADIENTS[kind](step).abs() > ABS_MAX_GRAD).sum()) for step in range(1, steps + 1))
    assert [optimizer.nonfinite_count() for optimizer in optimizers] == [counted] * 2


@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("beta2", [0.0, 0.99999])
@pytest.mark.parametrize("beta1", [0.0, 0.99999])
@pytest.mark.parametrize("codec", FORMATS)
def test_decay_rates_eps_lr_and_weight_decay_at_their_ends(codec, beta1, beta2, amsgrad):
    """eps, lr and weight decay 0. Gradients that never vanish: with beta2 = 0 a zero gradient leaves v = 0, and the
    momentum would be divided by eps, as by torch.optim.Adam."""
    common = dict(betas=(beta1, beta2), eps=0.0, weight_decay=0.0, amsgrad=amsgrad, **options_of(codec))
    optimizers = [fused8.Adam8bit(make_parameters([SHAPE]), backend=backend, **common) for backend in BACKENDS]
    start = parameters(optimizers[0])[0].detach().clone()
    for lr in (0.0, 1e-3):
        for step in range(1, 6):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = lr
                (p,) = parameters(optimizer)
                g = normal(step)
                p.grad = g.sign() * (0.1 + g.abs())
                optimizer.step()
            assert_same_optimizers(*optimizers, f"lr {lr}, step {step}")
            assert p.isfinite().all()
        moved = (p.detach() != start).float().mean()
        assert moved == 0 if lr == 0 else moved > 0.9


@pytest.mark.parametrize("lr", [math.inf, math.nan, -1e-9, torch.tensor(math.inf), torch.tensor(math.nan)], ids=str)
def test_an_lr_that_is_no_number_is_refused(lr):
    with pytest.raises(ValueError, match="lr"):
        # A tensor is read when it is used: its value may change until then.
        optimizer = fused8.Adam8bit(make_parameters([SHAPE]), lr=lr)
        (p,) = parameters(optimizer)
        p.grad = torch.ones(SHAPE)
        before = p.detach().clone()
        try:
            optimizer.step()
        finally:
            assert torch.equal(p, before) and not optimizer.state


@pytest.mark.parametrize(
    "option", [dict(eps=-1e-8), dict(eps=math.nan), dict(betas=(1.0, 0.999)), dict(weight_decay=math.inf)], ids=str
)
def test_options_beyond_their_ends_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        fused8.Adam8bit(make_parameters([SHAPE]), **option)


@pytest.mark.parametrize("codec", FORMATS)
def test_ten_thousand_steps_of_zeros_change_nothing(codec):
    """On a tensor with a spiked element and on one without any gradient, both with C++; the first steps with both.

    The spiked element is alone in its block: m is stored exactly but for roundings, and v in six mantissa bits (with
    the dither at most a code below, v / (65/64)) or exactly. So |m| / sqrt(v) starts at 0.1 / sqrt(0.001) and falls by
    0.9 sqrt(65/64 / 0.999) or faster; the bias corrections only shrink it. The sum of all updates is a geometric one.
    """
    ratio = 0.9 * math.sqrt(65 / 64 / 0.999)
    bound = LR * 0.1 / math.sqrt(0.001) / (1 - ratio) * 1.001
    kept = {}
    for backend, steps in (("cpp", 10_000), ("reference", 50)):
        params = make_parameters([(4, 20), (4, 20)])
        start = [p.detach().clone() for p in params]
        optimizer = fused8.Adam8bit(params, lr=LR, backend=backend, **options_of(codec))
        for p in params:
            p.grad = torch.zeros(4, 20)
        params[0].grad[1, 3] = 1.0
        for step in range(1, steps + 1):
            optimizer.step()
            params[0].grad[1, 3] = 0.0
            if step == 50:
                kept[backend] = copy.deepcopy(optimizer)
        assert torch.equal(params[1], start[1])
        moved = (params[0].detach() - start[0]).abs()
        assert 0 < moved[1, 3] <= bound and moved.count_nonzero() == 1
        assert all(p.isfinite().all() for p in params)
        v = moments(optimizer, params[0])[1]
        assert v[1, 3] > 0 and v.count_nonzero() == 1
        assert optimizer.state[params[0]]["step"] == steps
    assert_same_optimizers(kept["cpp"], kept["reference"], "after 50 steps")


# -- step counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True], ids=["on the host", "on the device"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", FORMATS)
def test_step_counts_end_at_2_to_the_24_before_anything_changes(codec, backend, capturable):
    """FP32 counts no further: 2^24 + 1 is 2^24. The last step that can be counted is made."""
    params = make_parameters([SHAPE, SHAPE, (5,)])
    optimizer = fused8.AdamW8bit(params, backend=backend, capturable=capturable, **options_of(codec))
    for p in params:
        p.grad = normal(1, p.shape)
    optimizer.step()
    optimizer.state[params[1]]["step"].fill_(MAX_STEP - 1)  # one of them, beside others
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, MAX_STEP, 2]
    assert all(p.isfinite().all() for p in params)
    before = copy.deepcopy(optimizer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"2\^24 steps"):
            optimizer.step()
        assert_same_optimizers(optimizer, before, "at the end")
    other = fused8.AdamW8bit(make_parameters([SHAPE, SHAPE, (5,)]), capturable=capturable, **options_of(codec))
    other.load_state_dict(optimizer.state_dict())
    values = [p.detach().clone() for p in parameters(other)]
    for p in parameters(other):
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match=r"2\^24 steps"):
        other.step()
    assert all(torch.equal(p, x) for p, x in zip(parameters(other), values, strict=True))
    assert [float(other.state[p]["step"]) for p in parameters(other)] == [2, MAX_STEP, 2]
    params[1].grad = None  # the others go on
    optimizer.step()
    assert float(optimizer.state[params[0]]["step"]) == 3


# -- many parameters --------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_parameters_are_stepped_as_one_of_as_many_rows():
    """Half of them with 8-bit state. Blocks are rows, and neither `dynamic` nor FP32 depends on where an element is."""
    n, steps = 50_000, 2
    wholes = [torch.nn.Parameter(normal(0, (n, 8))), torch.nn.Parameter(normal(1, (n, 3)))]  # 3 is too short a row
    apart = [[torch.nn.Parameter(row) for row in whole.detach().clone().split(1)] for whole in wholes]
    ours, few = (
        fused8.AdamW8bit(params, codec="dynamic", min_8bit_size=0) for params in ([*apart[0], *apart[1]], wholes)
    )
    for step in range(1, steps + 1):
        for whole, params in zip(wholes, apart, strict=True):
            whole.grad = normal(step, whole.shape)
            for p, g in zip(params, whole.grad.clone().split(1), strict=True):
                p.grad = g
        ours.step()
        few.step()
    for whole, params in zip(wholes, apart, strict=True):
        assert_same_bits(torch.cat([p.detach() for p in params]), whole.detach(), "parameters")
        for name, tensor in few.state[whole].items():
            if name != "step":
                assert_same_bits(torch.cat([ours.state[p][name] for p in params]), tensor, name)
        assert all(float(ours.state[p]["step"]) == steps for p in (params[0], params[-1]))


# -- one huge tensor --------------------------------------------------------------------------------------------------

HUGE = 2**31 + 1


def step_shard(backend, codec, place, shape, dtype, steps=2):
    """A shard that lies at `place` (row0, col0, global_inner) of a parameter, after some steps: all its tensors."""
    rows, inner = rows_and_inner(shape)
    p = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    states = [[] for _ in range(7)]
    if codec == FP32:
        states[0], states[1] = [torch.zeros(shape)], [torch.zeros(shape)]
    else:
        for i in range(2):
            states[i] = [torch.full(shape, CODECS[codec].zero_codes[i], dtype=CODECS[codec].code_dtypes[i])]
            states[2 + i] = [torch.zeros(rows, -(-inner // 256), dtype=CODECS[codec].scale_dtypes[i])]
    cache = {}
    for step in range(1, steps + 1):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(10 + step))
        scalars = scalar_table([scalar_row(Hyperparameters(LR, 0.9, 0.999, 1e-8, 0.01, True), step)])
        backends.BACKENDS[backend].adam_step(
            [p], [g], *states, scalars, torch.tensor([[0, *place]]), None, None, torch.zeros(1, dtype=torch.int64),
            codec, 256, True, False, dtype != torch.float32, cache=cache,
        )  # fmt: skip
    return [p, *(tensor for tensors in states for tensor in tensors)]


PLACES = {
    # where a shard begins, and its shape
    "the last of 2^31 + 1 elements": ((0, HUGE - 300, HUGE), (300,)),
    "across 2^31": ((0, 2**31 - 100, HUGE), (300,)),
    "the third of rows of 2^31 + 1": ((2, HUGE - 256, HUGE), (1, 256)),
    "rows of which one crosses 2^32": ((2**32 // 768 - 3, 0, 768), (6, 768)),
    "odd rows across 2^32": ((2**32 // 4097 - 1, 256, 4097), (3, 300)),
    "far beyond 2^32": ((2**40, 2**33 + 7, 2**35 + 3), (3, 70)),
}
DITHERED = [
    ("adaptive", torch.float32),
    ("adaptive", torch.bfloat16),
    ("dynamic", torch.bfloat16),
    (FP32, torch.bfloat16),
]


@pytest.mark.parametrize("codec, dtype", DITHERED, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_elements_beyond_2_to_the_31_and_32_are_the_same_on_every_backend(place, codec, dtype, monkeypatch):
    """What depends on the element's index (dither and stochastic rounding) takes it modulo 2^32, and only so."""
    at, shape = PLACES[place]
    expected = step_shard("reference", codec, at, shape, dtype)
    for isa in ("generic", torch.ops.fused8.cpu_isa()):
        monkeypatch.setenv("FUSED8_CPU_ISA", isa)
        for i, (a, b) in enumerate(zip(step_shard("cpp", codec, at, shape, dtype), expected, strict=True)):
            assert_same_bits(a, b, f"{isa}, tensor {i}")
    for i, (a, b) in enumerate(zip(step_shard("triton", codec, at, shape, dtype), expected, strict=True)):
        assert_same_bits(a, b, f"triton, tensor {i}")
    row0, col0, inner = at
    index = row0 * inner + col0  # exact, in Python
    if shape[0] == 1 or len(shape) == 1:  # one row: its place is one number
        same = step_shard("reference", codec, (0, index % 2**32, 1), shape, dtype)
        assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))
    other = step_shard("reference", codec, (row0, col0 + 1, inner), shape, dtype)
    assert not all(torch.equal(a, b) for a, b in zip(other, expected, strict=True)), "the index has no effect"


@pytest.mark.parametrize(
    "codec, shape", [("adaptive", (HUGE,)), ("adaptive", (3, HUGE // 3)), (FP32, (HUGE,))], ids=str
)
def test_the_tiles_of_a_tensor_of_more_than_2_to_the_31_elements_cover_it_once(codec, shape):
    """Only the tables are made: the tensors have no memory."""
    p = torch.empty(shape, device="meta")
    scale = torch.empty(1, 1, device="meta")
    scales = [] if codec == FP32 else [scale]
    lists = [[p], [p], [p], [p], scales, scales, [], [], []]
    tables = launch.BucketTables(lists, codec, 256, launch.CONFIGS["cuda"].tile)
    tables._watched = None
    tables._cut()
    rows, inner = rows_and_inner(shape)
    blocks = -(-inner // 256) * rows
    first = tables.tiles[:, 1].long()
    assert bool((first >= 0).all()) and bool((tables.tiles[:, 0] >= 0).all())
    flavour = (tables.tiles[:, 0] & launch.BODY_MASK.value) % launch.FLAVOURS.value
    per_tile = launch.CONFIGS["cuda"].tile // 256
    covered = torch.where(flavour == launch.UNALIGNED.value, per_tile // launch.UNALIGNED_PART.value, per_tile)
    ends = (first + covered).clamp(max=blocks)
    assert first[0] == 0 and ends[-1] == blocks and torch.equal(first[1:], ends[:-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_damaged_state_harms_its_own_parameter_alone(codec, isa, monkeypatch):
    """Scales that nothing checks any more: no table is left, no neighbour touched."""
    require_isa(isa, monkeypatch)

    def second_parameter(damage):
        params = make_parameters([SHAPE, SHAPE, SHAPE])
        optimizer = fused8.AdamW8bit(params, lr=LR, codec=codec, min_8bit_size=0, backend="cpp")
        for step, bad in enumerate((None, math.nan, math.inf, -math.inf, -1.0, 3e38)):
            for p in params:
                p.grad = normal(step)
                for name in ("exp_avg_scale", "exp_avg_sq_scale") if bad is not None and damage else ():
                    scale = optimizer.state[p][name]
                    if p is not params[1]:
                        scale.fill_(bad if scale.is_floating_point() else -5)
            optimizer.step()
        return params[1].detach()

    assert_same_bits(second_parameter(True), second_parameter(False), f"{codec} {isa}")
