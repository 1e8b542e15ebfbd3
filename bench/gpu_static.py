"""What the GPU kernel costs, read from its machine code: no GPU needed.

Compiles the Triton kernel and, where nvcc is on the PATH, the CUDA C++ kernel for each codec and dtype. Prints for the
aligned path registers, spills, shared memory, memory instructions, executed instructions and bytes per parameter, and
from those the time that one step of 10^9 parameters takes where memory or instruction issue is the limit.
`python -m bench.gpu_static [--json]`.
"""

from __future__ import annotations

import argparse
import collections
import heapq
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Gpu(NamedTuple):
    """Peak memory bandwidth (bytes/s), multiprocessors, and the clock (Hz) at which its peak FLOP/s are quoted."""

    capability: int
    bandwidth: float
    multiprocessors: int
    clock: float


GPUS = {
    "A100": Gpu(80, 2.039e12, 108, 1.41e9),
    "H100": Gpu(90, 3.35e12, 132, 1.83e9),
    "H200": Gpu(90, 4.8e12, 132, 1.83e9),
}

# Operations per clock and multiprocessor (CUDA C++ Programming Guide, "Arithmetic Instructions"). What the warp
# schedulers issue bounds all of them together.
ISSUE = 128
THROUGHPUT = {80: {"fma": 64, "alu": 64, "xu": 16}, 90: {"fma": 128, "alu": 64, "xu": 16}}
PIPES = {
    "fma": "FADD FFMA FMUL IMAD HFMA2",
    "alu": "F2FP FMNMX FSEL FSETP IABS IADD3 IMNMX ISETP LEA LOP3 MOV PLOP3 PRMT SEL SHF SGXT VIADD VIADDMNMX VIMNMX "
    "VIMNMX3",
    "xu": "F2I FCHK FLO I2F I2FP MUFU POPC",
}
PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names.split()}

PARAMETERS = 10**9
FULL_TILES, ALL_TILES = "full", "all"


@dataclass
class Report:
    """One compiled kernel. Instruction counts are per parameter, on the path without special cases."""

    kernel: str
    target: str
    codec: str
    param_dtype: str
    grad_dtype: str
    registers: int
    spilled_bytes: int
    local_accesses: int
    shared_bytes: int
    wide_accesses: int
    narrow_loads: int
    narrow_stores: int
    instructions: float
    pipes: dict[str, float]
    bytes: float
    milliseconds: dict[str, float] = field(default_factory=dict)
    of_bandwidth_limit: dict[str, float] = field(default_factory=dict)


class Instruction(NamedTuple):
    address: int
    predicate: str
    name: str
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]


def compile_kernel(
    target: str,
    codec: str,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    *,
    tiles: str = FULL_TILES,
    decoupled_weight_decay: bool = True,
    maximize: bool = False,
    amsgrad: bool = False,
    scaled: bool = False,
    extra_bits: int = 0,
    stochastic: bool = False,
) -> Any:
    """The kernel for a target ("sm_90", "gfx942"), as it is compiled for a bucket of rows of 256."""
    import triton
    from fused8.triton_kernels import adam, launch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    is_cuda = target.startswith("sm_")
    kind = "cuda" if is_cuda else "hip"
    body = (launch.WIDTHS.value - 1) * launch.FLAVOURS.value
    present = 1 << body + launch.FULL.value
    if tiles == ALL_TILES:
        present |= 1 << body + launch.ALIGNED.value | 1 << body + launch.UNALIGNED.value
    constants = adam.constants(
        param_dtype, grad_dtype, codec, decoupled_weight_decay, maximize, amsgrad, extra_bits, stochastic, present, kind
    )
    types = {
        "tensors": "*i64",
        "tiles": "*i32",
        "layout": "*i64",
        "scalars": "*fp32",
        "tables": "*fp32" if codec == "dynamic" else None,
        "grad_scale": "*fp32" if scaled else None,
        "found_inf": "*fp32" if scaled else None,
        "nonfinite": "*i64",
    }
    constants |= {name: None for name, type_ in types.items() if type_ is None}
    names = adam.adam_kernel.arg_names
    source = ASTSource(
        adam.adam_kernel,
        {name: types.get(name) or "constexpr" for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("tensors", "tiles")},
    )
    gpu = GPUTarget("cuda", int(target[3:]), 32) if is_cuda else GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=adam.compile_options(kind))


CUDA_SOURCE = Path(__file__).parent.parent / "csrc" / "cuda"
CUDA_CODECS = {"adaptive": "AdaptiveCodec", "dynamic": "DynamicCodec", "e4m3": "E4M3Codec", "fp32": "Fp32Codec"}
CUDA_TYPES = {torch.float32: "float", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
CUDA_ELEMENTS = 16  # ELEMENTS in csrc/cuda/lanes.cuh
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-prec-sqrt=true", "-prec-div=true", "-ftz=false"]
NVCC_FLAGS += ["--Werror", "all-warnings"]


def compile_cuda_kernel(
    target: str, codec: str, param_dtype: torch.dtype, grad_dtype: torch.dtype, *, amsgrad: bool = False
) -> bytes:
    """The cubin of one CUDA C++ kernel for a target ("sm_90"), compiled as setup.py does."""
    arguments = f"{CUDA_CODECS[codec]}, {str(amsgrad).lower()}, {CUDA_TYPES[param_dtype]}, {CUDA_TYPES[grad_dtype]}"
    source = f"""
#include "adam_cuda.cuh"
namespace fused8::cuda {{
template __global__ void adam_kernel<{arguments}>(const __grid_constant__ Launch);
}}
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cu")
        path.write_text(source)
        command = ["nvcc", *NVCC_FLAGS, f"-arch={target}", "-cubin", f"-I{CUDA_SOURCE}", "-o", f"{folder}/out", path]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"nvcc failed on {arguments} for {target}:\n{result.stderr}")
        return Path(folder, "out").read_bytes()


def disassemble(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a cubin and its resource usage."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    instructions = [
        Instruction(int(address, 16), predicate.strip(), name, operands.strip())
        for address, predicate, name, operands in re.findall(
            r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\d\s+)?([A-Z][\w.]*)([^;]*);", text
        )
    ]
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return instructions, usage


def executed(instructions: list[Instruction]) -> list[Instruction]:
    """The path that a thread takes whose elements are all ordinary: the shortest one that makes every wide store.

    Special cases are longer branches, and calls are the slow ways of division and square root.
    """
    position = {instruction.address: i for i, instruction in enumerate(instructions)}

    def successors(i: int) -> list[int]:
        instruction = instructions[i]
        following = [i + 1] if i + 1 < len(instructions) else []
        if instruction.base in ("EXIT", "RET"):
            return following if instruction.predicate else []
        if instruction.base == "BRA":
            target = position[int(re.search(r"0x([0-9a-f]+)", instruction.operands)[1], 16)]
            conditional = instruction.predicate or "P" in instruction.operands.split("0x")[0]
            return [target, *following] if conditional else [target]
        return following

    def shortest(start: int, is_end: Any) -> list[int]:
        distance, previous, heap = {start: 0}, {}, [(0, start)]
        while heap:
            d, i = heapq.heappop(heap)
            if d > distance[i]:
                continue
            if is_end(i):
                path = [i]
                while path[-1] in previous:
                    path.append(previous[path[-1]])
                return path[::-1]
            for j in successors(i):
                cost = d + (10_000 if instructions[i].base == "CALL" else 1)
                if cost < distance.get(j, sys.maxsize):
                    distance[j], previous[j] = cost, i
                    heapq.heappush(heap, (cost, j))
        raise ValueError("the kernel has no such path")

    stores = [i for i, x in enumerate(instructions) if x.base == "STG" and x.name.endswith(".128")]
    path = shortest(0, lambda i: i == stores[-1])
    path += shortest(stores[-1], lambda i: instructions[i].base == "EXIT")[1:]
    assert set(stores) <= set(path), "the kernel stores on several paths"
    return [instructions[i] for i in path]


def bytes_per_parameter(
    codec: str, param_dtype: torch.dtype, grad_dtype: torch.dtype, block_size: int = 256, extra_bits: int = 0
) -> float:
    """What one step reads and writes: p with its correction, g, and both states with their scales."""
    state = 2 * 4 if codec == "fp32" else 2 + 2 * 4 / block_size
    return 2 * (param_dtype.itemsize + extra_bits / 8) + grad_dtype.itemsize + 2 * state


def report(target: str, codec: str, param_dtype: torch.dtype, grad_dtype: torch.dtype, **options: Any) -> Report:
    """On the Triton kernel. `options`: those of `compile_kernel`."""
    from fused8.triton_kernels.launch import CONFIGS

    kernel = compile_kernel(target, codec, param_dtype, grad_dtype, **options)
    per_thread = CONFIGS["cuda"].tile // (32 * CONFIGS["cuda"].num_warps)
    shared, extra_bits = kernel.metadata.shared, options.get("extra_bits", 0)
    return _report(
        "triton", kernel.asm["cubin"], shared, per_thread, target, codec, param_dtype, grad_dtype, extra_bits
    )


def cuda_report(target: str, codec: str, param_dtype: torch.dtype, grad_dtype: torch.dtype, **options: Any) -> Report:
    """On the CUDA C++ kernel. `options`: those of `compile_cuda_kernel`."""
    cubin = compile_cuda_kernel(target, codec, param_dtype, grad_dtype, **options)
    return _report("cuda", cubin, None, CUDA_ELEMENTS, target, codec, param_dtype, grad_dtype)


def _report(
    kernel: str,
    cubin: bytes,
    shared_bytes: int | None,
    per_thread: int,
    target: str,
    codec: str,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    extra_bits: int = 0,
) -> Report:
    instructions, usage = disassemble(cubin)
    path = executed(instructions)
    pipes = collections.Counter(PIPE_OF.get(x.base, "other") for x in path)
    loads = [x for x in path if x.base == "LDG"]
    stores = [x for x in path if x.base == "STG"]
    wide = [x for x in loads + stores if ".128" in x.name]
    result = Report(
        kernel=kernel,
        target=target,
        codec=codec,
        param_dtype=str(param_dtype).removeprefix("torch."),
        grad_dtype=str(grad_dtype).removeprefix("torch."),
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        local_accesses=sum(x.base in ("LDL", "STL") for x in instructions),
        shared_bytes=usage["SHARED"] if shared_bytes is None else shared_bytes,
        wide_accesses=len(wide),
        narrow_loads=sum(".128" not in x.name for x in loads),
        narrow_stores=sum(".128" not in x.name for x in stores),
        instructions=len(path) / per_thread,
        pipes={pipe: count / per_thread for pipe, count in sorted(pipes.items())},
        bytes=bytes_per_parameter(codec, param_dtype, grad_dtype, extra_bits=extra_bits),
    )
    for name, gpu in GPUS.items():
        if target == f"sm_{gpu.capability}":
            memory = result.bytes / gpu.bandwidth
            clocks = max(
                result.instructions / ISSUE,
                *(result.pipes.get(pipe, 0) / rate for pipe, rate in THROUGHPUT[gpu.capability].items()),
            )
            seconds = max(memory, clocks / (gpu.clock * gpu.multiprocessors))
            result.milliseconds[name] = seconds * PARAMETERS * 1e3
            result.of_bandwidth_limit[name] = memory / seconds
    return result


def reports() -> list[Report]:
    codecs = ("adaptive", "dynamic", "e4m3", "fp32")
    dtypes = ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32))
    makers = [report, cuda_report] if shutil.which("nvcc") else [report]
    return [
        make(target, codec, *pair)
        for make, target, codec, pair in itertools.product(makers, ("sm_80", "sm_90"), codecs, dtypes)
    ]


def print_table(rows: list[Report]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ["kernel", "target", "codec", "dtypes", "regs", "spills", "shared", "128-bit", "narrow", "instr", "alu"]
    columns += ["B/param"]
    table = Table(*columns, *GPUS, title=f"One step of {PARAMETERS:.0e} parameters, predicted: ms, of bandwidth limit")
    for row in rows:
        table.add_row(
            row.kernel,
            row.target,
            row.codec,
            f"{row.param_dtype}/{row.grad_dtype}".replace("float", "f"),
            str(row.registers),
            str(row.spilled_bytes),
            str(row.shared_bytes),
            str(row.wide_accesses),
            str(row.narrow_loads + row.narrow_stores),
            f"{row.instructions:.1f}",
            f"{row.pipes['alu']:.1f}",
            f"{row.bytes:.2f}",
            *(
                f"{row.milliseconds[gpu]:.2f} {row.of_bandwidth_limit[gpu]:.0%}" if gpu in row.milliseconds else ""
                for gpu in GPUS
            ),
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(
        "regs, shared: per thread, per program. 128-bit, narrow: global accesses of a thread (16 parameters); narrow\n"
        "are pointers, scalars, block scales and the tables of dynamic. instr, alu: executed per parameter."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_static", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("gpu_static compiles: unset TRITON_INTERPRET", file=sys.stderr)
        return 2
    rows = reports()
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
