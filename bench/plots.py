"""Plots from a file of results: bars with their spread, the limit of the memory, growth, errors, losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, OTHERS, LIMIT = "#d9480f", "#9aa0a6", "#1864ab"
STYLE: Any = {
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
Job = dict[str, Any]


def _color(name: str) -> str:
    return OURS if name.startswith("fused8") else OTHERS


def _bars(axes: Axes, job: Job) -> None:
    """ns per parameter of each optimizer, with quartiles, and beside each bar the limit."""
    rows = [row for row in job["rows"] if "ns" in row][::-1]
    place = range(len(rows))
    spread = [
        [row["ns"] - row["ns_quartiles"][0] for row in rows],
        [row["ns_quartiles"][1] - row["ns"] for row in rows],
    ]
    axes.barh(place, [row["ns"] for row in rows], xerr=spread, color=[_color(row["name"]) for row in rows], capsize=2)
    limited = [(row["ns_at_limit"], at) for at, row in zip(place, rows, strict=True) if "ns_at_limit" in row]
    for limit, at in limited:
        axes.plot([limit, limit], [at - 0.4, at + 0.4], color=LIMIT, linewidth=2)
    if limited:
        axes.plot([], [], color=LIMIT, linewidth=2, label="at the limit of the memory")
        axes.legend(fontsize=8, loc="lower right")
    axes.set_yticks(place, [row["name"] for row in rows])
    axes.set_xscale("log")
    axes.set_xlabel("ns per parameter, log scale")
    axes.set_title(job["case"], fontsize=10)


def comparisons(jobs: list[Job]) -> Figure:
    columns = 2 if len(jobs) > 1 else 1
    lines = -(-len(jobs) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.2 * lines), layout="constrained")
    every = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, job in zip(every, jobs, strict=False):
        _bars(axes, job)
    for axes in every[len(jobs) :]:
        axes.remove()
    return figure


def growth(jobs: list[Job]) -> Figure:
    """Step time against parameters and against tensors, both axes logarithmic."""
    figure = Figure(figsize=(6 * len(jobs), 4), layout="constrained")
    for axes, job in zip(figure.subplots(1, len(jobs), squeeze=False).flat, jobs, strict=True):
        what = job["part"].replace("sizes", "parameters")
        for name, fit in job["fits"].items():
            points = [row for row in job["rows"] if row["name"] == name and "ns" in row]
            x = [row[what] for row in points]
            y = [row["ns"] * row.get("parameters", job.get("parameters", 0)) / 1e6 for row in points]
            label = f"{name}: log-log slope {fit['log_log_slope']:.2f}"
            style = "--" if name == "torch foreach" else "-"
            axes.plot(x, y, marker="o", markersize=4, color=_color(name), linestyle=style, label=label)
        axes.set(xscale="log", yscale="log", xlabel=what, ylabel="ms per step", title=job["case"])
        axes.legend(fontsize=8)
    return figure


def state_error(jobs: list[Job]) -> Figure:
    """A group of bars per stream, a bar per format."""
    rows = jobs[0]["rows"]
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    formats = list(dict.fromkeys((row["codec"], row["block_size"]) for row in rows))
    shades = {"adaptive": "Oranges", "dynamic": "Greys", "e4m3": "Blues"}
    figure = Figure(figsize=(max(6, 1.6 * len(streams)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(formats)
    for number, (codec, block) in enumerate(formats):
        errors = [row["error"] for row in rows if (row["codec"], row["block_size"]) == (codec, block)]
        at = [stream + (number - (len(formats) - 1) / 2) * width for stream in range(len(streams))]
        color = matplotlib.colormaps[shades.get(codec, "Greens")](0.35 + 0.5 * block / 256)
        axes.bar(at, errors, width, color=color, label=f"{codec} {block}")
    axes.set_xticks(range(len(streams)), streams)
    axes.set(yscale="log", ylabel="relative L2 error of the update")
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.2))
    return figure


def closed_loop(jobs: list[Job]) -> Figure:
    """The mean |difference| as a bar with its standard deviation, each seed as a dot."""
    rows = [row for row in jobs[0]["rows"] if "difference" in row][1:][::-1]
    figure = Figure(figsize=(7, 0.5 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    means, spread = [row["mean_abs"] for row in rows], [row["stdev_abs"] for row in rows]
    axes.barh(range(len(rows)), means, xerr=spread, color=[_color(row["name"]) for row in rows], capsize=3)
    for at, row in enumerate(rows):
        axes.plot([abs(x) for x in row["difference"]], [at] * len(row["difference"]), "k.", markersize=5)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.set_xlim(left=0)
    axes.set_xlabel("|difference| of the held-out loss from FP32 AdamW, nats per byte; dots: seeds")
    return figure


PLOTS: dict[str, tuple[tuple[str, ...], Callable[[list[Job]], Figure]]] = {
    "speed": (("speed",), comparisons),
    "options": (("options",), comparisons),
    "threads": (("threads",), comparisons),
    "growth": (("sizes", "tensors"), growth),
    "error": (("state_error",), state_error),
    "loss": (("closed_loop",), closed_loop),
}


def draw(content: dict[str, Any], file: Path) -> list[Path]:
    """One PNG per kind of plot beside the file of results, for the parts that it holds."""
    made = []
    with matplotlib.rc_context(STYLE):
        for name, (parts, plot) in PLOTS.items():
            jobs = [job for job in content["jobs"] if job["part"] in parts and "error" not in job]
            if jobs:
                target = file.with_name(f"{file.stem}-{name}.png")
                plot(jobs).savefig(target, dpi=120)
                made.append(target)
    return made
