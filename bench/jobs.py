"""What `make bench` measures: the list of jobs, each of which runs in a process of its own.

`python -m bench.jobs NAME SETTINGS FILE` runs one and writes its result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import bandwidth, closed_loop, contenders, fresh, results, scaling, state_error, workloads
from .cpu_speed import compare


@dataclass(frozen=True)
class Settings:
    """How large and how long. The defaults are those of the published results."""

    scale: float = 1.0
    """Of all times and numbers of training steps."""
    sizes: tuple[int, ...] = (2**20, 2**24, 2**27)
    model: int = 24_000_000
    """The 160 tensors of a language model have at most so many parameters."""
    large: int = 2**24
    """From so many parameters on the limit of the memory is measured too."""
    limit_elements: int = 0
    """Of the arrays that show it; 0: twice the largest cache."""
    growth_sizes: tuple[int, ...] = tuple(4**i for i in range(6, 14))
    tensor_counts: tuple[int, ...] = (1, 10, 100, 1000, 10000)
    tensor_total: int = 10000 * 4096
    schedule_steps: int = 500
    schedule_size: int = 2**20
    memory_size: int = 2**24
    error_steps: int = 1000
    error_elements: int = 8192
    error_streams: tuple[str, ...] = ()
    """Empty: all."""
    loop_steps: int = 250
    loop_seeds: int = 4
    loop_batch: int = 8
    fresh_limit: int = 10**6
    """At most so many optimizers are looked at in fresh processes."""
    threads: int = 0
    """0: as many as there are cores."""

    def seconds(self, seconds: float) -> float:
        return seconds * self.scale

    def steps(self, steps: int) -> int:
        return max(2, round(steps * min(1.0, self.scale)))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        values: dict[str, Any] = json.loads(text)
        settings: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
        return cls(**settings)


class Job(NamedTuple):
    part: str
    case: str
    run: Callable[[Settings], dict[str, Any]]

    @property
    def name(self) -> str:
        return f"{self.part}: {self.case}"


def _limit(settings: Settings, n: int) -> int:
    if n < settings.large:
        return 0
    return settings.limit_elements or bandwidth.elements_beyond_cache()


def _speed(dtype: str, shapes: list[workloads.Shape], seconds: float) -> Callable[[Settings], dict[str, Any]]:
    def run(settings: Settings) -> dict[str, Any]:
        n = workloads.numel(shapes)
        rows = compare(contenders.peers(), shapes, dtype, settings.seconds(seconds), _limit(settings, n))
        return {"dtype": dtype, "parameters": n, "tensors": len(shapes), "rows": rows}

    return run


def _options(settings: Settings) -> dict[str, Any]:
    n = settings.sizes[min(1, len(settings.sizes) - 1)]
    shapes = workloads.one_tensor(n)
    rows = compare(contenders.low_precision(), shapes, "bf16", settings.seconds(25), _limit(settings, n))
    return {"parameters": n, "rows": rows}


def _threads(threads: int) -> Callable[[Settings], dict[str, Any]]:
    def run(settings: Settings) -> dict[str, Any]:
        torch.set_num_threads(threads)
        n = settings.sizes[min(1, len(settings.sizes) - 1)]
        chosen = contenders.pick(*scaling.TENSOR_CONTENDERS)
        rows = compare(chosen, workloads.one_tensor(n), "fp32", settings.seconds(10), _limit(settings, n))
        return {"parameters": n, "threads": threads, "rows": rows}

    return run


def _sizes(settings: Settings) -> dict[str, Any]:
    return scaling.growth_with_size(settings.growth_sizes, settings.seconds(20))


def _tensors(settings: Settings) -> dict[str, Any]:
    return scaling.growth_with_tensors(settings.tensor_counts, settings.tensor_total, settings.seconds(40))


def _schedule(settings: Settings) -> dict[str, Any]:
    return scaling.schedule(settings.schedule_steps, settings.schedule_size)


def _first_step(settings: Settings) -> dict[str, Any]:
    return fresh.collect("first_step", {"fp32": fresh.FIRST_STEP[: settings.fresh_limit]}, settings.model)


def _memory(settings: Settings) -> dict[str, Any]:
    n = settings.memory_size
    names = {dtype: own[: settings.fresh_limit] for dtype, own in fresh.MEMORY.items()}
    return {"parameters": n, **fresh.collect("memory", names, n)}


def _state_error(settings: Settings) -> dict[str, Any]:
    streams = ",".join(settings.error_streams or state_error.streams.NAMES)
    steps = settings.steps(settings.error_steps)
    return state_error.run(["--streams", streams, "--steps", str(steps), "--n", str(settings.error_elements)])


def _closed_loop(settings: Settings) -> dict[str, Any]:
    steps = settings.steps(settings.loop_steps)
    return closed_loop.measure(closed_loop.contenders(), steps, settings.loop_seeds, settings.loop_batch)


def jobs(settings: Settings) -> list[Job]:
    """In the order in which they run."""
    result = []
    for n, seconds in zip(settings.sizes, (8, 15, 20), strict=False):
        for dtype in ("fp32", "bf16"):
            case = f"{dtype}, {workloads.size_name(n)}"
            result.append(Job("speed", case, _speed(dtype, workloads.one_tensor(n), seconds)))
    for dtype in ("fp32", "bf16"):
        shapes = workloads.gpt_of(settings.model)
        case = f"{dtype}, model of {len(shapes)} tensors, {workloads.size_name(workloads.numel(shapes))}"
        result.append(Job("speed", case, _speed(dtype, shapes, 15)))
    result.append(Job("options", "parameters of 16 and 8 bits", _options))
    cores = settings.threads or results.cores()
    for threads in dict.fromkeys((1, cores)):
        result.append(Job("threads", f"{threads} thread{'s' if threads > 1 else ''}", _threads(threads)))
    return [
        *result,
        Job("sizes", "growth with parameters", _sizes),
        Job("tensors", "growth with tensors", _tensors),
        Job("schedule", "a learning rate that changes", _schedule),
        Job("first_step", "in a fresh process", _first_step),
        Job("memory", "in a fresh process", _memory),
        Job("state_error", "against FP32 Adam", _state_error),
        Job("closed_loop", "held-out loss", _closed_loop),
    ]


def run(job: Job, settings: Settings) -> dict[str, Any]:
    start = time.perf_counter()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    found = job.run(settings)
    return {"part": job.part, "case": job.case, "seconds": round(time.perf_counter() - start, 1), **found}


def main() -> None:
    name, text, file = sys.argv[1:]
    settings = Settings.from_json(text)
    (job,) = (job for job in jobs(settings) if job.name == name)
    Path(file).write_text(json.dumps(run(job, settings)))


if __name__ == "__main__":
    main()
