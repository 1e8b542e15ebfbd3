"""What must hold for any bytes and any state dict: it works, or raises what is documented and changes nothing."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch

import fused8
from fused8 import checkpoints
from fused8.memory import checkpoint_reports

from ..support import assert_same_optimizers, make_parameters, parameters
from .corpus import SHAPES

PRECIOUS = b"what was there before"
CONVERSIONS = [(to, suffix) for to in checkpoints.TARGETS for suffix in (".pt", ".safetensors")]

CONVERT_RAISES: tuple[type[Exception], ...] = (ValueError, TypeError, OSError)
if not importlib.util.find_spec("safetensors"):  # then it says so
    CONVERT_RAISES = (*CONVERT_RAISES, ImportError)


class Fault(AssertionError):
    """A loader did what it must not do."""


def convert(path: Path, turn: int) -> bool:
    """`fused8 convert`, to the library and the format whose turn it is; whether it worked."""
    to, suffix = CONVERSIONS[turn % len(CONVERSIONS)]
    target = path.with_name(f"target{suffix}")
    target.write_bytes(PRECIOUS)
    names = sorted(p.name for p in path.parent.iterdir())
    works = _works("convert", CONVERT_RAISES, checkpoints.convert_file, path, target, to)
    if not works and target.read_bytes() != PRECIOUS:
        raise Fault(f"convert --to {to}: an error, and the target is another one")
    if sorted(p.name for p in path.parent.iterdir()) != names:
        raise Fault(f"convert --to {to} left files behind")
    if works:  # what it has written, it can read
        checkpoints.read(target)
        checkpoint_reports(target)
    return works


def report(path: Path) -> bool:
    """`fused8 report`, with the text and the JSON of what it found."""

    def run() -> None:
        for found in checkpoint_reports(path).values():
            found.tables()
            found.to_dict()

    return _works("report", (ValueError, OSError), run)


def estimate(path: Path) -> bool:
    """`fused8 estimate`."""
    return _works("estimate", (ValueError, TypeError, OSError, ImportError), fused8.estimate_memory, path)


def file(path: Path, turn: int) -> int:
    """All that reads files, one after the other; how many of them could read it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert(path, turn) + report(path) + estimate(path)


def load_state_dict(state_dict: dict[str, Any]) -> int:
    """`Adam8bit.load_state_dict`, and a step after it, whether or not it worked; 1 if it did."""
    optimizer = _optimizer()
    before, groups = copy.deepcopy(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        works = _works("load_state_dict", (ValueError, TypeError), optimizer.load_state_dict, state_dict)
        if not works:
            assert_same_optimizers(optimizer, before, "after the error")
            if optimizer.state_dict()["param_groups"] != groups:
                raise Fault("load_state_dict: an error, and the param groups are others")
        _step_without_nan(optimizer)
    return works


def _optimizer() -> fused8.AdamW8bit:
    optimizer = fused8.AdamW8bit(make_parameters(SHAPES), min_8bit_size=0, lr=1e-3)
    _step_without_nan(optimizer)
    return optimizer


def _step_without_nan(optimizer: torch.optim.Optimizer) -> None:
    for p in parameters(optimizer):
        p.grad = torch.full_like(p, 1e-3)
    try:
        optimizer.step()
    except RuntimeError as error:
        if "2^24 steps" not in str(error):  # which a file may hold
            raise
    if any(p.isnan().any() for p in parameters(optimizer)):
        raise Fault("a loaded state makes NaN")


def _works(what: str, documented: tuple[type[Exception], ...], function: Any, *args: Any) -> bool:
    try:
        function(*args)
    except documented as error:
        if isinstance(error, UnicodeError) or "\n" in str(error):
            raise Fault(f"{what}: a message of more than one line: {str(error)[:200]!r}") from error
        return False
    except Exception as error:
        raise Fault(f"{what} raised {type(error).__name__}: {error}") from error
    return True
