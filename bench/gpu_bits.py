"""Whether the GPU step has the bits of the CPU kernel: every kernel, unaligned and very large tensors, CUDA graphs,
streams, GradScaler, offload, compute-sanitizer where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fused8
from fused8 import ops, step_plan

from .gpu_common import CODECS, DTYPES, Bench, Unavailable, short
from .same_bits import assert_same_bits, assert_same_optimizers, hostile_gradient, make_parameters, run

BILLION = 10**9
# Full tiles and the rest, rows that are and are not multiples of 16, short rows, 1-D.
CHECK_SHAPES = ((64, 1024), (36, 256), (5, 304), (3, 1001), (600, 16), (700,), (4, 5, 70))
LRS = (1e-3, 2e-3, 3e-3)

ALL_FLAGS = dict(weight_decay=0.1, decoupled_weight_decay=False, maximize=True, amsgrad=True, betas=(0.8, 0.95))

# (codec, parameters, gradients, options). Few enough that compiling them takes about a minute.
CHECK_CASES: list[tuple[str, torch.dtype, torch.dtype, dict[str, Any]]] = [
    *((codec, dtype, dtype, dict(weight_decay=0.01)) for codec in CODECS for dtype in DTYPES),
    ("adaptive", torch.float16, torch.float16, dict(block_size=128)),
    ("adaptive", torch.bfloat16, torch.float32, ALL_FLAGS),
    ("adaptive", torch.float32, torch.bfloat16, dict(block_size=64)),
    ("dynamic", torch.bfloat16, torch.float16, ALL_FLAGS),
    ("e4m3", torch.float16, torch.bfloat16, ALL_FLAGS),
    # Every dtype of parameters with every number of extra bits, and both ways of rounding.
    ("adaptive", torch.bfloat16, torch.bfloat16, dict(param_rounding="stochastic")),
    ("adaptive", torch.bfloat16, torch.bfloat16, dict(master_bits=24)),
    ("dynamic", torch.bfloat16, torch.float32, dict(master_bits=32, param_rounding="stochastic")),
    ("adaptive", torch.float16, torch.float16, dict(master_bits=24, param_rounding="stochastic")),
    ("e4m3", torch.float16, torch.float16, dict(master_bits=32)),
    ("adaptive", torch.float8_e4m3fn, torch.bfloat16, {}),
    ("e4m3", torch.float8_e4m3fn, torch.bfloat16, dict(master_bits=16)),
    ("adaptive", torch.float8_e5m2, torch.float32, dict(master_bits=24)),
]


def optimizer_of(params: Sequence[Tensor], backend: str, **options: Any) -> fused8.Adam8bit:
    return fused8.Adam8bit(params, lr=1e-3, min_8bit_size=0, backend=backend, **options)


def check_parity(bench: Bench) -> None:
    cases = CHECK_CASES[:2] if bench.dry_run else CHECK_CASES
    for backend in bench.ours:
        for codec, dtype, grad_dtype, options in cases:

            def body() -> None:
                if bench.late(60):
                    raise Unavailable("no time left")
                chosen = dict(dtype=dtype, grad_dtype=grad_dtype, codec=codec, **options)  # noqa: B023
                steps = 2 if bench.dry_run else 5
                ours = run(backend, CHECK_SHAPES, steps=steps, lrs=LRS, device=bench.device, **chosen)  # noqa: B023
                truth = run(bench.truth, CHECK_SHAPES, steps=steps, lrs=LRS, **chosen)
                assert_same_optimizers(ours, truth, backend)  # noqa: B023
                assert ours.nonfinite_count() == truth.nonfinite_count() > 0

            flags = "all flags" if options is ALL_FLAGS else " ".join(str(v) for k, v in options.items() if "_" in k)
            bench.check(f"{backend} = {bench.truth}: {codec} {short(dtype)}/{short(grad_dtype)} {flags}".rstrip(), body)


def check_unaligned(bench: Bench) -> None:
    """Parameters and gradients that begin at odd elements of a buffer."""

    def body() -> None:
        def stepped(backend: str, device: torch.device) -> fused8.Adam8bit:
            shapes = [(40, 256), (5, 70)]
            params = []
            for p in make_parameters(shapes, torch.bfloat16, device):
                buffer = torch.empty(p.numel() + 1, dtype=p.dtype, device=device)
                params.append(torch.nn.Parameter(buffer[1:].view(p.shape).copy_(p.detach())))
            optimizer = optimizer_of(params, backend)
            for step in (1, 2, 3):
                for p in params:
                    g = hostile_gradient(p.shape, step, p.dtype)
                    p.grad = torch.empty(g.numel() + 1, dtype=p.dtype, device=device)[1:].view(p.shape).copy_(g)
                optimizer.step()
            return optimizer

        for backend in bench.ours:
            assert_same_optimizers(stepped(backend, bench.device), stepped(bench.truth, torch.device("cpu")), backend)

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
        self.stochastic = True  # rounding then depends on the element index too

    def rows(self, first: int, last: int) -> Block:
        """A copy on the CPU of some rows, which knows where they lie."""
        part = Block.__new__(Block)
        part.tensors = [tensor[first:last].cpu() for tensor in self.tensors]
        part.nonfinite = torch.zeros(1, dtype=torch.int64)
        part.row0 = self.row0 + first
        part.stochastic = self.stochastic
        return part

    def step(self, backend: str, step: int) -> None:
        h = step_plan.Hyperparameters(1e-3, 0.9, 0.999, 1e-8, 0.01, True)
        scalars = step_plan.scalar_table([step_plan.scalar_row(h, step)])
        lists = [[tensor] for tensor in self.tensors]
        table = torch.tensor([[0, self.row0, 0, 256]])
        ops.adam_step(
            backend, *lists, [], [], [], scalars, table, None, None, self.nonfinite,
            "adaptive", 256, True, False, self.stochastic, cache={},
        )  # fmt: skip


def check_large(bench: Bench) -> None:
    """More than 2^31 elements in one tensor: its first and last rows, and those around the 2^31st element."""

    def body() -> str:
        rows = 1100 if bench.dry_run else (1 << 23) + 1001
        needed = rows * 256 * 6.1 + (1 << 30)
        if bench.free_memory() < needed:
            raise Unavailable(f"needs {needed / 2**30:.0f} GiB of free memory")
        block = Block(rows, torch.bfloat16, bench.device)
        for tensor in block.tensors[:2]:
            tensor.normal_()
        places = [(0, 64), (rows - 1001 - 64, rows - 1001 + 64), (rows - 64, rows)]
        places = [(max(first, 0), last) for first, last in places]
        for step, backend in enumerate([*bench.ours, *bench.ours], start=1):
            parts = [block.rows(*place) for place in places]
            block.step(backend, step)
            for part, place in zip(parts, places, strict=True):
                part.step(bench.truth, step)
                for name, ours, truth in zip(Block.NAMES, block.rows(*place).tensors, part.tensors, strict=True):
                    assert_same_bits(ours, truth, f"{name} in rows {place}")
        return f"{rows * 256 / BILLION:.2f} B elements"

    bench.check("a tensor of more than 2^31 elements", body)
    bench.release()


def check_division(bench: Bench) -> None:
    """m / denom where the quick way is closest to a mistake: denom is one unit below a power of two, so that an
    estimate of its reciprocal may be a power of two, from which Newton's method does not get away."""

    def body() -> None:
        just_below = float.fromhex("0x1.fffffep-1")
        for power in (-40, -8, 0, 20):
            # decay 0 and lr -1 leave m / (sqrt(v) + eps), and the root vanishes beside eps.
            row = [1.0, 0.0, 1.0, 0.0, just_below * 2.0**power, -1.0, 1.0, 0.0, 0.0, 0, 0]
            scalars = step_plan.scalar_table([row])
            m = torch.cat([2.0 ** torch.arange(-60.0, 61.0), 1.0 + torch.arange(2048) * 2.0**-23])
            results = []
            for backend, device in [(bench.truth, torch.device("cpu")), *((b, bench.device) for b in bench.ours)]:
                p, g, v = torch.zeros_like(m), torch.zeros_like(m), torch.full_like(m, 2.0**-100)
                lists = [[tensor.to(device)] for tensor in (p, g, m, v)]
                ops.adam_step(
                    backend, *lists, [], [], [], [], [], scalars, torch.tensor([[0, 0, 0, len(m)]]), None, None,
                    torch.zeros(1, dtype=torch.int64, device=device), "fp32", 256, True, False, False, cache={},
                )  # fmt: skip
                results.append(lists[0][0])
            for result in results[1:]:
                assert_same_bits(result, results[0], f"m / {row[4]!r}")

    bench.check("divisions by one unit less than a power of two", body)


def check_graph(bench: Bench) -> None:
    """A captured step replays as eager steps do, also with a new lr, and after eager steps in between."""

    def body() -> None:
        if bench.dry_run:
            raise Unavailable("no CUDA graphs on the CPU")
        shapes = [(64, 1024), (5, 304), (700,)]
        outcomes = []
        for graphed in (False, True):
            params = make_parameters(shapes, torch.bfloat16, bench.device)
            lr = torch.tensor(1e-3, device=bench.device)
            optimizer = fused8.AdamW8bit(params, lr=lr, min_8bit_size=0, capturable=True)
            for p in params:
                p.grad = torch.zeros_like(p)

            def gradients(step: int) -> None:
                for p in params:  # noqa: B023
                    p.grad.copy_(hostile_gradient(p.shape, step, p.dtype))

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
        assert_same_optimizers(*outcomes, "graph")

    bench.check("CUDA graph: capture and replay", body)


def check_streams(bench: Bench) -> None:
    """Steps on two streams in turn, each waiting for the other only on the device."""

    def body() -> None:
        if bench.dry_run:
            raise Unavailable("no streams on the CPU")
        outcomes = []
        for streams in ([torch.cuda.current_stream()] * 2, [torch.cuda.Stream(), torch.cuda.Stream()]):
            params = make_parameters([(64, 1024), (700,)] * 20, torch.bfloat16, bench.device)
            grads = [[hostile_gradient(p.shape, step, p.dtype).to(p.device) for p in params] for step in range(1, 9)]
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
        assert_same_optimizers(*outcomes, "streams")

    bench.check("two streams", body)


def check_grad_scaler(bench: Bench) -> None:
    """GradScaler passes scale and found_inf to the device; a step with an infinite gradient changes nothing."""

    def body() -> None:
        outcomes = []
        for backend, device in (("triton", bench.device), (bench.truth, torch.device("cpu"))):
            params = make_parameters([(36, 256), (700,)], torch.float32, device)
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
        assert_same_optimizers(*outcomes, "GradScaler")
        steps = {float(state["step"]) for state in outcomes[0].state.values()}
        assert steps == {4.0}, steps

    bench.check("GradScaler", body)


def check_offload(bench: Bench) -> None:
    """State in CPU memory: the bits of state on the device, also when the CPU steps during backward."""

    def body() -> None:
        outcomes = []
        for options, in_backward in (({}, False), (dict(offload="cpu"), False), (dict(offload="cpu"), True)):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8)))
            model.to(bench.device, torch.bfloat16)
            optimizer = fused8.AdamW8bit(model.parameters(), lr=1e-3, master_bits=32, **options)
            handle = fused8.step_in_backward(optimizer) if in_backward else None
            for step in range(5):
                # Gradients by hand, the same in all runs: those of matrix products may not be.
                grads = [hostile_gradient(p.shape, step, p.dtype).to(p.device) for p in model.parameters()]
                loss = sum((p * g).sum() for p, g in zip(model.parameters(), grads, strict=True))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if handle is not None:
                handle.remove()
            bench.sync()
            outcomes.append(optimizer)
        for optimizer in outcomes[1:]:
            assert_same_optimizers(optimizer, outcomes[0], "offload")

    bench.check("offload", body)


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
        run("triton", CHECK_SHAPES, steps=1, dtype=torch.bfloat16, device="cuda", codec=codec)
    torch.cuda.synchronize()


CHECKS = (
    check_parity,
    check_unaligned,
    check_division,
    check_graph,
    check_streams,
    check_grad_scaler,
    check_offload,
    check_large,
)
