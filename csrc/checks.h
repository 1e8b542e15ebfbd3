// The arguments of fused8::adam_step_ (its schema stands in py/fused8/ops.py), checked before anything is changed.
// Shared by the ops of all devices; only PyTorch's stable ABI is used.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "adam.h"
#include "tensor_view.h"

namespace fused8 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  message << "fused8: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Where tensors have to be: on the CPU, or on one CUDA device.
struct Location {
  bool is_cuda;
  int32_t device_index;

  bool holds(const Tensor& tensor) const {
    return is_cuda ? tensor.is_cuda() && tensor.get_device_index() == device_index : tensor.is_cpu();
  }
  std::string name() const { return is_cuda ? "cuda:" + std::to_string(device_index) : "the CPU"; }
};

constexpr Location ON_CPU = {false, 0};

struct CodecTypes {
  CodecName name;
  ScalarType code, sq_code, scale, sq_scale;
};

inline CodecTypes codec_types(const std::string& codec) {
  using enum ScalarType;
  if (codec == "fp32") return {CodecName::FP32, Float, Float, Float, Float};
  if (codec == "adaptive") return {CodecName::ADAPTIVE, Char, Byte, Float, Int};
  if (codec == "dynamic") return {CodecName::DYNAMIC, Byte, Byte, Float, Float};
  if (codec == "e4m3") return {CodecName::E4M3, Byte, Byte, Float, Float};
  throw std::runtime_error("fused8: unknown codec '" + codec + "'; there are fp32, adaptive, dynamic and e4m3");
}

// As torch.<name>.
inline std::string name_of(ScalarType dtype) {
  using enum ScalarType;
  switch (dtype) {
    case Float: return "float32";
    case Double: return "float64";
    case Half: return "float16";
    case BFloat16: return "bfloat16";
    case Float8_e4m3fn: return "float8_e4m3fn";
    case Float8_e5m2: return "float8_e5m2";
    case Byte: return "uint8";
    case Char: return "int8";
    case Short: return "int16";
    case Int: return "int32";
    case Long: return "int64";
    case Bool: return "bool";
    default: return torch::headeronly::toString(dtype);
  }
}

inline Dtype param_dtype(const TensorList& params) {
  if (params.empty()) return Dtype::FLOAT32;
  switch (params.front().scalar_type()) {
    case ScalarType::Float: return Dtype::FLOAT32;
    case ScalarType::BFloat16: return Dtype::BFLOAT16;
    case ScalarType::Half: return Dtype::FLOAT16;
    case ScalarType::Float8_e4m3fn: return Dtype::FLOAT8_E4M3FN;
    case ScalarType::Float8_e5m2: return Dtype::FLOAT8_E5M2;
    default: break;
  }
  check(false, "params must be float32, bfloat16, float16, float8_e4m3fn or float8_e5m2, not ",
        name_of(params.front().scalar_type()));
  return Dtype::FLOAT32;
}

inline Dtype grad_dtype(const TensorList& grads) {
  if (grads.empty()) return Dtype::FLOAT32;
  const Dtype dtype = param_dtype(grads);
  check(dtype <= Dtype::FLOAT16, "grads must be float32, bfloat16 or float16, not ",
        name_of(grads.front().scalar_type()));
  return dtype;
}

// The extra mantissa bits of the parameters: 0, 8 or 16.
inline int32_t correction_bits(Dtype param, const TensorList& param_correction) {
  if (param_correction.empty()) return 0;
  check(param != Dtype::FLOAT32, "params of float32 have no param_correction");
  const ScalarType dtype = param_correction.front().scalar_type();
  check(dtype == ScalarType::Char || dtype == ScalarType::Short, "param_correction must be int8 or int16, not ",
        name_of(dtype));
  return dtype == ScalarType::Char ? 8 : 16;
}

inline std::string to_string(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "[") << shape[i];
  return shape.empty() ? "[]" : text.str() + "]";
}

inline std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// What every tensor has to be, so that its memory can be taken as an array.
inline void check_tensor(const std::string& name, const Tensor& tensor, ScalarType dtype, const Location& location) {
  check(location.holds(tensor), name, " must be on ", location.name());
  check(tensor.scalar_type() == dtype, name, " must be ", name_of(dtype), ", not ", name_of(tensor.scalar_type()));
  check(tensor.is_contiguous(), name, " must be contiguous");
}

inline void check_scalar(const char* name, const Tensor& tensor, ScalarType dtype, const Location& location) {
  check_tensor(name, tensor, dtype, location);
  check(tensor.numel() == 1, name, " must hold one element");
}

// The data of the i-th tensor of a list, after checking it; null if the list is empty.
inline void* element_data(const char* name, const TensorList& tensors, size_t i, ScalarType dtype,
                          const std::vector<int64_t>& shape, const Location& location) {
  if (tensors.empty()) return nullptr;
  const Tensor& tensor = tensors[i];
  const auto full_name = [&] { return std::string(name) + "[" + std::to_string(i) + "]"; };
  if (!location.holds(tensor) || tensor.scalar_type() != dtype || !tensor.is_contiguous()) {
    check_tensor(full_name(), tensor, dtype, location);
  }
  const auto sizes = tensor.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    check(false, full_name(), " must have the shape ", to_string(shape), ", not ", to_string(shape_of(tensor)));
  }
  return tensor.mutable_data_ptr();
}

struct Lists {
  const TensorList &params, &grads, &exp_avg, &exp_avg_sq, &exp_avg_scale, &exp_avg_sq_scale, &max_exp_avg_sq,
      &max_exp_avg_sq_scale, &param_correction;

  void check_lengths(bool has_scales) const {
    const size_t n = params.size();
    const bool amsgrad = !max_exp_avg_sq.empty();
    const auto check_length = [&](const char* name, const TensorList& list, size_t length) {
      check(list.size() == length, name, " must hold ", length, " tensors, not ", list.size());
    };
    check_length("grads", grads, n);
    check_length("exp_avg", exp_avg, n);
    check_length("exp_avg_sq", exp_avg_sq, n);
    check_length("exp_avg_scale", exp_avg_scale, has_scales ? n : 0);
    check_length("exp_avg_sq_scale", exp_avg_sq_scale, has_scales ? n : 0);
    check_length("max_exp_avg_sq", max_exp_avg_sq, amsgrad ? n : 0);
    check_length("max_exp_avg_sq_scale", max_exp_avg_sq_scale, amsgrad && has_scales ? n : 0);
    check_length("param_correction", param_correction, param_correction.empty() ? 0 : n);
  }

  TensorView view(size_t i, const CodecTypes& types, int64_t block_size, const Location& location) const {
    const std::vector<int64_t> shape = shape_of(params[i]);
    TensorView view = {};
    view.rows = view.inner = 1;
    for (size_t d = 0; d < shape.size(); ++d) (d == 0 && shape.size() > 1 ? view.rows : view.inner) *= shape[d];
    view.blocks_per_row = (view.inner + block_size - 1) / block_size;
    const std::vector<int64_t> scale_shape = {view.rows, view.blocks_per_row};
    const auto data = [&](const char* name, const TensorList& tensors, ScalarType dtype, const auto& of_shape) {
      return element_data(name, tensors, i, dtype, of_shape, location);
    };
    view.param = data("params", params, params.front().scalar_type(), shape);
    view.grad = data("grads", grads, grads.front().scalar_type(), shape);
    view.exp_avg = data("exp_avg", exp_avg, types.code, shape);
    view.exp_avg_sq = data("exp_avg_sq", exp_avg_sq, types.sq_code, shape);
    view.max_exp_avg_sq = data("max_exp_avg_sq", max_exp_avg_sq, types.sq_code, shape);
    view.exp_avg_scale = data("exp_avg_scale", exp_avg_scale, types.scale, scale_shape);
    view.exp_avg_sq_scale = data("exp_avg_sq_scale", exp_avg_sq_scale, types.sq_scale, scale_shape);
    view.max_exp_avg_sq_scale = data("max_exp_avg_sq_scale", max_exp_avg_sq_scale, types.sq_scale, scale_shape);
    if (!param_correction.empty()) {
      view.param_correction = data("param_correction", param_correction, param_correction.front().scalar_type(), shape);
    }
    return view;
  }
};

struct CheckedLists {
  CodecName codec;
  Dtype param_dtype;
  Dtype grad_dtype;
  int32_t correction_bits;
  bool amsgrad;
  std::vector<TensorView> tensors;
};

inline CheckedLists check_lists(const Lists& lists, const std::string& codec, int64_t block_size,
                                const Location& location) {
  const CodecTypes types = codec_types(codec);
  check(block_size == 64 || block_size == 128 || block_size == 256, "block_size must be 64, 128 or 256, not ",
        block_size);
  lists.check_lengths(types.name != CodecName::FP32);
  const Dtype param = param_dtype(lists.params);
  CheckedLists result = {types.name,
                         param,
                         grad_dtype(lists.grads),
                         correction_bits(param, lists.param_correction),
                         !lists.max_exp_avg_sq.empty(),
                         {}};
  result.tensors.reserve(lists.params.size());
  for (size_t i = 0; i < lists.params.size(); ++i) {
    result.tensors.push_back(lists.view(i, types, block_size, location));
  }
  return result;
}

// `scalars` and `table` may be anywhere that the caller has checked.
inline void check_table_shapes(const Tensor& scalars, const Tensor& table, size_t tensor_count) {
  constexpr int64_t SCALAR_WIDTH = sizeof(Scalars) / sizeof(float);
  check(scalars.dim() == 2 && scalars.size(1) == SCALAR_WIDTH, "scalars must have the shape [rows, ", SCALAR_WIDTH,
        "], not ", to_string(shape_of(scalars)));
  const std::vector<int64_t> table_shape = {static_cast<int64_t>(tensor_count), TABLE_WIDTH};
  check(shape_of(table) == table_shape, "table must have the shape ", to_string(table_shape), ", not ",
        to_string(shape_of(table)));
}

inline void check_scalar_row(int64_t row, size_t i, const Tensor& scalars) {
  check(0 <= row && row < scalars.size(0), "table[", i, "] names row ", row, " of scalars, which has ",
        scalars.size(0));
}

// A std::string argument would leak: torch's conversion copies it out of an object that it never deletes.
inline std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

}  // namespace
}  // namespace fused8
