"""Which kernel serves which device, and why.

A new backend is one entry of BACKENDS: a function with the arguments of the `fused8::adam_step_` schema (ops.py), and
one that says why it cannot serve a device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from . import reference

logger = logging.getLogger("fused8")

LIBRARY = Path(__file__).with_name("libfused8.so")


@functools.cache
def load_library() -> str | None:
    """Load the compiled library once; the reason why it is not there, or None."""
    if not LIBRARY.exists():
        return (
            f"the compiled library is missing ({LIBRARY.name}): it is built when fused8 is installed with a C++20 "
            "compiler and torch present (pip install --no-build-isolation)"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except (OSError, RuntimeError) as error:
        return f"the compiled library could not be loaded: {error}"
    return None


class Backend(NamedTuple):
    name: str
    unavailable: Callable[[torch.device], str | None]
    """Why this backend cannot serve the device, or None if it can."""
    adam_step: Callable[..., None]


def _cpp_unavailable(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"it serves the CPU, not {device.type}"
    return load_library()


def _cpp_adam_step(*args) -> None:
    torch.ops.fused8.adam_step_(*args)


def _triton_unavailable(device: torch.device) -> str | None:
    return "its kernels are not part of this version"


def _triton_adam_step(*args) -> None:
    raise NotImplementedError


def _reference_unavailable(device: torch.device) -> str | None:
    return None


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpp", _cpp_unavailable, _cpp_adam_step),
        Backend("triton", _triton_unavailable, _triton_adam_step),
        Backend("reference", _reference_unavailable, reference.adam_step),
    )
}

# Tried in this order when no backend is asked for.
AUTOMATIC = {"cpu": ("cpp",), "cuda": ("triton",)}


@functools.cache
def select(device: torch.device, requested: str | None) -> Backend:
    """The backend for a device. One that was asked for and cannot serve is a RuntimeError that says why."""
    if requested is not None:
        backend = BACKENDS[requested]
        if reason := backend.unavailable(device):
            raise RuntimeError(f"backend {requested!r} cannot serve device {str(device)!r}: {reason}")
        return backend
    for name in AUTOMATIC.get(device.type, ()):
        reason = BACKENDS[name].unavailable(device)
        if reason is None:
            return BACKENDS[name]
        logger.warning("fused8: device %s is served by the slow reference, not by %s: %s", device, name, reason)
    return BACKENDS["reference"]
