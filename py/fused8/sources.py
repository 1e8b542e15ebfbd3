"""Saved moments of one parameter, whatever their format: read as FP32 piece by piece, with the checks that all share.

A `Source` reads any range of a parameter's elements, counted in logical row-major order, so that a state is converted
piece by piece. Where it consists of codes and scales of a fused8 codec, `Source.blocks` holds them, so that they can be
taken over as they are.

The checks raise ValueError with a message that continues "the saved state of x ...".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import state as state_of
from .codecs import ABS_MAX_GRAD, CODECS, Encoded
from .sharding import is_dtensor, local

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = {"exp_avg": ABS_MAX_GRAD, "exp_avg_sq": ABS_MAX_GRAD**2, "max_exp_avg_sq": ABS_MAX_GRAD**2}


class Blocks(NamedTuple):
    """Codes and scales of a codec in blocks of the rows of [rows, inner]. Flat blocks are those of a single row."""

    codec: str
    block_size: int
    rows: int
    inner: int
    codes: list[Tensor]
    """For exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq; each [rows * inner]."""
    scales: list[Tensor]
    """Each [rows * blocks per row]."""

    @property
    def blocks_per_row(self) -> int:
        return -(-self.inner // self.block_size)

    @property
    def is_flat(self) -> bool:
        """Whether the blocks are also those of the flattened parameter."""
        return self.rows <= 1 or self.inner % self.block_size == 0

    def read(self, start: int, stop: int, device: torch.device) -> list[Tensor]:
        codes = [code[start:stop].to(device).unsqueeze(1) for code in self.codes]
        scales = [self._scales_of(scale, start, stop, device).unsqueeze(1) for scale in self.scales]
        codec = CODECS[self.codec]
        decoded = [*codec.decode(Encoded(codes[0], codes[1], scales[0], scales[1]))]
        if len(codes) == 3:
            decoded.append(codec.decode_sq(codes[2], scales[2]))
        return [x.squeeze(1) for x in decoded]

    def _scales_of(self, scale: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
        """The scale of each element."""
        if self.is_flat:
            return repeated(scale, start, stop, self.block_size, device)
        first_row, last_row = start // self.inner, -(-stop // self.inner)
        rows = scale.view(-1, self.blocks_per_row)[first_row:last_row].to(device)
        each = rows.repeat_interleave(self.block_size, 1)[:, : self.inner].reshape(-1)
        return each[start - first_row * self.inner :][: stop - start]

    def scales_for(self, rows: int, inner: int, block_size: int) -> list[Tensor] | None:
        """The scales [rows, blocks per row] with which the same codes, seen in other blocks, keep their values.

        None if there are none: each new block must lie within one of these.
        """
        if self.block_size % block_size:
            return None
        repeats, per_row = self.block_size // block_size, -(-inner // block_size)
        if (rows, inner) == (self.rows, self.inner):
            grids = [scale.view(rows, self.blocks_per_row) for scale in self.scales]
            return [grid.repeat_interleave(repeats, 1)[:, :per_row] for grid in grids]
        if self.is_flat and (rows <= 1 or inner % block_size == 0):
            return [scale.repeat_interleave(repeats)[: rows * per_row].view(rows, per_row) for scale in self.scales]
        return None


class Source(NamedTuple):
    """The saved moments of one parameter: of its local part, if it is sharded."""

    storage: str
    """How they are stored, in words."""
    step: int
    read: Callable[[int, int, torch.device], list[Tensor]]
    """(start, stop, device) -> FP32 exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq of elements start..stop-1."""
    in_32bit: bool = False
    blocks: Blocks | None = None
    lost: tuple[str, ...] = ()
    """What the file holds besides and fused8 has no place for, in words."""


def no_format(saved: Mapping[str, Any]) -> str:
    missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in saved]
    present = ", ".join(sorted(map(str, saved))) or "nothing"
    return f"lacks {', '.join(missing)}: it holds {present}, which is no state of Adam that fused8 knows"


def step_of(saved: Mapping[str, Any]) -> int:
    """The step count, which files hold as a number or as a tensor of one element."""
    step = saved["step"]
    if isinstance(step, Tensor):
        if step.numel() != 1:
            raise ValueError(f"has a step of shape {tuple(step.shape)} instead of a scalar")
        if step.is_complex():
            raise ValueError(f"has a step of dtype {step.dtype}")
        step = local(step).item()
    if isinstance(step, bool) or not isinstance(step, (int, float)):
        raise ValueError(f"has a step of type {type(step).__name__}")
    if not (0 <= step <= state_of.MAX_STEP and step == int(step)):
        shown = f"{step:g}" if abs(step) < 2.0**100 or step != step else "beyond 2^100"
        raise ValueError(f"has step {shown}, expected a whole number from 0 to 2^24")
    return int(step)


def require_readable(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor whose elements cannot be read one by one."""
    if x.layout is not torch.strided or x.is_nested or x.device.type == "meta":
        raise ValueError(f"has {name} that is no dense tensor with data")
    # An expanded tensor can claim any size, and a copy of it takes that.
    if type(x) is Tensor and x.untyped_storage().nbytes() < x.numel() * x.element_size():
        raise ValueError(f"has {name} of {x.numel():,} elements, and the data of fewer")


def require_names(saved: Mapping[str, Any], expected: Iterable[str], optional: Iterable[str] = ()) -> None:
    expected = set(expected)
    if missing := expected - saved.keys():
        if not {"exp_avg", "state1", "exp_avg::quantized"} & saved.keys():
            raise ValueError(no_format(saved))
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    if unknown := saved.keys() - expected - set(optional):
        raise ValueError(f"has unknown entries {', '.join(sorted(map(str, unknown)))}")


def require_placement(saved: Mapping[str, Any], p: Tensor) -> None:
    """State that has the parameter's shape must be sharded as the parameter is."""
    for name in MOMENTS:
        value = saved.get(name)
        if not isinstance(value, Tensor) or value is p:
            continue
        if is_dtensor(value) != is_dtensor(p):
            kinds = ("a DTensor", "not") if is_dtensor(value) else ("no DTensor", "one")
            raise ValueError(f"has {name} that is {kinds[0]}, and the parameter is {kinds[1]}")
        if is_dtensor(p) and (value.placements, value.device_mesh) != (p.placements, p.device_mesh):  # type: ignore[attr-defined]
            raise ValueError(f"has {name} that is sharded in another way than the parameter")


def require_whole(p: Tensor, origin: str) -> None:
    if is_dtensor(p):
        raise ValueError(
            f"is one of {origin}, which cannot be loaded into a DTensor: load it before sharding the model"
        )


def tensor_of(saved: Mapping[str, Any], name: str, dtypes: tuple[torch.dtype, ...], shape: Iterable[int]) -> Tensor:
    """An entry that must be a tensor of some dtype and shape; without its gradient."""
    value, shape = saved[name], tuple(shape)
    if not isinstance(value, Tensor):
        raise ValueError(f"has {name} of type {type(value).__name__} instead of a tensor")
    if value.dtype not in dtypes:
        raise ValueError(f"has {name} of dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tuple(value.shape) != shape:
        raise ValueError(f"has {name} of shape {tuple(value.shape)}, expected {shape}")
    return value.detach()


def require_range(name: str, x: Tensor, lowest: float, largest: float) -> None:
    if not x.numel():
        return
    smallest_of_x, largest_of_x = (float(end) for end in torch.aminmax(x))  # NaN if there is any
    if not (lowest <= smallest_of_x and largest_of_x <= largest):
        raise ValueError(f"has values in {name} outside [{lowest:g}, {largest:g}]")


def repeated(scale: Tensor, start: int, stop: int, block: int, device: torch.device) -> Tensor:
    """The scale of each of the elements start..stop-1 of flat blocks."""
    first = start // block
    scales = scale[first : -(-stop // block)].to(device).repeat_interleave(block)
    return scales[start - first * block :][: stop - start]
