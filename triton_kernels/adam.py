"""The Adam step of all tensors of a bucket in one Triton launch, with both moments kept in 8 bits.

A program takes in one tile: [blocks, width] elements of one tensor, where width is the block size or, for shorter rows,
the next power of two. It loads codes, block scales, parameters and gradients, decodes, applies Adam in FP32 registers,
encodes and stores. Which tensor and which blocks a program serves, and where the tensor lies, stand in tables on the
device (launch.py); so do all scalars. Nothing that changes from step to step is an argument that Triton specializes on.

The update is that of fused8/reference.py, operation for operation, and gives the same bits.
"""

# ruff: noqa: SIM102, SIM109, SIM300 (conditions on constexprs are written for the compiler)

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import finite_or_zero, load_4_floats, load_float, round_float, sqrt, store_same, subtract_ratio
from .codecs import decode, decode_sq, dynamic_tables, encode, encode_sq
from .formats import DTYPES, correction_type, is_plain, random_bits, stored_type
from .formats import decode as decode_parameter
from .formats import encode as encode_parameter
from .launch import (
    ALIGNED,
    BLOCKS_PER_ROW,
    BODY_BITS,
    BODY_MASK,
    CONFIGS,
    FLAVOURS,
    FULL,
    INNER,
    NARROWEST,
    NUM_BLOCKS,
    TENSOR_COLUMNS,
    UNALIGNED,
    UNALIGNED_PART,
    WIDTHS,
    BucketTables,
    Route,
    Upload,
)

# Columns of `scalars`.
BETA1 = tl.constexpr(0)
ONE_MINUS_BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
ONE_MINUS_BETA2 = tl.constexpr(3)
EPS = tl.constexpr(4)
STEP_SIZE = tl.constexpr(5)
INV_BIAS_CORRECTION2_SQRT = tl.constexpr(6)
DECAY = tl.constexpr(7)
WEIGHT_DECAY = tl.constexpr(8)
TIME_OFFSET = tl.constexpr(9)
ROUNDING_KEY = tl.constexpr(10)
SCALAR_WIDTH = tl.constexpr(16)

# Columns of `layout`.
SCALAR_ROW = tl.constexpr(0)
ROW0 = tl.constexpr(1)
COL0 = tl.constexpr(2)
GLOBAL_INNER = tl.constexpr(3)
LAYOUT_COLUMNS = tl.constexpr(4)


@triton.jit
def _load_scalars(row, TARGET: tl.constexpr):
    """What `adam_update` takes of a row of scalars, in its order."""
    if TARGET == "cuda":
        beta1, one_minus_beta1, beta2, one_minus_beta2 = load_4_floats(row)
        eps, step_size, inv_bias_correction2_sqrt, decay = load_4_floats(row + EPS)
    else:
        beta1 = tl.load(row + BETA1)
        one_minus_beta1 = tl.load(row + ONE_MINUS_BETA1)
        beta2 = tl.load(row + BETA2)
        one_minus_beta2 = tl.load(row + ONE_MINUS_BETA2)
        eps = tl.load(row + EPS)
        step_size = tl.load(row + STEP_SIZE)
        inv_bias_correction2_sqrt = tl.load(row + INV_BIAS_CORRECTION2_SQRT)
        decay = tl.load(row + DECAY)
    return beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_bias_correction2_sqrt, decay


@triton.jit
def adam_update(p, g, m, v, max_v, scalars, AMSGRAD: tl.constexpr, TARGET: tl.constexpr):
    """One Adam update of FP32 tiles -> new (p, m, v, max_v)."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_bias_correction2_sqrt, decay = scalars
    p = p * decay
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    second = v
    if AMSGRAD:
        max_v = tl.maximum(max_v, v)
        second = max_v
    denom = sqrt(second, TARGET) * inv_bias_correction2_sqrt + eps
    p = subtract_ratio(p, step_size, m, denom, eps, TARGET)
    return p, m, v, max_v


@triton.jit
def _pointer(tensor, column: tl.constexpr, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """The base pointer in a column of a tensor's row; 16-byte aligned when VECTOR."""
    pointer = tl.load(tensor + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, [16]) if VECTOR else pointer


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr, other: tl.constexpr):
    return tl.load(pointers, mask=mask, other=other) if MASKED else tl.load(pointers)


@triton.jit
def _store(pointers, x, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, x, mask=mask)
    else:
        tl.store(pointers, x)


@triton.jit
def _store_block(pointers, x, mask, MASKED: tl.constexpr, TARGET: tl.constexpr):
    """Store one number per block."""
    if MASKED or TARGET != "cuda":
        _store(pointers, x, mask, MASKED)
    else:
        store_same(pointers, x)


@triton.jit
def _element_index(layout, start, local, local_blocks, first_block, row, inner, blocks_per_row, MASKED: tl.constexpr):
    """The index in the global parameter, (row0 + row) * global_inner + col0 + column, modulo 2^32."""
    global_inner = tl.load(layout + GLOBAL_INNER)
    block_index = start + tl.load(layout + ROW0) * global_inner + tl.load(layout + COL0)
    block_index = block_index.to(tl.uint32) + tl.zeros_like(local_blocks).to(tl.uint32)
    if MASKED:
        block_index += (row * (global_inner - inner)).to(tl.uint32)
    elif global_inner != inner:
        row_of_block = (first_block + local_blocks) // blocks_per_row
        block_index += (row_of_block * (global_inner - inner)).to(tl.uint32)
    return block_index + local.to(tl.uint32)


@triton.jit
def _step_tile(
    tensor,
    first_block,
    layout,
    scalars,
    tables,
    grad_scale,
    nonfinite,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    CODEC: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    EXTRA_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    FLAVOUR: tl.constexpr,
    TARGET: tl.constexpr,
):
    """Step the blocks of one tensor from `first_block` on that fit into a tile.

    FLAVOUR FULL: every block is WIDTH long and they follow one another; ALIGNED: rows and pointers are multiples of 16
    elements and bytes, so that masks do not break 128-bit accesses; otherwise anything.
    """
    MASKED: tl.constexpr = FLAVOUR != FULL
    VECTOR: tl.constexpr = FLAVOUR == FULL or FLAVOUR == ALIGNED
    FP32: tl.constexpr = CODEC == "fp32"
    PLAIN: tl.constexpr = is_plain(PARAM_DTYPE, EXTRA_BITS, STOCHASTIC)
    # The interpreter stores bf16 wrongly: there bf16 tensors are int16.
    PLAIN_TYPE: tl.constexpr = tl.int16 if TARGET == "interpreter" and PARAM_DTYPE == tl.bfloat16 else PARAM_DTYPE
    P_TYPE: tl.constexpr = PLAIN_TYPE if PLAIN else stored_type(PARAM_DTYPE)
    G_TYPE: tl.constexpr = tl.int16 if TARGET == "interpreter" and GRAD_DTYPE == tl.bfloat16 else GRAD_DTYPE
    M_TYPE: tl.constexpr = tl.float32 if FP32 else (tl.int8 if CODEC == "adaptive" else tl.uint8)
    V_TYPE: tl.constexpr = tl.float32 if FP32 else tl.uint8
    V_SCALE_TYPE: tl.constexpr = tl.int32 if CODEC == "adaptive" else tl.float32
    M_ZERO: tl.constexpr = 127 if CODEC == "dynamic" else 0

    # The uniform loads come first: the wide ones wait for some of them.
    scalar_row = scalars + tl.load(layout + SCALAR_ROW) * SCALAR_WIDTH
    time_offset = tl.load(scalar_row + TIME_OFFSET).to(tl.uint32, bitcast=True)
    adam_scalars = _load_scalars(scalar_row, TARGET)

    # Element offsets: of the tile or of each block (int64), and within it (int32).
    inner = tl.load(tensor + INNER)
    blocks_per_row = tl.load(tensor + BLOCKS_PER_ROW).to(tl.int32)
    local_blocks = tl.arange(0, TILE // WIDTH)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    if MASKED:
        block = first_block + local_blocks
        block_mask = block < tl.load(tensor + NUM_BLOCKS).to(tl.int32)
        row = block // blocks_per_row
        column0 = (block - row * blocks_per_row).to(tl.int64) * WIDTH
        start = row.to(tl.int64) * inner + column0
        length = tl.where(block_mask, tl.minimum(inner - column0, WIDTH), 0).to(tl.int32)
        if VECTOR:
            start = tl.multiple_of(start, [16, 1])
            length = tl.multiple_of(length, [16, 1])
        mask = columns < length
        local = columns
    else:
        block_mask = True
        mask = True
        row = None
        start = first_block.to(tl.int64) * WIDTH
        local = local_blocks * WIDTH + columns

    p_pointers = _pointer(tensor, 0, P_TYPE, VECTOR) + start + local
    g_pointers = _pointer(tensor, 1, G_TYPE, VECTOR) + start + local
    m_pointers = _pointer(tensor, 2, M_TYPE, VECTOR) + start + local
    v_pointers = _pointer(tensor, 3, V_TYPE, VECTOR) + start + local
    if PLAIN:
        p = load_float(p_pointers, mask, MASKED, PARAM_DTYPE, TARGET)
    else:
        p = _load(p_pointers, mask, MASKED, 0)
        correction = p
        if EXTRA_BITS:
            correction_pointers = _pointer(tensor, 8, correction_type(EXTRA_BITS), VECTOR) + start + local
            correction = _load(correction_pointers, mask, MASKED, 0)
        p = decode_parameter(p, correction, PARAM_DTYPE, EXTRA_BITS)
    g = load_float(g_pointers, mask, MASKED, GRAD_DTYPE, TARGET)
    m = _load(m_pointers, mask, MASKED, M_ZERO)
    v = _load(v_pointers, mask, MASKED, 0)
    max_v = v
    if AMSGRAD:
        max_v_pointers = _pointer(tensor, 6, V_TYPE, VECTOR) + start + local
        max_v = _load(max_v_pointers, mask, MASKED, 0)
    if not FP32:
        m_scale_pointers = _pointer(tensor, 4, tl.float32, False) + first_block + local_blocks
        v_scale_pointers = _pointer(tensor, 5, V_SCALE_TYPE, False) + first_block + local_blocks
        m_scale = _load(m_scale_pointers, block_mask, MASKED, 0)
        v_scale = _load(v_scale_pointers, block_mask, MASKED, 0)
        if AMSGRAD:
            max_v_scale_pointers = _pointer(tensor, 7, V_SCALE_TYPE, False) + first_block + local_blocks
            max_v = decode_sq(max_v, _load(max_v_scale_pointers, block_mask, MASKED, 0), tables, CODEC)
        m, v = decode(m, v, m_scale, v_scale, tables, CODEC, TARGET)

    if grad_scale is not None:
        g = g * tl.div_rn(1.0, tl.load(grad_scale))
    if MAXIMIZE:
        g = -g
    if not DECOUPLED:
        g = g + tl.load(scalar_row + WEIGHT_DECAY) * p
    g = finite_or_zero(g, nonfinite, TARGET)
    p, m, v, max_v = adam_update(p, g, m, v, max_v, adam_scalars, AMSGRAD, TARGET)
    if STOCHASTIC:
        index = _element_index(layout, start, local, local_blocks, first_block, row, inner, blocks_per_row, MASKED)
    if PLAIN:
        _store(p_pointers, round_float(p, PARAM_DTYPE, TARGET), mask, MASKED)
    else:
        random = None
        if STOCHASTIC:
            random = random_bits(index, tl.load(scalar_row + ROUNDING_KEY).to(tl.uint32, bitcast=True))
        stored, correction = encode_parameter(p, random, PARAM_DTYPE, EXTRA_BITS, STOCHASTIC)
        _store(p_pointers, stored, mask, MASKED)
        if EXTRA_BITS:
            _store(correction_pointers, correction, mask, MASKED)

    if not FP32:
        if not STOCHASTIC:
            index = local.to(tl.uint32)
            if CODEC == "adaptive":
                index = _element_index(
                    layout, start, local, local_blocks, first_block, row, inner, blocks_per_row, MASKED
                )
        m, v, m_scale, v_scale = encode(m, v, index, time_offset, tables, CODEC, TARGET)
        _store_block(m_scale_pointers, m_scale, block_mask, MASKED, TARGET)
        _store_block(v_scale_pointers, v_scale, block_mask, MASKED, TARGET)
        if AMSGRAD:
            max_v, max_v_scale = encode_sq(max_v, tables, CODEC, TARGET)
            _store_block(max_v_scale_pointers, max_v_scale, block_mask, MASKED, TARGET)
    _store(m_pointers, m, mask, MASKED)
    _store(v_pointers, v, mask, MASKED)
    if AMSGRAD:
        _store(max_v_pointers, max_v, mask, MASKED)


@triton.jit(do_not_specialize_on_alignment=["layout", "scalars", "grad_scale", "found_inf", "nonfinite"])
def adam_kernel(
    tensors,  # int64 [tensors, TENSOR_COLUMNS]
    tiles,  # int32 [programs, 2]: tensor << BODY_BITS | body, first block
    layout,  # int64 [tensors, LAYOUT_COLUMNS]
    scalars,  # float32 [rows, SCALAR_WIDTH]
    tables,  # codecs.dynamic_tables() or None
    grad_scale,  # float32 or None
    found_inf,  # any number or None; not zero: do nothing
    nonfinite,  # int64
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    CODEC: tl.constexpr,
    DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    AMSGRAD: tl.constexpr,
    EXTRA_BITS: tl.constexpr,  # of a correction, or 0
    STOCHASTIC: tl.constexpr,  # rounding of parameters
    TILE: tl.constexpr,
    PRESENT: tl.constexpr,  # a bit for each body that occurs in `tiles`
    TARGET: tl.constexpr,
):
    """One program steps one tile. A body is a pair (width, flavour); only those present are compiled."""
    if found_inf is not None:
        if tl.load(found_inf) != 0:
            return
    program = tl.program_id(0)
    tensor_and_body = tl.load(tiles + 2 * program)
    first_block = tl.load(tiles + 2 * program + 1)
    tensor_number = (tensor_and_body >> BODY_BITS).to(tl.int64)
    for log_width in tl.static_range(WIDTHS):
        for flavour in tl.static_range(FLAVOURS):
            body = log_width * FLAVOURS + flavour
            if (PRESENT >> body) & 1:
                if PRESENT == 1 << body or (tensor_and_body & BODY_MASK) == body:
                    _step_tile(
                        tensors + tensor_number * TENSOR_COLUMNS,
                        first_block,
                        layout + tensor_number * LAYOUT_COLUMNS,
                        scalars,
                        tables,
                        grad_scale,
                        nonfinite,
                        PARAM_DTYPE,
                        GRAD_DTYPE,
                        CODEC,
                        DECOUPLED,
                        MAXIMIZE,
                        AMSGRAD,
                        EXTRA_BITS,
                        STOCHASTIC,
                        TILE // UNALIGNED_PART if flavour == UNALIGNED else TILE,
                        NARROWEST << log_width,
                        flavour,
                        "portable" if TARGET == "cuda" and flavour == UNALIGNED else TARGET,
                    )


TARGET = "interpreter" if triton.knobs.runtime.interpret else "hip" if torch.version.hip else "cuda"


def constants(
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    codec: str,
    decoupled_weight_decay: bool,
    maximize: bool,
    amsgrad: bool,
    extra_bits: int,
    stochastic: bool,
    present: int,
    target: str,
) -> dict[str, Any]:
    """The constexpr arguments of the kernel. `present`: BucketTables.present; `target`: a key of CONFIGS."""
    return dict(
        PARAM_DTYPE=DTYPES[param_dtype],
        GRAD_DTYPE=DTYPES[grad_dtype],
        CODEC=codec,
        DECOUPLED=decoupled_weight_decay,
        MAXIMIZE=maximize,
        AMSGRAD=amsgrad,
        EXTRA_BITS=extra_bits,
        STOCHASTIC=stochastic,
        TILE=CONFIGS[target].tile,
        PRESENT=present,
        TARGET="portable" if target == "hip" else target,
    )


def compile_options(target: str) -> dict[str, Any]:
    """Fusing a multiplication with an addition would change bits."""
    return dict(num_warps=CONFIGS[target].num_warps, enable_fp_fusion=False)


def launch_kernel(programs: int, arguments: tuple[Tensor | None, ...], constants: dict[str, Any]) -> None:
    adam_kernel[(programs,)](*arguments, **constants, **compile_options(TARGET))


_scalar_uploads: dict[torch.device, Upload] = {}  # buckets of one step share their scalars
_dynamic_tables = dynamic_tables()
_dynamic_table_uploads: dict[torch.device, Upload] = {}


def adam_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    exp_avg_scale: list[Tensor],
    exp_avg_sq_scale: list[Tensor],
    max_exp_avg_sq: list[Tensor],
    max_exp_avg_sq_scale: list[Tensor],
    param_correction: list[Tensor],
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
    cache: dict[str, Any] | None = None,
) -> None:
    """The step of one bucket, in place: one launch. Arguments as in the schema of `fused8::adam_step_` (ops.py).

    Nothing waits for the device and nothing is read back. `scalars` and `table` may be on the CPU or on the device.
    `cache` belongs to the bucket: what is kept there is valid as long as the lists hold tensors of the same shapes.

    Raises:
        TypeError: grad_scale is not float32.
        RuntimeError: a CUDA graph would capture scalars that stand on the CPU.
    """
    lists = (
        params, grads, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, max_exp_avg_sq, max_exp_avg_sq_scale,
        param_correction,
    )  # fmt: skip
    device = params[0].device
    stochastic = stochastic_rounding and params[0].dtype != torch.float32
    if grad_scale is not None and grad_scale.dtype != torch.float32:
        raise TypeError(f"grad_scale must be float32, got {grad_scale.dtype}")
    cache = {} if cache is None else cache
    if "triton" not in cache:
        tables = BucketTables(lists, codec, block_size, CONFIGS[TARGET].tile, keep_rows=stochastic)
        cache["triton"] = tables, Upload(), Upload(), Upload()
    tables, upload_tensors, upload_tiles, upload_table = cache["triton"]
    tables.update(lists)
    programs = len(tables.tiles)
    if programs == 0:
        return
    with contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        route = Route.current(device, scalars.device.type != "cpu", nonfinite)
        arguments = (
            upload_tensors(tables.tensors, route),
            upload_tiles(tables.tiles, route),
            upload_table(table, route),
            _scalar_uploads.setdefault(device, Upload())(scalars, route),
            _dynamic_table_uploads.setdefault(device, Upload())(_dynamic_tables, route) if codec == "dynamic" else None,
            grad_scale,
            found_inf,
            nonfinite,
        )
        launch_kernel(
            programs,
            arguments,
            constants(
                params[0].dtype,
                grads[0].dtype,
                codec,
                decoupled_weight_decay,
                maximize,
                bool(max_exp_avg_sq),
                8 * param_correction[0].element_size() if param_correction else 0,
                stochastic,
                tables.present,
                TARGET,
            ),
        )
