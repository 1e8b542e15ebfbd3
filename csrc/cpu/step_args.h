// What one call of the CPU step works on. Plain data, shared by the op and by the kernels of all instruction sets.

#pragma once

#include <cstdint>

#include "../adam.h"
#include "../tensor_view.h"

namespace fused8 {

struct TensorArgs : TensorView {
  int64_t begin, end;    // its elements in the concatenation of all tensors of the call
  uint32_t first_index;  // element index of its first element and distance of its rows, modulo 2^32
  uint32_t row_stride;
  Scalars scalars;
};

struct StepArgs {
  const TensorArgs* tensors;
  int64_t tensor_count;
  CodecName codec;
  int64_t block_size;
  Dtype param_dtype;
  Dtype grad_dtype;
  int32_t correction_bits;  // extra mantissa bits of the parameters: 0, 8 or 16
  bool stochastic_rounding;
  bool amsgrad;
  bool maximize;
  bool coupled_weight_decay;  // weight_decay * param is added to the gradient (L2)
  float grad_scale;           // 1 if none is given
};

// Steps every block whose first element lies in [begin, end) of the concatenation. Returns the number of gradient
// elements that counted as 0 because they were not finite or too large.
using StepFunction = int64_t (*)(const StepArgs& args, int64_t begin, int64_t end);

namespace generic {
int64_t step_elements(const StepArgs& args, int64_t begin, int64_t end);
}
#if defined(__x86_64__)
namespace avx2 {
int64_t step_elements(const StepArgs& args, int64_t begin, int64_t end);
}
namespace avx512 {
int64_t step_elements(const StepArgs& args, int64_t begin, int64_t end);
}
#endif

}  // namespace fused8
