// What the op knows of its tensors once they are checked. Plain data, for the kernels of every device.

#pragma once

#include <cstdint>

namespace fused8 {

enum class Dtype { FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 };
enum class CodecName { FP32, ADAPTIVE, DYNAMIC, E4M3 };

// One tensor of the lists, seen as [rows, inner].
struct TensorView {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  void* exp_avg_scale;   // the scales are null without a codec
  void* exp_avg_sq_scale;
  void* max_exp_avg_sq_scale;
  void* param_correction;  // int8 or int16; null without
  int64_t rows;
  int64_t inner;
  int64_t blocks_per_row;
};

constexpr int64_t TABLE_WIDTH = 4;  // columns of `table`: TABLE_COLUMNS in py/fused8/step_plan.py

}  // namespace fused8
