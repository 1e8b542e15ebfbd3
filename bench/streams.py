"""Streams of gradients that are hard to keep Adam's state for, in 8 bits: made up ones, and those of a tiny GPT.

A stream is an iterator over FP32 gradients of shape [n / 256, 256], the same for the same arguments. The scales are
those of a real network, around 1e-5. What the made-up ones have in common: a persistent direction `mean` of 0.3
standard deviations, and noise whose tails are those of Student's t with 4 degrees of freedom unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

COLUMNS = 256


class Maker:
    """The random parts that the streams are made of. Flat tensors of n elements."""

    def __init__(self, n: int, steps: int, seed: int = 0) -> None:
        self.n, self.steps = n, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.mean = 0.3 * self.normal(n)
        self.lognormal = 1e-5 * torch.exp(2.0 * self.normal(n))  # a spread of sigma = 2 inside every block
        rows, columns = torch.exp(self.normal(n // COLUMNS, 1)), torch.exp(0.7 * self.normal(1, COLUMNS))
        self.matrix = 1e-5 * (rows * columns).reshape(-1) * torch.exp(0.3 * self.normal(n))
        self.rate = 1.5 * self.normal(n)
        frequencies = 0.5 / torch.arange(1, n // 64 + 1) ** 0.9  # Zipf's law
        order = torch.randperm(len(frequencies), generator=self.generator)
        self.frequencies = frequencies[order].clamp(1e-3, 1)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def student(self, freedom: int = 4) -> Tensor:
        """Student's t noise of unit variance."""
        z = self.normal(self.n)
        chi2 = self.normal(freedom, self.n).square().mean(0)
        return z / chi2.sqrt() / math.sqrt(freedom / (freedom - 2))


def gauss2(make: Maker, t: int) -> Tensor:
    """Elements of a block differ by lognormal factors of sigma = 2; normal noise."""
    return make.lognormal * (make.mean + make.normal(make.n))


def heavy2(make: Maker, t: int) -> Tensor:
    """As gauss2 with heavy tails, and one step in a hundred is 10 times as large."""
    spike = 10.0 if make.uniform(1).item() < 0.01 else 1.0
    return make.lognormal * spike * (make.mean + make.student())


def matrix(make: Maker, t: int) -> Tensor:
    """A weight matrix: each row and each column has its own scale."""
    return make.matrix * (make.mean + make.student())


def drift(make: Maker, t: int) -> Tensor:
    """As heavy2 without spikes, and each element's scale grows or shrinks over the run, by e^(1.5 normal)."""
    return make.lognormal * torch.exp(make.rate * t / make.steps) * (make.mean + make.student())


def decay(make: Maker, t: int) -> Tensor:
    """A matrix whose gradients shrink by e^3 over the run; normal noise."""
    return make.matrix * math.exp(-3.0 * t / make.steps) * (make.mean + make.normal(make.n))


def embed(make: Maker, t: int) -> Tensor:
    """Rows of 64 elements, four to a block, that get a gradient as often as words occur, and otherwise none."""
    hit = (make.uniform(len(make.frequencies)) < make.frequencies).float().repeat_interleave(64)
    return 1e-5 * hit * (make.mean + make.student()) * torch.exp(0.5 * make.rate)


def period10(make: Maker, t: int) -> Tensor:
    """As matrix, but nine of ten gradients are 50 times smaller."""
    return make.matrix * (make.mean + make.student()) * (1.0 if t % 10 == 0 else 0.02)


MADE_UP: dict[str, Callable[[Maker, int], Tensor]] = {
    make.__name__: make for make in (matrix, gauss2, heavy2, drift, decay, embed, period10)
}
NAMES = ("gpt", *MADE_UP)


def stream(name: str, n: int, steps: int) -> Iterator[Tensor]:
    """The gradients of a stream by its name, each [n / 256, 256]."""
    if name == "gpt":
        yield from tiny_gpt(n, steps)
        return
    make = Maker(n, steps)
    for t in range(steps):
        yield MADE_UP[name](make, t).view(-1, COLUMNS)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class _TinyGPT(nn.Module):
    """Two layers, 128 wide, on ASCII characters."""

    def __init__(self, width: int = 128, length: int = 64) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(_Block(width, 4), _Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.positions.weight)))


def tiny_gpt(n: int, steps: int, length: int = 64) -> Iterator[Tensor]:
    """Real gradients: pieces of those of a tiny GPT that AdamW trains on torch's own sources (torch/optim)."""
    files = sorted(Path(torch.__file__).parent.glob("optim/*.py"))
    text = "".join(file.read_text(errors="ignore") for file in files)[:400_000]
    ids = torch.tensor([min(ord(c), 127) for c in text])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _TinyGPT(length=length)
    generator = torch.Generator().manual_seed(0)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01)
    pieces = sum(p.numel() for p in params) // 2048
    picked = torch.randperm(pieces, generator=torch.Generator().manual_seed(1))[: n // 2048]
    for t in range(steps):
        starts = torch.randint(0, len(ids) - length - 1, (8,), generator=generator).tolist()
        inputs = torch.stack([ids[i : i + length] for i in starts])
        targets = torch.stack([ids[i + 1 : i + length + 1] for i in starts])
        loss = nn.functional.cross_entropy(model(inputs).view(-1, 128), targets.view(-1))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (t + 1) / 100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        yield flat[: pieces * 2048].view(-1, 2048)[picked].reshape(-1, COLUMNS).clone()
        optimizer.step()
