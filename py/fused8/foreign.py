"""The saved state of one parameter in every format that can be read: recognise it, check it, decode it to FP32.

The formats, and where each is defined:

- fused8: state.py.
- torch.optim.Adam and AdamW (torch/optim/adam.py): `step`, `exp_avg`, `exp_avg_sq`, with amsgrad `max_exp_avg_sq`, in
  FP32 or the parameter's dtype.
- bitsandbytes (bitsandbytes/optim/optimizer.py): `step` (int); `state1`, `state2` uint8 codes of the parameter's shape,
  `absmax1`, `absmax2` FP32 [ceil(n / block)] of blocks of the flattened parameter (256 elements, 2048 before 0.44),
  `qmap1`, `qmap2` FP32 [256], the value of each code; small parameters FP32 `state1`, `state2`. Newer files nest all of
  it but `step` under `__bnb_optimizer_quant_state__`.
- torchao (torchao/optim/subclass_{8bit,4bit,fp8}.py): torch's names; the tensors of large parameters are subclasses
  with `codes`, `scale` FP32 [n / block] of flat blocks and, but for FP8, `qmap`. Their attributes are read, and nothing
  of torchao is called or imported.
- FlashOptim (flashoptim/optimizers.py): `exp_avg::quantized` int8 q, m = s y / (2 - |y|) with y = q / 127;
  `exp_avg_sq::quantized` uint8 q, v = (s q / 255)^2; `...::scales` float16 s of flat groups of 32, for bfloat16
  parameters stored as the same bits under the name bfloat16. Without quantization torch's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import state as state_of
from .codecs import FP32, Dynamic
from .sharding import local, rows_and_inner
from .sources import (
    FLOATS,
    LARGEST,
    MOMENTS,
    Blocks,
    Source,
    no_format,
    repeated,
    require_names,
    require_placement,
    require_range,
    require_readable,
    require_whole,
    step_of,
    tensor_of,
)

FUSED8, TORCH, BITSANDBYTES, TORCHAO, FLASHOPTIM = "fused8", "torch.optim", "bitsandbytes", "torchao", "FlashOptim"

NESTED_BITSANDBYTES = "__bnb_optimizer_quant_state__"
BITSANDBYTES_BLOCKS = (256, 2048)
FLASHOPTIM_GROUP = 32
TORCHAO_CLASSES = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")

_MARKS_OF_FUSED8 = ("state_format", "codec", "block_size", "min_8bit_size", "state_bits")
# Maps of other machines and libraries may differ from ours in the last bits: torch.linspace depends on the processor.
_MAP_TOLERANCE = 2.0**-21


def origin_of(state_dict: Mapping[str, Any]) -> str:
    """Which library made an optimizer state dict."""
    groups, states = state_dict["param_groups"], state_dict["state"].values()
    if any(mark in group for group in groups for mark in _MARKS_OF_FUSED8):
        return FUSED8
    for saved in states:
        if isinstance(saved, Mapping):
            names = saved.keys()
            if NESTED_BITSANDBYTES in names or "state1" in names:
                return BITSANDBYTES
            if any(_is_torchao(value) for value in saved.values()):
                return TORCHAO
            if "exp_avg::quantized" in names:
                return FLASHOPTIM
            if "exp_avg_scale" in names:
                return FUSED8
    if any("t_alpha" in group for group in groups):
        return BITSANDBYTES
    if any("master_bytewidth" in group for group in groups):
        return FLASHOPTIM
    return TORCH


def source_of(saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> Source:
    """The reader of a saved state, which has been checked.

    Args:
        saved: the state of one parameter: names and values.
        p: the parameter, or any tensor of its shape and placement.
        group: its options as they were saved, with fused8's defaults for what is missing.

    Raises:
        ValueError: it fits no format, or not the parameter. The message continues "the saved state of x ...".
    """
    saved = flattened(saved)
    for name, value in saved.items():
        if isinstance(value, Tensor):
            require_readable(str(name), value)
    names = saved.keys()
    if "state1" in names or "state2" in names:
        return _bitsandbytes(saved, p)
    if "exp_avg::quantized" in names or "exp_avg_sq::quantized" in names:
        return _flashoptim(saved, p)
    require_placement(saved, p)
    if any(_is_torchao(value) for value in saved.values()):
        return _torchao(saved, p, group)
    if any(name in names for name in ("exp_avg_scale", "exp_avg_sq_scale", "max_exp_avg_sq_scale")):
        return _fused8(saved, p, group)
    return _in_32bit(saved, p, group)


def flattened(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved state without the nesting of newer bitsandbytes."""
    nested = saved.get(NESTED_BITSANDBYTES, {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"has {NESTED_BITSANDBYTES} of type {type(nested).__name__}")
    return {name: value for name, value in saved.items() if name != NESTED_BITSANDBYTES} | dict(nested)


def example(saved: Mapping[str, Any]) -> Tensor:
    """A tensor of the shape and placement of the parameter that a saved state belongs to.

    Raises:
        ValueError: there is none. The message continues "the saved state of x ...".
    """
    flat = flattened(saved)
    for name in ("exp_avg", "state1", "exp_avg::quantized"):
        if isinstance(flat.get(name), Tensor):
            require_readable(name, flat[name])
            return flat[name]
    raise ValueError(no_format(flat))


# -- the formats ------------------------------------------------------------------------------------------------------


def _fused8(saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> Source:
    # min_8bit_size and state_bits may have been others there; which parameters can have 8 bits at all is a fixed rule.
    group = {**group, "min_8bit_size": 0, "state_bits": 8}
    if message := state_of.structural_error(saved, p, group):
        raise ValueError(message)
    step = step_of(saved)
    if message := state_of.value_error(saved, p, group):
        raise ValueError(message)
    names = [name for name in MOMENTS if name in saved]
    blocks = Blocks(
        group["codec"],
        group["block_size"],
        *rows_and_inner(local(saved["exp_avg"]).shape),
        [local(saved[name]).detach().reshape(-1) for name in names],
        [local(saved[f"{name}_scale"]).detach().reshape(-1) for name in names],
    )
    return Source(in_words(blocks.codec, blocks.block_size), step, blocks.read, blocks=blocks)


def _in_32bit(saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> Source:
    names = MOMENTS if group["amsgrad"] else MOMENTS[:2]
    require_names(saved, ("step", *names))
    tensors = [local(tensor_of(saved, name, FLOATS, p.shape)) for name in names]
    return _plain(step_of(saved), tensors, names)


def _plain(step: int, tensors: list[Tensor], names: Iterable[str], lost: tuple[str, ...] = ()) -> Source:
    for name, x, moment in zip(names, tensors, MOMENTS, strict=False):
        require_range(name, x, -LARGEST[moment] if moment == "exp_avg" else 0.0, LARGEST[moment])
    bits = 8 * max(x.element_size() for x in tensors)
    flat = [x.reshape(-1) for x in tensors]

    def read(start: int, stop: int, device: torch.device) -> list[Tensor]:
        return [x[start:stop].to(device).float() for x in flat]

    return Source(f"{bits} bits", step, read, in_32bit=True, lost=lost)


def _bitsandbytes(saved: Mapping[str, Any], p: Tensor) -> Source:
    require_whole(p, BITSANDBYTES)
    if "max1" in saved or "new_max1" in saved:
        raise ValueError(
            "has one scale for the whole tensor (block_wise=False of old bitsandbytes), which cannot be read"
        )
    known = {"gnorm_vec": "the history of percentile clipping", "unorm_vec": "the norm of max_unorm"}
    lost = tuple(known[name] for name in known if name in saved)
    in_8bit = isinstance(saved.get("state1"), Tensor) and saved["state1"].dtype == torch.uint8
    names = ["step", "state1", "state2"] + (["absmax1", "absmax2", "qmap1", "qmap2"] if in_8bit else [])
    require_names(saved, names, known)
    step = step_of(saved)
    dtypes = (torch.uint8,) if in_8bit else FLOATS
    states = [tensor_of(saved, name, dtypes, p.shape) for name in ("state1", "state2")]
    if not all(x.is_contiguous() for x in states):
        # The state of a channels_last parameter has that memory format. Its CPU kernels take its elements in logical
        # order, its CUDA kernels in the order of memory, and a file does not tell which of them ran.
        raise ValueError(
            "is not contiguous: bitsandbytes orders the elements of channels_last parameters differently on CPU and GPU"
        )
    if not in_8bit:
        return _plain(step, states, ("state1", "state2"), lost)
    # The block size of each possible number of blocks. With a single block both sizes mean the same.
    block_of = {-(-p.numel() // block): block for block in reversed(BITSANDBYTES_BLOCKS)}
    scales: list[Tensor] = []
    for name, moment in (("absmax1", "exp_avg"), ("absmax2", "exp_avg_sq")):
        scale = saved[name]
        numel = scale.numel() if isinstance(scale, Tensor) else 0
        if numel not in block_of:
            raise ValueError(f"has {name} of {numel} elements, expected {' or '.join(map(str, sorted(block_of)))}")
        scales.append(tensor_of(saved, name, (torch.float32,), (numel,)))
        require_range(name, scales[-1], 0.0, LARGEST[moment])
    if scales[0].shape != scales[1].shape:
        raise ValueError("has absmax1 and absmax2 of different lengths")
    for name, values in (("qmap1", Dynamic.SIGNED), ("qmap2", Dynamic.UNSIGNED)):
        _require_dynamic_map(name, tensor_of(saved, name, (torch.float32,), (256,)), values)
    return _flat_dynamic(step, states, scales, block_of[len(scales[0])], lost)


def _require_dynamic_map(name: str, qmap: Tensor, values: list[float]) -> None:
    ours = torch.tensor(values, device=qmap.device)
    if not bool(((qmap - ours).abs() <= _MAP_TOLERANCE * ours.abs()).all()):
        raise ValueError(f"has a {name} that is not the dynamic map")


def _flat_dynamic(
    step: int, codes: list[Tensor], scales: list[Tensor], block_size: int, lost: tuple[str, ...] = ()
) -> Source:
    """Codes of the dynamic map in blocks of the flattened parameter."""
    flat = [code.reshape(-1) for code in codes]
    blocks = Blocks(Dynamic.name, block_size, 1, flat[0].numel(), flat, scales)
    return Source(f"8 bits in blocks of {block_size}", step, blocks.read, blocks=blocks, lost=lost)


def _is_torchao(value: Any) -> bool:
    """Whether a state tensor is one of torchao's, perhaps within a DTensor. By name: torchao may not be installed."""
    if not isinstance(value, Tensor) or type(value) is Tensor:
        return False
    cls = type(local(value))
    return cls.__name__ in TORCHAO_CLASSES and cls.__module__.partition(".")[0] == "torchao"


def _torchao(saved: Mapping[str, Any], p: Tensor, group: Mapping[str, Any]) -> Source:
    names = MOMENTS if group["amsgrad"] else MOMENTS[:2]
    require_names(saved, ("step", *names))
    step = step_of(saved)
    tensors = []
    for name in names:
        if not _is_torchao(saved[name]):
            raise ValueError(f"has {name} of type {type(saved[name]).__name__} beside quantized tensors of torchao")
        if tuple(saved[name].shape) != tuple(p.shape):
            raise ValueError(f"has {name} of shape {tuple(saved[name].shape)}, expected {tuple(p.shape)}")
        tensors.append(local(saved[name]))
    kind = type(tensors[0]).__name__
    if any(type(x).__name__ != kind for x in tensors):
        raise ValueError("has quantized tensors of different kinds")
    parts = [_torchao_parts(name, x, kind) for name, x in zip(names, tensors, strict=True)]
    block = parts[0].block
    if kind == "OptimState8bit" and all(part.block == block for part in parts):
        for name, part in zip(names, parts, strict=True):
            values = Dynamic.SIGNED if name == "exp_avg" else Dynamic.UNSIGNED
            _require_dynamic_map(f"{name}.qmap", part.qmap, values)  # type: ignore[arg-type]
        return _flat_dynamic(step, [part.codes for part in parts], [part.scale for part in parts], block)

    def read(start: int, stop: int, device: torch.device) -> list[Tensor]:
        return [part.decode(start, stop, device) for part in parts]

    bits = {"OptimState4bit": "4 bits", "OptimStateFp8": "FP8"}.get(kind, "8 bits")
    return Source(f"{bits} in blocks of {block}", step, read)


class _TorchaoParts(NamedTuple):
    """The data of a torchao tensor: codes (two 4-bit codes in a byte, the first in the upper half), scale, map."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor | None
    block: int
    packed: bool

    def decode(self, start: int, stop: int, device: torch.device) -> Tensor:
        if self.packed:
            pairs = self.codes[start // 2 : -(-stop // 2)].to(device)
            codes = torch.stack([pairs >> 4, pairs & 15], 1).view(-1)[start % 2 :][: stop - start]
        else:
            codes = self.codes[start:stop].to(device)
        values = codes.float() if self.qmap is None else self.qmap.to(device)[codes.to(torch.int64)]
        return values * repeated(self.scale, start, stop, self.block, device)


def _torchao_parts(name: str, x: Tensor, kind: str) -> _TorchaoParts:
    packed, is_float = kind == "OptimState4bit", kind == "OptimStateFp8"
    attributes = ("codes", "scale") if is_float else ("codes", "scale", "qmap")
    data = {f"{name}.{attribute}": getattr(x, attribute, None) for attribute in attributes}
    n, code_dtype = x.numel(), torch.float8_e4m3fn if is_float else torch.uint8
    for key, value in data.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"has {key} of type {type(value).__name__} instead of a tensor")
        require_readable(key, value)
    codes = tensor_of(data, f"{name}.codes", (code_dtype,), (n // 2,) if packed else x.shape)
    blocks = data[f"{name}.scale"].numel()  # type: ignore[union-attr]
    if not blocks or n % blocks or (packed and n % 2):
        raise ValueError(f"has {name}.scale of {blocks} elements for {n} elements")
    scale = tensor_of(data, f"{name}.scale", (torch.float32,), (blocks,))
    largest = 448.0 if is_float else 1.0
    require_range(f"{name}.scale", scale, 0.0, LARGEST[name] / largest)
    qmap = None
    if is_float:
        magnitudes = codes.view(torch.uint8)
        if bool(((magnitudes & 0x7F) == 0x7F).any()) or (name != "exp_avg" and bool((magnitudes > 0x80).any())):
            raise ValueError(f"has {name}.codes that are NaN or of the wrong sign")
    else:
        qmap = tensor_of(data, f"{name}.qmap", (torch.float32,), (16 if packed else 256,))
        require_range(f"{name}.qmap", qmap, -1.0 if name == "exp_avg" else 0.0, 1.0)
    return _TorchaoParts(codes.reshape(-1), scale, qmap, n // blocks, packed)


def _flashoptim(saved: Mapping[str, Any], p: Tensor) -> Source:
    require_whole(p, FLASHOPTIM)
    names = [f"{moment}::{part}" for moment in MOMENTS[:2] for part in ("quantized", "scales")]
    require_names(saved, ("step", *names), ("error_bits",))
    step, n = step_of(saved), p.numel()
    codes, scales = [], []
    for moment, dtype, lowest, largest in (("exp_avg", torch.int8, -127, 127), ("exp_avg_sq", torch.uint8, 0, 255)):
        name = f"{moment}::quantized"
        code = tensor_of(saved, name, (dtype,), p.shape)
        if not code.is_contiguous():
            raise ValueError(f"has {name} that is not contiguous")
        require_range(name, code, lowest, largest)
        codes.append(code.reshape(-1))
        name = f"{moment}::scales"
        scale = tensor_of(saved, name, (torch.float16, torch.bfloat16), (-(-n // FLASHOPTIM_GROUP),))
        if scale.dtype == torch.bfloat16:
            scale = scale.contiguous().view(torch.float16)
        require_range(name, scale, 0.0, torch.finfo(torch.float16).max)
        scales.append(scale)

    def read(start: int, stop: int, device: torch.device) -> list[Tensor]:
        m, root = (code[start:stop].to(device).float() for code in codes)
        m_scale, root_scale = (repeated(s, start, stop, FLASHOPTIM_GROUP, device).float() for s in scales)
        m = m / 127
        return [m / (2 - m.abs()) * m_scale, (root / 255 * root_scale).square()]

    lost = ("the bits that extend the weights to 24 or 32 bits (error_bits)",) if "error_bits" in saved else ()
    return Source(f"8 bits in groups of {FLASHOPTIM_GROUP}", step, read, lost=lost)


# -- options ----------------------------------------------------------------------------------------------------------

# What the groups of other optimizers hold that means nothing here.
_FOREIGN_OPTIONS = {
    TORCH: ("foreach", "fused", "differentiable"),
    BITSANDBYTES: ("alpha", "t_alpha", "t_beta3"),
    TORCHAO: (),
    FLASHOPTIM: ("master_bytewidth", "quantize"),
}
# What holds of an optimizer without standing in its groups.
_IMPLIED_OPTIONS: dict[str, dict[str, Any]] = {
    TORCH: {},
    BITSANDBYTES: {"decoupled_weight_decay": True, "amsgrad": False, "maximize": False},
    TORCHAO: {"amsgrad": False, "maximize": False},
    FLASHOPTIM: {"amsgrad": False, "maximize": False},
}


def adapted_group(saved: Mapping[str, Any], origin: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """A group of another optimizer in the words of fused8: what means nothing here left out, what is implied added.

    Hyperparameters that are tensors become numbers unless the same one in `own` is a tensor. A group of fused8 stays
    as it is.
    """
    if origin == FUSED8:
        return dict(saved)
    result = _IMPLIED_OPTIONS[origin] | dict(saved)
    for name in _FOREIGN_OPTIONS[origin]:
        result.pop(name, None)
    for name in ("lr", "eps", "weight_decay"):
        if isinstance(result.get(name), Tensor) and not isinstance(own.get(name), Tensor):
            result[name] = number(result[name])
    betas = result.get("betas")
    if isinstance(betas, (tuple, list)):
        result["betas"] = tuple(number(beta) for beta in betas)
    return result


def number(x: Any) -> Any:
    """The number in a tensor of one element; anything else as it is."""
    if isinstance(x, Tensor) and x.numel() == 1 and x.device.type != "meta" and x.layout is torch.strided:
        return x.item()
    return x


def in_words(codec: str, block_size: int) -> str:
    return "32 bits" if codec == FP32 else f"{codec} in blocks of {block_size}"
