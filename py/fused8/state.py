"""The state of one parameter: which tensors, of what shape and dtype; allocation and validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codecs import CODECS, FP32, Encoded
from .formats import CORRECTION_DTYPES
from .sharding import local, placed_like, rows_and_inner, shard_of

STATE_FORMAT = 1  # what a saved group's `state_format` says; raised when the meaning of the tensors changes
BLOCK_SIZES = (64, 128, 256)
MIN_8BIT_VECTOR = 1 << 20  # a 1-D parameter below this stays in 32 bits: biases and norms, cheap and sensitive
MIN_8BIT_ROW = 8  # rows of fewer elements would pay more for their scales than they save
MAX_STEP = 1 << 24  # a float32 step counter cannot count beyond


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: int = 0


def kept_in_8bit(shape: Sequence[int], *, min_8bit_size: int, state_bits: int) -> bool:
    """Whether a parameter of this (global) shape gets 8-bit state."""
    numel = math.prod(shape)
    if state_bits == 32 or len(shape) == 0 or numel == 0 or numel < min_8bit_size:
        return False
    if len(shape) == 1:
        return numel >= MIN_8BIT_VECTOR
    return rows_and_inner(shape)[1] >= MIN_8BIT_ROW


def codec_of(shape: Sequence[int], group: Mapping[str, Any], keeps_blocks: bool = True) -> str:
    """The codec that a parameter of this (global) shape gets in this param group; `fp32` where it stays in 32 bits.

    `keeps_blocks` is False for a parameter that is sharded in a way that would cut blocks (see sharding.shard_of).
    """
    in_8bit = kept_in_8bit(shape, min_8bit_size=group["min_8bit_size"], state_bits=group["state_bits"])
    return group["codec"] if in_8bit and keeps_blocks else FP32


def codec_of_parameter(p: Tensor, group: Mapping[str, Any]) -> str:
    return codec_of(p.shape, group, shard_of(p, group["block_size"]).keeps_blocks)


def correction_bits(dtype: torch.dtype, group: Mapping[str, Any]) -> int:
    """How many bits are kept beside a parameter of this dtype: 0, 8 or 16."""
    if group["master_bits"] is None or dtype == torch.float32:
        return 0
    return group["master_bits"] - 8 * dtype.itemsize


def state_specs(
    shape: Sequence[int], group: Mapping[str, Any], keeps_blocks: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, TensorSpec]:
    """Name -> dtype, (global) shape and initial value of each state tensor of a parameter, `step` included."""
    shape = tuple(shape)
    specs = {"step": TensorSpec(torch.float32, ())}
    if extra := correction_bits(dtype, group):
        specs["param_correction"] = TensorSpec(CORRECTION_DTYPES[extra], shape)
    codec_name = codec_of(shape, group, keeps_blocks)
    if codec_name == FP32:
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        return specs | {name: TensorSpec(torch.float32, shape) for name in names}
    codec = CODECS[codec_name]
    rows, inner = rows_and_inner(shape)
    scale_shape = (rows, -(-inner // group["block_size"]))
    sources = {"exp_avg": 0, "exp_avg_sq": 1} | ({"max_exp_avg_sq": 1} if group["amsgrad"] else {})
    for name, i in sources.items():
        specs[name] = TensorSpec(codec.code_dtypes[i], shape, codec.zero_codes[i])
        specs[f"{name}_scale"] = TensorSpec(codec.scale_dtypes[i], scale_shape)
    return specs


def specs_of_parameter(p: Tensor, group: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return state_specs(p.shape, group, shard_of(p, group["block_size"]).keeps_blocks, p.dtype)


def device_of(p: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where the state of a parameter is."""
    return p.device if group["offload"] is None else torch.device(group["offload"])


def allocate(p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
    """The zero state of a parameter: where `device_of` says and sharded as it is, but `step`, which the plan places."""
    result = {}
    shard = local(p)
    rows, inner = rows_and_inner(shard.shape)
    for name, spec in specs_of_parameter(p, group).items():
        if name == "step":
            result[name] = torch.zeros((), dtype=torch.float32, device="cpu")
            continue
        is_scale = name.endswith("_scale")
        shape = (rows, -(-inner // group["block_size"])) if is_scale else shard.shape
        tensor = torch.full(shape, spec.fill, dtype=spec.dtype, device=device_of(shard, group))
        result[name] = placed_like(p, tensor, spec.shape)
    return result


def structural_error(state: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> str | None:
    """How names, dtypes or shapes of a state differ from what the parameter needs, or None. Reads no data."""
    specs = specs_of_parameter(p, group)
    if missing := specs.keys() - state.keys():
        return f"lacks {', '.join(sorted(missing))}"
    if unknown := state.keys() - specs.keys():
        return f"has unknown entries {', '.join(sorted(map(str, unknown)))}"
    for name, spec in specs.items():
        value = state[name]
        if name == "step" and not isinstance(value, Tensor):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                continue  # older and foreign files keep a Python number
            return f"has a step of type {type(value).__name__}"
        if not isinstance(value, Tensor):
            return f"has {name} of type {type(value).__name__} instead of a tensor"
        if name == "step":
            if value.numel() != 1:
                return f"has a step of shape {tuple(value.shape)} instead of a scalar"
        elif value.dtype != spec.dtype:
            return f"has {name} of dtype {value.dtype}, expected {spec.dtype}"
        elif tuple(value.shape) != spec.shape:
            return f"has {name} of shape {tuple(value.shape)}, expected {spec.shape}"
    return None


def value_error(state: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> str | None:
    """What in the codes and scales of a structurally valid state could not have come from an optimizer, or None."""
    codec = CODECS[codec_of_parameter(p, group)]
    for name in ("exp_avg_sq", "max_exp_avg_sq"):
        if name not in state:
            continue
        blocks = _blocks_of(state, name, group["block_size"])
        if message := codec.check(blocks):
            return message.replace("exp_avg_sq_scale", f"{name}_scale")
    return None


def _blocks_of(state: Mapping[str, Tensor], sq_name: str, block_size: int) -> Encoded:
    """The state as blocks [blocks, block_size] without copying it where rows divide evenly."""

    def blocks(codes: Tensor) -> Tensor:
        rows, inner = rows_and_inner(codes.shape)
        codes = codes.reshape(rows, inner)
        return torch.nn.functional.pad(codes, (0, -inner % block_size)).view(-1, block_size)

    return Encoded(
        blocks(local(state["exp_avg"])),
        blocks(local(state[sq_name])),
        local(state["exp_avg_scale"]).reshape(-1, 1),
        local(state[f"{sq_name}_scale"]).reshape(-1, 1),
    )
