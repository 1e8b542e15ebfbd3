"""The `fused8` command: what training takes, what a file holds, what works on this machine, and how fast it is.

A new command is a function that takes the parsed arguments and returns an exit code, and an entry in `_parser`. What
is wrong with its input it raises as ValueError or OSError; `main` makes one line of it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import fused8

from . import backends, convert_cli
from .codecs import CODECS
from .memory import Table, checkpoint_reports, estimate_memory, memory_report, mib
from .optimizer import AdamW8bit
from .state import BLOCK_SIZES

OK, ATTENTION, BAD_INPUT = 0, 1, 2  # exit codes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}
REINSTALL = "pip install --no-build-isolation --force-reinstall --no-deps fused8"


# -- estimate and report ----------------------------------------------------------------------------------------------


def estimate(args: argparse.Namespace) -> int:
    result = estimate_memory(
        args.path,
        dtype=WEIGHT_DTYPES.get(args.dtype),
        grad_dtype=DTYPES.get(args.grad_dtype),
        architecture=args.architecture,
        world_size=args.world_size,
        codec=args.codec,
        block_size=args.block_size,
        min_8bit_size=args.min_8bit_size,
        amsgrad=args.amsgrad,
        master_bits=args.master_bits,
    )
    _show(args, result.to_dict(), result.tables())
    return OK


def report(args: argparse.Namespace) -> int:
    found = checkpoint_reports(args.checkpoint)
    tables: list[Table] = []
    for place, result in found.items():
        first, *others = result.tables()
        tables += [first._replace(title=": ".join(filter(None, (args.checkpoint.name, place, first.title)))), *others]
    _show(args, {place: result.to_dict() for place, result in found.items()}, tables)
    return OK


# -- doctor -----------------------------------------------------------------------------------------------------------


def doctor(args: argparse.Namespace) -> int:
    logging.getLogger("fused8").setLevel(logging.ERROR)  # why a device falls back stands in the table
    advice: list[str] = []
    versions = _versions(advice)
    library = _library(advice)
    devices = [_diagnose(device, advice) for device in _devices(advice)]
    about = {name: version or "not found" for name, version in versions.items()}
    about["compiled library"] = library["problem"] or f"loaded, instruction set {library['instruction_set']}"
    tables = [
        Table("Versions", ["", "version"], [[*item] for item in about.items()], left=["version"]),
        Table(
            "Which backend serves which device",
            ["device", "backend", "self-test", "name"],
            [[d["device"], d["backend"], d["self_test"], d["name"]] for d in devices],
            left=["backend", "self-test", "name"],
        ),
        Table(
            "Why not the others",
            ["device", "backend", "reason"],
            [[d["device"], name, reason] for d in devices for name, reason in d["others"].items()],
            left=["backend", "reason"],
        ),
    ]
    content = {"versions": versions, "library": library, "devices": devices, "advice": advice}
    _show(args, content, tables, [f"* {line}" for line in advice] or ["All is fine."])
    return ATTENTION if advice else OK


def _versions(advice: list[str]) -> dict[str, str | None]:
    runtimes = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    runtime = ", ".join(f"{name} {version}" for name, version in runtimes.items() if version)
    if _release(torch.__version__) < (2, 10):
        advice.append(f"torch {torch.__version__} is too old: fused8 needs 2.10 or newer (pip install -U torch)")
    triton = None
    if importlib.util.find_spec("triton"):
        import triton as module

        triton = module.__version__
    return {
        "fused8": fused8.__version__,
        "torch": f"{torch.__version__} ({runtime or 'CPU'})",
        "triton": triton,
        "python": platform.python_version(),
        "C++ compiler": _first_line([*shlex.split(os.environ.get("CXX", "g++")), "--version"]),
        "CUDA compiler": _first_line(["nvcc", "--version"], line=-1),
        "platform": platform.platform(),
    }


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _first_line(command: list[str], line: int = 0) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[line] if done.returncode == 0 and lines else None


def _library(advice: list[str]) -> dict[str, Any]:
    problem = backends.load_library()
    instruction_set = None
    if problem is None:
        try:
            instruction_set = torch.ops.fused8.cpu_isa()
        except RuntimeError as error:  # of FUSED8_CPU_ISA
            problem = _one_line(error)
            advice.append(f"{problem}: unset it for the best one")
    else:
        advice.append(f"{problem}. Install a C++20 compiler if there is none, then: {REINSTALL}")
    if instruction_set is not None and os.environ.get("FUSED8_CPU_ISA"):
        advice.append(f"FUSED8_CPU_ISA forces the instruction set {instruction_set}; unset it for the best one")
    return {"path": str(backends.LIBRARY), "problem": problem, "instruction_set": instruction_set}


def _devices(advice: list[str]) -> list[torch.device]:
    devices = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and torch.accelerator.is_available():
        devices += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    elif gpu := _first_line(["nvidia-smi", "-L"]):
        advice.append(f"{gpu.split(' (')[0]} is here, and this torch cannot use it: install a CUDA build of torch")
    return devices


def _diagnose(device: torch.device, advice: list[str]) -> dict[str, Any]:
    chosen = backends.select(device, None).name
    others = {
        name: backend.unavailable(device) or f"it can, with backend={name!r}"
        for name, backend in backends.BACKENDS.items()
        if name != chosen
    }
    if chosen == "reference":
        wanted = backends.AUTOMATIC.get(device.type, ())
        reasons = "; ".join(f"{name}: {others[name]}" for name in wanted) or "no kernel is made for it"
        advice.append(f"{device} is served by the slow reference ({reasons})")
    problem = _difference_from_reference(device, torch.float32, "adaptive", 256)
    if problem:
        advice.append(f"the self-test of {chosen} on {device} failed: {problem}. Please report it")
    return {
        "device": str(device),
        "name": _device_name(device),
        "backend": chosen,
        "others": others,
        "self_test": "failed" if problem else "same bits as the reference",
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    if device.type != "cpu":
        return device.type
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(models or [platform.processor() or platform.machine()])[0]}, {torch.get_num_threads()} threads"


def _difference_from_reference(device: torch.device, dtype: torch.dtype, codec: str, block_size: int) -> str | None:
    """How three steps of the backend that serves a device differ from the reference on the CPU, or None."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((33, 300), (64, 16), (100,))
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]

    def results(device: torch.device, backend: str | None) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(p.to(device, dtype, copy=True)) for p in start]
        optimizer = AdamW8bit(params, min_8bit_size=0, codec=codec, block_size=block_size, backend=backend)
        for step in gradients:
            for p, grad in zip(params, step, strict=True):
                p.grad = grad.to(device, dtype)
            optimizer.step()
        tensors = [p.detach() for p in params] + [t for p in params for t in optimizer.state[p].values()]
        return [tensor.cpu() for tensor in tensors]

    try:
        ours = results(device, None)
    except Exception as error:  # a self-test reports whatever goes wrong
        return f"{type(error).__name__}: {_one_line(error)}"
    expected = results(torch.device("cpu"), "reference")
    wrong = sum(not torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    return f"{wrong} of {len(ours)} tensors differ from the reference" if wrong else None


# -- bench ------------------------------------------------------------------------------------------------------------

SPREAD = 0.05  # timing goes on until the middle half of the measurements lies within this of their median
ROUNDS = 5  # the fewest measurements
SECONDS_PER_MEASUREMENT = 0.05


def bench(args: argparse.Namespace) -> int:
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    problem = _difference_from_reference(device, dtype, args.codec, args.block_size)
    if problem:
        print(f"fused8 bench: no speed is given for wrong results: {problem}", file=sys.stderr)
        return ATTENTION
    columns = 1024
    total_rows = max(4, round(args.million * 1e6 / columns))
    rows = [min(columns, total_rows - first) for first in range(0, total_rows, columns)]
    runs = {}
    for name, make in (
        ("fused8 AdamW8bit", functools.partial(AdamW8bit, codec=args.codec, block_size=args.block_size)),
        ("torch AdamW, fused", functools.partial(torch.optim.AdamW, fused=True)),
    ):
        params = [torch.nn.Parameter(torch.randn(r, columns, device=device, dtype=dtype)) for r in rows]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer = make(params)
        optimizer.step()
        runs[name] = optimizer
    seconds = _measure([optimizer.step for optimizer in runs.values()], device, args.seconds)
    results: list[dict[str, Any]] = []
    for (name, optimizer), times in zip(runs.items(), seconds, strict=True):
        memory = memory_report(optimizer)
        median = statistics.median(times)
        moved = 2 * (memory.weights or 0) + (memory.gradients or 0) + 2 * memory.state
        results.append(
            {
                "optimizer": name,
                "ms": 1e3 * median,
                "ns_per_parameter": 1e9 * median / memory.parameters,
                "gb_per_s": moved / median / 1e9,
                "spread": _spread(times),
                "state_bytes": memory.state,
            }
        )
    speedup = statistics.median(theirs / ours for ours, theirs in zip(*seconds, strict=True))
    parameters = total_rows * columns
    content = {
        "device": _device_name(device),
        "backend": backends.select(device, None).name,
        "torch": torch.__version__,
        "parameters": parameters,
        "dtype": args.dtype,
        "codec": args.codec,
        "block_size": args.block_size,
        "results": results,
        "speedup": speedup,
    }
    table = Table(
        f"{parameters:,} parameters and gradients in {args.dtype} on {device}: {content['device']}",
        ["optimizer", "ms per step", "ns per parameter", "GB/s", "spread", "state MiB"],
        [
            [
                r["optimizer"],
                f"{r['ms']:.2f}",
                f"{r['ns_per_parameter']:.3f}",
                f"{r['gb_per_s']:.1f}",
                f"{r['spread']:.1%}",
                mib(r["state_bytes"]),
            ]
            for r in results
        ],
    )
    note = f"A step of fused8 ({content['backend']}, {args.codec}) is {speedup:.2f} times as fast as torch's."
    _show(args, content, [table], ["The results are those of the reference, bit for bit.", note])
    return OK


def _measure(steps: list[Callable[[], Any]], device: torch.device, seconds: float) -> list[list[float]]:
    """Seconds per call of each of some functions, measured in turn until they agree or the time is up."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def duration(step: Callable[[], Any], calls: int) -> float:
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            step()
        wait()
        return (time.perf_counter() - began) / calls

    for step in steps:
        duration(step, 2)
    calls = [max(1, int(SECONDS_PER_MEASUREMENT / duration(step, 2))) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    deadline = time.perf_counter() + seconds
    while len(times[0]) < ROUNDS or (time.perf_counter() < deadline and max(map(_spread, times)) > SPREAD):
        for own, step, n in zip(times, steps, calls, strict=True):
            own.append(duration(step, n))
    return times


def _spread(times: list[float]) -> float:
    """Half the distance between the quartiles, relative to the median."""
    first, median, third = statistics.quantiles(times, n=4)
    return (third - first) / 2 / median


# -- the command line -------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace, content: Any, tables: Sequence[Table], notes: Sequence[str] = ()) -> None:
    """JSON if asked for; else tables, with rich on a terminal where it is installed, and otherwise plain."""
    if args.json:
        print(json.dumps(content, indent=2, default=str))
    elif sys.stdout.isatty() and importlib.util.find_spec("rich"):
        _show_rich(tables, notes)
    else:
        print("\n\n".join([*map(str, tables), *(["\n".join(notes)] if notes else [])]))


def _show_rich(tables: Sequence[Table], notes: Sequence[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    for table in tables:
        rich_table = RichTable(title=escape(table.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i, name in enumerate(table.header):
            rich_table.add_column(escape(name), justify="left" if table.is_left(i) else "right")
        for row in table.rows:
            rich_table.add_row(*map(escape, row))
        console.print(rich_table)
    for note in notes:
        console.print(escape(note))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:397] + "..."


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fused8",
        description="8-bit Adam for PyTorch: memory, checkpoints, and the state of this installation.",
        epilog="exit codes: 0 fine, 1 something needs attention, 2 wrong usage or input",
    )
    parser.add_argument("--version", action="version", version=f"fused8 {fused8.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str, details: str, example: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}. {details}",
            epilog=f"example: {example}",
        )
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    def state_format(added: argparse.ArgumentParser) -> None:
        added.add_argument("--codec", choices=CODECS, default="adaptive", help="state format (default: adaptive)")
        added.add_argument(
            "--block-size", type=int, choices=BLOCK_SIZES, default=256, help="elements per scale (default: 256)"
        )

    added = command(
        "estimate",
        estimate,
        "the memory that training a model takes, exactly, and beside other optimizers",
        "Weights, gradients and optimizer state; activations are not counted. No weights are read.",
        "fused8 estimate config.json --architecture DistilBertForSequenceClassification --dtype bf16",
    )
    added.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help=".safetensors, an index of shards (.json), a saved state dict (.pt, .bin), a config.json of transformers, "
        "or a directory with one of these",
    )
    added.add_argument("--architecture", metavar="CLASS", help="class of transformers to build from a configuration")
    state_format(added)
    added.add_argument("--amsgrad", action="store_true", help="with the third state of AMSGrad")
    added.add_argument(
        "--min-8bit-size", type=int, default=4096, metavar="N", help="smaller tensors stay in 32 bits (default: 4096)"
    )
    added.add_argument("--dtype", choices=WEIGHT_DTYPES, help="of the weights (default: as they are)")
    added.add_argument("--grad-dtype", choices=DTYPES, help="of the gradients (default: that of the weights)")
    added.add_argument(
        "--master-bits", type=int, choices=(16, 24, 32), help="of the weights, where their dtype has fewer"
    )
    added.add_argument(
        "--world-size", type=int, metavar="N", help="also what each of N ranks holds that shard the model by FSDP2"
    )

    added = command(
        "report",
        report,
        "what is in the optimizer state of a checkpoint",
        "Reads a state dict of torch.save, one within a larger checkpoint (a .ckpt of Lightning, the Trainer's "
        "optimizer.pt), and what `fused8 convert` writes as .safetensors. Code in files is never run.",
        "fused8 report checkpoint-500/optimizer.pt",
    )
    added.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="the file")

    command(
        "doctor",
        doctor,
        "which backend serves each device here, and what to do where it is not the fast one",
        "Runs a short self-test on every device. Exit code 1 if something needs attention.",
        "fused8 doctor",
    )

    added = command(
        "bench",
        bench,
        "a quick speed check against torch's fused AdamW",
        "The results are first compared, bit for bit, with the reference.",
        "fused8 bench --dtype bf16 --device cuda",
    )
    added.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    added.add_argument("--dtype", choices=DTYPES, default="fp32", help="of weights and gradients (default: fp32)")
    state_format(added)
    added.add_argument("--million", type=float, default=16, metavar="N", help="million parameters (default: 16)")
    added.add_argument(
        "--seconds", type=float, default=10, metavar="S", help="measure at most about this long (default: 10)"
    )
    convert_cli.add_convert_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.run is None:
        parser.print_help()
        return BAD_INPUT
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        print(f"fused8 {args.command}: error: {_one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
