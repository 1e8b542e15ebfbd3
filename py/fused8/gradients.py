"""One FP32 scalar that the step divides gradients by: clipping without writing a gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .sharding import is_dtensor


def global_norm(buckets: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> Tensor:
    """The Euclidean norm of all gradients together, an FP32 scalar on the device of the first one.

    `buckets` holds parameters and the local parts of their gradients. The squares of DTensors are summed over the mesh
    dimensions that shard them: one all-reduce per mesh dimension and kind of placement, however many tensors.
    """
    sums: dict[tuple, tuple[Tensor, Tensor]] = {}  # how it is sharded -> a parameter like that, the sum of squares
    for params, grads in buckets:
        for key, positions in _by_placement(params).items():
            norms = torch._foreach_norm([grads[i] for i in positions], 2.0, dtype=torch.float32)
            square = torch.stack(norms).square().sum()
            p, total = sums.get(key, (params[positions[0]], None))
            sums[key] = (p, square if total is None else total + square.to(total.device))
    if not sums:
        return torch.zeros(())
    device = next(iter(sums.values()))[1].device
    squares = []
    for p, square in sums.values():
        if is_dtensor(p):
            for dim, placement in enumerate(p.placements):  # type: ignore[attr-defined]
                if placement.is_shard():
                    dist.all_reduce(square, group=p.device_mesh.get_group(dim))  # type: ignore[attr-defined]
        squares.append(square.to(device))
    return torch.stack(squares).sum().sqrt()


def _by_placement(params: Sequence[Tensor]) -> dict[tuple, list[int]]:
    positions: dict[tuple, list[int]] = {}
    for i, p in enumerate(params):
        key = (p.device_mesh, p.placements) if is_dtensor(p) else ()  # type: ignore[attr-defined]
        positions.setdefault(key, []).append(i)
    return positions


def clip(norm: Tensor, grad_scale: Tensor | None, max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm of the unscaled gradients, and what to divide gradients by to unscale and clip them.

    As torch.nn.utils.clip_grad_norm_: they are multiplied by min(1, max_norm / (norm + 1e-6)). If the norm is not
    finite they are divided by infinity: the step sees a zero gradient, and counts the elements that are not finite.
    """
    if grad_scale is not None:
        norm = norm / grad_scale.to(norm.device).float().expand_as(norm)
    excess = ((norm + 1e-6) / torch.full_like(norm, max_norm)).clamp(min=1.0)
    excess = torch.where(norm.isfinite(), excess, torch.inf)
    return norm, excess if grad_scale is None else excess * grad_scale.to(norm.device).float()
