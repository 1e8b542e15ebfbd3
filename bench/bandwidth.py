"""The limit: how fast this machine reads and writes memory, and how many bytes a step has to move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .rounds import Timed

COPY, TRIAD, UPDATE = "copy", "triad", "update in place"
ARRAYS_MOVED = {COPY: 2, TRIAD: 3, UPDATE: 3}


def kernels(elements: int) -> list[Timed]:
    """b = a; c = a + 2 b; b += 2 a, on FP32 arrays. The last one writes where it has read, as an optimizer does."""
    a, b, c = (torch.full((elements,), value) for value in (1.0, 2.0, 0.0))
    return [
        Timed(COPY, lambda: b.copy_(a)),
        Timed(TRIAD, lambda: torch.add(a, b, alpha=2.0, out=c)),
        Timed(UPDATE, lambda: b.add_(a, alpha=1e-9)),
    ]


def gb_per_second(kernel: Timed, elements: int, seconds: float) -> float:
    return ARRAYS_MOVED[kernel.name] * 4 * elements / seconds / 1e9


def elements_beyond_cache(at_least: int = 2**26) -> int:
    """So many that the three arrays are twice as large as the largest cache."""
    return max(at_least, 2 * _largest_cache() // 12)


def _largest_cache() -> int:
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * unit[size[-1]] for size in sizes if size[-1:] in unit), default=0)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors of a parameter's state that a step reads and writes; tensor subclasses are opened.

    Left out: step counters, and the tables of values (qmap) that all parameters share.
    """
    for name, x in value.items():
        if not isinstance(x, Tensor) or not x.dim() or name.startswith("qmap"):
            continue
        if hasattr(x, "__tensor_flatten__"):
            yield from tensors_of({inner: getattr(x, inner) for inner in x.__tensor_flatten__()[0]})
        else:
            yield x


def state_bytes(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> int:
    return sum(x.nbytes for p in params for x in tensors_of(optimizer.state[p]))


def bytes_moved(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """By one step at least: parameters and state are read and written, gradients read."""
    own = sum(2 * p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for p in params)
    return own + 2 * state_bytes(params, optimizer)
