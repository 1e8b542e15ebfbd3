"""`fused8 convert`: an optimizer state in a file, for another library or another codec."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import checkpoints
from .codecs import CODECS
from .state import BLOCK_SIZES

_SUMMARY = "convert the optimizer state in a file, for another library or another codec"
_DETAILS = """
Reads states of fused8, torch.optim.Adam and AdamW, bitsandbytes (8 and 32 bits), torchao (8-bit, 4-bit, FP8) and
FlashOptim, by themselves or within a larger checkpoint, the rest of which is kept. Files are those of torch.save or,
named .safetensors, of safetensors. OUT is replaced only when all is written. Code in files is never run.
"""


def add_convert_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `convert` to the commands of an argument parser; `args.run` is `convert_command`."""
    parser = subparsers.add_parser(
        "convert",
        help=_SUMMARY,
        description=f"{_SUMMARY[0].upper()}{_SUMMARY[1:]}. {' '.join(_DETAILS.split())}",
        epilog="example: fused8 convert checkpoint-500/optimizer.pt adamw.pt --to torch",
    )
    parser.set_defaults(run=convert_command)
    parser.add_argument("source", metavar="IN", type=Path, help="the file to read")
    parser.add_argument("target", metavar="OUT", type=Path, help="the file to write; may be the same")
    parser.add_argument("--to", choices=checkpoints.TARGETS, required=True, help="the library that is to load it")
    parser.add_argument("--codec", choices=CODECS, help="with --to fused8: state format (default: adaptive)")
    parser.add_argument(
        "--block-size", type=int, choices=BLOCK_SIZES, help="with --to fused8: elements per scale (default: 256)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def convert_command(args: argparse.Namespace) -> int:
    """Convert `args.source` to `args.target` and print what was converted; the exit code.

    Raises:
        ValueError, TypeError, OSError: the input is malformed, or a file cannot be read or written. The target is
            untouched then.
    """
    given = {"codec": args.codec, "block_size": args.block_size}
    options = {name: value for name, value in given.items() if value is not None}
    if options and args.to != "fused8":
        raise ValueError(f"--{next(iter(options)).replace('_', '-')} goes with --to fused8 only")
    with _progress(shown=not args.json) as progress:
        reports = checkpoints.convert_file(args.source, args.target, args.to, progress=progress, **options)
    if args.json:
        states = {place: report.to_dict() for place, report in reports.items()}
        print(json.dumps({"target": str(args.target), "states": states}, indent=2))
    else:
        for place, report in reports.items():
            print(f"{place}: {report}" if place else report)
        print(f"Written: {args.target}")
    return 0


@contextlib.contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal, where rich is installed."""
    if not (shown and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
