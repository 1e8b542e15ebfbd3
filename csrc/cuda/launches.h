// Packs the tensors of one call into as few kernel launches as hold them.

#pragma once

#include <cstring>
#include <stdexcept>
#include <vector>

#include "adam_cuda.cuh"

namespace fused8::FUSED8_ISA {

// What all launches of one call have in common.
struct Call {
  const Scalars* scalars;         // on the CPU, or null
  const int64_t* table;           // on the CPU, or null
  const Scalars* device_scalars;  // where the other is null
  const int64_t* device_table;
  const float* grad_scale;
  const float* found_inf;
  unsigned long long* nonfinite;
  CodecName codec;
  Dtype param_dtype;
  int32_t correction_bits;
  bool stochastic_rounding;
  int64_t block_size;
  bool maximize;
  bool coupled_weight_decay;
};

// Pointers to the elements that a kernel may access 128 bits at a time.
inline bool is_aligned(const TensorView& view) {
  const void* pointers[] = {view.param,      view.grad,           view.exp_avg,
                            view.exp_avg_sq, view.max_exp_avg_sq, view.param_correction};
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

// The number of tiles goes to `tiles`.
inline TensorArgs tensor_args(const Call& call, const TensorView& view, uint32_t& tiles) {
  int64_t rows = view.rows;
  int64_t inner = view.inner;
  if (call.codec == CodecName::FP32 && !call.stochastic_rounding) {  // nothing depends on the shape
    inner *= rows;
    rows = 1;
  }
  const int64_t blocks_per_row = (inner + call.block_size - 1) / call.block_size;
  const int64_t blocks = rows * blocks_per_row;
  if (blocks >= int64_t{1} << 31) throw std::runtime_error("fused8: a tensor has 2^31 blocks or more");
  int64_t lanes = 1;
  while (lanes * ELEMENTS < smaller(inner, call.block_size)) lanes *= 2;

  TensorArgs args = {};
  args.param = view.param;
  args.grad = view.grad;
  args.exp_avg = view.exp_avg;
  args.exp_avg_sq = view.exp_avg_sq;
  args.max_exp_avg_sq = view.max_exp_avg_sq;
  args.exp_avg_scale = view.exp_avg_scale;
  args.exp_avg_sq_scale = view.exp_avg_sq_scale;
  args.max_exp_avg_sq_scale = view.max_exp_avg_sq_scale;
  args.param_correction = view.param_correction;
  args.inner = inner;
  args.blocks = static_cast<uint32_t>(blocks);
  args.blocks_per_row = static_cast<uint32_t>(blocks_per_row);
  // Exact for block numbers below 2^31: Granlund and Montgomery, "Division by Invariant Integers using Multiplication".
  args.row_shift = 31;
  while (int64_t{1} << (args.row_shift - 31) < blocks_per_row) ++args.row_shift;
  args.row_multiplier = static_cast<uint32_t>((uint64_t{1} << args.row_shift) / args.blocks_per_row + 1);
  args.lanes = static_cast<uint8_t>(lanes);
  args.aligned = is_aligned(view) && (rows == 1 || inner % ELEMENTS == 0);
  const int64_t blocks_per_tile = THREADS / lanes;
  tiles = static_cast<uint32_t>((blocks + blocks_per_tile - 1) / blocks_per_tile);
  return args;
}

// Collects tensors and hands out a launch whenever one is full. `run` takes each launch.
template <class Run>
class LaunchPacker {
 public:
  LaunchPacker(const Call& call, Run run) : call_(call), run_(run) { clear(); }

  void add(const TensorView& view, uint32_t number) {
    if (view.rows * view.inner == 0) return;
    uint32_t tiles = 0;
    TensorArgs args = tensor_args(call_, view, tiles);
    args.number = number;
    const int64_t* row = call_.table == nullptr ? nullptr : call_.table + number * TABLE_WIDTH;
    const bool own_row = row != nullptr && call_.scalars != nullptr;
    if (launch_.tensor_count == MOST_TENSORS || launch_.tiles + uint64_t{tiles} > MOST_TILES ||
        (own_row && scalar_row(row[0]) == MOST_SCALAR_ROWS)) {
      flush();
    }
    if (row != nullptr) {
      args.row_stride = static_cast<uint32_t>(row[3]);
      args.first_index = static_cast<uint32_t>(row[1]) * args.row_stride + static_cast<uint32_t>(row[2]);
      args.scalar_row = static_cast<uint32_t>(row[0]);
    }
    if (own_row) {
      args.scalar_row = scalar_row(row[0]);
      if (args.scalar_row == rows_.size()) rows_.push_back(row[0]);
      std::memcpy(&launch_.scalars[args.scalar_row], call_.scalars + row[0], sizeof(Scalars));
    }
    launch_.first_tile[launch_.tensor_count] = launch_.tiles;
    launch_.tensors[launch_.tensor_count] = args;
    launch_.tensor_count += 1;
    launch_.tiles += tiles;
  }

  void flush() {
    if (launch_.tensor_count > 0) run_(static_cast<const Launch&>(launch_));
    clear();
  }

 private:
  static constexpr uint64_t MOST_TILES = 0x7FFFFFFF;  // of a grid

  // Where a row of `scalars` stands in the launch, or where it would be put.
  uint32_t scalar_row(int64_t row) const {
    uint32_t i = 0;
    while (i < rows_.size() && rows_[i] != row) ++i;
    return i;
  }

  void clear() {
    launch_ = {};
    launch_.device_scalars = call_.device_scalars;
    launch_.device_table = call_.device_table;
    launch_.grad_scale = call_.grad_scale;
    launch_.found_inf = call_.found_inf;
    launch_.nonfinite = call_.nonfinite;
    launch_.block_size = static_cast<int32_t>(call_.block_size);
    launch_.correction_bits = call_.correction_bits;
    launch_.format = format_of(call_.param_dtype);
    launch_.stochastic_rounding = call_.stochastic_rounding;
    launch_.maximize = call_.maximize;
    launch_.coupled_weight_decay = call_.coupled_weight_decay;
    for (uint32_t& first : launch_.first_tile) first = 0xFFFFFFFF;
    rows_.clear();
  }

  const Call call_;
  const Run run_;
  Launch launch_;
  std::vector<int64_t> rows_;  // of `scalars`, which are in the launch
};

inline Kernel kernel_of(const Call& call, Dtype grad, bool amsgrad) {
  return kernel_of(call.codec, param_kind(call.param_dtype, call.correction_bits, call.stochastic_rounding), grad,
                   amsgrad);
}

template <class Run>
void run_launches(const Call& call, const std::vector<TensorView>& views, Run run) {
  LaunchPacker<Run> packer(call, run);
  for (size_t i = 0; i < views.size(); ++i) packer.add(views[i], static_cast<uint32_t>(i));
  packer.flush();
}

}  // namespace fused8::FUSED8_ISA
