"""The file of results: what machine, which numbers, what went wrong."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fused8

PACKAGES = ("bitsandbytes", "torchao", "flashoptim", "torch-optimi", "triton", "numpy")


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def isa() -> str:
    """The instruction set that the C++ kernel has chosen."""
    try:
        return torch.ops.fused8.cpu_isa()
    except (AttributeError, RuntimeError):
        return "no-kernel"


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of everything that was measured, and of what a GPU runs on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "fused8": fused8.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    for runtime, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            found[runtime] = version
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        found["driver, power limit, clock"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found


def machine() -> dict[str, Any]:
    """What a reader has to know to compare the numbers."""
    return {
        "processor": processor(),
        "isa": isa(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        **versions(),
    }


def slug(about: dict[str, Any]) -> str:
    """The name of the machine's files."""
    text = f"{about['processor']} {about['isa']} {about['cores']} cores torch {about['torch'].split('+')[0]}"
    text = re.sub(r"\((r|tm)\)", "", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")


def problems(content: dict[str, Any]) -> list[str]:
    """What must not be: a part that broke down, fused8 refused, a promise that does not hold."""
    found = []
    for job in content["jobs"]:
        if "error" in job:
            found.append(f"{job['part']}, {job['case']}: {job['error']}")
        found += [f"{job['part']}, {job['case']}: {text}" for text in job.get("broken_promises", ())]
        for row in job.get("rows", ()):
            if row.get("ours") and row["status"] not in ("measured", "left out"):
                found.append(f"{job['part']}, {job['case']}: {row['name']}: {row['status']}: {row['reason']}")
    return found


def write(content: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
