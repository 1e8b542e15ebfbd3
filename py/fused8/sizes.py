"""Bytes: of tensors, and as text."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .sharding import is_dtensor, local

MIB = 2**20


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / MIB:,.2f}"


def per_parameter(size: float, parameters: int) -> str:
    return f"{size / parameters:.3f}" if parameters else ""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def pieces(tensor: Tensor) -> Iterator[tuple[torch.dtype, int]]:
    """Dtype and bytes of the plain tensors that a tensor consists of; of a DTensor what this process holds."""
    if is_dtensor(tensor):
        # Its __tensor_flatten__ also names the device mesh, and a local tensor can itself be a subclass.
        yield from pieces(local(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from pieces(getattr(tensor, name))
    else:
        yield tensor.dtype, tensor.numel() * tensor.element_size()


def held_bytes(tensor: Tensor) -> int:
    return sum(size for _, size in pieces(tensor))
