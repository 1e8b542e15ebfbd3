"""Parameters that are DTensors (FSDP2, tensor parallel): their local shard, where it lies, and state like them.

Everything that decides a state format looks at the global shape, never at a shard, so that one process and a cluster
agree. Blocks never cross rows, so codes and scales shard along dim 0 in the same places as the parameter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Shard(NamedTuple):
    """Where the local part of a parameter lies in the whole, seen as [rows, inner]."""

    row0: int = 0
    col0: int = 0
    global_inner: int = 1
    keeps_blocks: bool = True
    """Whether the local rows are whole rows, or pieces of them that begin and end at block boundaries on all ranks."""


def is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # without it there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_grad(p: Tensor) -> Tensor:
    """The local part of a parameter's gradient, placed as the parameter is."""
    grad = p.grad
    assert grad is not None
    if is_dtensor(p) and is_dtensor(grad) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local(grad)


def rows_and_inner(shape: Sequence[int]) -> tuple[int, int]:
    """How blocks see a parameter: dim 0 by the product of the rest; a 1-D parameter is one row."""
    if len(shape) >= 2:
        return shape[0], math.prod(shape[1:])
    return 1, math.prod(shape)


def shard_of(p: Tensor, block_size: int) -> Shard:
    """The place of the local part of a parameter. A parameter that is no DTensor is whole."""
    inner = rows_and_inner(p.shape)[1]
    if not is_dtensor(p):
        return Shard(global_inner=inner)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    sharded = [placement.dim for placement in placements if placement.is_shard()]
    _, offset = compute_local_shape_and_global_offset(p.shape, mesh, placements)
    if p.dim() < 2:  # one row: a shard of it would cut blocks
        return Shard(0, offset[0] if offset else 0, inner, keeps_blocks=False)
    rest = math.prod(p.shape[2:])
    columns = [size for size, placement in zip(mesh.shape, placements, strict=True) if placement.is_shard(1)]
    whole_blocks = True
    if columns:
        piece = -(-p.shape[1] // columns[0]) * rest  # torch.chunk: all pieces but the last are this long
        whole_blocks = len(columns) == 1 and piece % block_size == 0 and inner % block_size == 0
    keeps_blocks = whole_blocks and all(dim <= 1 for dim in sharded)
    return Shard(offset[0], offset[1] * rest, inner, keeps_blocks)


def refusal(p: Tensor) -> str | None:
    """Why a sharded parameter cannot be stepped, or None."""
    if getattr(p, "_fsdp_flattened", False):
        return (
            "belongs to FullyShardedDataParallel, whose flat parameters cut rows and whose checkpoints cannot hold "
            "8-bit state: shard the model with torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    if is_dtensor(p) and any(placement.is_partial() for placement in p.placements):  # type: ignore[attr-defined]
        return "is a DTensor with a Partial placement: only replicated and sharded parameters can be updated"
    return None


def placed_like(p: Tensor, tensor: Tensor, global_shape: Sequence[int]) -> Tensor:
    """A local state tensor as a DTensor with the parameter's mesh and placements; as it is for any other parameter."""
    if not is_dtensor(p):
        return tensor
    from torch.distributed.tensor import DTensor

    strides = torch.empty(tuple(global_shape), device="meta").stride()
    return DTensor.from_local(
        tensor,
        p.device_mesh,  # type: ignore[attr-defined]
        p.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=torch.Size(global_shape),
        stride=strides,
    )
