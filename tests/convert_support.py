"""What the tests of conversion share: optimizers to convert, decoding by other means, the nearest code, the bounds."""

import copy
import warnings

import pytest
import torch

import fused8
from fused8 import convert
from fused8.codecs import CODECS, Encoded

from .support import CODECS as CODEC_NAMES
from .support import assert_same_bits, assert_same_optimizers, make_parameters, parameters, through_file

# The first two have at least 4096 elements, from where on bitsandbytes and torchao quantize.
SHAPES = ((16, 256), (10, 410), (33, 16), (3, 300), (64,), ())
U = 2.0**-24  # the largest relative error of one rounding to FP32
FORMATS = [(codec, block_size) for codec in CODEC_NAMES for block_size in (64, 256)]


def gradient(shape, step):
    """Of many magnitudes, never zero, the same for the same arguments."""
    generator = torch.Generator().manual_seed(step)
    normal = torch.randn(shape, generator=generator)
    return normal.sign() * (0.05 + normal.abs()) * torch.exp(torch.randn(shape, generator=generator)) * 1e-3


def advance(optimizer, first, last):
    for step in range(first, last + 1):
        for p in parameters(optimizer):
            p.grad = gradient(p.shape, step).to(p.dtype)
        optimizer.step()
    return optimizer


def loaded(source, state_dict=None, cls=fused8.AdamW8bit, **options):
    """An optimizer of fused8 with the parameters of another and its state through a file; and the warnings' texts."""
    params = [torch.nn.Parameter(p.detach().clone()) for p in parameters(source)]
    optimizer = cls(params, **({"min_8bit_size": 0} | options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(through_file(source.state_dict() if state_dict is None else state_dict))
    return optimizer, [str(w.message) for w in caught]


def of_each_element(scale, shape, block_size):
    """The scale of each element of a parameter, [n, 1]."""
    inner = torch.Size(shape[1:] if len(shape) >= 2 else shape).numel()
    return scale.repeat_interleave(block_size, 1)[:, :inner].reshape(-1, 1)


def plain_decode(state, shape, codec_name, block_size):
    """The moments of one parameter, element by element; FP32 ones as they are."""
    if "exp_avg_scale" not in state:
        return [state[name] for name in convert.MOMENTS if name in state]
    names = [name for name in convert.MOMENTS if name in state]
    codes = [state[name].reshape(-1, 1) for name in names]
    scales = [of_each_element(state[f"{name}_scale"], shape, block_size) for name in names]
    codec = CODECS[codec_name]
    moments = [*codec.decode(Encoded(*codes[:2], *scales[:2]))]
    if len(names) == 3:
        moments.append(codec.decode_sq(codes[2], scales[2]))
    return [moment.view(shape) for moment in moments]


def next_code(codes, codec_name, moment, by):
    """The code whose value comes before or after; the same one at either end. (test_codecs.py tests this order.)"""
    codes = codes.to(torch.int32)
    if codec_name == "e4m3" and moment == "exp_avg":  # a sign and a magnitude
        place = torch.where(codes < 128, codes, 128 - codes) + by
        place = place.clamp(-126, 126)
        return torch.where(place >= 0, place, 128 - place)
    if moment != "exp_avg":  # a positive v never takes code 0
        return torch.where(codes == 0, 0, (codes + by).clamp(1, 126 if codec_name == "e4m3" else 255))
    return (codes + by).clamp(-127, 127) if codec_name == "adaptive" else (codes + by).clamp(0, 255)


def neighbours(state, shape, codec_name, block_size, moment):
    """Of each element: the value of its code, and the next smaller and larger one that its block could hold."""
    if "exp_avg_scale" not in state:
        return (state[moment],) * 3
    i, values = convert.MOMENTS.index(moment), []
    for by in (0, -1, 1):
        codes = next_code(state[moment], codec_name, moment, by).to(state[moment].dtype)
        values.append(plain_decode(state | {moment: codes}, shape, codec_name, block_size)[i])
    return values


def assert_nearest(state, shape, codec_name, block_size, moments, what):
    """Each moment became the nearest value that the codes of its block have.

    The boundary between two codes may be off by the rounding of what is computed to find it: x * inverse_root * inverse
    or x / absmax, and the products that decode, fewer than 8 roundings in all.
    """
    for moment, x in zip(convert.MOMENTS, moments, strict=False):
        own, below, above = neighbours(state, shape, codec_name, block_size, moment)
        if moment == "exp_avg" and codec_name == "adaptive":  # m is stored relative to the root of v
            x = torch.where(moments[1] == 0, 0.0, x)
        if moment != "exp_avg":
            assert torch.equal(own == 0, x == 0), f"{what}: {moment}"
        x, own, below, above = (t.double() for t in (x, own, below, above))
        slack = 8 * U * torch.maximum(x.abs(), own.abs())
        assert (x <= (own + above) / 2 + slack)[own < above].all(), f"{what}: {moment}"
        assert (x >= (below + own) / 2 - slack)[own > below].all(), f"{what}: {moment}"


def update_bound(state, shape, group, moments, p, grad, step):
    """How far apart the next updates of two optimizers can be if `state` holds `moments` to the nearest code.

    The moments of both lie within the half codes around what is stored; so m1 = beta1 m + (1 - beta1) g, v1 likewise,
    and the ratio m1 / (sqrt(v1 / c2) + eps) lie in intervals, whose width bounds the difference. What each optimizer
    rounds comes on top: fewer than 15 roundings of the update, with a bias correction that may come from a power
    rounded to FP32 (an error of U / c1, and U / (2 c2) after the root), and fewer than 4 of p.
    """
    beta1, beta2 = group["betas"]
    c1, c2 = 1 - beta1**step, 1 - beta2**step
    g, p = grad.double(), p.double()
    if group["maximize"]:
        g = -g
    if not group["decoupled_weight_decay"]:
        g = g + group["weight_decay"] * p
    ranges = {}
    for moment, x in zip(convert.MOMENTS, moments, strict=False):
        own, below, above = neighbours(state, shape, group["codec"], group["block_size"], moment)
        x, own, below, above = (t.double() for t in (x, own, below, above))
        ranges[moment] = torch.minimum(x, (below + own) / 2), torch.maximum(x, (own + above) / 2)
    m_ends = [beta1 * m + (1 - beta1) * g for m in ranges["exp_avg"]]
    v_ends = [beta2 * v.clamp(min=0) + (1 - beta2) * g * g for v in ranges["exp_avg_sq"]]
    if "max_exp_avg_sq" in ranges:
        v_ends = [torch.maximum(v, max_v) for v, max_v in zip(v_ends, ranges["max_exp_avg_sq"], strict=True)]
    ratios = torch.stack([m / ((v / c2).sqrt() + group["eps"]) for m in m_ends for v in v_ends])
    step_size = float(group["lr"]) / c1
    rounding = 2 * U * (15 + 1 / c1 + 0.5 / c2) * step_size * ratios.abs().amax(0) + 8 * U * p.abs()
    return step_size * (ratios.amax(0) - ratios.amin(0)) + rounding


def assert_next_update_matches(source, ours, step, exact=False):
    """Both make one more step with the same gradients, and their parameters end within the derived bound.

    `exact`: the moments of both are equal, so only what is rounded during the step may differ.
    """
    group = ours.param_groups[0]
    expected = []
    for p, q in zip(parameters(source), parameters(ours), strict=True):
        moments = [moment.clone() for moment in source_moments(source, p)]
        state = dict(zip(convert.MOMENTS, moments, strict=False)) if exact else copy.deepcopy(ours.state[q])
        grad = gradient(q.shape, step).to(q.dtype)
        expected.append(
            (q.detach().clone(), update_bound(state, tuple(q.shape), group, moments, q.detach(), grad, step))
        )
    advance(source, step, step)
    advance(ours, step, step)
    for p, q, (before, bound) in zip(parameters(source), parameters(ours), expected, strict=True):
        assert ours.state[q]["step"] == step
        distance = (p.detach().double() - q.detach().double()).abs()
        assert (distance <= bound).all(), f"{tuple(p.shape)}: {(distance / bound).max()} times the bound"
        moved = (q.detach().double() - before.double()).abs()
        assert bound.mean() < 0.5 * moved.mean(), "the bound says nothing"


def source_moments(source, p):
    """FP32 moments of another library's optimizer, by that library's own means."""
    state = source.state[p]
    if "state1" in state:
        if state["state1"].dtype != torch.uint8:
            return [state["state1"], state["state2"]]
        result = []
        for i in (1, 2):
            values = state[f"qmap{i}"][state[f"state{i}"].flatten().long()]
            scale = state[f"absmax{i}"].repeat_interleave(256)[: values.numel()]
            result.append((values * scale).view(p.shape))
        return result
    return [
        getattr(state[name], "dequantize", state[name].float)().clone() for name in convert.MOMENTS if name in state
    ]


def assert_same_nested(a, b, what="state dict"):
    if isinstance(a, torch.Tensor):
        assert_same_bits(a, b, what)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_same_nested(a[name], b[name], f"{what}, {name}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_nested(x, y, f"{what}, {i}")
    else:
        assert a == b, what


# -- state dicts of each kind, made without other packages -------------------------------------------------------------


def flashoptim_state(generator, shape, scale_dtype=torch.float16):
    """State as flashoptim/optimizers.py describes it, and the moments that it means."""
    n = torch.Size(shape).numel()
    groups = -(-n // 32)
    m_codes = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    v_codes = torch.randint(1, 256, shape, generator=generator).to(torch.uint8)
    scales = [(1e-4 + torch.rand(groups, generator=generator) * 1e-2).half() for _ in range(2)]
    state = {
        "step": torch.tensor(5),
        "exp_avg::quantized": m_codes,
        "exp_avg_sq::quantized": v_codes,
        "exp_avg::scales": scales[0].view(scale_dtype),
        "exp_avg_sq::scales": scales[1].view(scale_dtype),
    }
    y = m_codes.double() / 127
    m_scale, v_scale = (s.double().repeat_interleave(32)[:n].view(shape) for s in scales)
    return state, [(y / (2 - y.abs()) * m_scale).float(), ((v_codes.double() / 255) * v_scale).square().float()]


FLASHOPTIM_GROUP = {
    "lr": 1e-3,
    "initial_lr": 1e-3,
    "master_bytewidth": 3,
    "quantize": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
}


def torch_state(shapes=SHAPES):
    return advance(torch.optim.AdamW(make_parameters(shapes), amsgrad=True), 1, 2).state_dict()


def bitsandbytes_state(shapes=SHAPES):
    """As bitsandbytes saves it; made without the package."""
    ours = advance(fused8.AdamW8bit(make_parameters(shapes), min_8bit_size=0), 1, 2)
    return convert.to_bitsandbytes_state_dict(ours.state_dict())


def fused8_state(shapes=SHAPES):
    return advance(fused8.AdamW8bit(make_parameters(shapes), min_8bit_size=0, codec="e4m3"), 1, 2).state_dict()


def flashoptim_state_dict(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    states = {i: flashoptim_state(generator, shape)[0] for i, shape in enumerate(shapes)}
    return {"state": states, "param_groups": [FLASHOPTIM_GROUP | {"params": list(states)}]}


MAKERS = {
    "torch": torch_state,
    "bitsandbytes": bitsandbytes_state,
    "fused8": fused8_state,
    "FlashOptim": flashoptim_state_dict,
}


def trained(shapes=SHAPES):
    return advance(fused8.AdamW8bit(make_parameters(shapes), min_8bit_size=0, lr=0.5), 1, 1)


def assert_refused(state_dict, message=None):
    """Loading raises a clear error, and the optimizer is what it was."""
    optimizer = trained()
    before, groups = copy.deepcopy(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises((ValueError, TypeError), match=message) as error:
        optimizer.load_state_dict(state_dict)
    assert "\n" not in str(error.value)
    assert_same_optimizers(optimizer, before, "after the error")
    assert optimizer.state_dict()["param_groups"] == groups
    assert_same_optimizers(advance(optimizer, 2, 2), advance(before, 2, 2), "a step after the error")
