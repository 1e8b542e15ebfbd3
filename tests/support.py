"""What several test files share: parameters of every shape, the ways to store them, kernels called directly.

And by way of this, what they share with the check of a GPU: bench/same_bits.py.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.same_bits import (  # noqa: F401  tests import these from here
    assert_same_bits,
    assert_same_optimizers,
    bits,
    hostile_gradient,
    make_parameters,
    parameters,
    run,
    set_gradients,
)
from fused8 import backends, formats
from fused8.step_plan import scalar_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CODECS = ("adaptive", "dynamic", "e4m3")
ISAS = ("generic", "avx2", "avx512")

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


def choose_isa(isa: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Have the C++ kernel take an instruction set; False where the processor, an older one, does not have it."""
    monkeypatch.setenv("FUSED8_CPU_ISA", isa)
    try:
        assert torch.ops.fused8.cpu_isa() == isa
    except RuntimeError as error:
        assert isa != "generic" and "does not have" in str(error)
        return False
    return True


def require_isa(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and the test is skipped there."""
    if not choose_isa(isa, monkeypatch):
        pytest.skip(f"this processor does not have {isa}")


def storage_options(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """The ways to keep a parameter that is not FP32, but for rounding to nearest in 16 bits, by name."""
    own = 8 * dtype.itemsize
    options: dict[str, dict[str, Any]] = {
        "stochastic": dict(param_rounding="stochastic"),
        "8 more bits": dict(master_bits=own + 8),
        "16 more bits": dict(master_bits=own + 16),
        "8 more bits, stochastic": dict(master_bits=own + 8, param_rounding="stochastic"),
        "16 more bits, stochastic": dict(master_bits=own + 16, param_rounding="stochastic"),
    }
    return options | ({"nearest": dict(param_rounding="nearest")} if own == 8 else {})


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
