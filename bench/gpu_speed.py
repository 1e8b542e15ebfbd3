"""How fast the GPU step is, beside the bandwidth of a plain copy and beside other optimizers that are installed. A time
is taken only where the same tensors also passed a check."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fused8
from fused8 import ops, step_plan
from fused8.options import rounds_stochastically

from .gpu_common import CODECS, DTYPES, Bench, Check, Speed, short
from .same_bits import assert_same_bits

MILLION = 10**6


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
        corrections = [old["param_correction"]] if "param_correction" in old else []
        ops.adam_step(
            bench.truth, [q], [g], *states, [], [], corrections, scalars, table, None, None, nonfinite,
            group["codec"], group["block_size"], True, False, rounds_stochastically(p.dtype, group), cache={},
        )  # fmt: skip
        assert_same_bits(p[part], q, f"rows {part.start}.. of {tuple(p.shape)}")
        for name in old:
            assert_same_bits(state[name][part], old[name], f"{name} in rows {part.start}.. of {tuple(p.shape)}")


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

    side = 64 if bench.dry_run else 16384
    model = [(16, 256), (256,)] if bench.dry_run else model_shapes()
    small = [(128, 128)] * (1 if bench.dry_run else 160)
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
