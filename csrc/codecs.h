// The 8-bit state formats, one element (or register of elements) at a time: the same bits as py/fused8/codecs.py, which
// describes them.
//
// Reductions over a block belong to the kernels. Comparisons and maxima are taken of the bits of non-negative floats,
// which order like integers.

#pragma once

#include "platform.h"

namespace fused8::FUSED8_ISA {

// Adding 1.5 * 2^23 to |x| < 2^22 rounds x to the nearest even integer, which then stands in the low bits.
constexpr float ROUNDING = 12582912.0f;
constexpr int32_t ROUNDING_BITS = 0x4B400000;

template <class Float>
FUSED8_HD auto round_to_low_bits(Float x) {
  return float_bits(x + ROUNDING);
}

template <class Float>
FUSED8_HD auto round_to_int(Float x) {
  return round_to_low_bits(x) - ROUNDING_BITS;
}

// 1 where v > 0 and 0 where v = 0.
template <class Float>
FUSED8_HD auto positive(Float v) {
  const auto bits = float_bits(v);
  return bits < 1 ? bits : bits - bits + 1;
}

// Adaptive FP8: v is an unsigned 8-bit float on a grid that each block chooses, m is int8 relative to a power of two
// near sqrt(v).
namespace adaptive {

constexpr uint32_t SPACE = 0x6E1EF25B;  // as a fraction of 2^32: 1 - the second constant of the R2 sequence
constexpr int32_t SPAN = 253;           // distance of a block's end codes that leaves room for the dither's carry
constexpr int32_t SMALLEST_RATIO_BITS = (127 - 64) << 23;  // 2^-64: 127 / ratio must not overflow
constexpr float ONE_127TH = 1.0f / 127.0f;

// A cell is the FP32 pattern of a v without its low `shift` bits. Code c > 0 stands for the cell base + c, code 0 for
// the value 0.
template <class Int>
struct Grid {
  Int base;
  Int shift;
};

FUSED8_HD Grid<int32_t> unpack_grid(int32_t meta) {
  return {meta >> 3, 23 - (meta & 7)};
}

FUSED8_HD int32_t pack_grid(Grid<int32_t> grid) {
  return grid.base * 8 + (23 - grid.shift);
}

// The finest grid that spans a block, from the bits of its largest and its smallest positive v (both 0 if none is).
FUSED8_HD Grid<int32_t> choose_grid(int32_t largest, int32_t smallest) {
  int32_t shift = 23 - 2;
  for (int32_t finer = 23 - 3; finer >= 23 - 6; --finer) {
    shift = (largest >> finer) - (smallest >> finer) <= SPAN ? finer : shift;
  }
  return {larger((largest >> shift) - 254, 0), shift};
}

template <class Int>
FUSED8_HD Int decode_cell(Int code, Grid<Int> grid) {
  return code > 0 ? code + grid.base : Int{};
}

template <class Int>
FUSED8_HD auto decode_sq(Int cell, Grid<Int> grid) {
  return bits_float(cell << grid.shift);
}

// Half the exponent of a cell, rounded down: that of v's bits >> 24.
template <class Int>
FUSED8_HD Int half_exponent(Int cell, Grid<Int> grid) {
  return cell >> (24 - grid.shift);
}

template <class Int>
FUSED8_HD auto decode(Int code, float scale, Int cell, Grid<Int> grid) {
  const auto root = bits_float((half_exponent(cell, grid) + 64) << 23);
  return (to_float(code) * scale) * root;
}

// The dither of an element in this step, as a fraction of 2^32. It is linear: the next element's is SPACE further.
template <class Uint>
FUSED8_HD Uint dither(Uint index, uint32_t time_offset) {
  return index * SPACE + time_offset;
}

// What to add to the bits of v before they are cut: part of a cell, given by the dither or one half.
template <class Int, class Uint>
FUSED8_HD Int dithered(Uint dither, Grid<Int> grid) {
  return (Int)(dither >> (Uint)(32 - grid.shift));
}

template <class Int>
FUSED8_HD Int nearest(Grid<Int> grid) {
  return (Int{} + 1) << (grid.shift - 1);
}

// The cell to which positive v is rounded. It lies at most 255 above the base: the carry of `add` moves the block's
// largest v to base + 255, if base > 0, and otherwise its cell is at most 254.
template <class Int>
FUSED8_HD Int encode_cell(Int sq_bits, Int add, Grid<Int> grid) {
  return larger((sq_bits + add) >> grid.shift, grid.base + 1);
}

template <class Int>
FUSED8_HD Int encode_sq(Int sq_bits, Int cell, Grid<Int> grid) {
  return sq_bits > 0 ? cell - grid.base : Int{};
}

// m relative to the root of the v that its cell stands for.
template <class Float, class Int>
FUSED8_HD Float ratio(Float m, Int sq_bits, Int cell, Grid<Int> grid) {
  const Float inverse_root = bits_float((190 - half_exponent(cell, grid)) << 23);
  return sq_bits > 0 ? m * inverse_root : Float{};
}

// From the bits of a block's largest |ratio|: what turns a ratio into a code, and a code into a ratio.
struct RatioScale {
  float inverse;
  float scale;
};

FUSED8_HD RatioScale ratio_scale(int32_t largest) {
  if (largest < SMALLEST_RATIO_BITS) return {0.0f, 0.0f};
  return {127.0f / bits_float(largest), bits_float(largest) * ONE_127TH};
}

}  // namespace adaptive

// The dynamic-exponent map of bitsandbytes (Dettmers et al., "8-bit Optimizers via Block-wise Quantization"): codes are
// indices into 256 ascending values, relative to the block's largest |x|.
namespace dynamic {

constexpr int DECADES = 7;
constexpr int32_t SIGNED_ZERO = 127;  // the code of 0 in the signed map

// A straight line through the codes of one decade: slope * |y| + offset.
struct Lines {
  float slope[8];
  float offset[8];
};

struct Map {
  float value[256];
  float floor[256];  // the code of y is at least c if y > floor[c]
  // By `rough_decade`: the two decades in which such a y can lie.
  Lines lower, upper;
};

// Decade i from 10^-6 to 1 is cut into equal parts, whose midpoints are the values; then come 0 and 1. Computed with
// torch's two-sided FP32 linspace with fused multiply-add, as bitsandbytes does where the processor has one.
constexpr Map make_map(bool is_signed) {
  constexpr double POWERS[DECADES] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0};
  constexpr float FIRST = 0.1f;
  const int zero = is_signed ? SIGNED_ZERO : 0;
  Map map = {};
  map.value[255] = 1.0f;
  map.lower.offset[0] = map.upper.offset[DECADES] = 256.0f;  // there is no decade below 0 and none above 6
  for (int i = 0; i < DECADES; ++i) {
    const int parts = is_signed ? 1 << i : 2 << i;
    const int first_distance = is_signed ? parts : parts - 1;
    const double step = static_cast<float>((1.0 - double{FIRST}) / parts);
    float bounds[129] = {};
    for (int j = 0; j <= parts; ++j) {
      bounds[j] = static_cast<float>(j < (parts + 1) / 2 ? FIRST + step * j : 1.0 - step * (parts - j));
    }
    for (int j = 0; j < parts; ++j) {
      const float mean = static_cast<float>((double{bounds[j]} + double{bounds[j + 1]}) / 2.0);
      const float value = mean * static_cast<float>(POWERS[i]);
      map.value[zero + first_distance + j] = value;
      if (is_signed) map.value[zero - first_distance - j] = -value;
    }
    map.lower.slope[i + 1] = map.upper.slope[i] = static_cast<float>(parts / (0.9 * POWERS[i]));
    map.lower.offset[i + 1] = map.upper.offset[i] = static_cast<float>(first_distance - parts / 9.0 + 0.5);
  }
  map.floor[0] = -__builtin_huge_valf();
  for (int c = 1; c < 256; ++c) {
    const double exact = (double{map.value[c - 1]} + double{map.value[c]}) / 2.0;
    const float mid = static_cast<float>(exact);
    const int32_t below = __builtin_bit_cast(int32_t, mid) + (mid > 0.0f ? -1 : 1);
    map.floor[c] = double{mid} > exact ? __builtin_bit_cast(float, below) : mid;
  }
  return map;
}

inline constexpr Map SIGNED = make_map(true);
inline constexpr Map UNSIGNED = make_map(false);

// 5/16 of the base-2 logarithm, cut to an integer, where 0.30103 would be exact: if y lies in decade i, then this is
// i or i + 1 modulo 8.
template <class Int>
FUSED8_HD Int rough_decade(Int bits) {
  return (bits + (bits >> 2)) >> 25;
}

// How many codes the code of |y| <= 1 is from that of 0, or one more. The distance is a concave function of |y|, made
// of one line for each decade: the right line is the lower one.
template <class Float>
FUSED8_HD auto estimate_distance(Float magnitude, const Map& map) {
  constexpr int32_t SMALLEST_BITS = (127 - 24) << 23;  // of 2^-24, below which there is no decade
  const auto bits = float_bits(magnitude);
  const auto clamped = bits > SMALLEST_BITS ? bits : bits - bits + SMALLEST_BITS;
  const auto decade = rough_decade(clamped);
  const Float lower = lookup8(map.lower.slope, decade) * magnitude + lookup8(map.lower.offset, decade);
  const Float upper = lookup8(map.upper.slope, decade) * magnitude + lookup8(map.upper.offset, decade);
  return to_int(smaller(lower, upper));
}

// The largest code whose floor y is above, for y in [-1, 1].
template <class Float>
FUSED8_HD auto encode(Float y, const Map& map) {
  const auto bits = float_bits(y);
  const auto distance = estimate_distance(bits_float(bits & MAGNITUDE_MASK), map);
  const auto sign = bits >> 31;  // -1 or 0
  const auto code = ((distance - 1) ^ sign) + (SIGNED_ZERO + 1);
  return less_one_unless(lookup(map.floor, code) < y, code);
}

// The same for y = v / absmax. A positive v never becomes 0: m would keep a code while v vanished, and the next step
// were m / eps.
template <class Float>
FUSED8_HD auto encode_sq(Float y, Float v, const Map& map) {
  const auto code = estimate_distance(y, map);
  return larger(less_one_unless(lookup(map.floor, code) < y, code), positive(v));
}

}  // namespace dynamic

// float8_e4m3fn, relative to the block's largest |x|.
namespace e4m3 {

constexpr float ONE_448TH = 1.0f / 448.0f;
constexpr int32_t REBIAS = (127 - 7) << 23;

template <class Int>
FUSED8_HD auto decode(Int code) {
  const Int magnitude = code & 0x7F;
  const Int subnormal = float_bits(to_float(magnitude) * 0x1p-9f);
  const Int bits = magnitude < 8 ? subnormal : (magnitude << 20) + REBIAS;
  return bits_float(bits | (code & 0x80) << 24) * ONE_448TH;
}

// The code of y in [0, 1].
template <class Float>
FUSED8_HD auto encode_magnitude(Float y) {
  const Float z = y * 448.0f;
  const auto bits = float_bits(z) - REBIAS;
  const auto normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20;
  return z < 0x1p-6f ? round_to_int(z * 512.0f) : normal;
}

template <class Float>
FUSED8_HD auto encode(Float y) {
  const auto bits = float_bits(y);
  return encode_magnitude(bits_float(bits & MAGNITUDE_MASK)) | (bits >> 24 & 0x80);
}

// A positive v never becomes 0.
template <class Float>
FUSED8_HD auto encode_sq(Float y, Float v) {
  return larger(encode_magnitude(y), positive(v));
}

}  // namespace e4m3

}  // namespace fused8::FUSED8_ISA
