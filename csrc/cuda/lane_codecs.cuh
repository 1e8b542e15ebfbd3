// The state formats for the 16 elements of a thread, whose block is spread over `lanes` threads. A codec is a struct
// with
//   Code, SqCode, Scale, SqScale   the types of the state tensors,
//   ZERO                           the code of m = 0 (that of v = 0 is 0),
//   Shared                         what the threads of a tile share, filled by `prepare`,
//   decode, decode_sq              codes -> FP32,
//   encode, encode_sq              FP32 -> codes and scales; all threads of a warp call them together.

#pragma once

#include "../codecs.h"
#include "arithmetic.cuh"
#include "lanes.cuh"

namespace fused8::FUSED8_ISA {

using FloatLane = float[ELEMENTS];

struct Nothing {};

struct AdaptiveCodec {
  using Code = int8_t;
  using SqCode = uint8_t;
  using Scale = float;
  using SqScale = int32_t;
  using Shared = Nothing;
  static constexpr Code ZERO = 0;

  __device__ static void prepare(Shared&) {}

  __device__ __forceinline__ static void decode(const Packed<Code>& codes, const Packed<SqCode>& sq_codes, Scale scale,
                                                SqScale meta, const Shared&, FloatLane& m, FloatLane& v) {
    const adaptive::Grid<int32_t> grid = adaptive::unpack_grid(meta);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int32_t cell = adaptive::decode_cell(code_at(sq_codes, i), grid);
      m[i] = adaptive::decode(code_at(codes, i), scale, cell, grid);
      v[i] = adaptive::decode_sq(cell, grid);
    }
  }

  __device__ __forceinline__ static void decode_sq(const Packed<SqCode>& codes, SqScale meta, const Shared&,
                                                   FloatLane& v) {
    const adaptive::Grid<int32_t> grid = adaptive::unpack_grid(meta);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) v[i] = adaptive::decode_sq(adaptive::decode_cell(code_at(codes, i), grid), grid);
  }

  // The smallest positive v is kept as its bits minus 1, unsigned and negated, so that 0 becomes the smallest number
  // and both reductions are maxima.
  __device__ __forceinline__ static adaptive::Grid<int32_t> choose_grid(const FloatLane& v, int lanes) {
    int32_t largest = 0;
    uint32_t smallest_minus_1 = 0xFFFFFFFF;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      largest = larger(largest, float_bits(v[i]));
      smallest_minus_1 = smaller(smallest_minus_1, static_cast<uint32_t>(float_bits(v[i])) - 1);
    }
    largest = largest_in_block(largest, lanes);
    const uint32_t smallest = ~largest_in_block(~smallest_minus_1, lanes) + 1;
    return adaptive::choose_grid(largest, static_cast<int32_t>(smallest));
  }

  // Overwrites m. `index` is the element index of the first element.
  __device__ __forceinline__ static void encode(FloatLane& m, const FloatLane& v, uint32_t index, uint32_t time_offset,
                                                int lanes, const Shared&, Packed<Code>& codes, Packed<SqCode>& sq_codes,
                                                Scale& scale, SqScale& meta) {
    const adaptive::Grid<int32_t> grid = choose_grid(v, lanes);
    const uint32_t first_dither = adaptive::dither(index, time_offset);
    int32_t unpacked[ELEMENTS];
    int32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const uint32_t dither = first_dither + static_cast<uint32_t>(i) * adaptive::SPACE;
      const int32_t sq_bits = float_bits(v[i]);
      const int32_t cell = adaptive::encode_cell(sq_bits, adaptive::dithered(dither, grid), grid);
      unpacked[i] = adaptive::encode_sq(sq_bits, cell, grid);
      m[i] = adaptive::ratio(m[i], sq_bits, cell, grid);
      largest = larger(largest, float_bits(m[i]) & MAGNITUDE_MASK);
    }
    pack_codes(unpacked, sq_codes);
    const adaptive::RatioScale ratio_scale = adaptive::ratio_scale(largest_in_block(largest, lanes));
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) unpacked[i] = round_to_int(m[i] * ratio_scale.inverse);
    pack_codes(unpacked, codes);
    scale = ratio_scale.scale;
    meta = adaptive::pack_grid(grid);
  }

  __device__ __forceinline__ static void encode_sq(const FloatLane& v, int lanes, const Shared&, Packed<SqCode>& codes,
                                                   SqScale& meta) {
    const adaptive::Grid<int32_t> grid = choose_grid(v, lanes);
    int32_t unpacked[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const int32_t sq_bits = float_bits(v[i]);
      const int32_t cell = adaptive::encode_cell(sq_bits, adaptive::nearest(grid), grid);
      unpacked[i] = adaptive::encode_sq(sq_bits, cell, grid);
    }
    pack_codes(unpacked, codes);
    meta = adaptive::pack_grid(grid);
  }
};

// A format whose scale is the block's largest |x|. `Format` has decode, encode and encode_sq.
template <class Format>
struct AbsmaxCodec {
  using Code = uint8_t;
  using SqCode = uint8_t;
  using Scale = float;
  using SqScale = float;
  using Shared = typename Format::Shared;
  static constexpr Code ZERO = Format::ZERO;

  __device__ static void prepare(Shared& shared) { Format::prepare(shared); }

  __device__ __forceinline__ static void decode(const Packed<Code>& codes, const Packed<SqCode>& sq_codes, Scale scale,
                                                SqScale sq_scale, const Shared& shared, FloatLane& m, FloatLane& v) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) m[i] = Format::decode(code_at(codes, i), shared) * scale;
    decode_sq(sq_codes, sq_scale, shared, v);
  }

  __device__ __forceinline__ static void decode_sq(const Packed<SqCode>& codes, SqScale scale, const Shared& shared,
                                                   FloatLane& v) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) v[i] = Format::decode_sq(code_at(codes, i), shared) * scale;
  }

  __device__ __forceinline__ static float absmax(const FloatLane& x, int lanes) {
    int32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) largest = larger(largest, float_bits(x[i]) & MAGNITUDE_MASK);
    return bits_float(largest_in_block(largest, lanes));
  }

  __device__ __forceinline__ static void encode(FloatLane& m, const FloatLane& v, uint32_t, uint32_t, int lanes,
                                                const Shared& shared, Packed<Code>& codes, Packed<SqCode>& sq_codes,
                                                Scale& scale, SqScale& sq_scale) {
    scale = absmax(m, lanes);
    const RelativeTo relative(scale);
    int32_t unpacked[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      unpacked[i] = Format::encode(relative(m[i]), shared);
    }
    pack_codes(unpacked, codes);
    encode_sq(v, lanes, shared, sq_codes, sq_scale);
  }

  __device__ __forceinline__ static void encode_sq(const FloatLane& v, int lanes, const Shared& shared,
                                                   Packed<SqCode>& codes, SqScale& scale) {
    scale = absmax(v, lanes);
    const RelativeTo relative(scale);
    int32_t unpacked[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) unpacked[i] = Format::encode_sq(relative(v[i]), v[i], shared);
    pack_codes(unpacked, codes);
  }
};

// The look-ups of a warp go to different places of the maps, for which shared memory is made.
struct DynamicMaps {
  dynamic::Map is_signed, is_unsigned;
};

__device__ const DynamicMaps DYNAMIC_MAPS = {dynamic::SIGNED, dynamic::UNSIGNED};

struct DynamicFormat {
  using Shared = DynamicMaps;
  static constexpr uint8_t ZERO = dynamic::SIGNED_ZERO;

  __device__ static void prepare(Shared& shared) {
    static_assert(sizeof(Shared) % sizeof(uint4) == 0);
    const auto* from = reinterpret_cast<const uint4*>(&DYNAMIC_MAPS);
    auto* to = reinterpret_cast<uint4*>(&shared);
    for (unsigned i = threadIdx.x; i < sizeof(Shared) / sizeof(uint4); i += blockDim.x) to[i] = from[i];
    __syncthreads();
  }

  __device__ static float decode(int32_t code, const Shared& maps) { return lookup(maps.is_signed.value, code); }
  __device__ static float decode_sq(int32_t code, const Shared& maps) { return lookup(maps.is_unsigned.value, code); }
  __device__ static int32_t encode(float y, const Shared& maps) { return dynamic::encode(y, maps.is_signed); }
  __device__ static int32_t encode_sq(float y, float v, const Shared& maps) {
    return dynamic::encode_sq(y, v, maps.is_unsigned);
  }
};

struct E4M3Format {
  using Shared = Nothing;
  static constexpr uint8_t ZERO = 0;
  __device__ static void prepare(Shared&) {}
  __device__ static float decode(int32_t code, const Shared&) { return e4m3::decode(code); }
  __device__ static float decode_sq(int32_t code, const Shared&) { return e4m3::decode(code); }
  __device__ static int32_t encode(float y, const Shared&) { return e4m3::encode(y); }
  __device__ static int32_t encode_sq(float y, float v, const Shared&) { return e4m3::encode_sq(y, v); }
};

using DynamicCodec = AbsmaxCodec<DynamicFormat>;
using E4M3Codec = AbsmaxCodec<E4M3Format>;

// State that is not encoded.
struct Fp32Codec {
  using Code = float;
  using SqCode = float;
  using Scale = float;
  using SqScale = float;
  using Shared = Nothing;
  static constexpr Code ZERO = 0.0f;

  __device__ static void prepare(Shared&) {}
  __device__ __forceinline__ static void decode(const Packed<Code>& codes, const Packed<SqCode>& sq_codes, Scale,
                                                SqScale, const Shared&, FloatLane& m, FloatLane& v) {
    unpack(codes, m);
    unpack(sq_codes, v);
  }
  __device__ __forceinline__ static void decode_sq(const Packed<SqCode>& codes, SqScale, const Shared&, FloatLane& v) {
    unpack(codes, v);
  }
  __device__ __forceinline__ static void encode(FloatLane& m, const FloatLane& v, uint32_t, uint32_t, int,
                                                const Shared&, Packed<Code>& codes, Packed<SqCode>& sq_codes, Scale&,
                                                SqScale&) {
    pack(m, codes);
    pack(v, sq_codes);
  }
  __device__ __forceinline__ static void encode_sq(const FloatLane& v, int, const Shared&, Packed<SqCode>& codes,
                                                   SqScale&) {
    pack(v, codes);
  }
};

}  // namespace fused8::FUSED8_ISA
