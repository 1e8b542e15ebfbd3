// A program that steps a few small tensors with every codec, for ThreadSanitizer: a case for each way through the
// kernel (whole blocks, tails, short rows), but few elements, since every CUDA thread is a thread of the system.

#ifdef CUDA_HOST_THREADS

#include <vector>

#include "cuda_host.h"
// After cuda_host.h, which it needs.
#include "../../csrc/cuda/launches.h"

using namespace fused8;
using namespace fused8::FUSED8_ISA;

namespace {

// Memory of one tensor [rows, inner] and its state; large enough for every dtype.
struct Memory {
  std::vector<uint4> param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;
  std::vector<float> exp_avg_scale, exp_avg_sq_scale, max_exp_avg_sq_scale;
  TensorView view;

  Memory(int64_t rows, int64_t inner, int64_t block_size) {
    const int64_t blocks_per_row = (inner + block_size - 1) / block_size;
    for (auto* memory : {&param, &grad, &exp_avg, &exp_avg_sq, &max_exp_avg_sq}) memory->resize(rows * inner / 4 + 1);
    for (auto* memory : {&exp_avg_scale, &exp_avg_sq_scale, &max_exp_avg_sq_scale}) {
      memory->resize(rows * blocks_per_row);
    }
    for (size_t i = 0; i < grad.size(); ++i) grad[i] = {0x3F803F80, 0x3D803D81, 0xBF80BF80, 0x7F807F80};
    view = {param.data(),
            grad.data(),
            exp_avg.data(),
            exp_avg_sq.data(),
            max_exp_avg_sq.data(),
            exp_avg_scale.data(),
            exp_avg_sq_scale.data(),
            max_exp_avg_sq_scale.data(),
            nullptr,
            rows,
            inner,
            blocks_per_row};
  }
};

template <class Codec>
void step(CodecName codec, const char* name) {
  std::vector<Memory> memories;
  memories.emplace_back(3, 512, 256);
  memories.emplace_back(2, 300, 256);
  memories.emplace_back(9, 16, 256);
  std::vector<TensorView> views;
  for (const Memory& memory : memories) views.push_back(memory.view);
  const Scalars scalars = {0.9f, 0.1f, 0.999f, 0.001f, 1e-8f, 1e-3f, 1.0f, 1.0f, 0.0f, 7, 0, {}};
  const int64_t table[] = {0, 0, 0, 512, 0, 0, 0, 300, 0, 0, 0, 16};
  unsigned long long nonfinite = 0;
  Call call = {};
  call.scalars = &scalars;
  call.table = table;
  call.nonfinite = &nonfinite;
  call.codec = codec;
  call.block_size = 256;
  const Kernel kernel = adam_kernel<Codec, true, BFloat16, BFloat16>;
  run_launches(call, views,
               [&](const Launch& launch) { cuda_host::run(launch.tiles, THREADS, [&] { kernel(launch); }); });
  std::printf("%s %s\n", name, nonfinite > 0 ? "ok" : "did not run");
}

}  // namespace

int main() {
  step<Fp32Codec>(CodecName::FP32, "fp32");
  step<AdaptiveCodec>(CodecName::ADAPTIVE, "adaptive");
  step<DynamicCodec>(CodecName::DYNAMIC, "dynamic");
  step<E4M3Codec>(CodecName::E4M3, "e4m3");
}

#endif
