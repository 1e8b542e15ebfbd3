// The state formats, a block at a time. A codec here is a struct with
//   Code, SqCode, Scale, SqScale   the types of the state tensors,
//   ZERO                           the code of m = 0 (that of v = 0 is 0),
//   Decoder, SqDecoder             codes of one block -> FP32,
//   Extent, SqExtent               what encoding has to know about a whole block, gathered while it is stepped,
//   encode, encode_sq              FP32 -> codes and scales of one block of W elements.

#pragma once

#include "lanes.h"
// After lanes.h, whose overloads its templates use.
#include "../codecs.h"
#include "dynamic_buckets.h"
#include "quotient.h"

namespace fused8::FUSED8_ISA {

struct AdaptiveCodec {
  using Code = int8_t;
  using SqCode = uint8_t;
  using Scale = float;
  using SqScale = int32_t;
  static constexpr Code ZERO = 0;
  using LaneGrid = adaptive::Grid<Ints>;

  static LaneGrid in_all_lanes(adaptive::Grid<int32_t> grid) { return {broadcast(grid.base), broadcast(grid.shift)}; }

  struct SqDecoder {
    LaneGrid grid;
    explicit SqDecoder(SqScale meta) : grid(in_all_lanes(adaptive::unpack_grid(meta))) {}
    Floats sq(Ints code) const { return adaptive::decode_sq(adaptive::decode_cell(code, grid), grid); }
  };

  struct Decoder : SqDecoder {
    float scale;
    Decoder(Scale scale, SqScale meta) : SqDecoder(meta), scale(scale) {}
    void both(Ints code, Ints sq_code, Floats& m, Floats& v) const {
      const Ints cell = adaptive::decode_cell(sq_code, grid);
      m = adaptive::decode(code, scale, cell, grid);
      v = adaptive::decode_sq(cell, grid);
    }
  };

  // The smallest positive v is kept as its bits minus 1, unsigned, so that 0 becomes the largest number.
  struct SqExtent {
    Ints largest = {};
    Uints smallest_minus_1 = Uints{} - 1;
    void add_sq(Floats v) {
      largest = larger(largest, float_bits(v));
      smallest_minus_1 = smaller(smallest_minus_1, (Uints)float_bits(v) - 1);
    }
    adaptive::Grid<int32_t> grid() const {
      const uint32_t smallest = smallest_lane(smallest_minus_1) + 1;
      return adaptive::choose_grid(largest_lane(largest), static_cast<int32_t>(smallest));
    }
  };

  struct Extent : SqExtent {
    void add(Floats, Floats v) { add_sq(v); }
  };

  // Overwrites m. `dither` is that of the first element.
  template <int W>
  [[gnu::always_inline]] static void encode(float* __restrict m, const float* __restrict v, const Extent& extent,
                                            uint32_t dither, Code* __restrict codes, SqCode* __restrict sq_codes,
                                            Scale& scale, SqScale& sq_scale) {
    const adaptive::Grid<int32_t> of_block = extent.grid();
    const LaneGrid grid = in_all_lanes(of_block);
    Uints dithers = dither + lane_numbers() * adaptive::SPACE;
    Ints largest = {};
    for (int i = 0; i < W; i += LANES) {
      const Ints sq_bits = float_bits(load(v + i));
      const Ints cell = adaptive::encode_cell(sq_bits, adaptive::dithered(dithers, grid), grid);
      const Floats ratio = adaptive::ratio(load(m + i), sq_bits, cell, grid);
      store(sq_codes + i, adaptive::encode_sq(sq_bits, cell, grid));
      store(m + i, ratio);
      largest = larger(largest, float_bits(ratio) & MAGNITUDE_MASK);
      dithers += LANES * adaptive::SPACE;
    }
    const adaptive::RatioScale ratio_scale = adaptive::ratio_scale(largest_lane(largest));
    for (int i = 0; i < W; i += LANES) store(codes + i, round_to_low_bits(load(m + i) * ratio_scale.inverse));
    scale = ratio_scale.scale;
    sq_scale = adaptive::pack_grid(of_block);
  }

  template <int W>
  [[gnu::always_inline]] static void encode_sq(const float* __restrict v, const SqExtent& extent,
                                               SqCode* __restrict codes, SqScale& scale) {
    const adaptive::Grid<int32_t> of_block = extent.grid();
    const LaneGrid grid = in_all_lanes(of_block);
    for (int i = 0; i < W; i += LANES) {
      const Ints sq_bits = float_bits(load(v + i));
      const Ints cell = adaptive::encode_cell(sq_bits, adaptive::nearest(grid), grid);
      store(codes + i, adaptive::encode_sq(sq_bits, cell, grid));
    }
    scale = adaptive::pack_grid(of_block);
  }
};

// A format whose scale is the block's largest |x|. `Format` has decode, encode and encode_sq.
template <class Format>
struct AbsmaxCodec {
  using Code = uint8_t;
  using SqCode = uint8_t;
  using Scale = float;
  using SqScale = float;
  static constexpr Code ZERO = Format::ZERO;

  struct SqDecoder {
    float sq_scale;
    explicit SqDecoder(SqScale sq_scale) : sq_scale(sq_scale) {}
    Floats sq(Ints code) const { return Format::decode_sq(code) * sq_scale; }
  };

  struct Decoder : SqDecoder {
    float scale;
    Decoder(Scale scale, SqScale sq_scale) : SqDecoder(sq_scale), scale(scale) {}
    void both(Ints code, Ints sq_code, Floats& m, Floats& v) const {
      m = Format::decode(code) * scale;
      v = SqDecoder::sq(sq_code);
    }
  };

  struct SqExtent {
    Ints largest_sq = {};
    void add_sq(Floats v) { largest_sq = larger(largest_sq, float_bits(v)); }
  };

  struct Extent : SqExtent {
    Ints largest = {};
    void add(Floats m, Floats v) {
      largest = larger(largest, float_bits(m) & MAGNITUDE_MASK);
      SqExtent::add_sq(v);
    }
  };

  template <int W>
  [[gnu::always_inline]] static void encode(const float* __restrict m, const float* __restrict v, const Extent& extent,
                                            uint32_t, Code* __restrict codes, SqCode* __restrict sq_codes, Scale& scale,
                                            SqScale& sq_scale) {
    const float absmax = bits_float(largest_lane(extent.largest));
    if (absmax == 0.0f) {
      for (int i = 0; i < W; ++i) codes[i] = ZERO;
    } else {
      const Quotient quotient(absmax);
      for (int i = 0; i < W; i += LANES) store(codes + i, Format::encode(quotient(load(m + i))));
    }
    scale = absmax;
    encode_sq<W>(v, extent, sq_codes, sq_scale);
  }

  template <int W>
  [[gnu::always_inline]] static void encode_sq(const float* __restrict v, const SqExtent& extent,
                                               SqCode* __restrict codes, SqScale& scale) {
    const float absmax = bits_float(largest_lane(extent.largest_sq));
    if (absmax == 0.0f) {
      for (int i = 0; i < W; ++i) codes[i] = 0;
    } else {
      const Quotient quotient(absmax);
      for (int i = 0; i < W; i += LANES) {
        const Floats x = load(v + i);
        store(codes + i, Format::encode_sq(quotient(x), x));
      }
    }
    scale = absmax;
  }
};

struct DynamicFormat {
  static constexpr uint8_t ZERO = dynamic::SIGNED_ZERO;
  static Floats decode(Ints code) { return lookup(dynamic::SIGNED.value, code); }
  static Floats decode_sq(Ints code) { return lookup(dynamic::UNSIGNED.value, code); }
  static Ints encode(Floats y) { return dynamic::encode_by_bucket(y); }
  static Ints encode_sq(Floats y, Floats v) { return dynamic::encode_sq_by_bucket(y, v); }
};

struct E4M3Format {
  static constexpr uint8_t ZERO = 0;
  static Floats decode(Ints code) { return e4m3::decode(code); }
  static Floats decode_sq(Ints code) { return e4m3::decode(code); }
  static Ints encode(Floats y) { return e4m3::encode(y); }
  static Ints encode_sq(Floats y, Floats v) { return e4m3::encode_sq(y, v); }
};

using DynamicCodec = AbsmaxCodec<DynamicFormat>;
using E4M3Codec = AbsmaxCodec<E4M3Format>;

}  // namespace fused8::FUSED8_ISA
