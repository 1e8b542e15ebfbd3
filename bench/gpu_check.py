"""Is the GPU step right, and how fast is it? One run of less than 6 minutes on one GPU.

First the bits: every kernel against the CPU kernel, unaligned and very large tensors, CUDA graphs, streams, GradScaler,
compute-sanitizer where it is installed. Then the speed beside the bandwidth of a plain copy and beside other optimizers
where they are installed; a time is shown only if the same tensors also passed a check. `python -m bench.gpu_check`
prints short tables and writes a JSON file. Exit status: 0 all checks passed, 1 some failed, 2 there is no GPU.
`--dry-run` plays it through on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch

from . import gpu_bits, gpu_speed
from .gpu_common import Bench, Results, Speed, verdict


def goals(results: Results) -> list[str]:
    """The goals beside what was measured."""

    def find(optimizer: str, case: str, dtype: str) -> Speed | None:
        matches = [s for s in results.speeds if (s.optimizer, s.case, s.dtype) == (optimizer, case, dtype)]
        return matches[0] if matches else None

    lines = []
    for dtype in ("fp32", "bf16"):
        if ours := find("fused8 triton adaptive", "1 B", dtype) or find("fused8 triton adaptive", "64 M", dtype):
            lines.append(f"{ours.of_copy_bandwidth:.0%} of copy bandwidth, {ours.case} {dtype} (goal 90%)")
    ours, torch_fused = find("fused8 triton adaptive", "64 M", "fp32"), find("torch AdamW fused", "64 M", "fp32")
    if ours and torch_fused:
        lines.append(f"{torch_fused.milliseconds / ours.milliseconds:.2f} times torch fused AdamW, fp32 (goal 1.6)")
    ours = find("fused8 triton adaptive", "300 tensors", "bf16")
    if ours and (bnb := find("bitsandbytes Adam8bit", "300 tensors", "bf16")):
        lines.append(f"{bnb.milliseconds / ours.milliseconds:.2f} times bitsandbytes, 300 tensors bf16 (goal 3)")
    return lines


def print_results(results: Results) -> None:
    print(f"\n{results.device}; " + ", ".join(f"{name} {version}" for name, version in results.versions.items()))
    print(f"copy bandwidth {results.copy_bandwidth / 1e9:.0f} GB/s\n")
    print(f"{'':28} {'case':12} {'dtype':5} {'ms':>9} {'+-':>5} {'GB/s':>7} {'copy':>5} {'host us':>8} launches")
    for s in results.speeds:
        rate = s.bytes / s.milliseconds / 1e6
        print(
            f"{s.optimizer:28} {s.case:12} {s.dtype:5} {s.milliseconds:9.3f} {s.spread:5.1%} {rate:7.0f} "
            f"{s.of_copy_bandwidth:5.0%} {s.host_microseconds:8.0f} {s.launches or '':>8}"
        )
    for note in results.notes:
        print(f"note: {note}")
    print()
    for line in goals(results):
        print(line)
    counts = {verdict(passed): sum(c.passed is passed for c in results.checks) for passed in (True, False, None)}
    print(f"checks: {counts['ok']} ok, {counts['FAILED']} failed, {counts['skipped']} skipped; {results.seconds:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the JSON file (gpu_check.json)")
    parser.add_argument("--seconds", type=float, default=330, help="start nothing that would end later (330)")
    parser.add_argument("--one-step", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu_check needs a GPU that this torch can use; there is none", file=sys.stderr)
        return 2
    if options.one_step:
        gpu_bits.one_step()
        return 0
    bench = Bench(options.dry_run, options.seconds)
    if options.dry_run:
        bench.results.notes.append("dry run: the sizes are tiny, the times mean nothing")
    for check in gpu_bits.CHECKS:
        check(bench)
    gpu_speed.measure_copy(bench)
    bench.release()
    gpu_speed.measure_all(bench)
    gpu_bits.check_sanitizer(bench)
    bench.results.seconds = time.monotonic() - bench.started
    options.output.write_text(json.dumps(asdict(bench.results), indent=1) + "\n")
    print_results(bench.results)
    return 0 if all(check.passed is not False for check in bench.results.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
