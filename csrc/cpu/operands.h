// The FP32 parameters and gradients of a stretch of a tensor, whatever its dtypes are, and the way back.

#pragma once

#include "lanes.h"
// After lanes.h, whose overloads its templates use.
#include "../formats.h"
#include "step_args.h"

namespace fused8::FUSED8_ISA {

constexpr int MAX_WIDTH = 256;

// A stretch of one tensor: a block, or less.
struct Place {
  int64_t offset;  // of its first element in the tensor
  int64_t length;
  int64_t block;
  uint32_t index;  // element index of its first element
};

template <class T>
T* at(void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + offset;
}

template <class T>
const T* at(const void* base, int64_t offset) {
  return static_cast<const T*>(base) + offset;
}

inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::FLOAT32 ? 4 : dtype <= Dtype::FLOAT16 ? 2 : 1;
}

// FP32, BF16 and FP16 rounded to nearest: what the processor can do by itself.

template <class T>
void load_plain(const void* base, const void*, const Place& place, float* to) {
  const T* from = at<T>(base, place.offset);
  int64_t i = 0;
  for (; i + LANES <= place.length; i += LANES) store(to + i, load(from + i));
  if (i == place.length) return;
  T rest[LANES] = {};
  __builtin_memcpy(rest, from + i, (place.length - i) * sizeof(T));
  store(to + i, load(rest));
}

template <class T>
void store_plain(const float* from, void* base, void*, const Place& place, uint32_t) {
  T* to = at<T>(base, place.offset);
  int64_t i = 0;
  for (; i + LANES <= place.length; i += LANES) store(to + i, load(from + i));
  if (i == place.length) return;
  T rest[LANES];
  store(rest, load(from + i));
  __builtin_memcpy(to + i, rest, (place.length - i) * sizeof(T));
}

// Everything else.

template <int BITS>
struct Integers;

template <>
struct Integers<8> {
  using Signed = int8_t;
  using Unsigned = uint8_t;
};

template <>
struct Integers<16> {
  using Signed = int16_t;
  using Unsigned = uint16_t;
};

// Without extra bits, what takes their place is never touched.
template <>
struct Integers<0> : Integers<8> {};

// `own` itself if it ends with a whole register, else a copy in `buffer`.
template <class T>
const T* whole_registers(const T* own, int64_t length, T* buffer) {
  if (length % LANES == 0) return own;
  __builtin_memcpy(buffer, own, length * sizeof(T));
  for (int64_t i = length; i % LANES != 0; ++i) buffer[i] = 0;
  return buffer;
}

template <const Format& FORMAT, int EXTRA>
void load_format(const void* base, const void* correction, const Place& place, float* to) {
  using Code = typename Integers<FORMAT.bits>::Unsigned;
  using Extra = typename Integers<EXTRA>::Signed;
  Code codes_buffer[MAX_WIDTH];
  Extra extra_buffer[MAX_WIDTH];
  const Code* codes = whole_registers(at<Code>(base, place.offset), place.length, codes_buffer);
  const Extra* extra = nullptr;
  if constexpr (EXTRA != 0) extra = whole_registers(at<Extra>(correction, place.offset), place.length, extra_buffer);
  for (int64_t i = 0; i < place.length; i += LANES) {
    Ints rest = {};
    if constexpr (EXTRA != 0) rest = load(extra + i);
    store(to + i, decode(FORMAT, EXTRA, load(codes + i), rest));
  }
}

inline void store_bits(uint8_t* to, Uints x) {
  store(to, (Ints)x);
}

inline void store_bits(uint16_t* to, Uints x) {
  store(to, (Ints)(x & 0xFFFF));
}

// `from` has a whole last register.
template <const Format& FORMAT, int EXTRA, bool STOCHASTIC>
void store_format(const float* from, void* base, void* correction, const Place& place, uint32_t key) {
  using Code = typename Integers<FORMAT.bits>::Unsigned;
  using Extra = typename Integers<EXTRA>::Unsigned;
  Code codes_buffer[MAX_WIDTH];
  Extra extra_buffer[MAX_WIDTH];
  Code* own_codes = at<Code>(base, place.offset);
  Extra* own_extra = at<Extra>(correction, place.offset);
  const bool whole = place.length % LANES == 0;
  Code* codes = whole ? own_codes : codes_buffer;
  Extra* extra = whole ? own_extra : extra_buffer;
  Uints index = place.index + lane_numbers();
  for (int64_t i = 0; i < place.length; i += LANES) {
    const Uints random = STOCHASTIC ? random_bits(index, key) : Uints{};
    const Stored<Uints> stored = encode(FORMAT, EXTRA, STOCHASTIC, load(from + i), random);
    store_bits(codes + i, stored.param);
    if constexpr (EXTRA != 0) store_bits(extra + i, stored.correction);
    index += LANES;
  }
  if (whole) return;
  __builtin_memcpy(own_codes, codes, place.length * sizeof(Code));
  if constexpr (EXTRA != 0) __builtin_memcpy(own_extra, extra, place.length * sizeof(Extra));
}

using LoadFunction = void (*)(const void* base, const void* correction, const Place& place, float* to);
using StoreFunction = void (*)(const float* from, void* base, void* correction, const Place& place, uint32_t key);

struct ParamFunctions {
  LoadFunction load;  // null: FP32, which is worked on where it is
  StoreFunction store;
};

template <const Format& FORMAT, int EXTRA>
ParamFunctions extended(bool stochastic) {
  return {load_format<FORMAT, EXTRA>,
          stochastic ? store_format<FORMAT, EXTRA, true> : store_format<FORMAT, EXTRA, false>};
}

template <const Format& FORMAT>
ParamFunctions param_functions_of(int32_t correction_bits, bool stochastic) {
  switch (correction_bits) {
    case 8: return extended<FORMAT, 8>(stochastic);
    case 16: return extended<FORMAT, 16>(stochastic);
    default: return extended<FORMAT, 0>(stochastic);
  }
}

inline ParamFunctions param_functions(const StepArgs& args) {
  const bool plain = args.correction_bits == 0 && !args.stochastic_rounding;
  switch (args.param_dtype) {
    case Dtype::FLOAT32: return {nullptr, nullptr};
    case Dtype::BFLOAT16:
      if (plain) return {load_plain<BFloat16>, store_plain<BFloat16>};
      return param_functions_of<BFLOAT16_FORMAT>(args.correction_bits, args.stochastic_rounding);
    case Dtype::FLOAT16:
      if (plain) return {load_plain<Float16>, store_plain<Float16>};
      return param_functions_of<FLOAT16_FORMAT>(args.correction_bits, args.stochastic_rounding);
    case Dtype::FLOAT8_E4M3FN:
      return param_functions_of<FLOAT8_E4M3FN_FORMAT>(args.correction_bits, args.stochastic_rounding);
    case Dtype::FLOAT8_E5M2:
      return param_functions_of<FLOAT8_E5M2_FORMAT>(args.correction_bits, args.stochastic_rounding);
  }
  return {nullptr, nullptr};
}

inline LoadFunction grad_function(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFLOAT16: return load_plain<BFloat16>;
    case Dtype::FLOAT16: return load_plain<Float16>;
    default: return load_plain<float>;
  }
}

// The arguments of the call, and what follows from them.
struct Call : StepArgs {
  float grad_factor;  // 1 / grad_scale, negative to maximize
  bool grad_as_is;    // nothing is done to a gradient but its conversion
  ParamFunctions param;
  LoadFunction load_grad;

  // Where the FP environment is known.
  explicit Call(const StepArgs& args) : StepArgs(args) {
    grad_factor = (maximize ? -1.0f : 1.0f) / grad_scale;
    grad_as_is = grad_factor == 1.0f && !coupled_weight_decay;
    param = param_functions(args);
    load_grad = grad_function(grad_dtype);
  }
};

// The FP32 parameter and gradient of one place: the tensors' own memory where it will do, else a copy. The gradient is
// unscaled, negated to maximize, and has its weight decay.
class Fp32Operands {
 public:
  float* param;
  const float* grad;

  Fp32Operands(const Call& call, const TensorArgs& tensor, const Place& place) : call_(call) {
    param = at<float>(tensor.param, place.offset);
    grad = at<float>(tensor.grad, place.offset);
    if (call.param.load != nullptr) {
      call.param.load(tensor.param, tensor.param_correction, place, params_);
      param = params_;
    }
    if (call.grad_dtype == Dtype::FLOAT32 && call.grad_as_is) return;
    call.load_grad(tensor.grad, nullptr, place, grads_);
    if (call.grad_factor != 1.0f) {
      for (int64_t i = 0; i < place.length; ++i) grads_[i] = grads_[i] * call.grad_factor;
    }
    if (call.coupled_weight_decay) {
      for (int64_t i = 0; i < place.length; ++i) grads_[i] = grads_[i] + tensor.scalars.weight_decay * param[i];
    }
    grad = grads_;
  }

  void store_param(const TensorArgs& tensor, const Place& place) const {
    if (call_.param.store == nullptr) return;
    call_.param.store(params_, tensor.param, tensor.param_correction, place, tensor.scalars.rounding_key);
  }

 private:
  const Call& call_;
  alignas(64) float params_[MAX_WIDTH];
  alignas(64) float grads_[MAX_WIDTH];
};

}  // namespace fused8::FUSED8_ISA
