// The CPU kernel of fused8::adam_step_ (its schema stands in py/fused8/ops.py): checks the arguments, chooses the
// instruction set and shares out the elements to the threads.
//
// Only PyTorch's stable ABI is used, so that one library serves every torch from 2.10 on and every Python.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "float_env.h"
#include "step_args.h"

namespace fused8 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using TensorList = std::vector<Tensor>;

// Below this many elements per thread, waking a second thread costs more than it saves.
constexpr int64_t ELEMENTS_PER_THREAD = 32768;

template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  message << "fused8: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

struct InstructionSet {
  const char* name;
  StepFunction step;
  bool supported;
};

// The best one last.
std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> all = {{"generic", generic::step_elements, true}};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  all.push_back({"avx2", avx2::step_elements, avx2});
  all.push_back({"avx512", avx512::step_elements, avx2 && avx512});
#endif
  return all;
}

// The best that this processor has, or the one that FUSED8_CPU_ISA names.
const InstructionSet& choose_instruction_set() {
  static const std::vector<InstructionSet> all = instruction_sets();
  const char* wanted = std::getenv("FUSED8_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    const InstructionSet* best = &all.front();
    for (const InstructionSet& isa : all) best = isa.supported ? &isa : best;
    return *best;
  }
  for (const InstructionSet& isa : all) {
    if (std::strcmp(isa.name, wanted) != 0) continue;
    check(isa.supported, "FUSED8_CPU_ISA is ", wanted, ", which this processor does not have");
    return isa;
  }
  throw std::runtime_error("fused8: FUSED8_CPU_ISA is " + std::string(wanted) + ", which this library does not have");
}

std::string cpu_isa() {
  return choose_instruction_set().name;
}

struct CodecTypes {
  CodecName name;
  ScalarType code, sq_code, scale, sq_scale;
};

CodecTypes codec_types(const std::string& codec) {
  using enum ScalarType;
  if (codec == "fp32") return {CodecName::FP32, Float, Float, Float, Float};
  if (codec == "adaptive") return {CodecName::ADAPTIVE, Char, Byte, Float, Int};
  if (codec == "dynamic") return {CodecName::DYNAMIC, Byte, Byte, Float, Float};
  if (codec == "e4m3") return {CodecName::E4M3, Byte, Byte, Float, Float};
  throw std::runtime_error("fused8: unknown codec '" + codec + "'; there are fp32, adaptive, dynamic and e4m3");
}

Dtype param_or_grad_dtype(const char* name, const TensorList& tensors) {
  if (tensors.empty()) return Dtype::FLOAT32;
  switch (tensors.front().scalar_type()) {
    case ScalarType::Float: return Dtype::FLOAT32;
    case ScalarType::BFloat16: return Dtype::BFLOAT16;
    case ScalarType::Half: return Dtype::FLOAT16;
    default: break;
  }
  check(false, name, " must be float32, bfloat16 or float16, not ",
        torch::headeronly::toString(tensors.front().scalar_type()));
  return Dtype::FLOAT32;
}

std::string to_string(const std::vector<int64_t>& shape) {
  std::ostringstream text;
  for (size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "[") << shape[i];
  return shape.empty() ? "[]" : text.str() + "]";
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

// What every tensor has to be, so that its memory can be taken as an array.
void check_tensor(const std::string& name, const Tensor& tensor, ScalarType dtype) {
  check(tensor.is_cpu(), name, " must be on the CPU");
  check(tensor.scalar_type() == dtype, name, " must be ", torch::headeronly::toString(dtype), ", not ",
        torch::headeronly::toString(tensor.scalar_type()));
  check(tensor.is_contiguous(), name, " must be contiguous");
}

void check_scalar(const char* name, const Tensor& tensor, ScalarType dtype) {
  check_tensor(name, tensor, dtype);
  check(tensor.numel() == 1, name, " must hold one element");
}

// The data of the i-th tensor of a list, after checking it; null if the list is empty.
void* element_data(const char* name, const TensorList& tensors, size_t i, ScalarType dtype,
                   const std::vector<int64_t>& shape) {
  if (tensors.empty()) return nullptr;
  const Tensor& tensor = tensors[i];
  const auto full_name = [&] { return std::string(name) + "[" + std::to_string(i) + "]"; };
  if (!tensor.is_cpu() || tensor.scalar_type() != dtype || !tensor.is_contiguous()) {
    check_tensor(full_name(), tensor, dtype);
  }
  const auto sizes = tensor.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end())) {
    check(false, full_name(), " must have the shape ", to_string(shape), ", not ", to_string(shape_of(tensor)));
  }
  return tensor.mutable_data_ptr();
}

struct Lists {
  const TensorList &params, &grads, &exp_avg, &exp_avg_sq, &exp_avg_scale, &exp_avg_sq_scale, &max_exp_avg_sq,
      &max_exp_avg_sq_scale;

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
  }
};

// Everything about one tensor except its place among the others.
TensorArgs tensor_args(const Lists& lists, size_t i, const CodecTypes& types, int64_t block_size) {
  const Tensor& param = lists.params[i];
  const std::vector<int64_t> shape = shape_of(param);
  int64_t rows = 1, inner = 1;
  for (size_t d = 0; d < shape.size(); ++d) (d == 0 && shape.size() > 1 ? rows : inner) *= shape[d];
  const int64_t blocks_per_row = (inner + block_size - 1) / block_size;
  const std::vector<int64_t> scale_shape = {rows, blocks_per_row};

  TensorArgs args = {};
  args.param = element_data("params", lists.params, i, lists.params.front().scalar_type(), shape);
  args.grad = element_data("grads", lists.grads, i, lists.grads.front().scalar_type(), shape);
  args.exp_avg = element_data("exp_avg", lists.exp_avg, i, types.code, shape);
  args.exp_avg_sq = element_data("exp_avg_sq", lists.exp_avg_sq, i, types.sq_code, shape);
  args.max_exp_avg_sq = element_data("max_exp_avg_sq", lists.max_exp_avg_sq, i, types.sq_code, shape);
  args.exp_avg_scale = element_data("exp_avg_scale", lists.exp_avg_scale, i, types.scale, scale_shape);
  args.exp_avg_sq_scale = element_data("exp_avg_sq_scale", lists.exp_avg_sq_scale, i, types.sq_scale, scale_shape);
  args.max_exp_avg_sq_scale =
      element_data("max_exp_avg_sq_scale", lists.max_exp_avg_sq_scale, i, types.sq_scale, scale_shape);
  args.inner = inner;
  args.blocks_per_row = blocks_per_row;
  args.end = rows * inner;
  return args;
}

// The rows of `table` and `scalars` that belong to the tensors; also lays the tensors out one after the other.
void read_tables(const Tensor& scalars, const Tensor& table, std::vector<TensorArgs>& tensors) {
  constexpr int64_t SCALAR_WIDTH = sizeof(Scalars) / sizeof(float);
  constexpr int64_t TABLE_WIDTH = 4;
  check_tensor("scalars", scalars, ScalarType::Float);
  check_tensor("table", table, ScalarType::Long);
  check(scalars.dim() == 2 && scalars.size(1) == SCALAR_WIDTH, "scalars must have the shape [rows, ", SCALAR_WIDTH,
        "], not ", to_string(shape_of(scalars)));
  const std::vector<int64_t> table_shape = {static_cast<int64_t>(tensors.size()), TABLE_WIDTH};
  check(shape_of(table) == table_shape, "table must have the shape ", to_string(table_shape), ", not ",
        to_string(shape_of(table)));

  const auto* scalar_rows = static_cast<const Scalars*>(scalars.const_data_ptr());
  const auto* row = static_cast<const int64_t*>(table.const_data_ptr());
  int64_t begin = 0;
  for (size_t i = 0; i < tensors.size(); ++i, row += TABLE_WIDTH) {
    TensorArgs& tensor = tensors[i];
    const auto row0 = static_cast<uint32_t>(row[1]);
    const auto col0 = static_cast<uint32_t>(row[2]);
    const auto global_inner = static_cast<uint32_t>(row[3]);
    check(0 <= row[0] && row[0] < scalars.size(0), "table[", i, "] names row ", row[0], " of scalars, which has ",
          scalars.size(0));
    std::memcpy(&tensor.scalars, scalar_rows + row[0], sizeof(Scalars));
    tensor.first_index = row0 * global_inner + col0;
    tensor.row_stride = global_inner;
    tensor.begin = begin;
    tensor.end += begin;
    begin = tensor.end;
  }
}

// A std::string argument would leak: torch's conversion copies it out of an object that it never deletes.
std::string take_string(StringHandle handle) {
  size_t length = 0;
  const char* data = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  std::string text(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return text;
}

float scalar_value(const Tensor& tensor) {
  return *static_cast<const float*>(tensor.const_data_ptr());
}

void run(const StepArgs& args, int64_t& nonfinite) {
  const StepFunction step = choose_instruction_set().step;
  torch::stable::parallel_for(0, args.tensors[args.tensor_count - 1].end, ELEMENTS_PER_THREAD,
                              [&](int64_t begin, int64_t end) {
                                const DefaultFloatEnv env;
                                const int64_t count = step(args, begin, end);
                                if (count != 0) std::atomic_ref<int64_t>(nonfinite) += count;
                              });
}

void adam_step_(const TensorList& params, const TensorList& grads, const TensorList& exp_avg,
                const TensorList& exp_avg_sq, const TensorList& exp_avg_scale, const TensorList& exp_avg_sq_scale,
                const TensorList& max_exp_avg_sq, const TensorList& max_exp_avg_sq_scale, const Tensor& scalars,
                const Tensor& table, const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                const Tensor& nonfinite, StringHandle codec, int64_t block_size, bool decoupled_weight_decay,
                bool maximize) {
  const CodecTypes types = codec_types(take_string(codec));
  check(block_size == 64 || block_size == 128 || block_size == 256, "block_size must be 64, 128 or 256, not ",
        block_size);
  const Lists lists{
      params, grads, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, max_exp_avg_sq, max_exp_avg_sq_scale};
  lists.check_lengths(types.name != CodecName::FP32);
  if (grad_scale) check_scalar("grad_scale", *grad_scale, ScalarType::Float);
  if (found_inf) check_scalar("found_inf", *found_inf, ScalarType::Float);
  check_scalar("nonfinite", nonfinite, ScalarType::Long);

  StepArgs args = {};
  args.codec = types.name;
  args.block_size = block_size;
  args.param_dtype = param_or_grad_dtype("params", params);
  args.grad_dtype = param_or_grad_dtype("grads", grads);
  args.amsgrad = !max_exp_avg_sq.empty();
  args.maximize = maximize;
  args.coupled_weight_decay = !decoupled_weight_decay;
  args.grad_scale = grad_scale ? scalar_value(*grad_scale) : 1.0f;
  std::vector<TensorArgs> tensors;
  tensors.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) tensors.push_back(tensor_args(lists, i, types, block_size));
  read_tables(scalars, table, tensors);
  args.tensors = tensors.data();
  args.tensor_count = static_cast<int64_t>(tensors.size());

  if (tensors.empty() || (found_inf && scalar_value(*found_inf) != 0.0f)) return;
  run(args, *static_cast<int64_t*>(nonfinite.mutable_data_ptr()));
}

}  // namespace
}  // namespace fused8

STABLE_TORCH_LIBRARY_FRAGMENT(fused8, m) {
  m.def("cpu_isa() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fused8, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&fused8::cpu_isa));
}

STABLE_TORCH_LIBRARY_IMPL(fused8, CPU, m) {
  m.impl("adam_step_", TORCH_BOX(&fused8::adam_step_));
}
