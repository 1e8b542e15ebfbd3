"""What the tests and the check of a GPU share: parameters, hostile gradients, comparison of whole optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import fused8


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
    a, b = bits(a.detach().cpu()), bits(b.detach().cpu())
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


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def make_parameters(
    shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def set_gradients(params: Iterable[Tensor], step: int, dtype: torch.dtype | None = None) -> None:
    for p in params:
        p.grad = None
        if dtype is not None and dtype != p.dtype:
            p.grad_dtype = None  # any dtype
        p.grad = hostile_gradient(tuple(p.shape), step, dtype or p.dtype).to(p.device)


def run(
    backend: str,
    shapes: Iterable[tuple[int, ...]],
    *,
    steps: int,
    dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    lrs: tuple[float, ...] = (1e-3,),
    **options: Any,
) -> torch.optim.Optimizer:
    """A fresh optimizer after `steps` steps of hostile gradients on one backend."""
    params = make_parameters(shapes, dtype, device)
    optimizer = fused8.Adam8bit(params, **{"min_8bit_size": 0} | options, backend=backend)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lrs[step % len(lrs)]
        set_gradients(params, step, grad_dtype)
        optimizer.step()
    return optimizer
