"""What only a fresh process shows: the cost of the first step, and the memory that a step takes for a while.

`python -m bench.fresh WHAT NAME DTYPE PARAMETERS` prints one row as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import parity, workloads
from .contenders import BASELINE, DTYPES, pick
from .rounds import quartiles

FIRST_STEP = ("fused8 adaptive", BASELINE, "torch foreach", "bitsandbytes 8-bit", "torchao 8-bit", "optimi foreach")
OURS = ("fused8 adaptive", "fused8 dynamic", "fused8 e4m3")
MEMORY = {"fp32": (*OURS, *FIRST_STEP[1:]), "bf16": OURS}  # by dtype

LATER_STEPS = 20
WAIT = 300  # seconds
SHARE_OF_FP32 = 0.25
"""fused8 must stay below this part of one full-size FP32 tensor."""

# Large tensors get pages of their own, which go back to the system when they are freed, so that resident memory shows
# them.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def first_step(name: str, dtype: str, n: int) -> dict[str, Any]:
    """Milliseconds of making the optimizer, of its first step, and of later ones (quartiles)."""
    (contender,) = pick(name)
    params = workloads.make_params(workloads.gpt_of(n), DTYPES[dtype])
    _first_of_torch()
    contender.missing()  # imports its library, which is not timed
    start = time.perf_counter()
    optimizer = contender.make(params, lr=1e-3)
    made = time.perf_counter()
    optimizer.step()
    first = time.perf_counter() - made
    later = []
    for _ in range(LATER_STEPS):
        began = time.perf_counter()
        optimizer.step()
        later.append(1e3 * (time.perf_counter() - began))
    return {
        "parameters": sum(p.numel() for p in params),
        "constructor_ms": 1e3 * (made - start),
        "first_ms": 1e3 * first,
        "later_ms": list(quartiles(later)),
    }


def _first_of_torch() -> None:
    """What torch itself does at the first step of any optimizer: imports and threads."""
    p = torch.nn.Parameter(torch.zeros(2**20))
    p.grad = torch.zeros_like(p)
    torch.optim.SGD([p]).step()


def memory(name: str, dtype: str, n: int) -> dict[str, Any]:
    """Bytes beyond parameters, gradients and state at the peak of a step that is not the first."""
    (contender,) = pick(name)
    params = workloads.make_params(workloads.one_tensor(n), DTYPES[dtype])
    optimizer = contender.make(params, lr=1e-3)
    for _ in range(3):
        optimizer.step()
    reset = _reset_peak()
    before = _status("VmRSS")
    for _ in range(3):
        optimizer.step()
    peak = _status("VmHWM") if reset else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    extra = max(0, peak - before)
    row: dict[str, Any] = {"parameters": n, "resident": before, "extra_bytes": extra, "extra_per_parameter": extra / n}
    if contender.options is not None:
        row["holds"] = extra < SHARE_OF_FP32 * 4 * n
    return row


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def _reset_peak() -> bool:
    """Whether the system let us forget the peak so far."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


WHAT = {"first_step": first_step, "memory": memory}


def collect(what: str, names_by_dtype: Mapping[str, Sequence[str]], n: int) -> dict:
    """The rows of all contenders, each from a process of its own; only for those that are right."""
    rows, broken = [], []
    for dtype, names in names_by_dtype.items():
        for contender in pick(*names):
            verdict = parity.check(contender, dtype)
            row = {"name": contender.name, "ours": contender.options is not None, "dtype": dtype, **verdict.row()}
            if verdict.status == "measured":
                row.update(_in_a_process(what, contender.name, dtype, n))
            if row.get("holds") is False:
                broken.append(f"a step of {contender.name} takes {row['extra_bytes']} bytes on {n} {dtype} parameters")
            rows.append(row)
    return {"rows": rows, "broken_promises": broken}


def _in_a_process(what: str, name: str, dtype: str, n: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.fresh", what, name, dtype, str(n)]
    environment = {**os.environ, **MALLOC, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, env=environment)
    except subprocess.TimeoutExpired:
        return {"status": "left out", "reason": f"it took more than {WAIT} s"}
    if done.returncode:
        return {"status": "failed", "reason": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    what, name, dtype, n = sys.argv[1:]
    print(json.dumps(WHAT[what](name, dtype, int(n))))
