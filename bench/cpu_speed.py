"""How long does a step take on this CPU, beside other optimizers?  python -m bench.cpu_speed

One comparison: all optimizers interleaved in this process, beside plain memory kernels. `make bench` runs many of them.
No speed is shown for an optimizer whose result was not right in the same process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import bandwidth, parity, workloads
from .contenders import BASELINE, CODECS, DTYPES, Contender, peers
from .rounds import Timed, interleave, quartiles

SLOWEST_STEP = 3.0  # seconds: what takes longer is left out
SHARED_GRADIENTS = 2**24  # above so many parameters no cache holds the gradients, and all contenders share them
MEMORY_LEFT = 2 * 2**30

Row = dict[str, Any]


def compare(
    chosen: Sequence[Contender],
    shapes: Sequence[workloads.Shape],
    dtype: str,
    seconds: float,
    limit_elements: int = 0,
) -> list[Row]:
    """One row per contender: its times, or why there are none. `limit_elements` > 0: rows of the memory kernels too.

    Times are in ns per parameter (quartiles); `ratio` is how many times as fast as the baseline.
    """
    n = workloads.numel(shapes)
    rows: list[Row] = []
    timed: list[Timed] = bandwidth.kernels(limit_elements) if limit_elements else []
    kernels = len(timed)
    shared: dict[torch.dtype, list[torch.Tensor]] = {}
    for contender in chosen:
        verdict = parity.check(contender, dtype)
        row = {"name": contender.name, "ours": contender.options is not None, **verdict.row()}
        rows.append(row)
        if verdict.status != "measured":
            continue
        own_dtype = DTYPES[contender.dtype or dtype]
        if reason := _too_much(verdict.seconds_per_parameter * n, n * own_dtype.itemsize):
            row.update(status="left out", reason=reason)
            continue
        params = workloads.make_params(shapes, own_dtype, shared.get(own_dtype))
        if n > SHARED_GRADIENTS:
            shared[own_dtype] = [p.grad for p in params if p.grad is not None]
        optimizer = contender.make(params, lr=1e-3)
        optimizer.step()
        row["bytes_per_parameter"] = bandwidth.bytes_moved(params, optimizer) / n
        row["state_bytes_per_parameter"] = bandwidth.state_bytes(params, optimizer) / n
        timed.append(Timed(contender.name, optimizer.step))
    if not any(t.name == BASELINE for t in timed):
        raise RuntimeError(f"the baseline, {BASELINE}, could not be measured: {rows[0]['reason']}")
    interleave(timed, BASELINE, seconds)
    limits = [_limit_row(kernel, limit_elements) for kernel in timed[:kernels]]
    by_name = {row["name"]: row for row in rows}
    for t in timed[kernels:]:
        by_name[t.name].update(_measured(t, n, by_name[t.name]["bytes_per_parameter"]))
    if limits:
        set_limits(limits + rows)
    return limits + rows


def set_limits(rows: Sequence[Row]) -> None:
    """The time that each step would take at the best rate that anything in the run has reached. An optimizer may beat
    the plain kernels, which stand there for the case that all of them are slow."""
    best = max(row["gb_per_second"] for row in rows if "gb_per_second" in row)
    for row in rows:
        if "ns" in row:
            row["ns_at_limit"] = row["bytes_per_parameter"] / best


def _too_much(step: float, tensor: int) -> str | None:
    """Why a step that takes so many seconds, on parameters of so many bytes, is not tried."""
    if step > SLOWEST_STEP:
        return f"one step would take about {step:.1f} s"
    needed, available = 8 * tensor, available_memory()
    if available is not None and needed + MEMORY_LEFT > available and tensor > 2**26:
        return f"memory: up to {needed / 2**30:.1f} GiB more would be needed, {available / 2**30:.1f} are available"
    return None


def available_memory() -> int | None:
    """In bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _measured(t: Timed, n: int, bytes_per_parameter: float) -> Row:
    first, median, third = (1e9 * x / n for x in quartiles(t.times))
    ratio = quartiles(t.ratios)
    return {
        "rounds": len(t.times),
        "ns": median,
        "ns_quartiles": [first, third],
        "gb_per_second": bytes_per_parameter / median,
        "ratio": ratio[1],
        "ratio_quartiles": [ratio[0], ratio[2]],
    }


def _limit_row(kernel: Timed, elements: int) -> Row:
    first, median, third = quartiles(kernel.times)
    rate = [bandwidth.gb_per_second(kernel, elements, x) for x in (median, third, first)]
    return {
        "name": kernel.name,
        "status": "limit",
        "rounds": len(kernel.times),
        "gb_per_second": rate[0],
        "gb_per_second_quartiles": rate[1:],
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_speed", description=__doc__.split("\n")[0])
    parser.add_argument("--size", default="16M", help="parameters in all; K and M are 2^10 and 2^20")
    parser.add_argument("--tensors", type=int, default=1, help="split them into so many tensors")
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--codec", default=",".join(CODECS))
    parser.add_argument("--only-ours", action="store_true", help="no other library than torch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--budget", type=float, default=60, help="seconds per dtype")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    options = parser.parse_args(arguments)
    options.dtype, options.codec = options.dtype.split(","), options.codec.split(",")
    if unknown := (set(options.dtype) - {"fp32", "bf16"}) | (set(options.codec) - set(CODECS)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    try:
        options.shapes = workloads.equal_tensors(options.tensors, workloads.parse_size(options.size))
    except (ValueError, ZeroDivisionError) as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    from . import report, results  # needs rich, which the comparison does not

    options = parse(arguments)
    torch.set_num_threads(options.threads)
    ours = {f"fused8 {codec}" for codec in options.codec}
    chosen = [
        contender
        for contender in peers()
        if (contender.name in ours if contender.options is not None else not (options.only_ours and contender.module))
    ]
    n, limit = workloads.numel(options.shapes), bandwidth.elements_beyond_cache()
    jobs = [
        {
            "part": "speed",
            "case": f"{dtype}, {workloads.size_name(n)}",
            "rows": compare(chosen, options.shapes, dtype, options.budget, limit),
        }
        for dtype in options.dtype
    ]
    content = {"machine": results.machine(), "jobs": jobs}
    report.show(content)
    if options.json:
        results.write(content, options.json)
    return 1 if results.problems(content) else 0


if __name__ == "__main__":
    sys.exit(main())
