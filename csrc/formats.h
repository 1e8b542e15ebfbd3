// The formats of parameters that are not FP32, with or without extra mantissa bits kept beside them: the same bits as
// py/fused8/formats.py, which describes them.

#pragma once

#include "platform.h"

namespace fused8::FUSED8_ISA {

// FORMATS in py/fused8/formats.py. Codes are magnitudes counted from 0.
struct Format {
  int32_t bits;  // of the whole number
  int32_t mantissa_bits;
  int32_t e0;        // the FP32 exponent field of the smallest normal number
  int32_t largest;   // the code of the largest finite number
  int32_t overflow;  // the code that a number beyond it takes
  int32_t infinity;  // above every code if there is none
  int32_t nan;
};

constexpr int32_t NO_INFINITY = 0x7FFFFFFF;
constexpr Format BFLOAT16_FORMAT = {16, 7, 1, 0x7F7F, 0x7F80, 0x7F80, 0x7FC0};
constexpr Format FLOAT16_FORMAT = {16, 10, 113, 0x7BFF, 0x7C00, 0x7C00, 0x7E00};
constexpr Format FLOAT8_E4M3FN_FORMAT = {8, 3, 121, 0x7E, 0x7E, NO_INFINITY, 0x7F};
constexpr Format FLOAT8_E5M2_FORMAT = {8, 2, 113, 0x7B, 0x7B, 0x7C, 0x7E};

constexpr int32_t INFINITY_BITS = 0x7F800000;
constexpr int32_t NAN_BITS = 0x7FC00000;

// 32 random bits for an element index of a step: the hash `lowbias32` of index + key (Wellons, "Prospecting for Hash
// Functions").
template <class Uint>
FUSED8_HD Uint random_bits(Uint index, uint32_t key) {
  Uint h = index + key;
  h = (h ^ (h >> 16)) * 0x7FEB352Du;
  h = (h ^ (h >> 15)) * 0x846CA68Bu;
  return h ^ (h >> 16);
}

// The bits of a parameter, and in its low bits the correction if it has one.
template <class Uint>
struct Stored {
  Uint param;
  Uint correction;
};

// What is added before `drop` bits are cut off: half of the last kept bit, less 1 if it is even; or random bits.
template <class Uint>
FUSED8_HD Uint rounding(bool stochastic, Uint magnitude, Uint drop, Uint random) {
  const Uint last = (Uint{} + 1) << drop;
  return stochastic ? random & (last - 1) : (last >> 1) - 1 + ((magnitude >> drop) & 1);
}

// The bits of a magnitude, rounded to a code with `extra` more mantissa bits.
template <class Uint, class Int>
FUSED8_HD Uint round_to_code(Format format, int32_t extra, bool stochastic, Int magnitude, Uint random) {
  const int32_t mantissa_bits = format.mantissa_bits + extra;
  const int32_t keep = 23 - mantissa_bits;  // only -3, 0 or more
  if (format.e0 == 1) {                     // with the exponents of FP32, a code is the upper part of its bits
    const Uint cut = Uint{} + static_cast<uint32_t>(keep);
    return keep == 0 ? (Uint)magnitude : ((Uint)magnitude + rounding(stochastic, (Uint)magnitude, cut, random)) >> cut;
  }
  const Int exponent = larger(magnitude >> 23, Int{} + 1);
  Uint mantissa = (Uint)(magnitude - ((exponent - 1) << 23));
  Int drop = smaller(keep + larger(format.e0 - exponent, Int{}), Int{} + 31);
  if (keep < 0) {
    mantissa = mantissa << (Uint)larger(-drop, Int{});
    drop = larger(drop, Int{});
  }
  Uint add = rounding(stochastic, mantissa, (Uint)drop, random);
  if (!stochastic && keep <= 0) add = drop > 0 ? add : Uint{};
  // An octave more than the format has is beyond its largest number; a higher one would overflow.
  const Int octave = smaller(larger(exponent - format.e0, Int{}), Int{} + (format.largest >> format.mantissa_bits) + 1);
  return (Uint)(octave << mantissa_bits) + ((mantissa + add) >> (Uint)drop);
}

// FP32 -> the format with `extra` more mantissa bits. Rounds to nearest, ties to even, or with `random` stochastically.
// Everything but x and random is known when this is compiled, or the same for all elements.
template <class Uint, class Float>
FUSED8_HD Stored<Uint> encode(Format format, int32_t extra, bool stochastic, Float x, Uint random) {
  const auto magnitude = float_bits(x) & MAGNITUDE_MASK;
  const uint32_t half = (1u << extra) >> 1;
  // An infinite parameter could never come back.
  const bool saturates = extra != 0 || (stochastic && format.e0 > 1);
  const uint32_t last = saturates ? (format.largest << extra) + (extra != 0 ? half - 1 : 0) : format.overflow;
  Uint code = smaller(round_to_code(format, extra, stochastic, magnitude, random), Uint{} + last);
  if (saturates) code = magnitude >= INFINITY_BITS ? Uint{} + (uint32_t)(format.overflow << extra) : code;
  code = magnitude > INFINITY_BITS ? Uint{} + (uint32_t)(format.nan << extra) : code;
  const Uint sign = ((Uint)float_bits(x) >> (uint32_t)(32 - format.bits)) & (1u << (format.bits - 1));
  return {((code + half) >> (uint32_t)extra) | sign, code};
}

// The bits of a parameter and its correction (0 without) -> FP32, exactly.
template <class Int>
FUSED8_HD auto decode(Format format, int32_t extra, Int param, Int correction) {
  const int32_t mantissa_bits = format.mantissa_bits + extra;
  const int32_t shift = 23 - mantissa_bits;
  const Int upper = param & ((1 << (format.bits - 1)) - 1);
  const Int code = larger((upper << extra) + correction, Int{});
  Int bits = (shift < 0 ? code >> (shift < 0 ? -shift : 0) : code << (shift < 0 ? 0 : shift)) + ((format.e0 - 1) << 23);
  if (format.e0 > 1) {  // subnormal numbers of the format are normal in FP32; as such ones they would be slow on CPUs
    const float unit = bits_float((format.e0 - mantissa_bits) << 23);
    bits = code < (1 << mantissa_bits) ? float_bits(to_float(code) * unit) : bits;
  }
  bits = upper > format.largest ? Int{} + NAN_BITS : bits;
  bits = upper == format.infinity ? Int{} + INFINITY_BITS : bits;
  return bits_float(bits | (param & (1 << (format.bits - 1))) << (32 - format.bits));
}

}  // namespace fused8::FUSED8_ISA
