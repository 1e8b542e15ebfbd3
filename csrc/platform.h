// What the shared headers need to compile for a CPU, for its vector registers and for a GPU.

#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define FUSED8_HD __host__ __device__ __forceinline__
#else
#define FUSED8_HD inline
#endif

// Each CPU instruction set compiles the inline functions of these headers in a namespace of its own. In a shared one
// the linker would keep a single copy of each, perhaps the AVX-512 copy for every processor.
#ifndef FUSED8_ISA
#if defined(__CUDACC__)
#define FUSED8_ISA cuda
#else
#define FUSED8_ISA portable
#endif
#endif

// adam.h and codecs.h work on one element, or on a vector register of elements: `Float`, `Int` and `Uint` stand for
// float, int32_t and uint32_t, or for the vectors of them that cpu/lanes.h adds (include it first). A condition on
// vectors gives a vector; a cast between vectors keeps the bits.
namespace fused8::FUSED8_ISA {

FUSED8_HD int32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(x);
#else
  return __builtin_bit_cast(int32_t, x);
#endif
}

FUSED8_HD float bits_float(int32_t bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

FUSED8_HD float to_float(int32_t x) {
  return static_cast<float>(x);
}

FUSED8_HD int32_t to_int(float x) {
  return static_cast<int32_t>(x);
}

FUSED8_HD float square_root(float x) {
  return sqrtf(x);
}

template <class T>
FUSED8_HD T larger(T a, T b) {
  return a > b ? a : b;
}

template <class T>
FUSED8_HD T smaller(T a, T b) {
  return a < b ? a : b;
}

FUSED8_HD float lookup(const float* table, int32_t index) {
  return table[index];
}

// Without a branch: the callers' conditions are coin tosses.
FUSED8_HD int32_t less_one_unless(bool condition, int32_t x) {
  return x - !condition;
}

// In a table of 8, by the index modulo 8.
FUSED8_HD float lookup8(const float* table, int32_t index) {
  return table[index & 7];
}

constexpr int32_t MAGNITUDE_MASK = 0x7FFFFFFF;  // of the bits of a float: all but the sign

}  // namespace fused8::FUSED8_ISA
