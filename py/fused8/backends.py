"""Which kernel serves which device, and why.

A new backend is one entry of BACKENDS: a function with the arguments of the `fused8::adam_step_` schema (ops.py), and
one that says why it cannot serve a device.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import reference

logger = logging.getLogger("fused8")

LIBRARY = Path(__file__).with_name("libfused8.so")
CUDA_LIBRARY = Path(__file__).with_name("libfused8_cuda.so")

OLDEST_TRITON = (3, 6)  # earlier ones flush denormal numbers to zero


@functools.cache
def load_library() -> str | None:
    """Load the compiled library once; the reason why it is not there, or None."""
    how = "when fused8 is installed with a C++20 compiler and torch present (pip install --no-build-isolation)"
    return _load(LIBRARY, "the compiled library", how)


@functools.cache
def load_cuda_library() -> str | None:
    """Load the library of the CUDA C++ kernels once, which needs the CUDA of torch; as `load_library`."""
    how = "when fused8 is installed with nvcc and torch present (FUSED8_CUDA=1 pip install --no-build-isolation)"
    return _load(CUDA_LIBRARY, "its library", how)


def _load(path: Path, what: str, built: str) -> str | None:
    if not path.exists():
        return f"{what} is missing ({path.name}): it is built {built}"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{what} could not be loaded: {error}"
    return None


class Backend(NamedTuple):
    name: str
    unavailable: Callable[[torch.device], str | None]
    """Why this backend cannot serve the device, or None if it can."""
    adam_step: Callable[..., None]
    """Takes the arguments of the schema, and `cache`: a dict that lives as long as the bucket."""


def _cpp_unavailable(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves the CPU, not {device.type}"
    return load_library()


def _operator_adam_step(*args: Any, cache: dict[str, Any]) -> None:
    torch.ops.fused8.adam_step_(*args)


def _triton_unavailable(device: torch.device) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
    if device.type not in ("cpu", "cuda"):
        return f"it serves CUDA and ROCm devices, not {device.type}"
    if device.type == "cpu" and not interpreted:
        return "it serves the CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    if device.type == "cuda" and interpreted:
        return "Triton's interpreter (TRITON_INTERPRET is set) serves only the CPU"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
        return f"it needs Triton {'.'.join(map(str, OLDEST_TRITON))} or later, this is {triton.__version__}"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 or later"
    return None


def _triton_adam_step(*args: Any, cache: dict[str, Any]) -> None:
    from .triton_kernels.adam import adam_step  # imports triton, which import fused8 does not

    adam_step(*args, cache=cache)


def _cuda_unavailable(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it serves CUDA devices, not {'ROCm' if device.type == 'cuda' else device.type}"
    return load_cuda_library()


def _reference_unavailable(device: torch.device) -> str | None:
    return None


def _reference_adam_step(*args: Any, cache: dict[str, Any]) -> None:
    reference.adam_step(*args)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpp", _cpp_unavailable, _operator_adam_step),
        Backend("triton", _triton_unavailable, _triton_adam_step),
        Backend("cuda", _cuda_unavailable, _operator_adam_step),
        Backend("reference", _reference_unavailable, _reference_adam_step),
    )
}

# Tried in this order when no backend is asked for.
AUTOMATIC = {"cpu": ("cpp",), "cuda": ("triton",)}


@functools.cache
def select(device: torch.device, requested: str | None) -> Backend:
    """The backend for a device. One that was asked for and cannot serve is a RuntimeError that says why."""
    if requested is not None:
        if reason := BACKENDS[requested].unavailable(device):
            raise RuntimeError(f"backend {requested!r} cannot serve device {str(device)!r}: {reason}")
        return BACKENDS[requested]
    for name in AUTOMATIC.get(device.type, ()):
        reason = BACKENDS[name].unavailable(device)
        if reason is None:
            return BACKENDS[name]
        _say_once(f"fused8: device {device} is served by the slow reference, not by {name}: {reason}")
    return BACKENDS["reference"]


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
