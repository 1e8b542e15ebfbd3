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
#include <stdexcept>
#include <string>
#include <vector>

#include "../checks.h"
#include "float_env.h"
#include "step_args.h"

namespace fused8 {
namespace {

// Below this many elements per thread, waking a second thread costs more than it saves.
constexpr int64_t ELEMENTS_PER_THREAD = 32768;

struct InstructionSet {
  const char* name;
  StepFunction step;
  bool supported;
};

// The best one last.
std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> all = {{"generic", generic::step_elements, true}};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
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

// The tensors laid out one after the other, each with its rows of `table` and `scalars`.
std::vector<TensorArgs> tensor_args(const std::vector<TensorView>& views, const Tensor& scalars, const Tensor& table) {
  check_tensor("scalars", scalars, ScalarType::Float, ON_CPU);
  check_tensor("table", table, ScalarType::Long, ON_CPU);
  check_table_shapes(scalars, table, views.size());
  const auto* scalar_rows = static_cast<const Scalars*>(scalars.const_data_ptr());
  const auto* row = static_cast<const int64_t*>(table.const_data_ptr());
  std::vector<TensorArgs> tensors(views.size());
  int64_t begin = 0;
  for (size_t i = 0; i < views.size(); ++i, row += TABLE_WIDTH) {
    TensorArgs& tensor = tensors[i];
    static_cast<TensorView&>(tensor) = views[i];
    const auto row0 = static_cast<uint32_t>(row[1]);
    const auto col0 = static_cast<uint32_t>(row[2]);
    const auto global_inner = static_cast<uint32_t>(row[3]);
    check_scalar_row(row[0], i, scalars);
    std::memcpy(&tensor.scalars, scalar_rows + row[0], sizeof(Scalars));
    tensor.first_index = row0 * global_inner + col0;
    tensor.row_stride = global_inner;
    tensor.begin = begin;
    tensor.end = begin = begin + tensor.rows * tensor.inner;
  }
  return tensors;
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
                const TensorList& max_exp_avg_sq, const TensorList& max_exp_avg_sq_scale,
                const TensorList& param_correction, const Tensor& scalars, const Tensor& table,
                const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                const Tensor& nonfinite, StringHandle codec, int64_t block_size, bool decoupled_weight_decay,
                bool maximize, bool stochastic_rounding) {
  const CheckedLists lists = check_lists({params, grads, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale,
                                          max_exp_avg_sq, max_exp_avg_sq_scale, param_correction},
                                         take_string(codec), block_size, ON_CPU);
  if (grad_scale) check_scalar("grad_scale", *grad_scale, ScalarType::Float, ON_CPU);
  if (found_inf) check_scalar("found_inf", *found_inf, ScalarType::Float, ON_CPU);
  check_scalar("nonfinite", nonfinite, ScalarType::Long, ON_CPU);
  const std::vector<TensorArgs> tensors = tensor_args(lists.tensors, scalars, table);

  StepArgs args = {};
  args.tensors = tensors.data();
  args.tensor_count = static_cast<int64_t>(tensors.size());
  args.codec = lists.codec;
  args.block_size = block_size;
  args.param_dtype = lists.param_dtype;
  args.grad_dtype = lists.grad_dtype;
  args.correction_bits = lists.correction_bits;
  args.stochastic_rounding = stochastic_rounding;
  args.amsgrad = lists.amsgrad;
  args.maximize = maximize;
  args.coupled_weight_decay = !decoupled_weight_decay;
  args.grad_scale = grad_scale ? scalar_value(*grad_scale) : 1.0f;

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
