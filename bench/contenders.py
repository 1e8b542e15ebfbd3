"""The optimizers that are compared, and why one of them cannot take part.

All are AdamW with the same options: betas (0.9, 0.999), eps 1e-8, decoupled weight decay 0.01.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import fused8

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
CODECS = ("adaptive", "dynamic", "e4m3")
BASELINE = "torch fused"

WEIGHT_DECAY = 0.01
FULL, EIGHT_BIT = 1e-5, 0.05
"""The largest relative error of the movement (parity.py) by class of state: 32 bits, where only the order of the
operations differs, and 8 bits, where the formats measure 0.008 to 0.028."""


@dataclass(frozen=True)
class Contender:
    name: str
    make: Callable[..., torch.optim.Optimizer]
    """Takes parameters or groups, and lr."""
    tolerance: float = FULL
    module: str | None = None
    """What it needs to import."""
    unavailable: str | None = None
    """Why it cannot run on a CPU at all."""
    options: dict[str, Any] | None = field(default=None, hash=False)
    """Those of fused8.AdamW8bit; None for all others."""
    dtype: str | None = None
    """Of the parameters, where it is not that of the comparison."""

    def missing(self) -> str | None:
        """Why this optimizer cannot be made here, or None."""
        if self.unavailable or self.module is None:
            return self.unavailable
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}".split("\n")[0]
        return None


def ours(name: str, dtype: str | None = None, **options: Any) -> Contender:
    """fused8 with the C++ kernel: an option that it does not serve is an error, not a slow step of the reference."""
    options = {"backend": "cpp", **options}
    make = functools.partial(fused8.AdamW8bit, weight_decay=WEIGHT_DECAY, **options)
    return Contender(f"fused8 {name}", make, EIGHT_BIT, options=options, dtype=dtype)


def torchs(name: str, dtype: str | None = None, **options: Any) -> Contender:
    make = functools.partial(torch.optim.AdamW, weight_decay=WEIGHT_DECAY, **options)
    return Contender(name, make, dtype=dtype)


def _bitsandbytes(params: Iterable[Any], lr: Any = 1e-3) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=lr, weight_decay=WEIGHT_DECAY)


def _torchao(params: Iterable[Any], lr: Any = 1e-3) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=lr, weight_decay=WEIGHT_DECAY)


def _optimi(params: Iterable[Any], lr: Any = 1e-3, **how: bool) -> torch.optim.Optimizer:
    import optimi

    return optimi.AdamW(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY, **how)


def _cannot_run(params: Iterable[Any], lr: Any = 1e-3) -> torch.optim.Optimizer:
    raise RuntimeError("it cannot run on a CPU")


@functools.cache
def peers() -> tuple[Contender, ...]:
    """Everything that replaces torch's AdamW, the baseline first."""
    return (
        torchs(BASELINE, fused=True),
        torchs("torch foreach", foreach=True),
        *(ours(codec, codec=codec) for codec in CODECS),
        Contender("bitsandbytes 8-bit", _bitsandbytes, EIGHT_BIT, "bitsandbytes"),
        Contender("torchao 8-bit", _torchao, EIGHT_BIT, "torchao.optim"),
        Contender("optimi foreach", functools.partial(_optimi, foreach=True, triton=False), FULL, "optimi"),
        Contender("optimi loop", functools.partial(_optimi, foreach=False, triton=False), FULL, "optimi"),
        Contender("optimi triton", functools.partial(_optimi, triton=True), FULL, "optimi"),
        Contender("FlashOptim 8-bit", _cannot_run, EIGHT_BIT, unavailable="it runs on CUDA devices only"),
    )


@functools.cache
def low_precision() -> tuple[Contender, ...]:
    """What can be done with parameters of 16 and 8 bits. Gradients are BF16 except beside FP32 parameters."""
    return (
        torchs(BASELINE, "bf16", fused=True),
        torchs("torch fused, FP32 parameters", "fp32", fused=True),
        ours("bf16, to nearest", "bf16"),
        ours("bf16, stochastic rounding", "bf16", param_rounding="stochastic"),
        ours("bf16, master_bits=24", "bf16", master_bits=24),
        ours("bf16, master_bits=32", "bf16", master_bits=32),
        ours("fp8, stochastic rounding", "fp8"),
        ours("fp8, master_bits=16", "fp8", master_bits=16),
    )


def pick(*names: str) -> list[Contender]:
    return [contender for contender in peers() if contender.name in names]
