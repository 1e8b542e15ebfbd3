"""Everything, one command:  make bench   (or python -m bench.run)

Runs each job in a process of its own, writes bench/results/MACHINE.json, and makes the tables and plots from it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from . import report, results
from .jobs import Job, Settings, jobs

DEFAULT_BUDGET = 600
"""Seconds of timing and training at scale 1; setting things up takes about as long on two cores."""
RESULTS = Path(__file__).with_name("results")
PATIENCE = 900  # seconds, at scale 1, for one job

TINY = Settings(
    scale=0.01,
    sizes=(2**13, 2**14),
    model=1_000_000,
    large=2**14,
    limit_elements=2**16,
    growth_sizes=(2**12, 2**13, 2**14),
    tensor_counts=(1, 4, 16),
    tensor_total=2**16,
    schedule_steps=20,
    schedule_size=2**12,
    memory_size=2**21,
    error_steps=1000,
    error_elements=2048,
    error_streams=("matrix",),
    loop_steps=200,
    loop_seeds=2,
    loop_batch=2,
    fresh_limit=1,
)


def run_job(job: Job, settings: Settings) -> dict[str, Any]:
    """In a process of its own. What goes wrong there becomes the job's `error`."""
    start = time.perf_counter()
    failed = {"part": job.part, "case": job.case}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        command = [sys.executable, "-m", "bench.jobs", job.name, settings.to_json(), str(file)]
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=PATIENCE * max(1.0, settings.scale),
            )
        except subprocess.TimeoutExpired:
            return {**failed, "error": f"it took more than {time.perf_counter() - start:.0f} s"}
        if done.returncode or not file.exists():
            lines = done.stderr.strip().splitlines() or [""]
            return {**failed, "error": f"exit status {done.returncode}: {lines[-1]}"}
        return json.loads(file.read_text())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench ARGS=", description=__doc__.split("\n")[0])
    parser.add_argument("--budget", type=float, default=DEFAULT_BUDGET, help="seconds of timing and training (600)")
    parser.add_argument("--parts", default="", help="only these, as speed,memory")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows that everything works, measures nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (bench/results)")
    options = parser.parse_args(arguments)
    options.parts = [part for part in options.parts.split(",") if part]
    if unknown := set(options.parts) - {job.part for job in jobs(TINY)}:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if options.budget <= 0:
        parser.error("--budget must be positive")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    settings = TINY if options.tiny else Settings(scale=options.budget / DEFAULT_BUDGET)
    about = results.machine()
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    if about["load"] > 0.5:
        console.print("[yellow]other processes are running: trust the ratios alone[/yellow]")
    content: dict[str, Any] = {"machine": about, "settings": json.loads(settings.to_json()), "jobs": []}
    file = options.out / f"{results.slug(about)}.json"
    chosen = [job for job in jobs(settings) if not options.parts or job.part in options.parts]
    start = time.perf_counter()
    for number, job in enumerate(chosen, 1):
        console.print(f"[{time.perf_counter() - start:4.0f} s] {number} of {len(chosen)}: {job.name}", markup=False)
        content["jobs"].append(run_job(job, settings))
        content["seconds"] = round(time.perf_counter() - start)
        results.write(content, file)
    report.make(file, console)
    return 1 if results.problems(content) else 0


if __name__ == "__main__":
    sys.exit(main())
