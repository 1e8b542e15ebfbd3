"""No speed for a wrong result: is a contender's update that of AdamW?

Each takes some steps on small parameters that begin at zero. fused8 has to give the bits of its reference. Everyone's
movement has to agree with that of torch's FP32 AdamW, fed with the same gradients, within the tolerance of its class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import fused8

from .bandwidth import tensors_of
from .contenders import DTYPES, WEIGHT_DECAY, Contender

STEPS = 10
LR = 2.0**-4  # the smallest normal numbers of float8_e4m3fn are 2^-6

SHAPE = (256, 1024)
MODEL = ((64, 1024), (33, 300), (257,), (3, 5, 7), ())
"""Whole and broken blocks, and parameters whose state stays in 32 bits."""

# Rounding a parameter to M mantissa bits, to nearest, is off by up to 2^-(M+2) of the typical value at each of 10 steps
# (BF16: 10 / 512 = 0.02); stochastic rounding by twice as much. FP8 has 3 bits, and errors of 10 steps that are
# independent add up as their root: sqrt(10) / 16 = 0.2. Master bits only help.
ROUNDING = {"fp32": 0.0, "bf16": 0.02, "fp8": 0.2}


@dataclass
class Verdict:
    status: str
    """measured (may be), not available, or refused."""
    reason: str = ""
    error: float | None = None
    """The relative L2 distance of the movement from that of FP32 AdamW."""
    seconds_per_parameter: float = 0.0
    """Of the fastest step here: what a larger one will take at least."""

    def row(self) -> dict[str, object]:
        return {"status": self.status, "reason": self.reason, "update_error": self.error}


_verdicts: dict[tuple[Contender, str], Verdict] = {}


def check(contender: Contender, dtype: str) -> Verdict:
    """The verdict on a contender whose parameters have this dtype, found once per process."""
    dtype = contender.dtype or dtype
    if (contender, dtype) not in _verdicts:
        _verdicts[contender, dtype] = _check(contender, dtype)
    return _verdicts[contender, dtype]


def _check(contender: Contender, dtype: str) -> Verdict:
    if reason := contender.missing():
        return Verdict("not available", reason)
    try:
        moved, seconds = _movement(contender.make, [SHAPE], DTYPES[dtype])
        differs = contender.options is not None and _bits_differ(contender, dtype)
    except Exception as problem:  # a peer's: whatever it is, the others go on
        return Verdict("not available", f"{type(problem).__name__}: {problem}".split("\n")[0][:300])
    wanted, _ = _movement(_exact, [SHAPE], torch.float32, DTYPES[dtype])
    error = ((moved[0].double() - wanted[0].double()).norm() / wanted[0].double().norm()).item()
    verdict = Verdict("measured", error=error, seconds_per_parameter=seconds / moved[0].numel())
    stochastic = 2 if contender.options and contender.options.get("param_rounding") == "stochastic" else 1
    tolerance = contender.tolerance + ROUNDING[dtype] * stochastic
    if not error <= tolerance:
        verdict.status, verdict.reason = "refused", f"the update is off by {error:.1e}, accepted are {tolerance:.1e}"
    if differs:
        verdict.status, verdict.reason = "refused", "it does not give the bits of the reference"
    return verdict


def _exact(params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=WEIGHT_DECAY, foreach=False)


def _movement(
    make: Callable[..., torch.optim.Optimizer],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    given: torch.dtype | None = None,
) -> tuple[list[Tensor], float]:
    """The parameters and then the state after STEPS steps, and the seconds of the fastest one.

    Gradients are rounded to the dtype that belongs to parameters of dtype `given`.
    """
    rounded = torch.bfloat16 if (given or dtype).itemsize == 1 else given or dtype
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(shape).to(dtype)) for shape in shapes]
    if dtype.itemsize == 1:
        for p in params:
            p.grad_dtype = rounded
    optimizer = make(params, lr=LR)
    fastest = float("inf")
    for _ in range(STEPS):
        for p in params:
            grad = torch.randn(p.shape, generator=generator).to(rounded)
            p.grad = grad.float() if dtype == torch.float32 else grad
        start = time.perf_counter()
        optimizer.step()
        fastest = min(fastest, time.perf_counter() - start)
    state = [x for p in params for x in tensors_of(optimizer.state[p])]
    return [p.detach() for p in params] + state, fastest


def _bits_differ(contender: Contender, dtype: str) -> bool:
    def reference(params: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
        options = {**(contender.options or {}), "backend": "reference"}
        return fused8.AdamW8bit(params, lr=lr, weight_decay=WEIGHT_DECAY, **options)

    own, _ = _movement(contender.make, MODEL, DTYPES[dtype])
    wanted, _ = _movement(reference, MODEL, DTYPES[dtype])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return not all(
        a.dtype == b.dtype and torch.equal(a.view(bits[a.itemsize]), b.view(bits[b.itemsize]))
        for a, b in zip(own, wanted, strict=True)
    )
