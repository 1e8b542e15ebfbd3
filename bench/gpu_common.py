"""What the checks and the measurements of a GPU have in common: where they run, when they end, what they found."""

from __future__ import annotations

import itertools
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fused8 import backends

from .results import versions

CODECS = ("adaptive", "dynamic", "e4m3")
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Check:
    name: str
    passed: bool | None
    """None: could not be made here."""
    note: str = ""


@dataclass
class Speed:
    optimizer: str
    case: str
    dtype: str
    milliseconds: float
    spread: float
    """Half the distance of the quartiles, relative to the median."""
    host_microseconds: float
    bytes: float = 0.0
    of_copy_bandwidth: float = 0.0
    launches: int = 0


@dataclass
class Results:
    device: str
    versions: dict[str, str]
    copy_bandwidth: float = 0.0
    checks: list[Check] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Bench:
    """Where and how large: a GPU, or the CPU in a dry run."""

    def __init__(self, dry_run: bool, seconds: float) -> None:
        self.dry_run = dry_run
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.ours = ["triton"]
        self.truth = "cpp" if backends.load_library() is None else "reference"
        self.deadline = time.monotonic() + seconds
        self.started = time.monotonic()
        self.results = Results(device_name(self.device), versions())
        if "cuda" in backends.BACKENDS and backends.BACKENDS["cuda"].unavailable(self.device) is None:
            self.ours.append("cuda")

    def sync(self) -> None:
        if not self.dry_run:
            torch.cuda.synchronize()

    def free_memory(self) -> float:
        return 2.0**30 if self.dry_run else torch.cuda.mem_get_info()[0]

    def release(self) -> None:
        if not self.dry_run:
            torch.cuda.empty_cache()

    def check(self, name: str, body: Callable[[], str | None]) -> bool:
        """Run a check; its note, or None if it passed. AssertionError and any other error count as failed."""
        try:
            note = body()
            self.results.checks.append(Check(name, True, note or ""))
        except Unavailable as reason:
            self.results.checks.append(Check(name, None, str(reason)))
        except Exception as error:
            self.results.checks.append(Check(name, False, f"{type(error).__name__}: {str(error)[:300]}"))
            traceback.print_exc()
        last = self.results.checks[-1]
        print(f"{verdict(last.passed):7} {name}  {last.note}", flush=True)
        return last.passed is True

    def late(self, seconds: float) -> bool:
        """Whether something that takes so long no longer fits."""
        return time.monotonic() + seconds > self.deadline

    def time(self, function: Callable[[], Any], seconds: float = 1.0) -> tuple[float, float, float]:
        """Milliseconds on the device, their spread, and microseconds on the host, per call; warms up first."""
        for _ in range(1 if self.dry_run else 3):
            function()
        self.sync()
        start = time.perf_counter()
        function()
        self.sync()
        count = max(5, min(200, int(seconds / max(time.perf_counter() - start, 1e-6))))
        device_times, host_times = [], []
        if self.dry_run:
            for _ in range(2):
                start = time.perf_counter()
                function()
                host_times.append(time.perf_counter() - start)
            device_times = [x * 1e3 for x in host_times]
        else:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            marks[0].record()
            for mark in marks[1:]:
                start = time.perf_counter()
                function()
                host_times.append(time.perf_counter() - start)
                mark.record()
            self.sync()
            device_times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        quartiles = statistics.quantiles(device_times, n=4)
        # The queue hides the host's time until it is full: the fastest calls are those that did not wait.
        host = statistics.quantiles(host_times, n=4)[0] * 1e6
        return quartiles[1], (quartiles[2] - quartiles[0]) / 2 / quartiles[1], host


class Unavailable(Exception):
    """This check or peer cannot run here; says why."""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names.get(dtype) or str(dtype).removeprefix("torch.float8_")


def verdict(passed: bool | None) -> str:
    return {True: "ok", False: "FAILED", None: "skipped"}[passed]
