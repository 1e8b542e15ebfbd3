// A vector register of elements: Floats, Ints and Uints of LANES lanes each, with what adam.h, codecs.h and the kernel
// need beside the operators of the compiler's vector extension.
//
// Where no instruction set is written out here, LANES is 1: a register is one element, and the compiler vectorizes the
// loops by itself. The written out ones need fewer instructions: bytes are widened to 32 bits in one step, and a shift
// whose count is the same in all lanes still takes the count from a vector, which is one operation instead of two.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../platform.h"

namespace fused8::FUSED8_ISA {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 1;
#endif

#if defined(__AVX2__)

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Uints __attribute__((vector_size(4 * LANES)));

inline Ints float_bits(Floats x) {
  return reinterpret_cast<Ints>(x);
}

inline Floats bits_float(Ints bits) {
  return reinterpret_cast<Floats>(bits);
}

inline Floats to_float(Ints x) {
  return __builtin_convertvector(x, Floats);
}

// Towards zero.
inline Ints to_int(Floats x) {
  return __builtin_convertvector(x, Ints);
}

// Hidden from the compiler that all lanes are the same, so that shifts by it take one operation.
inline Ints broadcast(int32_t x) {
  Ints lanes = x - Ints{};
  asm("" : "+v"(lanes));
  return lanes;
}

inline Uints lane_numbers() {
  Uints numbers;
  for (int i = 0; i < LANES; ++i) numbers[i] = i;
  return numbers;
}

inline void store(float* to, Floats x) {
  __builtin_memcpy(to, &x, sizeof x);
}

inline Floats load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}

#endif

#if defined(__AVX512F__)

inline int32_t largest_lane(Ints x) {
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(x));
}

inline uint32_t smallest_lane(Uints x) {
  return _mm512_reduce_min_epu32(reinterpret_cast<__m512i>(x));
}

inline Floats square_root(Floats x) {
  return _mm512_sqrt_ps(x);
}

// A gather writes into a register that it also reads. With a mask that is visibly all ones the compiler takes any
// register, and so lets the gather wait for whatever was computed in it before.
inline Floats lookup(const float* table, Ints index) {
  __mmask16 all = 0xFFFF;
  asm("" : "+k"(all));
  return _mm512_mask_i32gather_ps(Floats{}, all, reinterpret_cast<__m512i>(index), table, sizeof(float));
}

// a * b + c, and c - a * b, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}

inline Floats multiply_subtract_from(Floats a, Floats b, Floats c) {
  return _mm512_fnmadd_ps(a, b, c);
}

inline Ints load(const int8_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline Ints load(const uint8_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Of each lane only the low byte.
inline void store(void* to, Ints x) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
}

inline Ints load(const uint16_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

inline Ints load(const int16_t* from) {
  return reinterpret_cast<Ints>(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

// Lanes are at most 0xFFFF.
inline void store(uint16_t* to, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}

inline Floats load(const Float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline void store(Float16* to, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__)

inline int32_t largest_lane(Ints x) {
  const __m256i all = reinterpret_cast<__m256i>(x);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return larger(_mm_cvtsi128_si32(two), _mm_extract_epi32(two, 1));
}

inline uint32_t smallest_lane(Uints x) {
  const __m256i all = reinterpret_cast<__m256i>(x);
  const __m128i four = _mm_min_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m128i two = _mm_min_epu32(four, _mm_unpackhi_epi64(four, four));
  return smaller<uint32_t>(_mm_cvtsi128_si32(two), _mm_extract_epi32(two, 1));
}

inline Floats square_root(Floats x) {
  return _mm256_sqrt_ps(x);
}

// A gather writes into a register that it also reads. With a mask that is visibly all ones the compiler takes any
// register, and so lets the gather wait for whatever was computed in it before.
inline Floats lookup(const float* table, Ints index) {
  Ints all = Ints{} - 1;
  asm("" : "+x"(all));
  return _mm256_mask_i32gather_ps(Floats{}, table, reinterpret_cast<__m256i>(index), bits_float(all), sizeof(float));
}

// a * b + c, and c - a * b, rounded once.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}

inline Floats multiply_subtract_from(Floats a, Floats b, Floats c) {
  return _mm256_fnmadd_ps(a, b, c);
}

inline Ints load(const int8_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

inline Ints load(const uint8_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

// Of each lane only the low byte.
inline void store(void* to, Ints x) {
  const __m256i low_bytes = _mm256_set1_epi32(0x0C080400);
  const __m256i each_half = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(x), low_bytes);
  const __m256i together = _mm256_permutevar8x32_epi32(each_half, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
  _mm_storel_epi64(static_cast<__m128i*>(to), _mm256_castsi256_si128(together));
}

inline Ints load(const uint16_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

inline Ints load(const int16_t* from) {
  return reinterpret_cast<Ints>(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Lanes are at most 0xFFFF.
inline void store(uint16_t* to, Ints x) {
  const __m256i words = reinterpret_cast<__m256i>(x);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
}

inline Floats load(const Float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

inline void store(Float16* to, Floats x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

#else

using Floats = float;
using Ints = int32_t;
using Uints = uint32_t;

inline Ints broadcast(int32_t x) {
  return x;
}

inline int32_t largest_lane(Ints x) {
  return x;
}

inline uint32_t smallest_lane(Uints x) {
  return x;
}

inline Uints lane_numbers() {
  return 0;
}

template <class T>
inline Ints load(const T* from) {
  return *from;
}

template <class T>
inline void store(T* to, Ints x) {
  *to = static_cast<T>(x);
}

inline Floats load(const float* from) {
  return *from;
}

inline void store(float* to, Floats x) {
  *to = x;
}

inline Floats load(const Float16* from) {
  constexpr int32_t REBIAS = (127 - 15) << 23;
  const int32_t magnitude = from->bits & 0x7FFF;
  int32_t bits = (magnitude << 13) + REBIAS;
  bits = magnitude >= 0x7C00 ? bits + REBIAS : bits;                              // infinite or NaN
  bits = magnitude < 0x0400 ? float_bits(to_float(magnitude) * 0x1p-24f) : bits;  // subnormal
  return bits_float(bits | (from->bits & 0x8000) << 16);
}

inline void store(Float16* to, Floats x) {
  constexpr int32_t REBIAS = (127 - 15) << 23;
  const int32_t magnitude = float_bits(x) & MAGNITUDE_MASK;
  int32_t half = (magnitude - REBIAS + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  half = magnitude < 0x38800000 ? float_bits(bits_float(magnitude) * 0x1p24f + 12582912.0f) - 0x4B400000
                                : half;            // subnormal: below 2^-14
  half = magnitude >= 0x477FF000 ? 0x7C00 : half;  // infinite: from 65520 on
  half = magnitude > 0x7F800000 ? 0x7E00 : half;   // NaN
  to->bits = static_cast<uint16_t>(half | (float_bits(x) >> 16 & 0x8000));
}

#endif

#if defined(__AVX2__)

inline Ints lookup(const int32_t* table, Ints index) {
  return float_bits(lookup(reinterpret_cast<const float*>(table), index));
}

#else

inline Ints lookup(const int32_t* table, Ints index) {
  return table[index];
}

#endif

#if defined(__AVX512F__)

// A permutation of 16-bit words moves the upper halves of the lanes in one operation, where a shift and a conversion
// take two and three.

inline Floats load(const BFloat16* from) {
  const __m512i halves = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  const __m512i each_twice = reinterpret_cast<__m512i>(lane_numbers() * 0x10001);
  return reinterpret_cast<Floats>(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, each_twice, halves));
}

inline void store(BFloat16* to, Floats x) {
  const __m512i bits = reinterpret_cast<__m512i>(x);
  const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
  rounded = _mm512_mask_add_epi32(rounded, is_odd, rounded, _mm512_set1_epi32(1));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7FC00000));
  const __m512i upper_halves = reinterpret_cast<__m512i>(lane_numbers() * 0x40004 + 0x30001);
  const __m512i together = _mm512_permutexvar_epi16(upper_halves, rounded);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(together));
}

#else

inline Floats load(const BFloat16* from) {
  return bits_float(load(&from->bits) << 16);
}

inline void store(BFloat16* to, Floats x) {
  const Uints bits = (Uints)float_bits(x);
  const Ints rounded = (Ints)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  store(&to->bits, x == x ? rounded : Ints{} + 0x7FC0);
}

#endif

inline Floats with_sign_of(Floats x, Floats magnitude) {
  return bits_float((float_bits(magnitude) & MAGNITUDE_MASK) | (float_bits(x) & ~MAGNITUDE_MASK));
}

// A hint; the address need not be valid. Not where the compiler vectorizes, which it would keep from doing so.
inline void prefetch(const void* address) {
  if constexpr (LANES > 1) __builtin_prefetch(address);
}

}  // namespace fused8::FUSED8_ISA
