// One Adam step on 8-bit state: per block load codes, parameters and gradients; decode; step; encode; store. A block
// stays in the first-level cache between its loops, so memory is passed over once.
//
// Included once per instruction set, each time with another FUSED8_ISA. Nothing here may call a function template of
// the standard library: the linker would share it between the instruction sets.

#pragma once

#include "block_codecs.h"
// After lanes.h, whose overloads its templates use.
#include "../adam.h"
#include "operands.h"

namespace fused8::FUSED8_ISA {

// How far ahead to fetch, in elements: 256 to 2048 measure alike. The processor's own prefetching falls behind while a
// block is encoded; without ours, the step takes a quarter longer.
constexpr int FETCH_AHEAD = 512;
constexpr int CACHE_LINE = 64;

// `own` itself if it holds W elements, else a copy in `buffer`, filled up to W.
template <int W, class T>
T* padded(T* own, int64_t length, T fill, T* buffer) {
  if (length == W) return own;
  for (int i = 0; i < W; ++i) buffer[i] = fill;
  __builtin_memcpy(buffer, own, length * sizeof(T));
  return buffer;
}

template <class T>
void store_padded(const T* buffer, T* own, int64_t length) {
  if (buffer != own) __builtin_memcpy(own, buffer, length * sizeof(T));
}

// The tensors' own memory FETCH_AHEAD elements further on; the kernel itself may be working on copies.
struct FetchAhead {
  const char* param;
  const char* grad;
  int64_t param_size;
  int64_t grad_size;
};

// What the kernel works on: the tensors' own memory if the block is W elements long, else copies.
template <class Codec>
struct Block {
  float* param;
  const float* grad;
  typename Codec::Code* exp_avg;
  typename Codec::SqCode* exp_avg_sq;
  typename Codec::SqCode* max_exp_avg_sq;
  typename Codec::Scale* exp_avg_scale;
  typename Codec::SqScale* exp_avg_sq_scale;
  typename Codec::SqScale* max_exp_avg_sq_scale;
  uint32_t index;
  FetchAhead ahead;
};

template <int W>
int64_t count_unusable(const float* grad) {
  int64_t count = 0;
  for (int i = 0; i < W; ++i) count += (float_bits(grad[i]) & MAGNITUDE_MASK) > LARGEST_GRAD_BITS;
  return count;
}

// Returns the number of gradient elements that counted as 0.
template <int W, bool AMSGRAD, class Codec>
int64_t step_block(const Block<Codec>& block, const Scalars& scalars) {
  alignas(64) float m[W], v[W], max_v[AMSGRAD ? W : 1];
  float* __restrict param = block.param;
  const float* __restrict grad = block.grad;
  auto* __restrict codes = block.exp_avg;
  auto* __restrict sq_codes = block.exp_avg_sq;
  auto* __restrict max_codes = block.max_exp_avg_sq;
  const FetchAhead ahead = block.ahead;
  const Scalars s = scalars;
  const typename Codec::Decoder decoder(*block.exp_avg_scale, *block.exp_avg_sq_scale);
  const typename Codec::SqDecoder max_decoder(AMSGRAD ? *block.max_exp_avg_sq_scale : 0);
  typename Codec::Extent extent;
  typename Codec::SqExtent max_extent;
  Ints largest_grad = {};
  for (int i = 0; i < W; i += LANES) {
    if (i % (CACHE_LINE / sizeof(float)) == 0) {
      prefetch(ahead.param + i * ahead.param_size);
      prefetch(ahead.grad + i * ahead.grad_size);
    }
    if (i % CACHE_LINE == 0) {
      prefetch(codes + i + FETCH_AHEAD);
      prefetch(sq_codes + i + FETCH_AHEAD);
    }
    Floats new_m, new_v, new_max = {};
    decoder.both(load(codes + i), load(sq_codes + i), new_m, new_v);
    if constexpr (AMSGRAD) new_max = max_decoder.sq(load(max_codes + i));
    Floats new_param = load(param + i);
    const Floats g = load(grad + i);
    adam_update<AMSGRAD>(new_param, usable_or_zero(g), new_m, new_v, new_max, s);
    store(param + i, new_param);
    store(m + i, new_m);
    store(v + i, new_v);
    extent.add(new_m, new_v);
    if constexpr (AMSGRAD) {
      store(max_v + i, new_max);
      max_extent.add_sq(new_max);
    }
    largest_grad = larger(largest_grad, float_bits(g) & MAGNITUDE_MASK);
  }
  Codec::template encode<W>(m, v, extent, adaptive::dither(block.index, s.time_offset), codes, sq_codes,
                            *block.exp_avg_scale, *block.exp_avg_sq_scale);
  if constexpr (AMSGRAD) {
    Codec::template encode_sq<W>(max_v, max_extent, max_codes, *block.max_exp_avg_sq_scale);
  }
  return largest_lane(largest_grad) > LARGEST_GRAD_BITS ? count_unusable<W>(grad) : 0;
}

inline FetchAhead fetch_ahead(const Call& args, const TensorArgs& tensor, const Place& place) {
  FetchAhead ahead;
  ahead.param_size = size_of(args.param_dtype);
  ahead.grad_size = size_of(args.grad_dtype);
  ahead.param = at<char>(tensor.param, (place.offset + FETCH_AHEAD) * ahead.param_size);
  ahead.grad = at<char>(tensor.grad, (place.offset + FETCH_AHEAD) * ahead.grad_size);
  return ahead;
}

template <int W, bool AMSGRAD, class Codec>
int64_t step_place(const Call& args, const TensorArgs& tensor, const Place& place) {
  using Code = typename Codec::Code;
  using SqCode = typename Codec::SqCode;
  using SqScale = typename Codec::SqScale;
  alignas(64) float params[W], grads[W];
  alignas(64) Code codes[W];
  alignas(64) SqCode sq_codes[W], max_codes[AMSGRAD ? W : 1];
  const Fp32Operands operands(args, tensor, place);
  Code* exp_avg = at<Code>(tensor.exp_avg, place.offset);
  SqCode* exp_avg_sq = at<SqCode>(tensor.exp_avg_sq, place.offset);
  SqCode* max_exp_avg_sq = at<SqCode>(tensor.max_exp_avg_sq, place.offset);
  const int64_t n = place.length;

  Block<Codec> block;
  block.param = padded<W>(operands.param, n, 0.0f, params);
  block.grad = padded<W>(const_cast<float*>(operands.grad), n, 0.0f, grads);
  block.exp_avg = padded<W>(exp_avg, n, Codec::ZERO, codes);
  block.exp_avg_sq = padded<W>(exp_avg_sq, n, SqCode{}, sq_codes);
  if constexpr (AMSGRAD) block.max_exp_avg_sq = padded<W>(max_exp_avg_sq, n, SqCode{}, max_codes);
  block.exp_avg_scale = at<typename Codec::Scale>(tensor.exp_avg_scale, place.block);
  block.exp_avg_sq_scale = at<SqScale>(tensor.exp_avg_sq_scale, place.block);
  block.max_exp_avg_sq_scale = at<SqScale>(tensor.max_exp_avg_sq_scale, place.block);
  block.index = place.index;
  block.ahead = fetch_ahead(args, tensor, place);

  const int64_t nonfinite = step_block<W, AMSGRAD>(block, tensor.scalars);

  store_padded(block.param, operands.param, n);
  operands.store_param(tensor, place);
  store_padded(block.exp_avg, exp_avg, n);
  store_padded(block.exp_avg_sq, exp_avg_sq, n);
  if constexpr (AMSGRAD) store_padded(block.max_exp_avg_sq, max_exp_avg_sq, n);
  return nonfinite;
}

// With the smallest width that holds the place: a row of 16 elements should not cost as much as one of 256.
template <class Codec, bool AMSGRAD>
int64_t step_any_width(const Call& args, const TensorArgs& tensor, const Place& place) {
  if (place.length > 128) return step_place<256, AMSGRAD, Codec>(args, tensor, place);
  if (place.length > 64) return step_place<128, AMSGRAD, Codec>(args, tensor, place);
  if (place.length > 32) return step_place<64, AMSGRAD, Codec>(args, tensor, place);
  if (place.length > 16) return step_place<32, AMSGRAD, Codec>(args, tensor, place);
  return step_place<16, AMSGRAD, Codec>(args, tensor, place);
}

// Steps the blocks of a tensor whose first element lies in [begin, end).
template <class Codec, bool AMSGRAD>
int64_t step_tensor(const Call& args, const TensorArgs& tensor, int64_t begin, int64_t end) {
  int64_t nonfinite = 0;
  int64_t row = begin / tensor.inner;
  int64_t block_in_row = (begin % tensor.inner + args.block_size - 1) / args.block_size;
  for (;; ++block_in_row) {
    if (block_in_row == tensor.blocks_per_row) {
      block_in_row = 0;
      ++row;
    }
    const int64_t col = block_in_row * args.block_size;
    Place place;
    place.offset = row * tensor.inner + col;
    if (place.offset >= end) return nonfinite;
    place.length = smaller(tensor.inner - col, args.block_size);
    place.block = row * tensor.blocks_per_row + block_in_row;
    place.index = tensor.first_index + static_cast<uint32_t>(row) * tensor.row_stride + static_cast<uint32_t>(col);
    nonfinite += step_any_width<Codec, AMSGRAD>(args, tensor, place);
  }
}

// FP32 state has no blocks; a stretch may cross rows.
template <bool AMSGRAD>
int64_t step_tensor_fp32(const Call& args, const TensorArgs& tensor, int64_t begin, int64_t end) {
  const Scalars s = tensor.scalars;
  int64_t nonfinite = 0;
  Place place = {};
  for (int64_t offset = begin; offset < end; offset += place.length) {
    place.offset = offset;
    place.length = smaller<int64_t>(end - offset, MAX_WIDTH);
    if (args.stochastic_rounding) {  // which needs the element index: within a row, consecutive
      const int64_t row = offset / tensor.inner;
      const int64_t col = offset % tensor.inner;
      place.length = smaller(place.length, tensor.inner - col);
      place.index = tensor.first_index + static_cast<uint32_t>(row) * tensor.row_stride + static_cast<uint32_t>(col);
    }
    const Fp32Operands operands(args, tensor, place);
    float* __restrict param = operands.param;
    const float* __restrict grad = operands.grad;
    float* __restrict exp_avg = at<float>(tensor.exp_avg, offset);
    float* __restrict exp_avg_sq = at<float>(tensor.exp_avg_sq, offset);
    float* __restrict max_exp_avg_sq = at<float>(tensor.max_exp_avg_sq, offset);
    float without_amsgrad = 0.0f;
    for (int64_t i = 0; i < place.length; ++i) {
      adam_update<AMSGRAD>(param[i], usable_or_zero(grad[i]), exp_avg[i], exp_avg_sq[i],
                           AMSGRAD ? max_exp_avg_sq[i] : without_amsgrad, s);
      nonfinite += (float_bits(grad[i]) & MAGNITUDE_MASK) > LARGEST_GRAD_BITS;
    }
    operands.store_param(tensor, place);
  }
  return nonfinite;
}

using TensorFunction = int64_t (*)(const Call&, const TensorArgs&, int64_t begin, int64_t end);

template <bool AMSGRAD>
TensorFunction tensor_function(CodecName codec) {
  switch (codec) {
    case CodecName::ADAPTIVE: return step_tensor<AdaptiveCodec, AMSGRAD>;
    case CodecName::DYNAMIC: return step_tensor<DynamicCodec, AMSGRAD>;
    case CodecName::E4M3: return step_tensor<E4M3Codec, AMSGRAD>;
    case CodecName::FP32: break;
  }
  return step_tensor_fp32<AMSGRAD>;
}

// The last tensor that begins at or before `element`.
inline int64_t find_tensor(const Call& args, int64_t element) {
  int64_t low = 0, high = args.tensor_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (args.tensors[middle].begin <= element ? low : high) = middle;
  }
  return low;
}

int64_t step_elements(const StepArgs& step_args, int64_t begin, int64_t end) {
  const Call args(step_args);
  const TensorFunction step = args.amsgrad ? tensor_function<true>(args.codec) : tensor_function<false>(args.codec);
  int64_t nonfinite = 0;
  for (int64_t t = find_tensor(args, begin); t < args.tensor_count && args.tensors[t].begin < end; ++t) {
    const TensorArgs& tensor = args.tensors[t];
    const int64_t from = larger<int64_t>(begin - tensor.begin, 0);
    const int64_t to = smaller(end, tensor.end) - tensor.begin;
    if (from < to) nonfinite += step(args, tensor, from, to);
  }
  return nonfinite;
}

}  // namespace fused8::FUSED8_ISA
