"""How far is the update of 8-bit Adam from that of FP32 Adam?  python -m bench.state_error

Each row drives the real optimizer at a learning rate of 1 on a parameter that is set to zero before every step, so that
the update is minus the parameter. torch.optim.Adam is driven the same way. The number is the relative L2 error of the
update, averaged over the last steps. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import fused8

from . import flash_rule, streams
from .contenders import CODECS

Format = tuple[str, int]  # codec, block size
FLASH = (flash_rule.NAME, flash_rule.GROUP)
FORMATS: tuple[Format, ...] = (*((codec, block) for codec in CODECS for block in (256, 128, 64)), FLASH)

# The default codec at block 256: the largest error on each stream that is accepted after 1000 steps.
PROMISES = {"gpt": 0.034, "matrix": 0.060, "gauss2": 0.115}
PROMISED_STEPS = 1000
PROMISED_SIZE = 8192


class Driven:
    """An optimizer that is read for its updates."""

    def __init__(self, make: Callable[[list[Tensor]], torch.optim.Optimizer], shape: tuple[int, int]) -> None:
        self.p = torch.nn.Parameter(torch.zeros(shape))
        self.optimizer = make([self.p])

    def update(self, grad: Tensor) -> Tensor:
        with torch.no_grad():
            self.p.zero_()
        self.p.grad = grad
        self.optimizer.step()
        return -self.p.detach()

    def bytes_per_parameter(self) -> float:
        """Of the state; the step counter is not counted."""
        state = self.optimizer.state[self.p]
        return sum(tensor.nbytes for name, tensor in state.items() if name != "step") / self.p.numel()


def driven(format: Format, options: argparse.Namespace) -> Driven:
    shape, betas = (options.n // streams.COLUMNS, streams.COLUMNS), (0.9, options.beta2)
    codec, block_size = format
    if format == FLASH:
        return Driven(lambda params: flash_rule.FlashRule(params, 1.0, betas, weight_decay=0.0, smallest=0), shape)
    arguments = dict(lr=1.0, betas=betas, codec=codec, block_size=block_size, min_8bit_size=0)
    return Driven(lambda params: fused8.Adam8bit(params, backend=options.backend, **arguments), shape)


def measure(
    name: str, formats: list[Format], options: argparse.Namespace, advance: Callable[[], object]
) -> list[dict[str, Any]]:
    """The error and the memory of each format on one stream."""
    shape, betas = (options.n // streams.COLUMNS, streams.COLUMNS), (0.9, options.beta2)
    exact = Driven(lambda params: torch.optim.Adam(params, lr=1.0, betas=betas), shape)
    by_format = {format: driven(format, options) for format in formats}
    errors = dict.fromkeys(formats, 0.0)
    tail = min(options.tail, options.steps)
    for t, grad in enumerate(streams.stream(name, options.n, options.steps)):
        wanted = exact.update(grad)
        for format, optimizer in by_format.items():
            update = optimizer.update(grad)
            if t >= options.steps - tail:
                errors[format] += ((update - wanted).norm() / wanted.norm()).item() / tail
        advance()
    return [
        {
            "stream": name,
            "codec": codec,
            "block_size": block_size,
            "error": errors[codec, block_size],
            "bytes_per_parameter": by_format[codec, block_size].bytes_per_parameter(),
        }
        for codec, block_size in formats
    ]


def broken_promises(rows: list[dict[str, Any]]) -> list[str]:
    """What the errors contradict, in words."""
    broken = []
    errors = {(row["stream"], row["codec"], row["block_size"]): row["error"] for row in rows}
    for name in dict.fromkeys(row["stream"] for row in rows):
        default, dynamic = errors.get((name, "adaptive", 256)), errors.get((name, "dynamic", 256))
        if default is None:
            continue
        if name in PROMISES and not default <= PROMISES[name]:
            broken.append(f"{name}: adaptive has an error of {default:.4f}, promised are {PROMISES[name]}")
        if dynamic is not None and not default <= dynamic:
            broken.append(f"{name}: adaptive has an error of {default:.4f}, dynamic of only {dynamic:.4f}")
    return broken


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.state_error", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default=",".join(streams.NAMES), help="some of: %(default)s")
    parser.add_argument("--codec", default="", help="some of: adaptive,dynamic,e4m3")
    parser.add_argument("--block-size", type=int, help="one block size for every codec instead of the usual rows")
    parser.add_argument("--steps", type=int, default=PROMISED_STEPS)
    parser.add_argument("--tail", type=int, default=50, help="average over this many last steps")
    parser.add_argument("--n", type=int, default=PROMISED_SIZE, help="elements, a multiple of 2048")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--backend", help="of fused8; by default the device's own")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args(arguments)
    options.streams = options.streams.split(",")
    if unknown := set(options.streams) - set(streams.NAMES):
        parser.error(f"unknown streams: {', '.join(sorted(unknown))}")
    if options.n <= 0 or options.n % 2048:
        parser.error("--n must be a multiple of 2048")
    return options


def run(arguments: list[str] | None) -> dict[str, Any]:
    """The rows of all streams, and the promises that they break, where those were made for this many steps."""
    options = parse(arguments)
    formats = list(FORMATS)
    if options.block_size:
        formats = [*dict.fromkeys((codec, options.block_size) for codec in CODECS)]
    if options.codec:
        formats = [format for format in formats if format[0] in options.codec.split(",")]
    rows = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in options.streams:
            task = progress.add_task(name, total=options.steps)
            rows += measure(name, formats, options, functools.partial(progress.advance, task))
    settings = {key: getattr(options, key) for key in ("steps", "tail", "n", "beta2")}
    binding = options.steps >= PROMISED_STEPS and options.n >= PROMISED_SIZE
    return {**settings, "rows": rows, "broken_promises": broken_promises(rows) if binding else []}


def main(arguments: list[str] | None = None) -> int:
    from . import report, results

    options = parse(arguments)
    job = {"part": "state_error", "case": "against FP32 Adam", **run(arguments)}
    content = {"machine": results.machine(), "jobs": [job]}
    report.show(content)
    if options.json:
        results.write(content, options.json)
    return 1 if job["broken_promises"] else 0


if __name__ == "__main__":
    sys.exit(main())
