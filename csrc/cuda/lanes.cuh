// The 16 elements that one thread holds: loading, storing, and what the threads of one block say to each other.
//
// Compiled by nvcc, and by a plain C++ compiler for the tests, which bring their own threadIdx, shuffles and so on.

#pragma once

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "../platform.h"

namespace fused8::FUSED8_ISA {

// Elements per thread: one 128-bit access to 8-bit codes, two to bf16, four to fp32. With 8 the work that each thread
// repeats (finding its tensor, scalars, reductions) would weigh twice as much, with 32 the registers would leave too
// few warps to hide the latency of memory.
constexpr int ELEMENTS = 16;
constexpr unsigned ALL_LANES = 0xFFFFFFFF;

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// The bits of a parameter in a format that the launch names (formats.h), or of a correction.
struct Bits16 {
  uint16_t bits;
};

using Bits8 = uint8_t;

// 16 elements as they stand in memory.
template <class T>
struct alignas(16) Packed {
  static constexpr int WORDS = ELEMENTS * sizeof(T) / 4;
  uint32_t words[WORDS];
};

template <class T>
__device__ __forceinline__ uint32_t raw_bits(T x) {
  if constexpr (sizeof(T) == 4) {
    return static_cast<uint32_t>(float_bits(x));
  } else if constexpr (sizeof(T) == 2) {
    return x.bits;
  } else {
    return static_cast<uint8_t>(x);
  }
}

template <class T>
__device__ __forceinline__ T from_raw_bits(uint32_t bits) {
  if constexpr (sizeof(T) == 4) {
    return bits_float(static_cast<int32_t>(bits));
  } else if constexpr (sizeof(T) == 2) {
    return {static_cast<uint16_t>(bits)};
  } else {
    return static_cast<T>(bits);
  }
}

// The bits of the i-th element, of size 1 or 2, and above them other elements.
template <class T>
__device__ __forceinline__ uint32_t raw_element(const Packed<T>& packed, int i) {
  constexpr int PER_WORD = 4 / sizeof(T);
  return packed.words[i / PER_WORD] >> (i % PER_WORD * 8 * static_cast<int>(sizeof(T)));
}

__device__ __forceinline__ void unpack(const Packed<float>& packed, float (&x)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) x[i] = bits_float(static_cast<int32_t>(packed.words[i]));
}

__device__ __forceinline__ void pack(const float (&x)[ELEMENTS], Packed<float>& packed) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) packed.words[i] = static_cast<uint32_t>(float_bits(x[i]));
}

__device__ __forceinline__ void unpack(const Packed<BFloat16>& packed, float (&x)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; i += 2) {
    const uint32_t word = packed.words[i / 2];
    x[i] = bits_float(static_cast<int32_t>(word << 16));
    x[i + 1] = bits_float(static_cast<int32_t>(word & 0xFFFF0000));
  }
}

__device__ __forceinline__ uint32_t round_pair_to_bfloat16(float low, float high) {
#if defined(__CUDACC__)
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return __bfloat16_as_ushort(pair.x) | static_cast<uint32_t>(__bfloat16_as_ushort(pair.y)) << 16;
#else
  const auto round = [](float x) -> uint32_t {
    const uint32_t bits = static_cast<uint32_t>(float_bits(x));
    return x != x ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  };
  return round(low) | round(high) << 16;
#endif
}

__device__ __forceinline__ void pack(const float (&x)[ELEMENTS], Packed<BFloat16>& packed) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; i += 2) packed.words[i / 2] = round_pair_to_bfloat16(x[i], x[i + 1]);
}

__device__ __forceinline__ float half_to_float(uint16_t bits) {
#if defined(__CUDACC__)
  return __half2float(__ushort_as_half(bits));
#else
  return static_cast<float>(__builtin_bit_cast(_Float16, bits));
#endif
}

__device__ __forceinline__ uint32_t round_pair_to_half(float low, float high) {
#if defined(__CUDACC__)
  const __half2 pair = __floats2half2_rn(low, high);
  return __half_as_ushort(pair.x) | static_cast<uint32_t>(__half_as_ushort(pair.y)) << 16;
#else
  const auto round = [](float x) -> uint32_t { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(x)); };
  return round(low) | round(high) << 16;
#endif
}

__device__ __forceinline__ void unpack(const Packed<Float16>& packed, float (&x)[ELEMENTS]) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) x[i] = half_to_float(static_cast<uint16_t>(raw_element(packed, i)));
}

__device__ __forceinline__ void pack(const float (&x)[ELEMENTS], Packed<Float16>& packed) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; i += 2) packed.words[i / 2] = round_pair_to_half(x[i], x[i + 1]);
}

__device__ __forceinline__ int32_t code_at(const Packed<uint8_t>& packed, int i) {
  return static_cast<int32_t>(raw_element(packed, i) & 0xFF);
}

__device__ __forceinline__ int32_t code_at(const Packed<int8_t>& packed, int i) {
  return static_cast<int8_t>(raw_element(packed, i));
}

__device__ __forceinline__ int32_t code_at(const Packed<Bits16>& packed, int i) {
  return static_cast<int32_t>(raw_element(packed, i) & 0xFFFF);
}

// The low halves of 16 codes.
__device__ __forceinline__ void pack_codes(const int32_t (&codes)[ELEMENTS], Packed<Bits16>& packed) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; i += 2) {
    packed.words[i / 2] = (static_cast<uint32_t>(codes[i]) & 0xFFFF) | static_cast<uint32_t>(codes[i + 1]) << 16;
  }
}

// The low bytes of 16 codes.
template <class Code>
__device__ __forceinline__ void pack_codes(const int32_t (&codes)[ELEMENTS], Packed<Code>& packed) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; i += 4) {
#if defined(__CUDACC__)
    const uint32_t low = __byte_perm(codes[i], codes[i + 1], 0x0040);
    const uint32_t high = __byte_perm(codes[i + 2], codes[i + 3], 0x0040);
    packed.words[i / 4] = __byte_perm(low, high, 0x5410);
#else
    packed.words[i / 4] =
        (codes[i] & 0xFFu) | (codes[i + 1] & 0xFFu) << 8 | (codes[i + 2] & 0xFFu) << 16 | (codes[i + 3] & 0xFFu) << 24;
#endif
  }
}

// Some of the elements of one tensor that belong to one thread: `count` of them from `offset` on. With `wide` it is all
// 16, at an address that is a multiple of 16 bytes.
struct Span {
  int64_t offset;
  int32_t count;
  bool wide;
};

// Elements beyond the span are `fill`.
template <class T>
__device__ __forceinline__ void load(const void* base, const Span& span, T fill, Packed<T>& packed) {
  const T* from = static_cast<const T*>(base) + span.offset;
  if (span.wide) {
#pragma unroll
    for (int i = 0; i < Packed<T>::WORDS; i += 4) {
      const uint4 words = reinterpret_cast<const uint4*>(from)[i / 4];
      packed.words[i] = words.x;
      packed.words[i + 1] = words.y;
      packed.words[i + 2] = words.z;
      packed.words[i + 3] = words.w;
    }
  } else {
    constexpr int PER_WORD = 4 / sizeof(T);
    constexpr uint32_t SHIFT = 8 * sizeof(T);
#pragma unroll
    for (int i = 0; i < Packed<T>::WORDS; ++i) {
      uint32_t word = 0;
#pragma unroll
      for (int j = 0; j < PER_WORD; ++j) {
        const int element = PER_WORD * i + j;
        word |= raw_bits(element < span.count ? from[element] : fill) << (SHIFT % 32 * j);
      }
      packed.words[i] = word;
    }
  }
}

template <class T>
__device__ __forceinline__ void store(void* base, const Span& span, const Packed<T>& packed) {
  T* to = static_cast<T*>(base) + span.offset;
  if (span.wide) {
#pragma unroll
    for (int i = 0; i < Packed<T>::WORDS; i += 4) {
      reinterpret_cast<uint4*>(to)[i / 4] =
          make_uint4(packed.words[i], packed.words[i + 1], packed.words[i + 2], packed.words[i + 3]);
    }
  } else {
    constexpr int PER_WORD = 4 / sizeof(T);
    constexpr uint32_t SHIFT = 8 * sizeof(T);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      if (i < span.count) to[i] = from_raw_bits<T>(packed.words[i / PER_WORD] >> (SHIFT % 32 * (i % PER_WORD)));
    }
  }
}

// The largest of the numbers that the `lanes` neighbouring threads of one block hold: 1, 2, 4, 8 or 16 of them. All
// threads of the warp take part.
template <class Int>
__device__ __forceinline__ Int largest_in_block(Int x, int lanes) {
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) {
    const Int other = __shfl_xor_sync(ALL_LANES, x, distance);
    if (distance < lanes) x = larger(x, other);
  }
  return x;
}

}  // namespace fused8::FUSED8_ISA
