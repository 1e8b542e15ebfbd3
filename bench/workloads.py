"""Parameters with gradients to step on: one tensor, many tensors, the shapes of a language model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROW = 1024  # a plain tensor of n parameters has the shape [n / ROW, ROW]
PATTERN = 2**20  # random numbers repeat after so many elements: making more takes longer than measuring

Shape = tuple[int, ...]


def one_tensor(n: int) -> list[Shape]:
    return [(n // ROW, ROW)]


def equal_tensors(count: int, total: int) -> list[Shape]:
    """`total` parameters in `count` tensors of equal size."""
    rows = total // count // ROW
    if rows * ROW * count != total:
        raise ValueError(f"{total} parameters are not {count} tensors of whole rows of {ROW}")
    return [(rows, ROW)] * count


def gpt(width: int, vocabulary: int = 50257, context: int = 1024, layers: int = 13) -> list[Shape]:
    """The tensors of GPT-2 at another width; 13 layers make 160 of them."""
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(norm + attention + norm + mlp) * layers, *norm]


def gpt_of(n: int) -> list[Shape]:
    """The widest such model, in steps of 64, that has no more than n parameters; the narrowest one at least.

    Below 4 M parameters its vocabulary and its context are small.
    """
    sizes = (50257, 1024) if n >= 4_000_000 else (256, 64)
    width = 64
    while numel(gpt(width + 64, *sizes)) <= n:
        width += 64
    return gpt(width, *sizes)


def numel(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _filled(shape: Shape, pattern: Tensor) -> Tensor:
    result = torch.empty(shape, dtype=pattern.dtype)
    for piece in result.view(-1).split(len(pattern)):
        piece.copy_(pattern[: len(piece)])
    return result


def make_params(
    shapes: Sequence[Shape], dtype: torch.dtype, grads: Sequence[Tensor] | None = None
) -> list[torch.nn.Parameter]:
    """Parameters with gradients, of their dtype or BF16 for FP8. Every call gives the same values.

    `grads` are used as they are: optimizers only read them.
    """
    generator = torch.Generator().manual_seed(0)
    longest = min(PATTERN, max(map(math.prod, shapes)))
    noise = torch.randn(longest, generator=generator)
    grad_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    values, slopes = (0.02 * noise).to(dtype), (1e-3 * noise.flip(0)).to(grad_dtype)
    params = []
    for i, shape in enumerate(shapes):
        p = torch.nn.Parameter(_filled(shape, values))
        if grad_dtype != dtype:
            p.grad_dtype = grad_dtype
        p.grad = grads[i] if grads else _filled(shape, slopes)
        params.append(p)
    return params


def parse_size(text: str) -> int:
    """A number of parameters; K and M are 2^10 and 2^20."""
    unit = {"K": 2**10, "M": 2**20}.get(text[-1].upper(), 1)
    return int(text.rstrip("kKmM")) * unit


def size_name(n: int) -> str:
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return str(n)
