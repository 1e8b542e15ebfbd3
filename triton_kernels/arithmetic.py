"""FP32 arithmetic that gives the same bits in Triton's interpreter, on CUDA and on ROCm.

TARGET is "cuda", "interpreter" or "portable", which every compiler takes. Kernels are compiled with
enable_fp_fusion=False: only tl.fma fuses.

For "cuda", `sqrt`, `subtract_ratio` and `finite_or_zero` compute the 16 elements of a thread as if none were special,
then test once whether one was, and only then start again the slow way. The quick way is the one that ptxas uses for
sqrt.rn and div.rn, correctly rounded where it applies; but those test and branch for every element, which costs more
instructions than the result and keeps the compiler from interleaving the elements.
"""

# ruff: noqa: SIM300 (conditions on constexprs are written for the compiler)

import struct

import triton
import triton.language as tl

# Elements of a thread that share one test. Every tile of the "cuda" target gives each thread exactly so many.
GROUP = 16
GROUP_SIZE = tl.constexpr(GROUP)

ABS_MAX_GRAD = tl.constexpr(2.0**63)
# Adding 1.5 * 2^23 to |x| < 2^22 rounds x to the nearest even integer, which then stands in the low bits.
ROUNDING = tl.constexpr(12582912.0)
ROUNDING_BITS = tl.constexpr(0x4B400000)
# From here on the residual of a square root, x - y * y, is no denormal number.
SMALLEST_SQUARE = tl.constexpr(2.0**-101)


class _Asm:
    """PTX that returns its first input, `quick`, unless `test` holds for an element of the group: `slow` redoes all.

    Both are templates, repeated for each element, in which {out} and the names of `inputs` stand for its registers and
    {x} for one of its own. `test` sets the predicate flag; {chain} and {and_flag} join it to the tests before.
    `types` has the constraint letter of each input.
    """

    def __init__(self, inputs: str, types: str, test: str, slow: str) -> None:
        names = inputs.split()
        registers = [{"out": f"${i}"} for i in range(GROUP)]
        for n, name in enumerate(names, start=1):
            for i in range(GROUP):
                registers[i][name] = f"${n * GROUP + i}"
        for i, element in enumerate(registers):
            element |= {"x": f"x{i}", "chain": ".or" if i else "", "and_flag": ", flag" if i else ""}
        lines = ["{", ".reg .pred flag;", f".reg .f32 x<{GROUP}>;"]
        for template in ("mov.b32 {out}, {quick};", test, "@!flag bra DONE;", slow):
            once = "{" not in template
            lines += [template] if once else [template.format(**element) for element in registers]
        self.source = tl.constexpr("\n".join([*lines, "DONE:", "}"]))
        self.constraints = tl.constexpr(",".join(["=f"] * GROUP + [letter for letter in types for _ in range(GROUP)]))


def _ptx(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


_SQRT = _Asm(
    inputs="quick square",
    types="ff",
    test=f"setp.ltu{{chain}}.f32 flag, {{square}}, {_ptx(SMALLEST_SQUARE.value)}{{and_flag}};",
    slow="sqrt.rn.f32 {out}, {square};",
)
SQRT_ASM, SQRT_CONSTRAINTS = _SQRT.source, _SQRT.constraints

_SUBTRACT_RATIO = _Asm(
    inputs="quick minuend factor dividend divisor safe",
    types="ffffff",
    test="abs.f32 {x}, {quick}; setp.ltu{chain}.f32 flag, {x}, {safe}{and_flag};",
    slow="div.rn.f32 {x}, {dividend}, {divisor}; mul.rn.f32 {x}, {factor}, {x}; sub.rn.f32 {out}, {minuend}, {x};",
)
SUBTRACT_RATIO_ASM, SUBTRACT_RATIO_CONSTRAINTS = _SUBTRACT_RATIO.source, _SUBTRACT_RATIO.constraints

_FINITE_OR_ZERO = _Asm(
    inputs="quick counter",
    types="fl",
    test=f"abs.f32 {{x}}, {{quick}}; setp.gtu{{chain}}.f32 flag, {{x}}, {_ptx(ABS_MAX_GRAD.value)}{{and_flag}};",
    slow=f"setp.gtu.f32 flag, {{x}}, {_ptx(ABS_MAX_GRAD.value)}; @flag mov.b32 {{out}}, 0; "
    "@flag red.relaxed.gpu.global.add.u64 [{counter}], 1;",
)
FINITE_OR_ZERO_ASM, FINITE_OR_ZERO_CONSTRAINTS = _FINITE_OR_ZERO.source, _FINITE_OR_ZERO.constraints


@triton.jit
def load_4_floats(pointer):
    """Four floats from a 16-byte aligned address in one access. CUDA only; nothing may write to them meanwhile."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l",
        [pointer.to(tl.int64)],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_same(pointers, x):
    """Store 32-bit numbers of which threads may hold copies: all write the same. CUDA only.

    tl.store would first bring them, through shared memory, into a layout in which they are consecutive.
    """
    tl.inline_asm_elementwise(
        "st.global.b32 [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), x.to(tl.int32, bitcast=True)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_to_int(x):
    """The integer nearest to x, |x| < 2^22, ties to even."""
    return float_bits(x + ROUNDING) - ROUNDING_BITS


@triton.jit
def load_float(pointers, mask, MASKED: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr):
    """Load elements of DTYPE as FP32; 0 where masked. In the interpreter bf16 pointers are int16 pointers."""
    x = tl.load(pointers, mask=mask, other=0) if MASKED else tl.load(pointers)
    if DTYPE == tl.bfloat16 and TARGET == "interpreter":
        return bits_float(x.to(tl.int32) << 16)
    elif DTYPE == tl.bfloat16 and TARGET == "cuda":  # two elements stand in one register: one instruction each
        return bits_float(
            tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [x], tl.int32, is_pure=True, pack=2
            )
        )
    else:
        return x.to(tl.float32)


@triton.jit
def signed_bytes_to_float(x, TARGET: tl.constexpr):
    if TARGET == "cuda":  # four elements stand in one register: one instruction each
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 x<4>;
            mov.b32 {x0, x1, x2, x3}, $4;
            cvt.rn.f32.s8 $0, x0; cvt.rn.f32.s8 $1, x1; cvt.rn.f32.s8 $2, x2; cvt.rn.f32.s8 $3, x3;
            }""",
            "=f,=f,=f,=f,r",
            [x],
            tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def round_float(x, DTYPE: tl.constexpr, TARGET: tl.constexpr):
    """FP32 -> DTYPE, to nearest even, in the form that is stored."""
    if DTYPE == tl.bfloat16 and TARGET == "interpreter":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _reciprocal_estimate(x):
    """1 / x within one unit in the last place, for normal x and 1 / x. CUDA only."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _root_reciprocal_estimate(x):
    """1 / sqrt(x) within 2^-22.9 of itself, for normal x. CUDA only."""
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _ratio_by(x, y, reciprocal):
    """x / y from 1 / y correctly rounded; exact where neither the ratio nor its residual is a denormal number."""
    quotient = x * reciprocal
    return tl.fma(-tl.fma(y, quotient, -x), reciprocal, quotient)


@triton.jit
def _quick_ratio(x, y):
    estimate = _reciprocal_estimate(y)
    return _ratio_by(x, y, tl.fma(estimate, tl.fma(-y, estimate, 1.0), estimate))


@triton.jit
def ratio(x, y, TARGET: tl.constexpr):
    """x / y for normal y, where neither the ratio nor its residual is a denormal number."""
    return _quick_ratio(x, y) if TARGET == "cuda" else tl.div_rn(x, y)


@triton.jit
def relative(x, absmax, TARGET: tl.constexpr):
    """x / absmax, and 0 where absmax is 0. absmax is one number per block, at least |x| and at most 2^126.

    For CUDA ratios below 2^-40, which no codec tells from 0, are not correctly rounded.
    """
    if TARGET == "cuda":
        # A block of small numbers is scaled up, which is exact, so that nothing below becomes denormal.
        power = tl.where(absmax < 2.0**-20, 2.0**100, 1.0)
        scaled = absmax * power
        scaled = tl.where(absmax > 0.0, scaled, 1.0)
        return _ratio_by(x * power, scaled, tl.div_rn(tl.full(scaled.shape, 1.0, tl.float32), scaled))
    else:
        return tl.div_rn(x, tl.where(absmax > 0.0, absmax, 1.0))


@triton.jit
def sqrt(x, TARGET: tl.constexpr):
    if TARGET == "cuda":
        estimate = _root_reciprocal_estimate(x)
        y = x * estimate
        quick = tl.fma(tl.fma(-y, y, x), estimate * 0.5, y)
        return tl.inline_asm_elementwise(
            SQRT_ASM, SQRT_CONSTRAINTS, [quick, x], tl.float32, is_pure=True, pack=GROUP_SIZE
        )
    else:
        return tl.sqrt_rn(x)


@triton.jit
def subtract_ratio(minuend, factor, dividend, divisor, smallest_divisor, TARGET: tl.constexpr):
    """minuend - factor * (dividend / divisor), for divisor >= smallest_divisor >= 2^-64; the latter and factor >= 0 are
    scalars.

    The quick division is exact unless |dividend| < 2^-100 or the ratio is below 2^-125. Then `small` bounds the ratio,
    and a result above 2^28 * factor * small does not depend on it: the quick result is right all the same.
    """
    if TARGET == "cuda":
        quick = minuend - factor * _quick_ratio(dividend, divisor)
        small = tl.maximum(_reciprocal_estimate(smallest_divisor) * 2.0**-100, 2.0**-125)
        safe = tl.maximum(factor * (small * 2.0**29), 2.0**-100)
        safe = tl.where(smallest_divisor > 2.0**100, float("inf"), safe)  # its reciprocal may be a denormal number
        return tl.inline_asm_elementwise(
            SUBTRACT_RATIO_ASM,
            SUBTRACT_RATIO_CONSTRAINTS,
            [quick, minuend, factor, dividend, divisor, safe],
            tl.float32,
            is_pure=True,
            pack=GROUP_SIZE,
        )
    else:
        return minuend - factor * tl.div_rn(dividend, divisor)


@triton.jit
def finite_or_zero(g, counter, TARGET: tl.constexpr):
    """g, but 0 where it is not finite or too large to square; `counter` points to how many of those there were."""
    if TARGET == "cuda":
        return tl.inline_asm_elementwise(
            FINITE_OR_ZERO_ASM,
            FINITE_OR_ZERO_CONSTRAINTS,
            [g, counter.to(tl.int64)],
            tl.float32,
            is_pure=False,
            pack=GROUP_SIZE,
        )
    else:
        usable = tl.abs(g) <= ABS_MAX_GRAD  # false for NaN
        unusable = tl.sum(tl.where(usable, 0, 1))
        tl.atomic_add(counter, unusable.to(tl.int64), mask=unusable > 0, sem="relaxed")
        return tl.where(usable, g, 0.0)
