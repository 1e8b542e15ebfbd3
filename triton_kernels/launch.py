"""The tables that tell a program which elements it serves, and their way to the device.

Each tensor of a bucket is cut into tiles. How a tile is stepped is its body, a pair of width and flavour that the
kernel compiles separately: which of them a bucket needs depends on its shapes and pointers, and on nothing that changes
from step to step.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class LaunchConfig:
    tile: int
    """Elements per program, a power of two of at least 256."""
    num_warps: int


# 16 elements per thread: one 128-bit access to codes, two to bf16. With 32 the registers (about 200) leave 10 warps to
# a multiprocessor; with 8 the work that each thread repeats (pointers, scalars, block reductions) weighs twice as much.
# 4 warps: a multiple of the 4 schedulers; more would only make the barriers wait for more.
CONFIGS = {
    "cuda": LaunchConfig(tile=2048, num_warps=4),
    "hip": LaunchConfig(tile=4096, num_warps=4),  # a warp is 64 threads
    "interpreter": LaunchConfig(tile=8192, num_warps=1),  # its cost is per program
}

# Columns of the table of tensors: nine pointers, in the order of the lists of `fused8::adam_step_`, then the geometry.
POINTERS = 9
GRADS = 1
WATCHED = 3  # of the lists: params, grads, exp_avg
INNER = tl.constexpr(9)
BLOCKS_PER_ROW = tl.constexpr(10)
NUM_BLOCKS = tl.constexpr(11)
TENSOR_COLUMNS = tl.constexpr(16)  # 128 bytes, one cache line

# A body is FLAVOURS * log2(width / NARROWEST) + flavour.
NARROWEST = tl.constexpr(8)
WIDEST = 256
FLAVOURS = tl.constexpr(3)
FULL = tl.constexpr(0)
ALIGNED = tl.constexpr(1)
UNALIGNED = tl.constexpr(2)
# An UNALIGNED tile is smaller: each element has an address of its own, which takes registers.
UNALIGNED_PART = tl.constexpr(2)
WIDTHS = tl.constexpr((WIDEST // NARROWEST.value).bit_length())
BODY_BITS = tl.constexpr(5)
BODY_MASK = tl.constexpr((1 << BODY_BITS.value) - 1)
assert WIDTHS.value * FLAVOURS.value <= BODY_MASK.value + 1

ALIGNMENT = 16  # bytes of a pointer and elements of a row that permit 128-bit accesses for every dtype

_MOST_BLOCKS = (1 << 31) - 1


def _int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")  # whatever the default device is


class BucketTables:
    """The table of tensors and the table of tiles of one bucket, on the CPU.

    `lists` are the tensor lists of `fused8::adam_step_`. `tile` is the number of elements per program. `keep_rows`: the
    kernel needs the index of each element in the global parameter, whatever the codec.
    """

    def __init__(
        self, lists: Sequence[Sequence[Tensor]], codec: str, block_size: int, tile: int, keep_rows: bool = False
    ) -> None:
        self._tile = tile
        self._numel, rows, inner = [], [], []
        for p in lists[0]:
            numel = p.numel()
            self._numel.append(numel)
            # Without blocks the shape does not matter, except for the index: rows of a shard may lie apart.
            flat = (codec == "fp32" and not keep_rows) or p.dim() < 2
            rows.append(1 if flat else p.shape[0])
            inner.append(numel if flat else numel // max(p.shape[0], 1))
        block_size = WIDEST if codec == "fp32" else block_size
        widths = [min(block_size, max(NARROWEST.value, 1 << (n - 1).bit_length() if n else 1)) for n in inner]
        self._rows, self._inner, self._width = (_int64(x) for x in (rows, inner, widths))
        blocks_per_row = (self._inner + block_size - 1) // block_size
        self._num_blocks = self._rows * blocks_per_row
        if bool((self._num_blocks > _MOST_BLOCKS).any()):
            raise ValueError("a tensor has more than 2^31 - 1 blocks")
        self.tensors = torch.zeros(len(rows), TENSOR_COLUMNS.value, dtype=torch.int64, device="cpu")
        self.tensors[:, INNER.value] = self._inner
        self.tensors[:, BLOCKS_PER_ROW.value] = blocks_per_row.clamp(min=1)
        self.tensors[:, NUM_BLOCKS.value] = self._num_blocks
        self._aligned = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        self._watched: list[list[int]] | None = None
        self.tiles = torch.empty(0, 2, dtype=torch.int32, device="cpu")
        self.present = 0

    def update(self, lists: Sequence[Sequence[Tensor]]) -> None:
        """Notice tensors that have moved: parameters, gradients, and states (of which exp_avg stands for all, since
        whoever moves a state moves all of it)."""
        watched = [[*map(Tensor.data_ptr, tensors)] for tensors in lists[:WATCHED]]
        if watched == self._watched:
            return
        device = lists[0][0].device
        for column, tensors in enumerate(lists):
            known = self._watched is not None and column < WATCHED and watched[column] == self._watched[column]
            if known or not tensors:
                continue
            # A gradient is where its parameter is; anything else can be moved alone.
            if column != GRADS and any(tensor.device != device for tensor in tensors):
                raise RuntimeError(f"some tensors of the optimizer are not on {device}, where the parameters are")
            pointers = array.array("q", watched[column] if column < WATCHED else map(Tensor.data_ptr, tensors))
            self.tensors[:, column] = torch.frombuffer(pointers, dtype=torch.int64)
        aligned = ((self.tensors[:, :POINTERS] & (ALIGNMENT - 1)) == 0).all(1)
        if self._watched is None or not torch.equal(aligned, self._aligned):
            self._aligned = aligned
            self._cut()
        self._watched = watched

    def _cut(self) -> None:
        """Fill `tiles`: per tensor its full tiles, then the others. `present` has a bit for each body."""
        numel = _int64(self._numel)
        blocks_per_tile = self._tile // self._width
        whole_rows = self._inner == self.tensors[:, BLOCKS_PER_ROW.value] * self._width
        full_tiles = torch.where(self._aligned & (whole_rows | (self._rows == 1)), numel // self._tile, 0)
        by_rows = self._aligned & (self._inner % ALIGNMENT == 0)
        other_flavour = torch.where(by_rows, ALIGNED.value, UNALIGNED.value)
        other_blocks = self._num_blocks - full_tiles * blocks_per_tile
        blocks_per_other = torch.where(by_rows, blocks_per_tile, blocks_per_tile // UNALIGNED_PART.value)
        other_tiles = (other_blocks + blocks_per_other - 1) // blocks_per_other
        log_width = (self._width // NARROWEST.value).double().log2().to(torch.int64)

        # Two runs of tiles per tensor.
        counts = torch.stack([full_tiles, other_tiles], 1).flatten()
        flavours = torch.stack([torch.full_like(other_flavour, FULL.value), other_flavour], 1).flatten()
        body = log_width.repeat_interleave(2) * FLAVOURS.value + flavours
        self.present = sum(1 << b for b in set(body[counts > 0].tolist()))
        run = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
        tile_in_run = torch.arange(len(run), device="cpu") - (counts.cumsum(0) - counts)[run]
        first_of_run = torch.stack([torch.zeros_like(full_tiles), full_tiles * blocks_per_tile], 1).flatten()
        blocks_of_tile = torch.stack([blocks_per_tile, blocks_per_other], 1).flatten()
        first_block = first_of_run[run] + tile_in_run * blocks_of_tile[run]
        self.tiles = torch.stack([((run // 2) << BODY_BITS.value) + body[run], first_block], 1).to(torch.int32)


@dataclass(frozen=True)
class Route:
    """The way of tables to the device in one call."""

    device: torch.device
    stream: int = 0
    capturable: bool = False
    """Whether a CUDA graph may capture a later call."""
    captured: list[Tensor] | None = None
    """None, or a CUDA graph is capturing this call: what keeps the buffers that it will read at each replay."""

    @classmethod
    def current(cls, device: torch.device, capturable: bool, owner: Tensor) -> Route:
        """The current stream of the current device. `owner` is a tensor that outlives every graph of its steps."""
        if device.type == "cpu":
            return cls(device)
        captured = None
        if torch.cuda.is_current_stream_capturing():
            if not capturable:
                raise RuntimeError("a CUDA graph can capture the step only with capturable=True")
            captured = _captured.setdefault(owner, [])
        return cls(device, torch.cuda.current_stream().cuda_stream, capturable, captured)


_captured: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Upload:
    """Copies of a CPU tensor on a device, made again only when the tensor or the stream is another one.

    Each copy goes through a pinned buffer of its own, so that nobody waits: an earlier copy may not have begun. In a
    CUDA graph the copy is a part of the graph; what earlier steps left on the device may be freed before the graph is.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, int, Tensor] | None = None
        self._spare: Tensor | None = None  # for a capture, during which not every torch can pin memory

    def __call__(self, source: Tensor, route: Route) -> Tensor:
        if source.device == route.device:
            return source
        if route.captured is not None:
            buffer, self._spare = self._spare, None
            if buffer is None or buffer.shape != source.shape:
                buffer = torch.empty_like(source, pin_memory=True)
            route.captured.append(buffer.copy_(source))
            return buffer.to(route.device, non_blocking=True)
        if route.capturable and (self._spare is None or self._spare.shape != source.shape):
            self._spare = torch.empty_like(source, pin_memory=True)
        last = self._last
        if last is not None and last[0] is source and last[1:3] == (source._version, route.stream):
            return last[3]
        copy = source.pin_memory().to(route.device, non_blocking=True)
        self._last = (source, source._version, route.stream, copy)
        return copy
