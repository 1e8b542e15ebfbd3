"""The optimizer step in plain torch: the ground truth that every other backend equals bit for bit.

Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019) with both moments kept in 8 bits between steps. All
arithmetic is FP32, one correctly rounded operation at a time, in the order written here. That rules out torch's fused
forms (addcmul, addcdiv, lerp, alpha=), scalar / tensor and tensor / scalar (both become a multiplication by a
reciprocal on some device), and torch.sqrt on FP32 CPU tensors (not correctly rounded).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import formats
from .codecs import ABS_MAX_GRAD, CODECS, FP32, Encoded

CHUNK_ELEMENTS = 1 << 22  # temporaries are FP32 and several; this bounds them to about 300 MB


def sqrt(x: Tensor) -> Tensor:
    """The correctly rounded FP32 square root."""
    if x.device.type == "mps":  # has no float64; whether its sqrt is correctly rounded is not known
        return x.sqrt()
    return x.double().sqrt().float()


class Scalars:
    """One row of the scalar table as 0-dim tensors: nothing is read back from the device."""

    def __init__(self, row: Tensor) -> None:
        (
            self.beta1,
            self.one_minus_beta1,
            self.beta2,
            self.one_minus_beta2,
            self.eps,
            self.step_size,
            self.inv_bias_correction2_sqrt,
            self.decay,
            self.weight_decay,
        ) = row[:9].unbind()
        self.time_offset, self.rounding_key = (row[9:11].view(torch.int32).to(torch.int64) & 0xFFFFFFFF).unbind()


def adam_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, max_v: Tensor | None, s: Scalars
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One Adam update of FP32 tensors of one shape -> new (p, m, v, max_v).

    `s.decay` is 1 - lr * weight_decay when weight decay is decoupled and 1 otherwise.
    """
    p = p * s.decay
    m = s.beta1 * m + s.one_minus_beta1 * g
    v = s.beta2 * v + (s.one_minus_beta2 * g) * g
    if max_v is not None:
        max_v = torch.maximum(max_v, v)
    denom = sqrt(v if max_v is None else max_v) * s.inv_bias_correction2_sqrt + s.eps
    p = p - s.step_size * (m / denom)
    return p, m, v, max_v


def _rows(x: Tensor) -> Tensor:
    """View a contiguous tensor as [rows, inner]: rows is dim 0, except that 0-D and 1-D tensors are one row."""
    return x.view(x.shape[0], -1) if x.dim() >= 2 else x.view(1, -1)


def _to_blocks(x: Tensor, block_size: int, fill: float = 0) -> Tensor:
    """[rows, inner] -> [rows * blocks per row, block_size], the last block of each row padded with `fill`."""
    padding = -x.shape[1] % block_size
    return torch.nn.functional.pad(x, (0, padding), value=fill).view(-1, block_size)


def _from_blocks(blocks: Tensor, rows: int, inner: int) -> Tensor:
    return blocks.view(rows, -1)[:, :inner]


def _row_chunks(rows: int, inner: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(inner, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    exp_avg_scale: Sequence[Tensor],
    exp_avg_sq_scale: Sequence[Tensor],
    max_exp_avg_sq: Sequence[Tensor],
    max_exp_avg_sq_scale: Sequence[Tensor],
    param_correction: Sequence[Tensor],
    scalars: Tensor,
    table: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    nonfinite: Tensor,
    codec: str,
    block_size: int,
    decoupled_weight_decay: bool,
    maximize: bool,
    stochastic_rounding: bool,
) -> None:
    """The step of one bucket, in place. Arguments as in the schema of `fused8::adam_step_` (ops.py).

    All tensors are contiguous. Gradient elements that are not finite, or above 2^63, count as 0 and are counted in
    `nonfinite`.
    """
    if found_inf is not None and bool(found_inf):
        return
    for i, (scalar_row, row0, col0, global_inner) in enumerate(table.tolist()):
        if params[i].numel() == 0:
            continue
        s = Scalars(scalars[scalar_row].to(params[i].device))
        p_rows, g_rows = _rows(params[i]), _rows(grads[i])
        states = [exp_avg[i], exp_avg_sq[i]] + ([max_exp_avg_sq[i]] if max_exp_avg_sq else [])
        scales = [] if codec == FP32 else [exp_avg_scale[i], exp_avg_sq_scale[i]]
        if codec != FP32 and max_exp_avg_sq:
            scales.append(max_exp_avg_sq_scale[i])
        states = [_rows(state) for state in states]
        for rows in _row_chunks(*p_rows.shape):
            correction = _rows(param_correction[i])[rows] if param_correction else None
            p, g = formats.decode(p_rows[rows], correction), g_rows[rows].float()
            index = _element_index(p.shape, rows.start, row0, col0, global_inner, p.device)
            if grad_scale is not None:
                g = g * (torch.ones_like(grad_scale) / grad_scale).float()
            if maximize:
                g = -g
            if not decoupled_weight_decay:
                g = g + s.weight_decay * p
            usable = g.abs() <= ABS_MAX_GRAD  # false for NaN
            nonfinite += g.numel() - usable.sum()
            g = torch.where(usable, g, 0.0)
            chunk_states = [state[rows] for state in states]
            if codec == FP32:
                new_p = _step_fp32(p, g, chunk_states, s)
            else:
                chunk_scales = [scale[rows] for scale in scales]
                new_p = _step_8bit(p, g, chunk_states, chunk_scales, index, s, codec, block_size)
            _store_param(p_rows[rows], correction, new_p, index, s, stochastic_rounding)


def _element_index(
    shape: torch.Size, first_row: int, row0: int, col0: int, global_inner: int, device: torch.device
) -> Tensor:
    """The global row-major index of each element of some rows, modulo 2^32."""
    row_numbers = torch.arange(first_row, first_row + shape[0], device=device).unsqueeze(1)
    return ((row0 + row_numbers) * global_inner + col0 + torch.arange(shape[1], device=device)) & 0xFFFFFFFF


def _store_param(
    stored: Tensor, correction: Tensor | None, p: Tensor, index: Tensor, s: Scalars, stochastic_rounding: bool
) -> None:
    if stored.dtype == torch.float32:
        stored.copy_(p)
        return
    extra = 0 if correction is None else 8 * correction.element_size()
    random = formats.random_bits(index, s.rounding_key) if stochastic_rounding else None
    new, new_correction = formats.encode(p, stored.dtype, extra, random)
    stored.copy_(new)
    if correction is not None and new_correction is not None:
        correction.copy_(new_correction)


def _step_fp32(p: Tensor, g: Tensor, states: list[Tensor], s: Scalars) -> Tensor:
    m, v, *rest = states
    p, new_m, new_v, new_max_v = adam_update(p, g, m, v, rest[0] if rest else None, s)
    m.copy_(new_m)
    v.copy_(new_v)
    if new_max_v is not None:
        rest[0].copy_(new_max_v)
    return p


def _step_8bit(
    p: Tensor,
    g: Tensor,
    states: list[Tensor],
    scales: list[Tensor],
    index: Tensor,
    s: Scalars,
    codec_name: str,
    block_size: int,
) -> Tensor:
    codec = CODECS[codec_name]
    shape = p.shape
    fills = [*codec.zero_codes, codec.zero_codes[1]]
    codes = [_to_blocks(state, block_size, fill) for state, fill in zip(states, fills, strict=False)]
    block_scales = [scale.reshape(-1, 1) for scale in scales]
    m, v = codec.decode(Encoded(codes[0], codes[1], block_scales[0], block_scales[1]))
    max_v = codec.decode_sq(codes[2], block_scales[2]) if len(codes) == 3 else None

    p_blocks, g_blocks = _to_blocks(p, block_size), _to_blocks(g, block_size)
    p_blocks, m, v, max_v = adam_update(p_blocks, g_blocks, m, v, max_v, s)

    encoded = codec.encode(m, v, _to_blocks(index, block_size), s.time_offset)
    new_codes, new_scales = list(encoded[:2]), list(encoded[2:])
    if max_v is not None:
        max_codes, max_scale = codec.encode_sq(max_v)
        new_codes.append(max_codes)
        new_scales.append(max_scale)
    for state, new in zip(states, new_codes, strict=True):
        state.copy_(_from_blocks(new, *shape))
    for scale, new in zip(scales, new_scales, strict=True):
        scale.copy_(new.view_as(scale))
    return _from_blocks(p_blocks, *shape)
