// The CUDA kernel: one Adam step on 8-bit state for many tensors in one launch. Per block load codes, parameters and
// gradients; decode; step; encode; store; all between the loads and the stores happens in registers.
//
// A tile is what one thread block takes in: as many blocks of one tensor as its threads can hold, 16 elements each.
// The threads of a block are neighbours in one warp and reduce by shuffles. A row of 40 elements takes 4 threads, not
// the 16 of a whole block, so that short rows leave few threads idle.
//
// There are no launches here: a plain C++ compiler can compile this file, and the tests run it so.

#pragma once

#include "../adam.h"
#include "../formats.h"
#include "../tensor_view.h"
#include "arithmetic.cuh"
#include "lane_codecs.cuh"
#include "lanes.cuh"

namespace fused8::FUSED8_ISA {

// Threads per tile, 2048 elements: a multiple of the 4 warp schedulers, few enough that the last tiles end together.
constexpr int THREADS = 128;

// One tensor in the parameters of a launch.
struct TensorArgs {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;
  void* exp_avg_scale;
  void* exp_avg_sq_scale;
  void* max_exp_avg_sq_scale;
  void* param_correction;
  int64_t inner;
  uint32_t blocks;
  uint32_t blocks_per_row;
  uint32_t row_multiplier;  // block * row_multiplier >> row_shift is block / blocks_per_row
  uint8_t row_shift;
  uint8_t lanes;         // threads per block
  bool aligned;          // 128-bit accesses are possible wherever a thread has all its elements
  uint32_t number;       // in the lists of the call, which `table` follows
  uint32_t scalar_row;   // of the launch or of the call, see find_scalars; unused where `table` stands on the device
  uint32_t first_index;  // element index of its first element and distance of its rows, modulo 2^32; likewise
  uint32_t row_stride;
};

// Parameters of one kernel launch: at most 4096 bytes on every GPU and driver. So the pointers reach the kernel with
// the launch itself, and need neither device memory of their own nor a copy that must have ended.
constexpr int MOST_TENSORS = 32;
constexpr int MOST_SCALAR_ROWS = 4;

struct Launch {
  const Scalars* device_scalars;  // null: see `scalars`
  const int64_t* device_table;    // null: see `tensors`
  const float* grad_scale;        // null: 1
  const float* found_inf;         // null: 0
  unsigned long long* nonfinite;
  int32_t block_size;
  int32_t correction_bits;  // extra mantissa bits of the parameters: 0, 8 or 16
  Format format;            // of parameters that are Bits16 or Bits8
  bool stochastic_rounding;
  bool maximize;
  bool coupled_weight_decay;  // weight_decay * param is added to the gradient (L2)
  uint32_t tiles;
  uint32_t tensor_count;
  uint32_t first_tile[MOST_TENSORS];  // of each tensor; beyond the last the largest number
  TensorArgs tensors[MOST_TENSORS];
  Scalars scalars[MOST_SCALAR_ROWS];
};
static_assert(sizeof(Launch) <= 4096);

// Where the elements of one thread lie.
struct Place {
  Span span;
  uint32_t block;  // in its tensor
  uint32_t row;
  bool in_tensor;   // false for the threads that the last tile has too many
  bool first_lane;  // the thread that stores the scales
};

__device__ __forceinline__ uint32_t find_tensor(const Launch& launch, uint32_t tile) {
  uint32_t found = 0;
#pragma unroll
  for (uint32_t distance = MOST_TENSORS / 2; distance > 0; distance /= 2) {
    if (launch.first_tile[found + distance] <= tile) found += distance;
  }
  return found;
}

__device__ __forceinline__ Place find_place(const TensorArgs& tensor, uint32_t tile_of_tensor, int32_t block_size) {
  const uint32_t lanes = tensor.lanes;
  const uint32_t lane = threadIdx.x & (lanes - 1);
  Place place;
  place.block = (tile_of_tensor * THREADS + threadIdx.x) / lanes;
  place.in_tensor = place.block < tensor.blocks;
  place.first_lane = lane == 0;
  place.row = static_cast<uint32_t>(static_cast<uint64_t>(place.block) * tensor.row_multiplier >> tensor.row_shift);
  const uint32_t block_in_row = place.block - place.row * tensor.blocks_per_row;
  const int64_t column = static_cast<int64_t>(block_in_row) * block_size + lane * ELEMENTS;
  place.span.offset = place.row * tensor.inner + column;
  const int64_t left = tensor.inner - column;
  place.span.count = place.in_tensor && left > 0 ? static_cast<int32_t>(smaller<int64_t>(left, ELEMENTS)) : 0;
  place.span.wide = tensor.aligned && place.span.count == ELEMENTS;
  return place;
}

// Rows of `scalars` are numbered from the first of the call where they stand on the device, from the first of the
// launch where they came with it.
__device__ __forceinline__ Scalars find_scalars(const Launch& launch, const TensorArgs& tensor) {
  if (launch.device_scalars == nullptr) return launch.scalars[tensor.scalar_row];
  const int64_t* row = launch.device_table;
  return launch.device_scalars[row == nullptr ? tensor.scalar_row : row[tensor.number * TABLE_WIDTH]];
}

// That of a thread's first element.
__device__ __forceinline__ uint32_t element_index(const Launch& launch, const TensorArgs& tensor, const Place& place) {
  uint32_t first_index = tensor.first_index;
  uint32_t row_stride = tensor.row_stride;
  if (launch.device_table != nullptr) {
    const int64_t* row = launch.device_table + tensor.number * TABLE_WIDTH;
    row_stride = static_cast<uint32_t>(row[3]);
    first_index = static_cast<uint32_t>(row[1]) * row_stride + static_cast<uint32_t>(row[2]);
  }
  const uint32_t column = static_cast<uint32_t>(place.span.offset) - place.row * static_cast<uint32_t>(tensor.inner);
  return first_index + place.row * row_stride + column;
}

// Elements that are not finite or too large to square become 0 and are counted. That is rare, so it is asked for all 16
// at once.
__device__ __forceinline__ void clear_unusable(FloatLane& grad, unsigned long long* nonfinite) {
  int32_t largest = 0;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) largest = larger(largest, float_bits(grad[i]) & MAGNITUDE_MASK);
  if (largest <= LARGEST_GRAD_BITS) return;
  unsigned long long count = 0;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    count += (float_bits(grad[i]) & MAGNITUDE_MASK) > LARGEST_GRAD_BITS;
    grad[i] = usable_or_zero(grad[i]);
  }
  atomicAdd(nonfinite, count);
}

template <class T>
__device__ __forceinline__ T load_scale(const void* scales, const Place& place) {
  return place.in_tensor ? static_cast<const T*>(scales)[place.block] : T{};
}

template <class T>
__device__ __forceinline__ void store_scale(void* scales, const Place& place, T scale) {
  if (place.in_tensor && place.first_lane) static_cast<T*>(scales)[place.block] = scale;
}

// Parameters in the format of the launch: the formats, corrections and ways of rounding share a kernel, which chooses
// at run time; each by itself would be a kernel more for every codec and gradient.
template <class Param>
constexpr bool IN_FORMAT_OF_LAUNCH = false;
template <>
inline constexpr bool IN_FORMAT_OF_LAUNCH<Bits16> = true;
template <>
inline constexpr bool IN_FORMAT_OF_LAUNCH<Bits8> = true;

using IntLane = int32_t[ELEMENTS];

__device__ __forceinline__ void load_correction(const Launch& launch, const TensorArgs& tensor, const Span& span,
                                                IntLane& correction) {
  if (launch.correction_bits == 16) {
    Packed<Bits16> packed;
    load(tensor.param_correction, span, Bits16{}, packed);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) correction[i] = static_cast<int16_t>(code_at(packed, i));
  } else if (launch.correction_bits == 8) {
    Packed<int8_t> packed;
    load(tensor.param_correction, span, int8_t{}, packed);
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) correction[i] = code_at(packed, i);
  } else {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) correction[i] = 0;
  }
}

__device__ __forceinline__ void store_correction(const Launch& launch, const TensorArgs& tensor, const Span& span,
                                                 const IntLane& correction) {
  if (launch.correction_bits == 16) {
    Packed<Bits16> packed;
    pack_codes(correction, packed);
    store(tensor.param_correction, span, packed);
  } else if (launch.correction_bits == 8) {
    Packed<int8_t> packed;
    pack_codes(correction, packed);
    store(tensor.param_correction, span, packed);
  }
}

template <class Param>
__device__ __forceinline__ void unpack_in_format(const Launch& launch, const Packed<Param>& packed,
                                                 const IntLane& correction, FloatLane& param) {
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    param[i] = decode(launch.format, launch.correction_bits, code_at(packed, i), correction[i]);
  }
}

// `index` is the element index of the first element.
template <class Param>
__device__ __forceinline__ void pack_in_format(const Launch& launch, const FloatLane& param, uint32_t index,
                                               uint32_t key, Packed<Param>& packed, IntLane& correction) {
  IntLane codes;
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    const uint32_t random = launch.stochastic_rounding ? random_bits(index + i, key) : 0;
    const Stored<uint32_t> stored =
        encode(launch.format, launch.correction_bits, launch.stochastic_rounding, param[i], random);
    codes[i] = static_cast<int32_t>(stored.param);
    correction[i] = static_cast<int32_t>(stored.correction);
  }
  pack_codes(codes, packed);
}

template <class Codec, bool AMSGRAD, class Param, class Grad>
__global__ void __launch_bounds__(THREADS) adam_kernel(const __grid_constant__ Launch launch) {
  using Code = typename Codec::Code;
  using SqCode = typename Codec::SqCode;
  using Scale = typename Codec::Scale;
  using SqScale = typename Codec::SqScale;
  constexpr bool HAS_SCALES = sizeof(Code) == 1;
  __shared__ typename Codec::Shared shared;

  if (launch.found_inf != nullptr && *launch.found_inf != 0.0f) return;
  Codec::prepare(shared);
  const uint32_t tensor_number = find_tensor(launch, blockIdx.x);
  const TensorArgs& tensor = launch.tensors[tensor_number];
  const Place place = find_place(tensor, blockIdx.x - launch.first_tile[tensor_number], launch.block_size);
  const int lanes = tensor.lanes;

  // All loads come first, so that they wait for memory together.
  Packed<Param> packed_param;
  Packed<Grad> packed_grad;
  Packed<Code> codes;
  Packed<SqCode> sq_codes, max_codes;
  Scale scale = {};
  SqScale sq_scale = {}, max_scale = {};
  IntLane correction;
  load(tensor.param, place.span, Param{}, packed_param);
  if constexpr (IN_FORMAT_OF_LAUNCH<Param>) load_correction(launch, tensor, place.span, correction);
  load(tensor.grad, place.span, Grad{}, packed_grad);
  load(tensor.exp_avg, place.span, Codec::ZERO, codes);
  load(tensor.exp_avg_sq, place.span, SqCode{}, sq_codes);
  if constexpr (AMSGRAD) load(tensor.max_exp_avg_sq, place.span, SqCode{}, max_codes);
  if constexpr (HAS_SCALES) {
    scale = load_scale<Scale>(tensor.exp_avg_scale, place);
    sq_scale = load_scale<SqScale>(tensor.exp_avg_sq_scale, place);
    if constexpr (AMSGRAD) max_scale = load_scale<SqScale>(tensor.max_exp_avg_sq_scale, place);
  }
  const Scalars s = find_scalars(launch, tensor);

  FloatLane param, grad, m, v, max_v;
  if constexpr (IN_FORMAT_OF_LAUNCH<Param>) {
    unpack_in_format(launch, packed_param, correction, param);
  } else {
    unpack(packed_param, param);
  }
  unpack(packed_grad, grad);
  if (launch.grad_scale != nullptr) {
    const float inverse = 1.0f / *launch.grad_scale;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) grad[i] = grad[i] * inverse;
  }
  if (launch.maximize) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) grad[i] = -grad[i];
  }
  if (launch.coupled_weight_decay) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) grad[i] = grad[i] + s.weight_decay * param[i];
  }
  clear_unusable(grad, launch.nonfinite);

  Codec::decode(codes, sq_codes, scale, sq_scale, shared, m, v);
  if constexpr (AMSGRAD) Codec::decode_sq(max_codes, max_scale, shared, max_v);
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) {
    update_moments(grad[i], m[i], v[i], s);
    if constexpr (AMSGRAD) max_v[i] = update_max(max_v[i], v[i]);
  }
  update_params(param, m, AMSGRAD ? max_v : v, place.span.count == 0, s);
  const uint32_t index = element_index(launch, tensor, place);
  if constexpr (IN_FORMAT_OF_LAUNCH<Param>) {
    pack_in_format(launch, param, index, s.rounding_key, packed_param, correction);
    store_correction(launch, tensor, place.span, correction);
  } else {
    pack(param, packed_param);
  }
  store(tensor.param, place.span, packed_param);

  Codec::encode(m, v, index, s.time_offset, lanes, shared, codes, sq_codes, scale, sq_scale);
  store(tensor.exp_avg, place.span, codes);
  store(tensor.exp_avg_sq, place.span, sq_codes);
  if constexpr (HAS_SCALES) {
    store_scale(tensor.exp_avg_scale, place, scale);
    store_scale(tensor.exp_avg_sq_scale, place, sq_scale);
  }
  if constexpr (AMSGRAD) {
    Codec::encode_sq(max_v, lanes, shared, max_codes, max_scale);
    store(tensor.max_exp_avg_sq, place.span, max_codes);
    if constexpr (HAS_SCALES) store_scale(tensor.max_exp_avg_sq_scale, place, max_scale);
  }
}

// What the kernel is compiled for: the dtypes that are as fast as can be, and all else.
enum class ParamKind { FLOAT32, BFLOAT16, FLOAT16, BITS16, BITS8 };

inline ParamKind param_kind(Dtype param, int32_t correction_bits, bool stochastic_rounding) {
  const bool plain = correction_bits == 0 && !stochastic_rounding;
  switch (param) {
    case Dtype::FLOAT32: return ParamKind::FLOAT32;
    case Dtype::BFLOAT16: return plain ? ParamKind::BFLOAT16 : ParamKind::BITS16;
    case Dtype::FLOAT16: return plain ? ParamKind::FLOAT16 : ParamKind::BITS16;
    default: return ParamKind::BITS8;
  }
}

inline Format format_of(Dtype param) {
  switch (param) {
    case Dtype::BFLOAT16: return BFLOAT16_FORMAT;
    case Dtype::FLOAT16: return FLOAT16_FORMAT;
    case Dtype::FLOAT8_E4M3FN: return FLOAT8_E4M3FN_FORMAT;
    case Dtype::FLOAT8_E5M2: return FLOAT8_E5M2_FORMAT;
    default: return {};
  }
}

// The kernel for one call.
using Kernel = void (*)(Launch);

template <class Codec, bool AMSGRAD, class Param>
Kernel choose_by_grad(Dtype grad) {
  switch (grad) {
    case Dtype::FLOAT32: return adam_kernel<Codec, AMSGRAD, Param, float>;
    case Dtype::BFLOAT16: return adam_kernel<Codec, AMSGRAD, Param, BFloat16>;
    case Dtype::FLOAT16: return adam_kernel<Codec, AMSGRAD, Param, Float16>;
    default: return nullptr;
  }
}

template <class Codec, bool AMSGRAD>
Kernel choose_by_param(ParamKind param, Dtype grad) {
  switch (param) {
    case ParamKind::FLOAT32: return choose_by_grad<Codec, AMSGRAD, float>(grad);
    case ParamKind::BFLOAT16: return choose_by_grad<Codec, AMSGRAD, BFloat16>(grad);
    case ParamKind::FLOAT16: return choose_by_grad<Codec, AMSGRAD, Float16>(grad);
    case ParamKind::BITS16: return choose_by_grad<Codec, AMSGRAD, Bits16>(grad);
    case ParamKind::BITS8: return choose_by_grad<Codec, AMSGRAD, Bits8>(grad);
  }
  return nullptr;
}

template <class Codec>
Kernel choose_kernel(ParamKind param, Dtype grad, bool amsgrad) {
  return amsgrad ? choose_by_param<Codec, true>(param, grad) : choose_by_param<Codec, false>(param, grad);
}

// Each compiled in a file of its own.
Kernel adaptive_kernel(ParamKind param, Dtype grad, bool amsgrad);
Kernel dynamic_kernel(ParamKind param, Dtype grad, bool amsgrad);
Kernel e4m3_kernel(ParamKind param, Dtype grad, bool amsgrad);
Kernel fp32_kernel(ParamKind param, Dtype grad, bool amsgrad);

inline Kernel kernel_of(CodecName codec, ParamKind param, Dtype grad, bool amsgrad) {
  switch (codec) {
    case CodecName::ADAPTIVE: return adaptive_kernel(param, grad, amsgrad);
    case CodecName::DYNAMIC: return dynamic_kernel(param, grad, amsgrad);
    case CodecName::E4M3: return e4m3_kernel(param, grad, amsgrad);
    case CodecName::FP32: return fp32_kernel(param, grad, amsgrad);
  }
  return nullptr;
}

}  // namespace fused8::FUSED8_ISA
