"""Is the GPU step right, and how fast is it? One run of less than 6 minutes on one GPU.

First the bits: every kernel against the CPU kernel, unaligned and very large tensors, CUDA graphs, streams, GradScaler,
compute-sanitizer where it is installed. Then the speed beside the bandwidth of a plain copy and beside other optimizers
where they are installed; a time is shown only if the same tensors also passed a check. `python -m bench.gpu_check`
prints short tables and writes a JSON file. Exit status: 0 all checks passed, 1 some failed, 2 there is no GPU.
`--dry-run` plays it through on the CPU with tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
from torch import Tensor

import fused8
from fused8 import backends, ops, step_plan

MILLION, BILLION = 10**6, 10**9
CODECS = ("adaptive", "dynamic", "e4m3")
DTYPES = (torch.float32, torch.bfloat16)

# Full tiles and the rest, rows that are and are not multiples of 16, short rows, 1-D.
CHECK_SHAPES = ((64, 1024), (36, 256), (5, 304), (3, 1001), (600, 16), (700,), (4, 5, 70))

ALL_FLAGS = dict(weight_decay=0.1, decoupled_weight_decay=False, maximize=True, amsgrad=True, betas=(0.8, 0.95))

# (codec, parameters, gradients, options). Few enough that compiling them takes about a minute.
CHECK_CASES: list[tuple[str, torch.dtype, torch.dtype, dict[str, Any]]] = [
    *((codec, dtype, dtype, dict(weight_decay=0.01)) for codec in CODECS for dtype in DTYPES),
    ("adaptive", torch.float16, torch.float16, dict(block_size=128)),
    ("adaptive", torch.bfloat16, torch.float32, ALL_FLAGS),
    ("adaptive", torch.float32, torch.bfloat16, dict(block_size=64)),
    ("dynamic", torch.bfloat16, torch.float16, ALL_FLAGS),
    ("e4m3", torch.float16, torch.bfloat16, ALL_FLAGS),
]


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
        for _ in range(3):
            function()
        self.sync()
        start = time.perf_counter()
        function()
        self.sync()
        count = max(5, min(200, int(seconds / max(time.perf_counter() - start, 1e-6))))
        device_times, host_times = [], []
        if self.dry_run:
            for _ in range(3):
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


def versions() -> dict[str, str]:
    found = {"fused8": fused8.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("triton", "bitsandbytes", "torchao", "flashoptim"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    for runtime, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            found[runtime] = version
    if tool := shutil.which("nvidia-smi"):
        command = [tool, "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        found["driver, power limit, clock"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return found


def verdict(passed: bool | None) -> str:
    return {True: "ok", False: "FAILED", None: "skipped"}[passed]


# -- the same bits


def hostile(shape: Sequence[int], step: int, dtype: torch.dtype) -> Tensor:
    """Ordinary gradients, and rows of zeros, tiny, huge, sparse and non-finite ones."""
    generator = torch.Generator().manual_seed(1000 * step + len(shape))
    g = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    rows = g.view(shape[0], -1) if len(shape) > 1 else g.view(1, -1)
    uniform = torch.rand(rows.shape, generator=generator, dtype=torch.float64)
    kinds: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, u: x,
        lambda x, u: x * 0,
        lambda x, u: x * 1e-21,
        lambda x, u: x * 1e18,
        lambda x, u: x * 10 ** (u * 45 - 30),
        lambda x, u: x * (u < 0.1),
        lambda x, u: torch.where(u < 0.01, float("nan"), torch.where(u > 0.99, float("inf"), x)),
        lambda x, u: x * 1e-3,
    ]
    for r in range(rows.shape[0]):
        rows[r] = kinds[(r + step) % len(kinds)](rows[r], uniform[r])
    return g.float().to(dtype)


def same_bits(a: Tensor, b: Tensor, what: str) -> None:
    a, b = a.detach().cpu(), b.detach().cpu()
    same = a == b
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
        same &= (torch.signbit(a) == torch.signbit(b)) | a.isnan()
    if not bool(same.all()):
        where = (~same).nonzero()
        raise AssertionError(f"{what}: {len(where)} of {a.numel()} differ, first at {where[0].tolist()}")


def same_optimizers(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    pairs = zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True)
    for i, (p, q) in enumerate(pairs):
        same_bits(p, q, f"parameter {i} {tuple(p.shape)}")
        for name, tensor in a.state[p].items():
            same_bits(tensor, b.state[q][name], f"{name} of parameter {i} {tuple(p.shape)}")


def parameters(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(tuple(s), generator=generator).to(dtype).to(device)) for s in shapes]


def optimizer_of(params: Sequence[Tensor], backend: str, **options: Any) -> fused8.Adam8bit:
    return fused8.Adam8bit(params, lr=1e-3, min_8bit_size=0, backend=backend, **options)


def set_gradients(params: Sequence[Tensor], step: int, dtype: torch.dtype) -> None:
    for p in params:
        p.grad = None
        p.grad_dtype = None  # type: ignore[attr-defined]
        p.grad = hostile(p.shape, step, dtype).to(p.device)


def stepped(
    backend: str, device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype, steps: int, options: dict[str, Any]
) -> fused8.Adam8bit:
    params = parameters(CHECK_SHAPES, dtype, device)
    optimizer = optimizer_of(params, backend, **options)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * step
        set_gradients(params, step, grad_dtype)
        optimizer.step()
    return optimizer


def check_parity(bench: Bench) -> None:
    cases = CHECK_CASES[:2] if bench.dry_run else CHECK_CASES
    for backend in bench.ours:
        for codec, dtype, grad_dtype, options in cases:

            def body() -> None:
                arguments = (dtype, grad_dtype, 2 if bench.dry_run else 5, dict(codec=codec, **options))  # noqa: B023
                ours = stepped(backend, bench.device, *arguments)  # noqa: B023
                truth = stepped(bench.truth, torch.device("cpu"), *arguments)
                same_optimizers(ours, truth)
                assert ours.nonfinite_count() == truth.nonfinite_count() > 0

            flags = "all flags" if options is ALL_FLAGS else ""
            bench.check(f"{backend} = {bench.truth}: {codec} {short(dtype)}/{short(grad_dtype)} {flags}".rstrip(), body)


def check_unaligned(bench: Bench) -> None:
    """Parameters and gradients that begin at odd elements of a buffer."""

    def body() -> None:
        def run(backend: str, device: torch.device) -> fused8.Adam8bit:
            shapes = [(40, 256), (5, 70)]
            params = []
            for p in parameters(shapes, torch.bfloat16, device):
                buffer = torch.empty(p.numel() + 1, dtype=p.dtype, device=device)
                params.append(torch.nn.Parameter(buffer[1:].view(p.shape).copy_(p.detach())))
            optimizer = optimizer_of(params, backend)
            for step in (1, 2, 3):
                for p in params:
                    g = hostile(p.shape, step, p.dtype)
                    p.grad = torch.empty(g.numel() + 1, dtype=p.dtype, device=device)[1:].view(p.shape).copy_(g)
                optimizer.step()
            return optimizer

        for backend in bench.ours:
            same_optimizers(run(backend, bench.device), run(bench.truth, torch.device("cpu")))

    bench.check("unaligned tensors", body)


class Block:
    """One 8-bit parameter [rows, 256] with state and gradient, for direct calls of the operator."""

    NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tensors = [
            zeros(rows, 256, dtype=dtype),
            zeros(rows, 256, dtype=dtype),
            zeros(rows, 256, dtype=torch.int8),
            zeros(rows, 256, dtype=torch.uint8),
            zeros(rows, 1, dtype=torch.float32),
            zeros(rows, 1, dtype=torch.int32),
        ]
        self.nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        self.row0 = 0

    def rows(self, first: int, last: int) -> Block:
        """A copy on the CPU of some rows, which knows where they lie."""
        part = Block.__new__(Block)
        part.tensors = [tensor[first:last].cpu() for tensor in self.tensors]
        part.nonfinite = torch.zeros(1, dtype=torch.int64)
        part.row0 = self.row0 + first
        return part

    def step(self, backend: str, step: int) -> None:
        h = step_plan.Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.01, True)
        scalars = step_plan.scalar_table([step_plan.scalar_row(h, step)])
        lists = [[tensor] for tensor in self.tensors]
        table = torch.tensor([[0, self.row0, 0, 256]])
        ops.adam_step(
            backend, *lists, [], [], scalars, table, None, None, self.nonfinite, "adaptive", 256, True, False
        )  # fmt: skip


def check_large(bench: Bench) -> None:
    """More than 2^31 elements in one tensor: its first and last rows, and those around the 2^31st element."""

    def body() -> str:
        rows = 1024 if bench.dry_run else (1 << 23) + 1001
        needed = rows * 256 * 6.1 + (1 << 30)
        if bench.free_memory() < needed:
            raise Unavailable(f"needs {needed / 2**30:.0f} GiB of free memory")
        block = Block(rows, torch.bfloat16, bench.device)
        for tensor in block.tensors[:2]:
            tensor.normal_()
        places = [(0, 64), (rows - 1001 - 64, rows - 1001 + 64), (rows - 64, rows)]
        places = [(max(first, 0), last) for first, last in places]
        for step in (1, 2):
            parts = [block.rows(*place) for place in places]
            block.step("triton", step)
            for part, place in zip(parts, places, strict=True):
                part.step(bench.truth, step)
                for name, ours, truth in zip(Block.NAMES, block.rows(*place).tensors, part.tensors, strict=True):
                    same_bits(ours, truth, f"{name} in rows {place}")
        return f"{rows * 256 / BILLION:.2f} B elements"

    bench.check("a tensor of more than 2^31 elements", body)
    bench.release()


def check_graph(bench: Bench) -> None:
    """A captured step replays as eager steps do, also with a new lr, and after eager steps in between."""

    def body() -> None:
        if bench.dry_run:
            raise Unavailable("no CUDA graphs on the CPU")
        shapes = [(64, 1024), (5, 304), (700,)]
        outcomes = []
        for graphed in (False, True):
            params = parameters(shapes, torch.bfloat16, bench.device)
            lr = torch.tensor(1e-3, device=bench.device)
            optimizer = fused8.AdamW8bit(params, lr=lr, min_8bit_size=0, capturable=True)
            for p in params:
                p.grad = torch.zeros_like(p)

            def gradients(step: int) -> None:
                for p in params:  # noqa: B023
                    p.grad.copy_(hostile(p.shape, step, p.dtype))

            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for step in (1, 2, 3):
                    gradients(step)
                    optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            if graphed:
                with torch.cuda.graph(graph):
                    optimizer.step()
            for step in range(4, 10):
                gradients(step)
                lr.fill_(1e-3 * step)
                if graphed and step != 7:
                    graph.replay()
                else:
                    optimizer.step()
            bench.sync()
            outcomes.append(optimizer)
        same_optimizers(*outcomes)

    bench.check("CUDA graph: capture and replay", body)


def check_streams(bench: Bench) -> None:
    """Steps on two streams in turn, each waiting for the other only on the device."""

    def body() -> None:
        if bench.dry_run:
            raise Unavailable("no streams on the CPU")
        outcomes = []
        for streams in ([torch.cuda.current_stream()] * 2, [torch.cuda.Stream(), torch.cuda.Stream()]):
            params = parameters([(64, 1024), (700,)] * 20, torch.bfloat16, bench.device)
            grads = [[hostile(p.shape, step, p.dtype).to(p.device) for p in params] for step in range(1, 9)]
            optimizer = optimizer_of(params, "triton")
            bench.sync()
            previous = torch.cuda.current_stream()
            for step, step_grads in enumerate(grads):
                stream = streams[step % 2]
                stream.wait_stream(previous)
                with torch.cuda.stream(stream):
                    for p, g in zip(params, step_grads, strict=True):
                        p.grad = g
                    optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1)
                    optimizer.step()
                previous = stream
            bench.sync()
            outcomes.append(optimizer)
        same_optimizers(*outcomes)

    bench.check("two streams", body)


def check_grad_scaler(bench: Bench) -> None:
    """GradScaler passes scale and found_inf to the device; a step with an infinite gradient changes nothing."""

    def body() -> None:
        outcomes = []
        for backend, device in (("triton", bench.device), (bench.truth, torch.device("cpu"))):
            params = parameters([(36, 256), (700,)], torch.float32, device)
            optimizer = optimizer_of(params, backend)
            scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
            for step in range(1, 6):
                for p in params:
                    g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                    p.grad = (g * 1024 * (float("inf") if step == 3 else 1)).to(device)
                scaler.scale(torch.zeros((), device=device))
                scaler.step(optimizer)
                scaler.update(1024.0)
            outcomes.append(optimizer)
        same_optimizers(*outcomes)
        steps = {float(state["step"]) for state in outcomes[0].state.values()}
        assert steps == {4.0}, steps

    bench.check("GradScaler", body)


def check_sanitizer(bench: Bench) -> None:
    tool = shutil.which("compute-sanitizer")
    for kind in ("memcheck", "racecheck"):

        def body() -> None:
            if bench.dry_run or tool is None:
                raise Unavailable("compute-sanitizer is not installed")
            if bench.late(60):
                raise Unavailable("no time left")
            command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, "-m", "bench.gpu_check"]  # noqa: B023
            # The caching allocator would hide accesses beyond the end of a tensor.
            environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            result = subprocess.run(
                [*command, "--one-step"], capture_output=True, text=True, timeout=120, env=environment
            )
            assert result.returncode == 0, result.stdout[-1500:]

        bench.check(f"compute-sanitizer {kind}", body)


def one_step() -> None:
    """What runs under compute-sanitizer."""
    for codec in CODECS:
        stepped("triton", torch.device("cuda"), torch.bfloat16, torch.bfloat16, 1, dict(codec=codec))
    torch.cuda.synchronize()


# -- speed


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def measure_copy(bench: Bench) -> None:
    numel = MILLION if bench.dry_run else 1 << 30
    source = torch.empty(numel, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    milliseconds, _, _ = bench.time(lambda: target.copy_(source))
    bench.results.copy_bandwidth = 2 * numel / milliseconds * 1e3
    print(f"copy bandwidth {bench.results.copy_bandwidth / 1e9:.0f} GB/s", flush=True)


def peer_optimizers() -> Iterator[tuple[str, Callable[[list[Tensor]], torch.optim.Optimizer]]]:
    """Other optimizers that are installed: a name and how to make one."""
    yield "torch AdamW fused", lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)
    for name, module, attribute in (
        ("bitsandbytes Adam8bit", "bitsandbytes.optim", "Adam8bit"),
        ("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
        ("FlashAdamW", "flashoptim", "FlashAdamW"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            make = getattr(importlib.import_module(module), attribute)
            yield name, lambda params, make=make: make(params, lr=1e-3)


def check_step_of(bench: Bench, optimizer: fused8.Adam8bit) -> None:
    """One more step of an optimizer that was timed: some rows of each parameter against the CPU kernel."""
    group = optimizer.param_groups[0]
    picked = []
    for p in group["params"]:
        state = optimizer.state[p]
        if state["exp_avg"].dtype == torch.float32 or p.dim() < 2:
            continue
        rows = p.shape[0]
        first = rows // 2
        part = slice(first, min(rows, first + 16))
        picked.append((p, state, part, [t[part].detach().cpu() for t in (p, p.grad)], copy_rows(state, part)))
        if len(picked) == 8:
            break
    steps = [int(state["step"]) + 1 for _, state, *_ in picked]
    optimizer.step()
    bench.sync()
    h = step_plan.Hyperparameters(float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], True)
    for (p, state, part, (q, g), old), step in zip(picked, steps, strict=True):
        scalars = step_plan.scalar_table([step_plan.scalar_row(h, step)])
        inner = p.numel() // p.shape[0]
        names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        table = torch.tensor([[0, part.start, 0, inner]])
        nonfinite = torch.zeros(1, dtype=torch.int64)
        states = [[old[name]] for name in names]
        ops.adam_step(
            bench.truth, [q], [g], *states, [], [], scalars, table, None, None, nonfinite,
            group["codec"], group["block_size"], True, False,
        )  # fmt: skip
        same_bits(p[part], q, f"rows {part.start}.. of {tuple(p.shape)}")
        for name in names:
            same_bits(state[name][part], old[name], f"{name} in rows {part.start}.. of {tuple(p.shape)}")


def copy_rows(state: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
    return {name: tensor[part].cpu() for name, tensor in state.items() if name != "step"}


def bytes_moved(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> float:
    """What a step must read and write: parameters and states twice, gradients once."""
    total = 0
    for p in params:
        total += 2 * p.nbytes + p.grad.nbytes
        total += sum(2 * t.nbytes for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.numel() > 1)
    return total


def measure(bench: Bench, name: str, case: str, dtype: torch.dtype, shapes: Any, make: Any, ours: bool) -> None:
    """Time one optimizer on one set of shapes, after a check if it is ours."""
    label = f"{name} {case} {short(dtype)}"
    numel = sum(int(torch.Size(shape).numel()) for shape in shapes)
    per_parameter = 2 * dtype.itemsize + (4 if ours else 10)
    if bench.free_memory() < numel * per_parameter * 1.05 + (1 << 29):
        bench.results.notes.append(f"{label}: does not fit into the free memory")
        return
    if bench.late(15):
        bench.results.notes.append(f"{label}: no time left")
        return
    try:
        params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype, device=bench.device)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = make(params)
        optimizer.step()
        if ours and not bench.check(f"{label}: rows against the CPU kernel", lambda: check_step_of(bench, optimizer)):
            return
        launches = count_launches(optimizer) if ours else 0
        milliseconds, spread, host = bench.time(optimizer.step, 0.5)
        moved = bytes_moved(params, optimizer)
        fraction = moved / milliseconds * 1e3 / bench.results.copy_bandwidth
        speed = Speed(name, case, short(dtype), milliseconds, spread, host, moved, fraction, launches)
        bench.results.speeds.append(speed)
        print(f"{label}: {milliseconds:.3f} ms, {fraction:.0%} of copy bandwidth, host {host:.0f} us", flush=True)
    except Exception as error:
        bench.results.notes.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
        if ours:
            bench.results.checks.append(Check(label, False, str(error)[:300]))
            traceback.print_exc()
    finally:
        params = optimizer = None
        bench.release()


def count_launches(optimizer: torch.optim.Optimizer) -> int:
    from fused8.triton_kernels import adam

    launch, count = adam.launch_kernel, 0

    def counting(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return launch(*arguments)

    adam.launch_kernel = counting
    try:
        optimizer.step()
    finally:
        adam.launch_kernel = launch
    return count


def model_shapes() -> list[tuple[int, ...]]:
    """300 tensors, 1.1 B parameters: a language model (d 2048, hidden 5632, 22 layers) and some small adapters."""
    d, kv, hidden, vocabulary = 2048, 256, 5632, 32000
    layer = [(d, d), (kv, d), (kv, d), (d, d), (hidden, d), (hidden, d), (d, hidden), (d,), (d,), (d,), (kv,), (kv,)]
    return [(vocabulary, d), *layer * 22, (d,), (vocabulary, d), *[(64, 64)] * 33]


def measure_all(bench: Bench) -> None:
    peers = dict(peer_optimizers())

    def ours(backend: str, codec: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
        return lambda params: fused8.AdamW8bit(params, lr=1e-3, codec=codec, backend=backend)

    def compare(case: str, dtype: torch.dtype, shapes: Any, codecs: Sequence[str], others: Sequence[str]) -> None:
        for backend in bench.ours:
            for codec in codecs:
                name = f"fused8 {backend} {codec}"
                measure(bench, name, case, dtype, shapes, ours(backend, codec), ours=True)
        for name in others:
            if name in peers and not bench.dry_run:
                measure(bench, name, case, dtype, shapes, peers[name], ours=False)

    side = 256 if bench.dry_run else 16384
    model = [(64, 256), (256,)] * 3 if bench.dry_run else model_shapes()
    small = [(128, 128)] * (4 if bench.dry_run else 160)
    quick = ("torch AdamW fused", "bitsandbytes Adam8bit")
    for dtype in DTYPES:
        compare("64 M", dtype, [(side // 4, side)], CODECS, tuple(peers))
    for dtype in DTYPES:
        compare("300 tensors", dtype, model, CODECS[:1], quick)
        compare("160 small", dtype, small, CODECS[:1], quick)
    for dtype in DTYPES:
        compare("1 B", dtype, [(side * 4, side)], CODECS[:1], quick)
    for dtype in DTYPES:
        compare("1 B", dtype, [(side * 4, side)], CODECS[1:], ())


# -- what came out


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
        one_step()
        return 0
    bench = Bench(options.dry_run, options.seconds)
    if options.dry_run:
        bench.results.notes.append("dry run: the sizes are tiny, the times mean nothing")
    for check in (check_parity, check_unaligned, check_graph, check_streams, check_grad_scaler, check_large):
        check(bench)
    measure_copy(bench)
    bench.release()
    measure_all(bench)
    check_sanitizer(bench)
    bench.results.seconds = time.monotonic() - bench.started
    options.output.write_text(json.dumps(asdict(bench.results), indent=1) + "\n")
    print_results(bench.results)
    return 0 if all(check.passed is not False for check in bench.results.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
