"""What several test files share: parameters of every shape, hostile gradients, comparison of whole optimizers."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import fused8
from fused8 import backends, formats
from fused8.step_plan import scalar_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CODECS = ("adaptive", "dynamic", "e4m3")

FLAGS: dict[str, dict[str, Any]] = {
    "adamw": dict(weight_decay=0.01),
    "l2": dict(weight_decay=0.01, decoupled_weight_decay=False),
    "maximize": dict(weight_decay=0.01, maximize=True),
    "amsgrad": dict(amsgrad=True),
    "all": dict(
        weight_decay=0.1,
        decoupled_weight_decay=False,
        maximize=True,
        amsgrad=True,
        betas=(0.8, 0.95),
        eps=0.0,
    ),
}

# 0 to 3 dims, sizes around the block, tails, short rows, one row, many rows.
SHAPES = (
    (),
    (0,),
    (1,),
    (3, 0),
    (1, 1),
    (1, 255),
    (1, 256),
    (1, 257),
    (16, 256),
    (5, 300),
    (3, 1000),
    (40, 8),
    (33, 16),
    (9, 65),
    (7, 3),
    (4, 5, 70),
    (2, 3, 256),
)


def hostile_gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient whose rows (or the whole, if it has no rows) are of 16 kinds, each trouble for some codec.

    Reproducible: the same for the same arguments.
    """
    generator = torch.Generator().manual_seed(1000 * step + len(shape))
    rows = shape[0] if len(shape) >= 2 else 1
    g = torch.randn(shape, generator=generator, dtype=torch.float64).reshape(rows, -1)
    uniform = torch.rand(g.shape, generator=generator, dtype=torch.float64)
    inner = g.shape[1]
    for r in range(rows if inner else 0):
        kind = (r + (step if rows == 1 else 0)) % 16
        if kind == 1:
            g[r] = 0
        elif kind == 2:
            g[r] *= 1e-38
        elif kind == 3:
            g[r] *= 1e-21  # its square is denormal
        elif kind == 4:
            g[r] *= 1e38  # cannot be squared in FP32
        elif kind == 5:
            g[r] *= 1e18
        elif kind == 6:
            g[r] *= 10 ** (uniform[r] * 45 - 30)  # 45 decades in one block
        elif kind == 7:
            g[r, int(uniform[r, 0] * inner)] = float("nan")
            g[r, inner // 2] = -float("inf")
        elif kind == 8:
            g[r] = 1e-3
        elif kind == 9:
            g[r] = 0
            g[r, inner // 3] = 1e-3 if step == 1 else 0  # one spike, then silence
        elif kind == 10:
            g[r] *= step < 3
        elif kind == 11:
            g[r] = -0.0
        elif kind == 12:
            g[r] *= uniform[r] < 0.1
        elif kind == 13:
            g[r] *= 2e-22 * (step % 2)
        elif kind == 14:
            g[r, : inner // 2] *= 1e-10
            g[r, inner // 2 :] *= 1e10
    return g.reshape(shape).to(torch.float32).to(dtype)


def bits(x: Tensor) -> Tensor:
    """The bit pattern, so that -0 differs from 0; NaNs of any payload are equal."""
    if not x.is_floating_point():
        return x
    if x.element_size() == 1:  # FP8, which has no arithmetic; as FP32 it is exact
        x = x.float()
    x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same_bits(a: Tensor, b: Tensor, what: str) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape, what
    a, b = bits(a), bits(b)
    if not torch.equal(a, b):
        where = (a != b).nonzero()
        raise AssertionError(f"{what}: {len(where)} of {a.numel()} elements differ, first at {where[0].tolist()}")


def assert_same_optimizers(a: torch.optim.Optimizer, b: torch.optim.Optimizer, what: str) -> None:
    """Parameters, codes, scales and steps of two optimizers are bit for bit the same."""
    for i, (p, q) in enumerate(zip(parameters(a), parameters(b), strict=True)):
        assert_same_bits(p.detach(), q.detach(), f"{what}: parameter {i} {tuple(p.shape)}")
        assert a.state[p].keys() == b.state[q].keys()
        for name, tensor in a.state[p].items():
            assert_same_bits(tensor, b.state[q][name], f"{what}: {name} of parameter {i} {tuple(p.shape)}")


def storage_options(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """The ways to keep a parameter that is not FP32, but for rounding to nearest in 16 bits, by name."""
    bits = 8 * dtype.itemsize
    options: dict[str, dict[str, Any]] = {
        "stochastic": dict(param_rounding="stochastic"),
        "8 more bits": dict(master_bits=bits + 8),
        "16 more bits": dict(master_bits=bits + 16),
        "8 more bits, stochastic": dict(master_bits=bits + 8, param_rounding="stochastic"),
        "16 more bits, stochastic": dict(master_bits=bits + 16, param_rounding="stochastic"),
    }
    return options | ({"nearest": dict(param_rounding="nearest")} if bits == 8 else {})


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def make_parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: Iterable[Tensor], step: int, dtype: torch.dtype | None = None) -> None:
    for p in params:
        p.grad = None
        if dtype is not None and dtype != p.dtype:
            p.grad_dtype = None  # any dtype
        p.grad = hostile_gradient(tuple(p.shape), step, dtype or p.dtype)


def run(
    backend: str,
    shapes: Iterable[tuple[int, ...]],
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    lrs: tuple[float, ...] = (1e-3,),
    **options: Any,
) -> torch.optim.Optimizer:
    """A fresh optimizer after `steps` steps of hostile gradients on one backend."""
    params = make_parameters(shapes, dtype)
    optimizer = fused8.Adam8bit(params, **{"min_8bit_size": 0} | options, backend=backend)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lrs[step % len(lrs)]
        set_gradients(params, step, grad_dtype)
        optimizer.step()
    return optimizer


# Every dtype that is not FP32 with each way to store it: dtype, name of the way, options.
STORAGE = [(dtype, name, options) for dtype in formats.FORMATS for name, options in storage_options(dtype).items()]
STORAGE_IDS = [f"{dtype} {name}" for dtype, name, _ in STORAGE]


def any_floats(n: int = 1 << 16) -> Tensor:
    """FP32 numbers [n] of every exponent and sign, all ties of 16-bit formats, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randint(-(2**31), 2**31, (n // 2,), generator=generator, dtype=torch.int64).to(torch.int32)
    ties = (torch.randint(0, 1 << 16, (n // 4,), generator=generator) << 16 | 0x8000).to(torch.int32)
    near = torch.randn(n // 4 - 5, generator=generator) * torch.logspace(-9, 6, n // 4 - 5)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    return torch.cat([patterns.view(torch.float32), ties.view(torch.float32), near, special])


def store_as(
    backend: str, x: Tensor, start: Tensor, correction: Tensor | None, stochastic: bool, decay: float
) -> tuple[Tensor, Tensor | None]:
    """decay * start + x (FP32, one row) as a backend stores it -> the parameter, which was `start`, and its correction.
    It is a step of which these scalars leave only that."""
    params, corrections = [start.clone()], [] if correction is None else [correction.clone()]
    row = [1.0, 0.0, 1.0, 0.0, 1.0, -1.0, 1.0, decay, 0.0, 0, formats.rounding_key(1, 2)]
    backends.BACKENDS[backend].adam_step(
        params, [torch.zeros(x.shape)], [x.clone()], [torch.zeros(x.shape)], [], [], [], [], corrections,
        scalar_table([row]), torch.tensor([[0, 0, 0, x.numel()]]), None, None, torch.zeros(1, dtype=torch.int64),
        "fp32", 256, True, False, stochastic, cache={},
    )  # fmt: skip
    return params[0], corrections[0] if corrections else None


def assert_stores_as_the_reference(backend: str, dtype: torch.dtype, extra: int, stochastic: bool) -> None:
    """Every kind of number, into a parameter that was every kind of number before."""
    x = any_floats()
    start, correction = formats.encode(x.flip(0), dtype, extra)
    start = torch.where(start.float().isfinite(), start.float(), 1.0).to(dtype)  # 0 * infinity would hide x
    for decay, added in ((0.0, x), (1.0, torch.zeros_like(x))):
        ours, truth = (store_as(name, added, start, correction, stochastic, decay) for name in (backend, "reference"))
        assert_same_bits(ours[0], truth[0], f"parameter, decay {decay}")
        if extra:
            assert_same_bits(ours[1], truth[1], f"correction, decay {decay}")


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict as it comes back from a file."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
