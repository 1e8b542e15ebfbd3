"""The state of other optimizers in bytes, from their released sources.

A test compares those that run on a CPU with what they allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from .models import Part

Peer: TypeAlias = Callable[[Sequence[Part], bool], "int | None"]


def _torch_fp32(parts: Sequence[Part], amsgrad: bool) -> int:
    """torch.optim.AdamW with FP32 parameters: two FP32 moments (three with amsgrad) and a float32 `step`."""
    return sum((3 if amsgrad else 2) * 4 * part.numel + 4 for part in parts)


def _torch_masters(parts: Sequence[Part], amsgrad: bool) -> int:
    """The usual mixed precision: as above, and an FP32 copy of every 16-bit parameter."""
    return _torch_fp32(parts, amsgrad) + sum(4 * part.numel for part in parts if part.in_dtype.itemsize == 2)


def _torch_low_precision(parts: Sequence[Part], amsgrad: bool) -> int:
    """torch.optim.AdamW as it is: the moments have the parameter's dtype."""
    return sum((3 if amsgrad else 2) * part.in_dtype.itemsize * part.numel + 4 for part in parts)


def _bitsandbytes(parts: Sequence[Part], amsgrad: bool) -> int | None:
    """bitsandbytes 0.50 Adam8bit, AdamW8bit: two codes, two float32 absmax per 256 elements of the flattened
    parameter; below 4096 elements two FP32 moments. Two maps of 256 float32 for all. `step` is a Python number."""
    if amsgrad:
        return None
    large = [part.numel for part in parts if part.numel >= 4096]
    small = [part.numel for part in parts if part.numel < 4096]
    maps = 2 * 256 * 4 if large else 0
    return sum(2 * n + 8 * -(-n // 256) for n in large) + 8 * sum(small) + maps


def _torchao(parts: Sequence[Part], amsgrad: bool) -> int:
    """torchao 0.18 AdamW8bit: a code and a float32 scale per 256 elements for each moment, and for each of these
    tensors a map of 256 float32; moments in the parameter's dtype below 4096 elements and where 256 does not divide
    their number. A float32 `step`."""
    moments = 3 if amsgrad else 2
    total = 0
    for part in parts:
        n = part.numel
        if n >= 4096 and n % 256 == 0:
            total += moments * (n + 4 * (n // 256) + 256 * 4) + 4
        else:
            total += moments * n * part.in_dtype.itemsize + 4
    return total


def _flashoptim(parts: Sequence[Part], amsgrad: bool) -> int | None:
    """flashoptim 0.1 FlashAdamW: a code and a float16 scale per 32 elements for each moment, of every parameter; for
    16-bit parameters a correction of 8 bits, which makes them 24-bit master weights. An int64 `step`."""
    if amsgrad:
        return None
    total = 0
    for part in parts:
        correction = part.numel if part.in_dtype.itemsize == 2 else 0
        total += 2 * (part.numel + 2 * -(-part.numel // 32)) + correction + 8
    return total


# Its operators refuse the parameters of FSDP2 (0.50). The others keep state of the local shard, by whose size torchao
# also decides what stays in 32 bits.
TAKE_NO_DTENSORS = ("bitsandbytes AdamW8bit",)


def peers(parts: Sequence[Part]) -> dict[str, Peer]:
    low_precision = any(part.in_dtype.itemsize == 2 for part in parts)
    return {
        "torch AdamW, FP32 state": _torch_fp32,
        **({"torch AdamW, FP32 state and master weights": _torch_masters} if low_precision else {}),
        **({"torch AdamW, state in the weights' dtype": _torch_low_precision} if low_precision else {}),
        "bitsandbytes AdamW8bit": _bitsandbytes,
        "torchao AdamW8bit": _torchao,
        f"FlashAdamW{', with 24-bit master weights' if low_precision else ''}": _flashoptim,
    }
