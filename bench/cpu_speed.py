"""How long does a step take on this CPU, beside other optimizers?  python -m bench.cpu_speed

All run interleaved in one process, one step each per round, so that a slow moment of the machine hits all of them; what
counts is the ratio to torch's fused step of the same round. Rounds are made until that is known well, or the time is
up. No speed is shown for a step that is wrong: fused8 has to give the bits of its reference, the others an update close
to that of FP32 AdamW.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import fused8

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CODECS = ("adaptive", "dynamic", "e4m3")
BASELINE = "torch fused"
COPY = "memory copy"

ROW = 1024  # parameters are shaped [n / ROW, ROW]
MIN_ROUNDS = 9
RATIO_ERROR = 0.01  # enough rounds: the median of the ratios is known this well
SLOW_ROUNDS = 3  # for what takes so long that a few rounds have to do

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


def _bitsandbytes(params: list[Tensor]) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params)


class Contender(NamedTuple):
    name: str
    make: MakeOptimizer
    codec: str | None = None
    """Of fused8; None for the others."""
    tolerance: float = 1e-5
    """For the others: the largest relative L2 error of the movement after 5 steps on FP32 parameters."""
    slow: bool = False


def contenders(codecs: tuple[str, ...] = CODECS) -> list[Contender]:
    """The optimizers to compare, the baseline first, as far as they are installed. All are AdamW, decay 0.01."""

    def ours(codec: str) -> Contender:
        return Contender(
            f"fused8 {codec}", lambda params: fused8.AdamW8bit(params, codec=codec, backend="cpp"), codec=codec
        )

    result = [
        Contender(BASELINE, lambda params: torch.optim.AdamW(params, fused=True)),
        Contender("torch foreach", lambda params: torch.optim.AdamW(params, foreach=True)),
        *map(ours, codecs),
    ]
    if importlib.util.find_spec("bitsandbytes"):
        result.append(Contender("bitsandbytes", _bitsandbytes, tolerance=0.1, slow=True))
    return result


def make_params(n: int, tensors: int, dtype: torch.dtype) -> list[Tensor]:
    """Parameters of n elements in all, with gradients. Every call gives the same values."""
    generator = torch.Generator().manual_seed(0)
    params = []
    for i in range(tensors):
        rows = n // ROW * (i + 1) // tensors - n // ROW * i // tensors
        p = torch.nn.Parameter((0.02 * torch.randn(rows, ROW, generator=generator)).to(dtype))
        p.grad = (1e-3 * torch.randn(rows, ROW, generator=generator)).to(dtype)
        params.append(p)
    return params


def parity_error(contender: Contender, dtype: torch.dtype) -> str | None:
    """Why this optimizer cannot be trusted with a measurement, or None. Runs a few steps on small parameters."""
    try:
        if contender.codec is not None:
            return _bits_differ(contender, dtype)
        return _update_differs(contender, dtype)
    except RuntimeError as error:
        return str(error)


def _five_steps(make: MakeOptimizer, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> list[Tensor]:
    """The parameters, which began at zero, and then the state tensors."""
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    optimizer = make(params)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    return [p.detach() for p in params] + [x for p in params for x in tensors_of(optimizer.state[p])]


def _bits_differ(contender: Contender, dtype: torch.dtype) -> str | None:
    def reference(params: list[Tensor]) -> torch.optim.Optimizer:
        return fused8.AdamW8bit(params, codec=contender.codec, backend="reference")

    shapes = ((64, ROW), (33, 300))
    pairs = zip(_five_steps(contender.make, shapes, dtype), _five_steps(reference, shapes, dtype), strict=True)
    return None if all(torch.equal(a, b) for a, b in pairs) else "does not give the bits of the reference"


def _update_differs(contender: Contender, dtype: torch.dtype) -> str | None:
    shapes = ((64, ROW),)
    moved = _five_steps(contender.make, shapes, dtype)[0].double()
    wanted = _five_steps(lambda params: torch.optim.AdamW(params, foreach=False), shapes, torch.float32)[0].double()
    error = ((moved - wanted).norm() / wanted.norm()).item()
    # BF16 has 8 bits: parameter, gradient and two moments are off by up to 2^-9 at each step.
    tolerance = contender.tolerance + (0.02 if dtype == torch.bfloat16 else 0)
    return None if error <= tolerance else f"an update that is off by {error:.1%} is not AdamW's"


def tensors_of(state: dict) -> list[Tensor]:
    """The tensors of a parameter's state that a step reads and writes."""
    return [x for name, x in state.items() if isinstance(x, Tensor) and x.dim() and not name.startswith("qmap")]


class Runner:
    """One contender on its own parameters, with the times of its steps."""

    def __init__(self, name: str, step: Callable[[], object], traffic: int, slow: bool = False) -> None:
        self.name, self.step, self.traffic, self.slow = name, step, traffic, slow
        self.times: list[float] = []
        self.ratios: list[float] = []

    @classmethod
    def of(cls, contender: Contender, n: int, tensors: int, dtype: torch.dtype) -> Runner:
        params = make_params(n, tensors, dtype)
        optimizer = contender.make(params)
        optimizer.step()
        state_bytes = sum(x.nbytes for p in params for x in tensors_of(optimizer.state[p]))
        return cls(contender.name, optimizer.step, 3 * sum(p.nbytes for p in params) + 2 * state_bytes, contender.slow)

    @classmethod
    def of_copy(cls, n: int, dtype: torch.dtype) -> Runner:
        source, target = torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype)
        return cls(COPY, lambda: target.copy_(source), 2 * source.nbytes)

    def run(self) -> float:
        start = time.perf_counter()
        self.step()
        self.times.append(time.perf_counter() - start)
        return self.times[-1]

    def row(self, n: int) -> dict[str, object]:
        """The measurements, as a row of the report. `ratio` is how many times as fast as the baseline."""
        median = statistics.median(self.times)
        return {
            "name": self.name,
            "rounds": len(self.times),
            "ns_per_parameter": median / n * 1e9,
            "iqr_ns_per_parameter": interquartile(self.times) / n * 1e9,
            "best_ns_per_parameter": min(self.times) / n * 1e9,
            "bytes_per_parameter": self.traffic / n,
            "gb_per_second": self.traffic / median / 1e9,
            "ratio": statistics.median(self.ratios),
            "iqr_ratio": interquartile(self.ratios),
        }


def interquartile(values: list[float]) -> float:
    lower, _, upper = statistics.quantiles(values, n=4)
    return upper - lower


def run_rounds(runners: list[Runner], budget: float) -> None:
    """Interleaved rounds until every ratio is known well, or `budget` seconds are over."""
    fast = [runner for runner in runners if not runner.slow]
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rounds", total=budget)
        round = 0
        while round < SLOW_ROUNDS or time.perf_counter() - start < budget:
            taking_part = runners if round < SLOW_ROUNDS else fast
            first = round % len(taking_part)
            seconds = {runner.name: runner.run() for runner in taking_part[first:] + taking_part[:first]}
            for runner in taking_part:
                runner.ratios.append(seconds[BASELINE] / seconds[runner.name])
            round += 1
            progress.update(task, completed=time.perf_counter() - start)
            if round >= MIN_ROUNDS and max(map(ratio_error, fast)) < RATIO_ERROR:
                break


def ratio_error(runner: Runner) -> float:
    """Relative: the standard error of a median of n values is about their interquartile range / sqrt(n)."""
    return interquartile(runner.ratios) / statistics.median(runner.ratios) / math.sqrt(len(runner.ratios))


def measure(dtype: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """One row per contender: what `Runner.row` gives, or the reason why there is no speed."""
    n, tensors = options.size, options.tensors
    failed, runners = [], [Runner.of_copy(n, DTYPES[dtype])]
    for contender in contenders(options.codec):
        if reason := parity_error(contender, DTYPES[dtype]):
            failed.append({"name": contender.name, "error": reason})
        else:
            runners.append(Runner.of(contender, n, tensors, DTYPES[dtype]))
    run_rounds(runners, options.budget)
    return [{"dtype": dtype, **row} for row in [runner.row(n) for runner in runners] + failed]


def table_of(dtype: str, rows: list[dict[str, object]]) -> Table:
    table = Table(
        title=f"{dtype} parameters and gradients",
        caption="ratio: speed against torch fused, median over rounds; IQR: interquartile range",
        box=box.SIMPLE,
        padding=0,
    )
    table.add_column("optimizer", no_wrap=True)
    for name in ("ns/param", "IQR", "best", "B/param", "GB/s", "ratio", "IQR", "rounds"):
        table.add_column(name, justify="right", min_width=6)
    for row in rows:
        if "error" in row:
            table.add_row(row["name"], "none")
            continue
        table.add_row(
            row["name"],
            f"{row['ns_per_parameter']:.3f}",
            f"{row['iqr_ns_per_parameter']:.3f}",
            f"{row['best_ns_per_parameter']:.3f}",
            f"{row['bytes_per_parameter']:.2f}",
            f"{row['gb_per_second']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['iqr_ratio']:.3f}",
            str(row["rounds"]),
        )
    return table


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def environment(options: argparse.Namespace) -> dict[str, object]:
    """What a reader has to know to compare the numbers."""
    try:
        isa = torch.ops.fused8.cpu_isa()
    except (AttributeError, RuntimeError):
        isa = None
    return {
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "isa": isa,
        "torch": torch.__version__,
        "fused8": fused8.__version__,
        "size": options.size,
        "tensors": options.tensors,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="16M", help="parameters in all; K and M are 2^10 and 2^20")
    parser.add_argument("--tensors", type=int, default=1, help="split them into so many tensors")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--codec", default=",".join(CODECS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=float, default=60, help="seconds per dtype")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args(arguments)
    unit = {"K": 2**10, "M": 2**20}.get(options.size[-1].upper(), 1)
    options.size = int(options.size.rstrip("kKmM")) * unit
    if options.tensors < 1 or options.size < ROW * options.tensors or options.size % ROW:
        parser.error(f"--size must be a multiple of {ROW} and at least {ROW} for each tensor")
    options.dtype, options.codec = options.dtype.split(","), tuple(options.codec.split(","))
    if unknown := (set(options.dtype) - set(DTYPES)) | (set(options.codec) - set(CODECS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    about = environment(options)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    if about["load"] > 1:
        console.print("[yellow]other processes are running: the numbers will be worse than they could be[/yellow]")
    rows = []
    for dtype in options.dtype:
        of_dtype = measure(dtype, options)
        console.print(table_of(dtype, of_dtype))
        for row in of_dtype:
            if "error" in row:
                console.print(f"[red]no speed for {row['name']}:[/red] {row['error']}")
        rows += of_dtype
    if options.json:
        options.json.write_text(json.dumps({**about, "results": rows}, indent=1) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
