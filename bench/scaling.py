"""How the time of a step grows with the number of parameters, of tensors, and of steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from . import parity, workloads
from .contenders import BASELINE, Contender, pick
from .cpu_speed import Row, compare
from .rounds import quartiles

SIZE_CONTENDERS = (BASELINE, "fused8 adaptive")
TENSOR_CONTENDERS = (BASELINE, "torch foreach", "fused8 adaptive")
LARGE = 2**20  # sizes from here on are fitted
WINDOW = 20  # steps that make one time of the schedule


def line(x: Sequence[float], y: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the weighted least squares line."""
    total = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    spread = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    slope = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True)) / spread
    return mean_y - slope * mean_x, slope


def fit(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Seconds = fixed + slope x, with relative errors weighted alike; and the slope in the log-log plane."""
    x, y = zip(*points, strict=True)
    fixed, slope = line(x, y, [1 / value**2 for value in y])
    _, log_slope = line([math.log(value) for value in x], [math.log(value) for value in y], [1.0] * len(x))
    return {"fixed": fixed, "slope": slope, "log_log_slope": log_slope}


def _seconds(rows: Sequence[Row], n: int) -> dict[str, float]:
    return {row["name"]: 1e-9 * row["ns"] * n for row in rows if "ns" in row}


def growth_with_size(sizes: Sequence[int], seconds: float) -> dict[str, Any]:
    """FP32, one tensor. `slope` of the fits is in seconds per parameter, over the sizes from LARGE on."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for n in sizes:
        found = compare(pick(*SIZE_CONTENDERS), workloads.one_tensor(n), "fp32", seconds / len(sizes))
        rows += [{**row, "parameters": n} for row in found]
        for name, value in _seconds(found, n).items():
            points.setdefault(name, []).append((n, value))
    large = {name: [p for p in own if p[0] >= LARGE] or own for name, own in points.items()}
    return {"rows": rows, "fits": {name: fit(own) for name, own in large.items() if len(own) > 1}}


def growth_with_tensors(counts: Sequence[int], total: int, seconds: float) -> dict[str, Any]:
    """FP32, the same parameters in more and more tensors. `slope` of the fits is in seconds per tensor."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for count in counts:
        shapes = workloads.equal_tensors(count, total)
        # Ten thousand tensors take longer: of steps as slow as theirs more than three rounds are wanted.
        found = compare(pick(*TENSOR_CONTENDERS), shapes, "fp32", seconds * count**0.25 / sum(n**0.25 for n in counts))
        rows += [{**row, "tensors": count} for row in found]
        for name, value in _seconds(found, total).items():
            points.setdefault(name, []).append((count, value))
    return {"parameters": total, "rows": rows, "fits": {name: fit(own) for name, own in points.items()}}


def schedule(steps: int, n: int) -> dict[str, Any]:
    """Does a learning rate that is a tensor and changes at every step cost anything as the run goes on?

    Times (microseconds, quartiles) of the first WINDOW steps from the fifth on and of the last WINDOW.
    """
    rows = []
    for contender in pick(BASELINE, "fused8 adaptive"):
        verdict = parity.check(contender, "fp32")
        row: Row = {"name": contender.name, "ours": contender.options is not None, **verdict.row()}
        if verdict.status == "measured":
            row.update(_follow(contender, steps, n))
        rows.append(row)
    return {"parameters": n, "steps": steps, "window": _window(steps), "rows": rows}


def _window(steps: int) -> int:
    return min(WINDOW, (steps - 4) // 2)


def _follow(contender: Contender, steps: int, n: int) -> Row:
    params = workloads.make_params(workloads.one_tensor(n), torch.float32)
    optimizer = contender.make(params, lr=torch.tensor(1e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.step()
        times.append(1e6 * (time.perf_counter() - start))
        scheduler.step()
    window = _window(steps)
    early, late = quartiles(times[4 : 4 + window]), quartiles(times[-window:])
    return {
        "early_us": list(early),
        "late_us": list(late),
        "whole_us": statistics.median(times),
        "within_noise": early[0] <= late[2] and late[0] <= early[2],
    }
