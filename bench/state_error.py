"""How far is the update of 8-bit Adam from that of FP32 Adam?  python -m bench.state_error

Each stream of gradients (streams.py) drives the real optimizer at a learning rate of 1 on a parameter that is set to
zero before every step, so that the update is minus the parameter. torch.optim.Adam is driven the same way. The number
is the relative L2 error of the update, averaged over the last steps. Exits with 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import fused8

from . import streams

FORMATS = (("adaptive", 256), ("adaptive", 64), ("dynamic", 256), ("e4m3", 256))

# The default codec at block 256: the largest error on each stream that is accepted.
PROMISES = {"gpt": 0.034, "matrix": 0.060, "gauss2": 0.115}


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


def measure(
    name: str, formats: list[tuple[str, int]], options: argparse.Namespace, advance: Callable[[], None]
) -> dict[tuple[str, int], dict[str, float]]:
    """The error and the memory of each format on one stream."""
    shape = (options.n // streams.COLUMNS, streams.COLUMNS)
    betas = (0.9, options.beta2)
    exact = Driven(lambda params: torch.optim.Adam(params, lr=1.0, betas=betas), shape)

    def make(codec: str, block_size: int) -> Driven:
        arguments = dict(lr=1.0, betas=betas, codec=codec, block_size=block_size, min_8bit_size=0)
        return Driven(lambda params: fused8.Adam8bit(params, backend=options.backend, **arguments), shape)

    driven = {format: make(*format) for format in formats}
    errors = dict.fromkeys(formats, 0.0)
    tail = min(options.tail, options.steps)
    for t, grad in enumerate(streams.stream(name, options.n, options.steps)):
        wanted = exact.update(grad)
        for format, optimizer in driven.items():
            update = optimizer.update(grad)
            if t >= options.steps - tail:
                errors[format] += ((update - wanted).norm() / wanted.norm()).item() / tail
        advance()
    return {
        format: {"error": errors[format], "bytes_per_parameter": driven[format].bytes_per_parameter()}
        for format in formats
    }


def broken_promises(results: dict[str, dict[tuple[str, int], dict[str, float]]]) -> list[str]:
    """What the errors contradict, in words."""
    broken = []
    for name, by_format in results.items():
        error = {format: result["error"] for format, result in by_format.items()}
        default, dynamic = error.get(("adaptive", 256)), error.get(("dynamic", 256))
        if default is None:
            continue
        if name in PROMISES and not default <= PROMISES[name]:
            broken.append(f"{name}: adaptive has an error of {default:.4f}, promised are {PROMISES[name]}")
        if dynamic is not None and not default <= dynamic:
            broken.append(f"{name}: adaptive has an error of {default:.4f}, dynamic of only {dynamic:.4f}")
    return broken


def table_of(results: dict[str, dict[tuple[str, int], dict[str, float]]], formats: list[tuple[str, int]]) -> Table:
    table = Table(title="relative L2 error of the update against FP32 Adam", box=box.SIMPLE, padding=0)
    table.add_column("codec, block")
    table.add_column("B/param", justify="right")
    for name in results:
        table.add_column(name, justify="right")
    for format in formats:
        own = [by_format[format] for by_format in results.values()]
        errors = [f"{result['error']:.4f}" for result in own]
        table.add_row(f"{format[0]} {format[1]}", f"{own[0]['bytes_per_parameter']:.3f}", *errors)
    return table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.state_error", description=__doc__.split("\n")[0])
    parser.add_argument("--streams", default=",".join(streams.NAMES), help="some of: %(default)s")
    parser.add_argument("--codec", default="", help="some of: adaptive,dynamic,e4m3")
    parser.add_argument("--block-size", type=int, help="one block size for every codec instead of the usual rows")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tail", type=int, default=50, help="average over this many last steps")
    parser.add_argument("--n", type=int, default=8192, help="elements, a multiple of 2048")
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


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    formats = list(FORMATS)
    if options.block_size:
        formats = list(dict.fromkeys((codec, options.block_size) for codec, _ in formats))
    if options.codec:
        formats = [format for format in formats if format[0] in options.codec.split(",")]
    results = {}
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in options.streams:
            task = progress.add_task(name, total=options.steps)
            results[name] = measure(name, formats, options, lambda task=task: progress.advance(task))
    console.print(table_of(results, formats))
    console.print(f"beta2 {options.beta2}, {options.steps} steps, {options.n} elements, torch {torch.__version__}")
    broken = broken_promises(results)
    for message in broken:
        console.print(f"[red]broken promise:[/red] {message}")
    if options.json:
        rows = [
            {"stream": name, "codec": codec, "block_size": block_size, **result}
            for name, by_format in results.items()
            for (codec, block_size), result in by_format.items()
        ]
        settings = {key: getattr(options, key) for key in ("steps", "tail", "n", "beta2")}
        report = {"torch": torch.__version__, **settings, "results": rows, "broken_promises": broken}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
