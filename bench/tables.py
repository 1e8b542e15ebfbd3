"""Results as tables of text, the same for the terminal and for Markdown."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Job = dict[str, Any]


@dataclass
class Table:
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    missing: list[tuple[str, str, str]] = field(default_factory=list)
    """Those without numbers: name, what became of them, why."""
    note: str = ""

    def add(self, row: Row, key: str, cells: Callable[[], list[str]], name: str | None = None) -> None:
        """A row of numbers if it has `key`, else one that says why not."""
        name = name or row["name"]
        if key in row:
            self.rows.append([name, *cells()])
        else:
            self.missing.append((name, row["status"], row.get("reason", "")))


def _width(quartiles: Sequence[float], form: str) -> str:
    """The interquartile range."""
    return format(quartiles[-1] - quartiles[0], form)


def of_comparison(job: Job) -> list[Table]:
    columns = ("optimizer", "ns/param", "IQR", "speed", "IQR", "B/param", "GB/s", "limit", "error", "rounds")
    table = Table(f"One step: {job['case']}", columns)
    limits = [row for row in job["rows"] if row["status"] == "limit"]
    for row in job["rows"]:
        if row["status"] != "limit":
            table.add(row, "ns", functools.partial(_comparison_cells, row))
    if limits:
        rates = ", ".join(f"{row['name']} {row['gb_per_second']:.1f}" for row in limits)
        table.note = f"Memory in the same rounds, GB/s: {rates}. The limit is the best rate in the run."
    return [table]


def _comparison_cells(row: Row) -> list[str]:
    return [
        f"{row['ns']:.3f}",
        _width(row["ns_quartiles"], ".3f"),
        f"{row['ratio']:.3f}",
        _width(row["ratio_quartiles"], ".3f"),
        f"{row['bytes_per_parameter']:.2f}",
        f"{row['gb_per_second']:.1f}",
        f"{row['ns_at_limit'] / row['ns']:.0%}" if "ns_at_limit" in row else "",
        f"{row['update_error']:.0e}",
        str(row["rounds"]),
    ]


def of_growth(what: str, unit: float, unit_name: str) -> Callable[[Job], list[Table]]:
    def tables(job: Job) -> list[Table]:
        table = Table(f"Step time: {job['case']}", ("optimizer", what, "ms", "ns/param", "speed", "IQR"))
        for row in job["rows"]:
            table.add(row, "ns", functools.partial(cells, job, row))
        fits = Table(f"Fitted: {job['case']}", ("optimizer", unit_name, "fixed, us", "log-log slope"))
        for name, fit in job["fits"].items():
            numbers = f"{fit['slope'] * unit:.3f}", f"{fit['fixed'] * 1e6:.1f}", f"{fit['log_log_slope']:.3f}"
            fits.rows.append([name, *numbers])
        return [table, fits]

    def cells(job: Job, row: Row) -> list[str]:
        n = row.get("parameters", job.get("parameters", 0))
        times = f"{row['ns'] * n / 1e6:.3f}", f"{row['ns']:.3f}"
        return [f"{row[what]:,}", *times, f"{row['ratio']:.3f}", _width(row["ratio_quartiles"], ".3f")]

    return tables


def of_schedule(job: Job) -> list[Table]:
    columns = ("optimizer", "first steps, us", "IQR", "last steps, us", "IQR", "equal within noise")
    table = Table(f"The learning rate a tensor, changed before each of {job['steps']} steps", columns)
    for row in job["rows"]:
        table.add(row, "early_us", functools.partial(_schedule_cells, row))
    table.note = f"First: {job['window']} steps from the fifth on; last: as many. Of {job['parameters']:,} parameters."
    return [table]


def _schedule_cells(row: Row) -> list[str]:
    times = [cell for t in (row["early_us"], row["late_us"]) for cell in (f"{t[1]:.0f}", _width(t, ".0f"))]
    return [*times, "yes" if row["within_noise"] else "no"]


def of_first_step(job: Job) -> list[Table]:
    columns = ("optimizer", "parameters", "constructor, ms", "first step, ms", "later steps, ms", "IQR")
    table = Table("The first step, which allocates the state, in a fresh process", columns)
    for row in job["rows"]:
        table.add(row, "first_ms", functools.partial(_first_step_cells, row))
    return [table]


def _first_step_cells(row: Row) -> list[str]:
    times = [f"{row['constructor_ms']:.1f}", f"{row['first_ms']:.1f}", f"{row['later_ms'][1]:.2f}"]
    return [f"{row['parameters']:,}", *times, _width(row["later_ms"], ".2f")]


def of_memory(job: Job) -> list[Table]:
    title = f"Memory of a step beyond parameters, gradients and state, {job['parameters']:,} parameters"
    table = Table(title, ("optimizer, parameters", "MiB", "B/param", "promise"))
    for row in job["rows"]:
        table.add(row, "extra_bytes", functools.partial(_memory_cells, row), f"{row['name']}, {row['dtype']}")
    table.note = "Promised: fused8 stays below 1 byte per parameter, a quarter of one FP32 tensor of full size."
    return [table]


def _memory_cells(row: Row) -> list[str]:
    promise = {True: "holds", False: "BROKEN", None: ""}[row.get("holds")]
    return [f"{row['extra_bytes'] / 2**20:.1f}", f"{row['extra_per_parameter']:.3f}", promise]


def of_state_error(job: Job) -> list[Table]:
    streams = list(dict.fromkeys(row["stream"] for row in job["rows"]))
    table = Table("Relative L2 error of the update against FP32 Adam", ("codec, block", "B/parameter", *streams))
    by_format: dict[tuple[str, int], list[Row]] = {}
    for row in job["rows"]:
        by_format.setdefault((row["codec"], row["block_size"]), []).append(row)
    for (codec, block_size), rows in by_format.items():
        errors = [f"{row['error']:.4f}" for row in rows]
        table.rows.append([f"{codec} {block_size}", f"{rows[0]['bytes_per_parameter']:.3f}", *errors])
    table.note = f"beta2 {job['beta2']}, mean of the last {job['tail']} of {job['steps']} steps, {job['n']} elements."
    return [table]


def of_closed_loop(job: Job) -> list[Table]:
    seeds = [f"seed {seed}" for seed in range(job["seeds"])]
    columns = ("optimizer", "mean |diff|", "stdev", *seeds, "loss, mean")
    table = Table(f"Held-out loss of a GPT of {job['parameters']:,} parameters after {job['steps']} steps", columns)
    for row in job["rows"]:
        table.add(row, "difference", functools.partial(_closed_loop_cells, row))
    table.note = (
        "Differences from torch fused, FP32 AdamW, of the same seed, in nats per byte. torch foreach is FP32 AdamW "
        "too: its difference is chance."
    )
    return [table]


def _closed_loop_cells(row: Row) -> list[str]:
    differences = [f"{x:+.4f}" for x in row["difference"]]
    return [
        f"{row['mean_abs']:.4f}",
        f"{row['stdev_abs']:.4f}",
        *differences,
        f"{statistics.fmean(row['held_out']):.4f}",
    ]


PARTS: dict[str, Callable[[Job], list[Table]]] = {
    "speed": of_comparison,
    "options": of_comparison,
    "threads": of_comparison,
    "sizes": of_growth("parameters", 1e9, "ns/parameter"),
    "tensors": of_growth("tensors", 1e6, "us/tensor"),
    "schedule": of_schedule,
    "first_step": of_first_step,
    "memory": of_memory,
    "state_error": of_state_error,
    "closed_loop": of_closed_loop,
}


def of_results(content: dict[str, Any]) -> list[Table]:
    return [table for job in content["jobs"] if "error" not in job for table in PARTS[job["part"]](job)]
